"""A step's weights from their files to several processes at once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from onepolicy.config import TrainingError
from onepolicy.sync.broadcast import Sender
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WrittenWeights, read_weights

T = TypeVar("T")


class ReplicaBroadcast:
    """One `sync.broadcast.Sender` for `receivers` processes, inside an `async with`. Each calls `to` once.

    A receiver that fails ends it for all. What that means is for the callers of `to` to decide, each of whom gets an
    error: leaving the `async with` raises only what no receiver has seen.
    """

    def __init__(self, written: WrittenWeights, receivers: int, *, host: str, limit: float) -> None:
        """host: this machine's address for the receivers. limit: seconds of every wait; all of it may take longer."""
        self._limit = limit
        self._sender = Sender(receivers=receivers, host=host, timeout_s=limit, key=written.key)
        self._send = partial(
            self._sender.send, read_weights(written.folder), written.version, written.sums
        )
        self._ranks = itertools.count(1)
        self._failed = False

    async def send_to(self, receive: Callable[[str, int], Awaitable[T]]) -> T:
        """What receive(invitation, rank) returns once that process has all weights. TimeoutError if it is silent."""
        receiving = asyncio.ensure_future(receive(self._sender.invitation, next(self._ranks)))
        try:
            await asyncio.wait((receiving, self._sending), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait(
                (receiving,), timeout=self._limit
            )  # while the sender sends, it has an eye on receivers
            if not receiving.done():
                raise TimeoutError
            return receiving.result()
        except BaseException:
            self.give_up()
            raise
        finally:
            receiving.cancel()

    def give_up(self) -> None:
        """A receiver will not come, or has ended early."""
        self._failed = True
        self._sender.cancel()

    async def __aenter__(self) -> Self:
        self._sending = asyncio.ensure_future(run_in_daemon_thread(self._send))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None or self._failed:
            self._sender.cancel()  # everybody has ended
        (sent,) = await asyncio.gather(self._sending, return_exceptions=True)
        seen = error is not None or (self._failed and isinstance(sent, TrainingError))
        if isinstance(sent, BaseException) and not seen:
            raise sent
