"""Requests to an engine in another process: how many run, and whether more may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Traffic:
    """Of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: int) -> None:
        self.loop, self.running = loop, 0
        self.open, self.idle = asyncio.Event(), asyncio.Event()
        self.open.set()
        self.idle.set()
        self._slots = asyncio.Semaphore(slots)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Held by a request; waits while all slots are taken, or it is not open."""
        async with self._slots:
            await self.open.wait()
            self.running += 1
            self.idle.clear()
            try:
                yield
            finally:
                self.running -= 1
                if not self.running:
                    self.idle.set()


def here(known: Traffic | None, slots: int) -> Traffic:
    """`known`, if it is that of the running event loop; nothing of an earlier one can be running."""
    loop = asyncio.get_running_loop()
    return known if known is not None and known.loop is loop else Traffic(loop, slots)
