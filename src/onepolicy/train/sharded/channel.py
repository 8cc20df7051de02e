"""Messages between the driver and one rank over a socket.

Every wait has a time limit, and every error names the peer.
"""

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
"""Length of the size field before every message."""
MAX_MESSAGE_BYTES = 2**36
GREETING_S = 5.0
"""Time limit for a rank's token and greeting."""
MAX_GREETING_BYTES = 2**16
MAX_PENDING = 64
"""Connections without a greeting that are kept. When another one comes, the oldest is closed."""
BACKLOG = 1024
"""Connections that wait in the kernel; it may allow fewer."""
POLL_S = 0.2
"""Interval of the checks that the other ranks' processes are alive."""
KEEPALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 60_000}
"""Seconds, seconds, number of probes, and milliseconds for data that is not acknowledged. If the
peer's machine fails, a wait without a limit ends after a minute."""


class FailureCause(IntEnum):
    """Causes of a lost rank. The higher, the more likely this rank failed first."""

    SILENT = 0  # it sent nothing within the time limit
    REPORTED = 1  # it reported an error, which may be that another rank is lost
    DISCONNECTED = 2  # it ended without a report


class RankGreeting(TypedDict):
    """A rank's first message to the driver."""

    rank: int
    pid: int
    host: str


DriverAddress: TypeAlias = tuple[str, int, str]  # host, port, token in hex


class RankLost(TrainingError):
    """Raised if a rank has ended or is silent for too long."""

    def __init__(self, text: str, cause: FailureCause = FailureCause.DISCONNECTED) -> None:
        super().__init__(text)
        self.cause = cause


class Channel:
    """A connection to a peer that sends and receives messages."""

    def __init__(self, connection: socket.socket, peer: str) -> None:
        """Configure the connection. peer: name of the other side, for errors."""
        self.connection, self.peer = connection, peer
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: Message, limit: float) -> None:
        """Send a message. limit: seconds for the whole message. Raises RankLost."""
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
        """Return the next message.

        limit: seconds until the next bytes arrive; None waits as long as the peer is connected.
        Raises RankLost.
        """
        size = int.from_bytes(self.read(SIZE_BYTES, limit), "little")
        if size > MAX_MESSAGE_BYTES:
            raise TrainingError(
                f"{self.peer} announces a message of {size} bytes; at most {MAX_MESSAGE_BYTES} "
                "are expected"
            )
        return Message.decode(self.read(size, limit))

    def read(self, count: int, limit: float | None) -> bytes:
        """Return the next `count` bytes. limit: as in `receive`."""
        data = bytearray(count)
        view, filled = memoryview(data), 0
        try:
            self.connection.settimeout(limit)
            while filled < count:
                received = self.connection.recv_into(view[filled:])
                if received == 0:
                    raise RankLost(f"{self.peer} has ended")
                filled += received
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
    """A connection whose greeting is not complete. Its methods never wait."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection, self.deadline = connection, time.monotonic() + GREETING_S
        self._received = bytearray()

    def read_greeting(self, token: bytes) -> Message | None:
        """Return the greeting once it is complete.

        Raises RankLost if the peer does not know the token or has disconnected. Raises
        TrainingError if it knows the token but sends no greeting of a rank.
        """
        self._read_up_to(TOKEN_BYTES)
        if len(self._received) < TOKEN_BYTES:
            return None
        if not hmac.compare_digest(bytes(self._received[:TOKEN_BYTES]), token):
            raise RankLost("a connection does not know the token")
        start = TOKEN_BYTES + SIZE_BYTES
        self._read_up_to(start)
        if len(self._received) < start:
            return None
        size = int.from_bytes(self._received[TOKEN_BYTES:start], "little")
        if size > MAX_GREETING_BYTES:
            raise TrainingError(
                f"a rank greets with {size} bytes; at most {MAX_GREETING_BYTES} are expected"
            )
        self._read_up_to(start + size)
        if len(self._received) < start + size:
            return None
        return Message.decode(bytes(self._received[start:]))

    def _read_up_to(self, count: int) -> None:
        """Read until `count` bytes have arrived in all, or none are left.

        It never reads more: the bytes after the greeting belong to the channel.
        """
        try:
            while len(self._received) < count:
                data = self.connection.recv(count - len(self._received))
                if not data:
                    raise RankLost("a connection has ended")
                self._received += data
        except BlockingIOError:
            pass
        except OSError as error:
            raise RankLost(f"a connection has ended: {error}") from None


class RankListener:
    """The driver's server socket. It closes a peer that does not know the token.

    No message is read before the token.
    """

    def __init__(self, host: str) -> None:
        """Listen. host: name of this machine as the other ranks see it."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self.socket = socket.create_server((_listening_address(host), 0), backlog=BACKLOG)
        self.socket.setblocking(False)
        self.address: tuple[str, int] = (host, self.socket.getsockname()[1])

    def accept(
        self, ranks: int, limit: float, check_alive: Callable[[], None]
    ) -> dict[int, Channel]:
        """Return channels to ranks 1..ranks-1.

        check_alive: called regularly; it raises if a rank has ended before it joined. All pending
        connections are read at the same time, so silent strangers do not delay the ranks.
        """
        found: dict[int, Channel] = {}
        pending: list[PendingConnection] = []
        deadline = time.monotonic() + limit
        try:
            while len(found) < ranks - 1:
                check_alive()
                if time.monotonic() > deadline:
                    missing = sorted(set(range(1, ranks)) - found.keys())
                    raise RankLost(
                        f"rank {missing[0]} did not come within {limit:g} s (train.rank_timeout)"
                    )
                self._wait_for_data(pending)
                pending += self._accept_waiting()
                pending = [each for each in pending if not self._settle(each, ranks, found)]
                pending = _close_oldest(pending)
        except BaseException:
            for channel in found.values():
                channel.close()
            raise
        finally:
            for each in pending:
                each.connection.close()
        return found

    def _wait_for_data(self, pending: list[PendingConnection]) -> None:
        """Wait for a connection or for data, at most POLL_S."""
        with selectors.DefaultSelector() as selector:
            for each in (self.socket, *(waiting.connection for waiting in pending)):
                selector.register(each, selectors.EVENT_READ)
            selector.select(POLL_S)

    def _accept_waiting(self) -> list[PendingConnection]:
        """Accept the waiting connections, at most MAX_PENDING."""
        accepted: list[PendingConnection] = []
        while len(accepted) < MAX_PENDING:
            try:
                connection, _ = self.socket.accept()
            except OSError:  # no connection is waiting
                break
            accepted.append(PendingConnection(connection))
        return accepted

    def _settle(self, pending: PendingConnection, ranks: int, found: dict[int, Channel]) -> bool:
        """Return whether nothing more is expected of the connection.

        It was closed, or it is that of a rank and now in `found`.
        """
        try:
            greeting = pending.read_greeting(self.token)
        except RankLost:
            pending.connection.close()
            return True
        if greeting is None:
            late = time.monotonic() > pending.deadline
            if late:
                pending.connection.close()
            return late
        about = validate_message(RankGreeting, greeting.header, "a rank's greeting")
        rank = about["rank"]
        if not 0 < rank < ranks or rank in found:
            raise TrainingError(
                f"a second rank {rank}, or a rank that this run does not have, greets the driver"
            )
        pending.connection.setblocking(True)
        peer = f"rank {rank} (process {about['pid']} on {about['host']})"
        found[rank] = Channel(pending.connection, peer)
        return True

    def close(self) -> None:
        self.socket.close()


