"""The broadcast of a step's weights from their files to several processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from onepolicy.config import TrainingError
from onepolicy.sync.broadcast import ReceiverLost, Sender
from onepolicy.sync.group import run_in_daemon_thread
from onepolicy.sync.weight_files import WrittenWeights, read_weights

T = TypeVar("T")


class ReplicaBroadcast:
    """A `sync.broadcast.Sender` for `receivers` processes. Use it as an async context.

    Call `send_to` once for each receiver. If one receiver fails, the broadcast ends for all, and
    every `send_to` raises an error. Leaving the context raises only an error that no receiver saw.
    """

    def __init__(self, written: WrittenWeights, receivers: int, *, host: str, limit: float) -> None:
        """Prepare the broadcast.

        host: this machine's address for the receivers. limit: seconds of every single wait.
        """
        self._limit = limit
        self._sender = Sender(receivers=receivers, host=host, timeout_s=limit, key=written.key)
        self._send = partial(
            self._sender.send, read_weights(written.folder), written.version, written.sums
        )
        self._ranks = itertools.count(1)
        self._failed = False

    async def send_to(self, receive: Callable[[str, int], Awaitable[T]]) -> T:
        """Return the result of receive(invitation, rank), which ends when it has all weights.

        Raises TimeoutError if the receiver does not answer.
        """
        receiving = asyncio.ensure_future(receive(self._sender.invitation, next(self._ranks)))
        try:
            # while it sends, the sender itself watches the receivers
            await asyncio.wait((receiving, self._sending), return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait((receiving,), timeout=self._limit)
            if not receiving.done():
                raise TimeoutError
            return receiving.result()
        except BaseException:
            self.cancel()
            raise
        finally:
            receiving.cancel()

    def cancel(self) -> None:
        """End the broadcast because a receiver will not come or has failed."""
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
            self._sender.cancel()
        (result,) = await asyncio.gather(self._sending, return_exceptions=True)
        own = isinstance(result, Exception) and not isinstance(result, ReceiverLost)
        if own and (error is None or isinstance(error, Exception)):
            assert isinstance(result, Exception)
            raise result from error  # the first cause: receivers only saw the connection end
        seen = error is not None or (self._failed and isinstance(result, TrainingError))
        if isinstance(result, BaseException) and not seen:
            raise result
