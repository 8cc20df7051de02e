"""Messages between the driver and one rank over a socket. Every wait has a limit, every error names the other side."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from enum import IntEnum
from typing import TypeAlias

from typing_extensions import TypedDict

from onepolicy.config import TrainingError
from onepolicy.sync.messages import validate_message
from onepolicy.train.sharded.wire import Message

TOKEN_BYTES = 32
SIZE_BYTES = 8
"""Before every message."""
LARGEST_BYTES = 2**36
"""Of a message."""
GREETING_S = 5.0
"""For all that a rank sends when it comes."""
GREETING_BYTES = 2**16
"""Most that a rank says of itself."""
MOST_PENDING = 64
"""Connections at a time that have not said who they are; when another comes, the one that has waited longest goes."""
BACKLOG = 1024
"""Connections that wait in the kernel; it may allow fewer."""
POLL_S = 0.2
"""Between two looks at whether the other ranks' processes are alive."""
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
"""Seconds, seconds, probes; milliseconds for what was sent and is not acknowledged. A machine that is gone ends a wait
without a limit after a minute."""


class FailureCause(IntEnum):
    """How sure it is that this rank is the one that failed first."""

    SILENT = 0  # for too long
    TOLD = 1  # its own error, which may be that another rank is gone
    GONE = 2  # ended without a word


class RankGreeting(TypedDict):
    """What a rank says of itself when it comes."""

    rank: int
    pid: int
    host: str


DriverAddress: TypeAlias = tuple[str, int, str]


class RankLost(TrainingError):
    """A rank has ended or is silent for too long."""

    def __init__(self, text: str, cause: FailureCause = FailureCause.GONE) -> None:
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
            self.connection.sendall(len(data).to_bytes(SIZE_BYTES, "little"))
            self.connection.sendall(data)
        except TimeoutError:
            raise RankLost(
                f"{self.peer} took nothing for {limit:g} s (train.rank_timeout)",
                FailureCause.SILENT,
            ) from None
        except OSError as error:
            raise RankLost(f"{self.peer} has ended: {error.strerror or error}") from None

    def receive(self, limit: float | None) -> Message:
        """limit: seconds until the next bytes arrive; None: as long as the other side lives."""
        size = int.from_bytes(self.read(SIZE_BYTES, limit), "little")
        if size > LARGEST_BYTES:
            raise TrainingError(
                f"{self.peer} announces a message of {size} bytes; at most {LARGEST_BYTES} are expected"
            )
        return Message.decode(self.read(size, limit))

    def read(self, count: int, limit: float | None) -> bytes:
        data = bytearray(count)
        view, filled = memoryview(data), 0
        try:
            self.connection.settimeout(limit)
            while filled < count:
                if (got := self.connection.recv_into(view[filled:])) == 0:
                    raise RankLost(f"{self.peer} has ended")
                filled += got
        except TimeoutError:
            raise RankLost(
                f"{self.peer} has sent nothing for {limit:g} s (train.rank_timeout)",
                FailureCause.SILENT,
            ) from None
        except OSError as error:
            raise RankLost(f"{self.peer} has ended: {error.strerror or error}") from None
        return bytes(data)

    def close(self) -> None:
        self.connection.close()


class PendingConnection:
    """A connection that has not yet said all of who it is. Never waits."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.end = connection, time.monotonic() + GREETING_S
        self._came = bytearray()

    def greeting(self, token: bytes) -> Message | None:
        """What has come, once it is whole. RankLost for who does not know the token or has gone; TrainingError for who
        knows it and says what no rank says."""
        self._read(TOKEN_BYTES)
        if len(self._came) < TOKEN_BYTES:
            return None
        if not hmac.compare_digest(bytes(self._came[:TOKEN_BYTES]), token):
            raise RankLost("a connection does not know the token")
        start = TOKEN_BYTES + SIZE_BYTES
        self._read(start)
        if len(self._came) < start:
            return None
        size = int.from_bytes(self._came[TOKEN_BYTES:start], "little")
        if size > GREETING_BYTES:
            raise TrainingError(
                f"a rank greets with {size} bytes; at most {GREETING_BYTES} are expected"
            )
        self._read(start + size)
        return (
            Message.decode(bytes(self._came[start:])) if len(self._came) == start + size else None
        )

    def _read(self, count: int) -> None:
        """What is there, up to `count` bytes in all: what follows the greeting is the channel's."""
        try:
            while len(self._came) < count:
                if not (got := self.connection.recv(count - len(self._came))):
                    raise RankLost("a connection has ended")
                self._came += got
        except BlockingIOError:
            pass
        except OSError as error:
            raise RankLost(f"a connection has ended: {error}") from None


