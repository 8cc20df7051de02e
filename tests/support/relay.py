"""A network that stalls, without namespaces: a port of this machine whose bytes are forwarded until
the test stops it."""

import asyncio
import threading

CHUNK = 2**16


class Relay:
    """TCP to `target`, (host, port), through a port of `host`: `address`.

    Between stall() and go_on() connections are accepted and stay open, but no byte and no end of
    one passes; bytes sent meanwhile pass afterwards. The kernel answers keep-alive probes, as it
    does for a process that is stopped.
    """

    def __init__(self, host, target=None):
        self.host, self.target = host, target
        self.stalled, self._cue = threading.Event(), None
        self._loop, self._begun = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete, args=(self._serve(),), daemon=True
        )

    def __enter__(self):
        self._thread.start()
        assert self._begun.wait(10)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(10)
        self._loop.close()

    def stall(self):
        self._loop.call_soon_threadsafe(self._stall)

    def stall_before(self, words):
        """Stall as soon as a message to the target has these bytes, which the target does not get
        before go_on()."""
        self._cue = words

    def go_on(self):
        self.stalled.clear()
        self._loop.call_soon_threadsafe(self._open.set)

    def _stall(self):
        self._cue = None
        self._open.clear()
        self.stalled.set()

    async def _serve(self):
        self._open, self._ended, tasks = asyncio.Event(), asyncio.Event(), set()
        self._open.set()
        server = await asyncio.start_server(
            lambda *ends: tasks.add(self._loop.create_task(self._connected(*ends))), self.host, 0
        )
        self.address = server.sockets[0].getsockname()[:2]
        self._begun.set()
        await self._ended.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader, writer):
        try:
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            try:
                async with asyncio.TaskGroup() as both:
                    both.create_task(self._forward(reader, far_writer))
                    both.create_task(self._forward(far_reader, writer))
            finally:
                far_writer.close()
        except* OSError:
            pass  # one side is gone, which the other learns by the close
        finally:
            writer.close()

    async def _forward(self, reader, writer):
        while data := await reader.read(CHUNK):
            if self._cue is not None and self._cue in data:
                self._stall()
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        await self._open.wait()
        writer.write_eof()
