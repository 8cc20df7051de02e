"""Child processes for parsers of strangers' files: so much memory, so much time, and no more.

`stream` starts a task in a child and yields its messages. A task is a generator function that is
named MODULE:FUNCTION. It imports its libraries, yields None, and then reads. The limits begin at
that None, so that the memory of libraries and a slow disk do not count. `ask` puts questions to a
task, whose child waits for more of them: it takes each from its `yield` and answers with a message.

A message is a JSON object and flat arrays of numbers. It travels as JSON and raw bytes. Nothing is
unpickled, because the file may have taken over the child. The child also takes crashes: a library
that ends its process ends the child only.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import errno
import fcntl
import importlib
import json
import math
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from onepolicy.errors import UsageError

GIB = 2**30
NONSENSE = "its reader answered nonsense; it is damaged"
LARGEST_INFO = 2**20  # bytes of a message's JSON
PIPE_BYTES = 2**20
SHARE_OF_MESSAGE = 4  # a message has at most this part of the child's memory
HOLES, HOLES_PER_BYTE = GIB, 16
"""Bytes of holes that a file may have, and more for each byte of its data (`refuse_holes`)."""
CPU_SECONDS_MORE = 30
"""CPU seconds beyond the time limit after which a child ends itself, if no others are given."""


class Message(NamedTuple):
    """A part of a task's result: a JSON object, and arrays [n] of numbers by name."""

    info: dict[str, Any]
    arrays: Mapping[str, np.ndarray] = {}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The memory and the time that a child may take."""

    memory: int  # bytes, besides those of its libraries
    seconds: float  # for an answer, of a task that is asked
    fix: str = ""  # end of a message about them
    cpu_seconds: float | None = None  # None: those of the time, and CPU_SECONDS_MORE


class StoppedError(Exception):
    """A task that did not end well. The message says why, as the second half of a sentence."""


def stream(task: str, arguments: Mapping[str, Any], limits: Limits) -> Iterator[Message]:
    """Run a task in a child and yield its messages. The time limit runs while the caller works too.

    task: MODULE:FUNCTION. arguments: its keyword arguments, JSON.

    Raises:
        UsageError: the task raised it.
        StoppedError: the child passed a limit, crashed, or raised something else.
    """
    child = _Child(limits)
    try:
        child.start(task, arguments)
        while (message := child.receive()) is not None:
            yield message
    finally:
        child.close()


def ask(task: str, question: Any, limits: Limits) -> Message:
    """Return a task's answer to a question, JSON. The child stays for the next one until it fails.

    It is asked again only under the limits that it was started with. Raises as `stream`.
    """
    with _LOCK:
        child = _ASKED.pop((task, limits), None)
        try:
            if child is None:
                child = _Child(limits)
                child.start(task, {}, asked=True)
            answer = child.ask(question)
        except BaseException:
            if child is not None:
                child.close()
            raise
        _ASKED[task, limits] = child
    return answer


@contextlib.contextmanager
def less_memory(more: int) -> Iterator[None]:
    """Let this process take at most so many bytes more than it has, inside this block, on Linux.

    Something that passes the limit raises MemoryError. It holds for all threads, so it is for the
    start of a program. For libraries that must have their result in this process.
    """
    if sys.platform != "linux":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    _limit_memory(more)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class _Child:
    """The parent's end of a child."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._late = limits, False
        there, self._alive = os.pipe()  # nothing is written: it is closed when this process ends
        self._process = subprocess.Popen(
            # -P: a file of the working folder must not stand in for a module.
            [sys.executable, "-P", "-m", "onepolicy.bounded", str(there)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a stranger's file may choose the words of a warning
            env=_environment(),
            pipesize=PIPE_BYTES,
            pass_fds=[there],
            start_new_session=True,  # what it starts ends with it
        )
        os.close(there)
        self._timer = threading.Timer(limits.seconds, self._stop)

    def start(self, task: str, arguments: Mapping[str, Any], *, asked: bool = False) -> None:
        """Name the child its task, wait until it has its libraries, and start the clock."""
        request = {"task": task, "arguments": arguments, "asked": asked}
        self._write(request | dataclasses.asdict(self._limits))
        self.receive()
        self._start_clock()

    def ask(self, question: Any) -> Message:
        """Return the answer to a question."""
        self._timer.cancel()
        self._start_clock()
        self._write(question)
        answer = self.receive()
        self._timer.cancel()
        if answer is None:
            raise StoppedError(NONSENSE)
        return answer

    def _start_clock(self) -> None:
        self._timer = threading.Timer(self._limits.seconds, self._stop)
        self._timer.daemon = True
        self._timer.start()

    def _write(self, value: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next message says why it has ended
            self._process.stdin.write(json.dumps(value).encode() + b"\n")
            self._process.stdin.flush()

    def receive(self) -> Message | None:
        """Return the next message; None after the last one."""
        (size,) = struct.unpack("<I", self._read(4))
        try:
            if size > LARGEST_INFO:
                raise ValueError
            info = json.loads(self._read(size))
            kind = info.pop("kind")
            layout = [(str(name), np.dtype(dtype), int(n)) for name, dtype, n in info.pop("arrays")]
            if any(dtype.kind not in "biuf" or count < 0 for _, dtype, count in layout):
                raise ValueError
        except StoppedError:
            raise
        except Exception:  # whatever a child says that its file has taken over
            raise StoppedError(NONSENSE) from None
        if kind == "message":
            return Message(info, self._arrays(layout))
        if kind == "refused":
            raise UsageError(str(info.get("text")))
        if kind == "failed":
            raise StoppedError(f"cannot be read ({info.get('text')}); it is damaged")
        if kind == "memory":
            raise StoppedError(self._memory_text())
        return None  # ready, or the end

    def _arrays(self, layout: list[tuple[str, np.dtype, int]]) -> dict[str, np.ndarray]:
        size = sum(dtype.itemsize * count for _, dtype, count in layout)
        if size > self._limits.memory // SHARE_OF_MESSAGE:
            raise StoppedError(self._memory_text())
        return {
            name: np.frombuffer(self._read(dtype.itemsize * count), dtype, count)
            for name, dtype, count in layout
        }

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view, filled = memoryview(data), 0
        pipe = cast(BufferedReader, self._process.stdout)
        while filled < size:
            count = pipe.readinto(view[filled:])
            if not count:
                raise StoppedError(self._end_text())
            filled += count
        return data

    def _end_text(self) -> str:
        """Return why the child ended before its last message."""
        status = self._process.wait()
        limits = self._limits
        if -status == signal.SIGXCPU and limits.cpu_seconds is not None:
            return f"took longer than {limits.cpu_seconds:,.0f} s of a CPU{limits.fix}"
        if self._late or -status == signal.SIGXCPU:
            return f"took longer than {limits.seconds:,.0f} s{limits.fix}"
        name = f"status {status}"
        if status < 0:
            name = signal.Signals(-status).name
        return (
            f"its reader died ({name}): it is damaged, or needs more than the "
            f"{limits.memory / GIB:.3g} GiB of memory that it may take{limits.fix}"
        )

    def _memory_text(self) -> str:
        return f"needs more than {self._limits.memory / GIB:.3g} GiB of memory{self._limits.fix}"

    def _stop(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        self._timer.cancel()
        self._kill()
        os.close(self._alive)
        with contextlib.suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            pass


_LOCK = threading.Lock()
_ASKED: dict[tuple[str, Limits], _Child] = {}
"""Children that wait for the next question, by their tasks and limits."""


@atexit.register
def _close_asked() -> None:
    for child in _ASKED.values():
        child.close()


def size_of_data(path: Path) -> int:
    """Return the bytes of a file that its holes do not make up; limits grow with them.

    The file system is asked for its holes. Where it knows none, all is data. Its count of blocks
    (st_blocks) is too small where it compresses, and 0 on some networks and for short files.
    """
    if not hasattr(os, "SEEK_DATA"):
        return path.stat().st_size
    size, end = 0, 0
    with path.open("rb") as file:
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
                end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no data from there on
                    return size
                return path.stat().st_size
            size += end - start


def refuse_holes(path: Path, fix: str) -> None:
    """Raise UsageError for a file that is larger than HOLES and far more than its data.

    A file of a few bytes can be terabytes long. Where it is read whole, that is memory.
    fix: end of the message.
    """
    size = path.stat().st_size
    if size > HOLES and size > HOLES + HOLES_PER_BYTE * size_of_data(path):
        raise UsageError(f"{path}: is {size / GIB:,.0f} GiB long, nearly all of it holes; {fix}")


def refuse_pipes(path: Path) -> None:
    """Raise UsageError for what is neither a file nor a folder: to read it may take for ever."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"{path}: is neither a file nor a folder; restore the file")


def _environment() -> dict[str, str]:
    """Return the child's environment: this onepolicy, one thread, allocators that reserve little.

    The limit is one of address space, and an arena for every thread of a large machine takes much.
    """
    paths = [str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }


def _serve() -> None:
    """Run the task that stdin names, in the child."""
    _end_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    pipe = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no message
    request = json.loads(sys.stdin.buffer.readline())
    cpu_seconds = request["cpu_seconds"]
    if cpu_seconds is None:
        cpu_seconds = request["seconds"] + CPU_SECONDS_MORE
    module, _, name = request["task"].partition(":")
    try:
        messages = getattr(importlib.import_module(module), name)(**request["arguments"])
        next(messages)
        _limit_memory(request["memory"])
        _limit_cpu(cpu_seconds)
        _send(pipe, {"kind": "ready"})
        if request["asked"]:
            for line in sys.stdin.buffer:
                _limit_cpu(cpu_seconds)
                info, arrays = messages.send(json.loads(line))
                _send(pipe, {"kind": "message", **info}, arrays)
            return
        for info, arrays in messages:
            _send(pipe, {"kind": "message", **info}, arrays)
        _send(pipe, {"kind": "end"})
    except MemoryError:
        _send(pipe, {"kind": "memory"})
    except UsageError as error:
        _send(pipe, {"kind": "refused", "text": str(error)[:4000]})
    except Exception as error:  # of a library on a stranger's file: no traceback for the user
        text = f"{type(error).__name__}: {str(error)[:160]}"
        _send(pipe, {"kind": "failed", "text": text.splitlines()[0]})


def _end_with_parent(alive: int) -> None:
    """Let the kernel end this process and its children as soon as the pipe `alive` is closed.

    It does so where Python does not get to run, and whichever of the parent's threads ends:
    PR_SET_PDEATHSIG is bound to one thread.
    """
    signal.signal(signal.SIGIO, signal.SIG_DFL)  # it ends the process
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        os.read(alive, 1)
        sys.exit()  # it was closed before


def _limit_memory(memory: int) -> None:
    """Limit the address space of this process to so much more than it has."""
    if sys.platform != "linux":  # other systems take RLIMIT_AS and do nothing
        return
    import resource

    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    _set_soft_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + memory)


def _limit_cpu(seconds: float) -> None:
    """Limit the CPU time of this process from now on. It holds when the parent was killed too."""
    import resource

    _set_soft_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + seconds))


def _set_soft_limit(kind: int, value: int) -> None:
    import resource

    now, hard = resource.getrlimit(kind)
    if kind == resource.RLIMIT_AS and now != resource.RLIM_INFINITY:
        value = min(value, now)
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, hard))


def _send(pipe: int, info: dict[str, Any], arrays: Mapping[str, np.ndarray] = {}) -> None:
    flat = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    layout = [(name, array.dtype.str, array.size) for name, array in flat.items()]
    text = json.dumps({**info, "arrays": layout}).encode()
    _write(pipe, struct.pack("<I", len(text)) + text)
    for array in flat.values():
        if array.size:
            _write(pipe, array.view(np.uint8).data)


def _write(pipe: int, data: bytes | memoryview) -> None:
    while len(data):
        data = data[os.write(pipe, data) :]


if __name__ == "__main__":
    _serve()
