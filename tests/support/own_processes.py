"""Processes that tests start: they end with the test's own process, however that ends."""

import ctypes
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from onepolicy.rollout.vllm import reaper
from support.waiting import wait_until

LIBC = ctypes.CDLL(None)


def end_with_parent():
    """Let the kernel kill this process when its parent ends, even by SIGKILL. For `preexec_fn`."""
    if sys.platform == "linux":
        LIBC.prctl(reaper.PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def start_process(command, **how):
    """Start a process that a Ctrl-C in the terminal does not reach, and that ends with this one."""
    how = {"start_new_session": True, "preexec_fn": end_with_parent} | how
    return subprocess.Popen(list(map(str, command)), **how)


def start_reaped(command, **how):
    """Start a process whose descendants end with this one too, wherever they have moved to."""
    command = [sys.executable, "-I", "-S", reaper.__file__, *command]
    return start_process(command, stdin=subprocess.PIPE, preexec_fn=None, **how)


def children_of(pid):
    """Return the processes that any thread of the process has started."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, task.read_text().split())
    return found


def descendants_of(pid):
    """Return the children of a process, each before its own."""
    return [each for child in children_of(pid) for each in (child, *descendants_of(child))]


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids):
    wait_until(lambda: all(map(gone, pids)))
