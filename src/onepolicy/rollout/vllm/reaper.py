"""A process that runs a command and ends all its processes when the command or the starter ends.

`python reaper.py COMMAND ...`, with the standard library only. Standard input is a pipe. The
starter holds its other end and never writes to it, so that it closes when the starter ends, even
by SIGKILL. The exit status is the command's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_S = 0.01  # while killed processes end


def main(command: list[str]) -> int:
    """Run the command and return its exit status."""
    early_signals: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def forward_signal(number: int, _: object) -> None:
        if process is None:
            early_signals.append(number)
        else:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, forward_signal)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command as well
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    if early_signals:
        process.send_signal(early_signals[0])
    threading.Thread(target=_watch_starter, daemon=True).start()
    status = process.wait()
    end_children()
    return status


@contextmanager
def adopted_children_end() -> Iterator[None]:
    """Adopt the orphans of processes that are started inside, and kill them at the end.

    For the starter, whose process so ends the orphans of a killed reaper. Children that it had
    before live on.
    """
    kept = set(_children_by_parent().get(os.getpid(), []))
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        end_children(kept)
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


def end_children(kept: Set[int] = frozenset()) -> None:
    """Kill all processes below this one, and those that they start meanwhile.

    kept: children that live on, with their descendants.
    """
    while True:
        pids = _descendants(os.getpid(), kept)
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):  # it is a child's child
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_S)


def _watch_starter() -> None:
    while os.read(0, 1):
        pass
    end_children()
    os._exit(1)


def _descendants(pid: int, kept: Set[int]) -> list[int]:
    """Return the children of the process but those kept, their children, and so on."""
    children = _children_by_parent()
    found: list[int] = []
    unvisited = [pid]
    while unvisited:
        direct = [each for each in children.get(unvisited.pop(), []) if each not in kept]
        found += direct
        unvisited += direct
    return found


def _children_by_parent() -> dict[int, list[int]]:
    """Return the children of every process. Empty on other systems than Linux."""
    children: dict[int, list[int]] = {}
    if sys.platform != "linux":
        return children
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(int(name))
    return children


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Call prctl on Linux. On other systems orphans are not found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status < 0:  # end by the same signal as the command
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
