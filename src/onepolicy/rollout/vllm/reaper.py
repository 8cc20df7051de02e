"""Run a command, and end every process of it when it ends or when the process that started this one does.

`python reaper.py COMMAND ...`, with the standard library only. Standard input is a pipe whose other end the starter
holds and never writes to: it closes whatever ends the starter, SIGKILL included. The exit status is the command's.
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
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_S = 0.01  # while killed processes are waited for


def main(command: list[str]) -> int:
    came: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _: object) -> None:
        came.append(number)
        if process is not None:
            process.send_signal(number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command as well
    _prctl(PR_SET_CHILD_SUBREAPER, 1)  # whom the command leaves behind becomes our child
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    if came:  # before there was a process to take it
        process.send_signal(came[0])
    threading.Thread(target=_watch_starter, daemon=True).start()
    status = process.wait()
    end_children()
    return status


def end_children() -> None:
    """Kill all processes below this one, those that they start meanwhile too."""
    while True:
        for pid in _below(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(POLL_S)


def _watch_starter() -> None:
    while os.read(0, 1):
        pass
    end_children()
    os._exit(1)


def _below(pid: int) -> list[int]:
    """Children of this process, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it has ended
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    left = [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


def _die_with_parent() -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere a process that is left behind is not found."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    if status < 0:  # end as the command has ended
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)
