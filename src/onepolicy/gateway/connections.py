"""The connections of a gateway's server: how many there may be, and how long one may be idle."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS_OF_HEAD = 10
"""Seconds in which the head of a request must be there."""
MOST_FILES, OWN_FILES = 2**16, 256
"""Files that the process may have open, and those that are no connections."""


class HTTP(H11Protocol):
    """A connection of uvicorn's that is closed if the head of a request is not there in time.

    uvicorn itself waits for ever. A program that leaks connections would then shut out the others.
    A connection beyond `limit_concurrency` is closed at once; uvicorn would hold it for a request.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) > self.limit_concurrency:
            transport.abort()
            return
        self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_limit()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._limit_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._limit_head()

    def _limit_head(self) -> None:
        """Start the time of a head that is not there yet; stop it where one is.

        h11's state does not say it: after an answer that came before the whole body it stays that
        of a body.
        """
        waits = self.cycle is None or self.cycle.response_complete
        if not waits:
            self._stop_limit()
        elif self._late is None and not self.transport.is_closing():
            self._late = self.loop.call_later(SECONDS_OF_HEAD, self.transport.close)

    def _stop_limit(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def raise_most_connections() -> int:
    """Let this process open as many files as it may. Return how many connections that leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES
    if hard != resource.RLIM_INFINITY:
        most = min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # a limit of the machine is lower than the process's own
            most = soft
    return max(most - OWN_FILES, most // 2)