class RankListener:
    """Where the ranks find the driver. Who does not know the token is hung up on before a message is read.

    host: what this machine is called by theirs.
    """

    def __init__(self, host: str) -> None:
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket = socket.create_server((_own_address(host), 0), backlog=BACKLOG)
        self.socket.setblocking(False)
        self.address: tuple[str, int] = (host, self.socket.getsockname()[1])

    def accept(self, ranks: int, limit: float, alive: Callable[[], None]) -> dict[int, Channel]:
        """Channels to ranks 1..ranks-1. `alive` is called now and then, and raises if one will never come.

        All who come are listened to at the same time, so that silent strangers cost the ranks nothing.
        """
        found: dict[int, Channel] = {}
        pending: list[PendingConnection] = []
        end = time.monotonic() + limit
        try:
            while len(found) < ranks - 1:
                alive()
                if time.monotonic() > end:
                    missing = sorted(set(range(1, ranks)) - found.keys())
                    raise RankLost(
                        f"rank {missing[0]} did not come within {limit:g} s (train.rank_timeout)"
                    )
                self._wait(pending)
                pending += self._arrived()
                pending = [each for each in pending if not self._settled(each, ranks, found)]
                for oldest in pending[: max(len(pending) - MOST_PENDING, 0)]:
                    oldest.connection.close()
                    pending.remove(oldest)
        except BaseException:
            for channel in found.values():
                channel.close()
            raise
        finally:
            for each in pending:
                each.connection.close()
        return found

    def _wait(self, pending: list[PendingConnection]) -> None:
        """Until somebody comes or says something, but not long."""
        with selectors.DefaultSelector() as selector:
            for each in (self.socket, *(arrival.connection for arrival in pending)):
                selector.register(each, selectors.EVENT_READ)
            selector.select(POLL_S)

    def _arrived(self) -> list[PendingConnection]:
        """Who waits, up to as many as are listened to."""
        arrived: list[PendingConnection] = []
        while len(arrived) < MOST_PENDING:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # nobody (any more)
                break
            arrived.append(PendingConnection(connection))
        return arrived

    def _settled(self, arrival: PendingConnection, ranks: int, found: dict[int, Channel]) -> bool:
        """Whether it is no longer waited for: it is a rank, now among those found, or was hung up on."""
        try:
            greeting = arrival.greeting(self.token)
        except RankLost:
            arrival.connection.close()
            return True
        if greeting is None:
            if time.monotonic() <= arrival.end:
                return False
            arrival.connection.close()
            return True
        about = validate_message(RankGreeting, greeting.header, "a rank's greeting")
        if not 0 < about["rank"] < ranks or about["rank"] in found:
            raise TrainingError(
                f"a second rank {about['rank']}, or one that this run has not, greets the driver"
            )
        arrival.connection.setblocking(True)
        peer = f"rank {about['rank']} (process {about['pid']} on {about['host']})"
        found[about["rank"]] = Channel(arrival.connection, peer)
        return True

    def close(self) -> None:
        self.socket.close()


def _own_address(host: str) -> str:
    """Where to listen as `host`. Debian has a machine's own name on a loopback address that no other machine reaches:
    then everywhere."""
    address = socket.gethostbyname(host)
    everywhere = ipaddress.ip_address(address).is_loopback and host not in (address, "localhost")
    return "" if everywhere else address


def connect_to_driver(address: tuple[str, int], token: bytes, rank: int, limit: float) -> Channel:
    """To the driver."""
    try:
        connection = socket.create_connection(address, timeout=limit)
        connection.sendall(token)
    except OSError as error:
        raise RankLost(
            f"rank {rank} cannot reach the driver at {address[0]}:{address[1]}: {error}"
        ) from None
    channel = Channel(connection, "the driver (rank 0)")
    about: RankGreeting = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
    channel.send(Message({**about}), limit)
    return channel


def encode_address(address: tuple[str, int], token: bytes) -> str:
    """Address and token as text, for the ranks' rendezvous."""
    return json.dumps([*address, token.hex()])


def decode_address(text: str) -> tuple[tuple[str, int], bytes]:
    """TrainingError for what is no such text."""
    try:
        host, port, token = validate_message(
            DriverAddress, json.loads(text), "the driver's address"
        )
        return (host, port), bytes.fromhex(token)
    except ValueError:
        raise TrainingError(
            "the driver's address, as the ranks' rendezvous has it, is none"
        ) from None