def _close_oldest(pending: list[PendingConnection]) -> list[PendingConnection]:
    """Close the oldest connections and return the newest MAX_PENDING."""
    excess = max(len(pending) - MAX_PENDING, 0)
    for oldest in pending[:excess]:
        oldest.connection.close()
    return pending[excess:]


def _listening_address(host: str) -> str:
    """Return the address to listen on; "" means all interfaces.

    Debian maps a machine's own name to a loopback address that no other machine reaches. The driver
    then listens on all interfaces.
    """
    address = socket.gethostbyname(host)
    if ipaddress.ip_address(address).is_loopback and host not in (address, "localhost"):
        return ""
    return address


def connect_to_driver(address: tuple[str, int], token: bytes, rank: int, limit: float) -> Channel:
    """Connect this rank to the driver. Raises RankLost if it cannot be reached."""
    try:
        connection = socket.create_connection(address, timeout=limit)
        connection.sendall(token)
    except OSError as error:
        raise RankLost(
            f"rank {rank} cannot reach the driver at {address[0]}:{address[1]}: {error}"
        ) from None
    channel = Channel(connection, "the driver (rank 0)")
    greeting: RankGreeting = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname()}
    channel.send(Message({**greeting}), limit)
    return channel


def encode_address(address: tuple[str, int], token: bytes) -> str:
    """Return the driver's address and token as text, for the ranks' rendezvous."""
    return json.dumps([*address, token.hex()])


def decode_address(text: str) -> tuple[tuple[str, int], bytes]:
    """Read the text of `encode_address`. Raises TrainingError for any other text."""
    try:
        host, port, token = validate_message(
            DriverAddress, json.loads(text), "the driver's address"
        )
        return (host, port), bytes.fromhex(token)
    except ValueError:
        raise TrainingError(
            "the driver's address in the ranks' rendezvous is malformed; it must be host, port "
            "and token"
        ) from None
