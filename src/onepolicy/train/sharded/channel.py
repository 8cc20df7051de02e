"""Messages between the driver and one rank over a socket. Every wait has a limit, every error names the other side."""

from __future__ import annotations

import hmac
import ipaddress
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from enum import IntEnum

from onepolicy.config import TrainingError
from onepolicy.train.sharded.wire import Message

TOKEN_BYTES = 32
GREETING_S = 5.0
"""For all that a rank sends when it comes: others wait meanwhile."""
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
"""Seconds, seconds, probes; milliseconds for what was sent and is not acknowledged. A machine that is gone ends a wait
without a limit after a minute."""


class Cause(IntEnum):
    """How sure it is that this rank is the one that failed first."""

    SILENT = 0  # for too long
    TOLD = 1  # its own error, which may be that another rank is gone
    GONE = 2  # ended without a word


class RankLost(TrainingError):
    """A rank has ended or is silent for too long."""

    def __init__(self, text: str, cause: Cause = Cause.GONE) -> None:
        super().__init__(text)
        self.cause = cause


class Channel:
    """`peer`: the other side, for errors."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.connection, self.peer = connection, peer
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message, limit: float) -> None:
        """limit: seconds for all of it."""
        data = message.encode()
        try:
            self.connection.settimeout(limit)
            self.connection.sendall(len(data).to_bytes(8, "little"))
            self.connection.sendall(data)
        except TimeoutError:
            raise RankLost(f"{self.peer} took nothing for {limit:g} s (train.rank_timeout)", Cause.SILENT) from None
        except OSError as error:
            raise RankLost(f"{self.peer} has ended: {error.strerror or error}") from None

    def receive(self, limit: float | None, end: float = math.inf) -> Message:
        """limit: seconds until the next bytes arrive; None: as long as the other side lives. end: as in `read`."""
        size = int.from_bytes(self.read(8, limit, end), "little")
        return Message.decode(self.read(size, limit, end))

    def read(self, count: int, limit: float | None, end: float = math.inf) -> bytes:
        """end: on the monotonic clock, by when all of them must be there."""
        data = bytearray(count)
        view, filled = memoryview(data), 0
        try:
            self.connection.settimeout(limit)
            while filled < count:
                if end < math.inf:
                    self.connection.settimeout(max(end - time.monotonic(), 1e-3))  # 0 would not wait at all
                if (got := self.connection.recv_into(view[filled:])) == 0:
                    raise RankLost(f"{self.peer} has ended")
                filled += got
        except TimeoutError:
            raise RankLost(f"{self.peer} has sent nothing for {limit:g} s (train.rank_timeout)", Cause.SILENT) from None
        except OSError as error:
            raise RankLost(f"{self.peer} has ended: {error.strerror or error}") from None
        return bytes(data)

    def close(self) -> None:
        self.connection.close()


class Listener:
    """Where the ranks find the driver. Who does not know the token is hung up on before a message is read.

    host: what this machine is called by theirs.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket = socket.create_server((_own_address(host), 0))
        self.address: tuple[str, int] = (host, self.socket.getsockname()[1])

    def accept(self, ranks: int, limit: float, alive: Callable[[], None]) -> dict[int, Channel]:
        """Channels to ranks 1..ranks-1. `alive` is called now and then, and raises if one will never come."""
        found: dict[int, Channel] = {}
        end = time.monotonic() + limit
        self.socket.settimeout(0.2)
        while len(found) < ranks - 1:
            alive()
            if time.monotonic() > end:
                missing = sorted(set(range(1, ranks)) - found.keys())
                raise RankLost(f"rank {missing[0]} did not come within {limit:g} s (train.rank_timeout)")
            try:
                connection, _ = self.socket.accept()
            except TimeoutError:
                continue
            if (arrived := self._greet(connection)) is not None:
                found[arrived[0]] = arrived[1]
        return found

    def _greet(self, connection: socket.socket) -> tuple[int, Channel] | None:
        channel = Channel(connection, "a rank")
        try:
            end = time.monotonic() + GREETING_S
            if not hmac.compare_digest(channel.read(TOKEN_BYTES, GREETING_S, end), self.token):
                connection.close()
                return None
            about = channel.receive(GREETING_S, end).header
        except RankLost:
            connection.close()
            return None
        channel.peer = f"rank {about['rank']} (process {about['pid']} on {about['host']})"
        return int(about["rank"]), channel

    def close(self) -> None:
        self.socket.close()


def _own_address(host: str) -> str:
    """Where to listen as `host`. Debian has a machine's own name on a loopback address that no other machine reaches:
    then everywhere."""
    address = socket.gethostbyname(host)
    everywhere = ipaddress.ip_address(address).is_loopback and host not in (address, "localhost")
    return "" if everywhere else address


def connect(address: tuple[str, int], token: bytes, rank: int, limit: float) -> Channel:
    """To the driver."""
    try:
        connection = socket.create_connection(address, timeout=limit)
        connection.sendall(token)
    except OSError as error:
        raise RankLost(f"rank {rank} cannot reach the driver at {address[0]}:{address[1]}: {error}") from None
    channel = Channel(connection, "the driver (rank 0)")
    channel.send(Message({"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}), limit)
    return channel


def advertised(address: tuple[str, int], token: bytes) -> str:
    """Address and token as text, for the ranks' rendezvous."""
    return json.dumps([*address, token.hex()])


def read_advertised(text: str) -> tuple[tuple[str, int], bytes]:
    host, port, token = json.loads(text)
    return (host, port), bytes.fromhex(token)
