"""The first process of the Python tool's sandbox: sets limits, starts the code and watches it.

The sandbox's Python runs the text of this file. It therefore imports nothing of onepolicy, and the
driver runs nothing of it. Every process in the sandbox descends from this process and inherits its
limits. When the code's process ends, this process ends, and the kernel then ends all others.

The code runs as the same user, so this process must give it nothing to exploit. Its environment has
three variables. It cannot be read or traced. It ignores signals, as the kernel arranges for the
first process of a PID namespace.
"""

import os

# Exit statuses, beyond those of Python and of signals (128 + number).
TOO_MANY_FILES, TOO_MANY_TABLES, TOO_LONG, NOT_READY = 240, 241, 242, 243
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_NO_HUGE_PAGES = 1, 4, 41  # linux/prctl.h
WATCH_INTERVAL_S = 0.02
"""Seconds between two checks. A watched bound can be exceeded only in between."""


def enter_sandbox(
    user: int, limits: dict[str, int], seconds: float, inodes: int, tables_kib: int
) -> None:
    """Set every limit and fork. Return in the code's process only.

    The first process stays in this function until the sandbox ends. user: user id to take if this
    is root. limits: resource limit of every process, by name. seconds: time until everything ends.
    inodes, tables_kib: bounds that are watched.
    """
    root = os.geteuid() == 0
    if root:
        os.setgroups([])
        os.setresgid(user, user, user)
        # A saved 0 lets bubblewrap, which is root without capabilities, end this process.
        os.setresuid(user, user, 0)
    # A huge page stays whole while any 4 KiB of it are mapped.
    if not _prctl(SET_NO_HUGE_PAGES, 1):
        os._exit(NOT_READY)
    for name, limit in limits.items():
        if name != "NPROC":
            _set_limit(name, limit)
    wait, ready = os.pipe()
    code = os.fork()
    # After the fork: Linux before 5.14 also counts the user's processes outside.
    _set_limit("NPROC", limits["NPROC"])
    if code == 0:
        os.close(ready)
        os.read(wait, 1)  # ends when the watch begins
        os.close(wait)
        if root:
            os.setresuid(user, user, user)
        return
    os._exit(_watch(code, ready, seconds, inodes, tables_kib))


def _set_limit(name: str, limit: int) -> None:
    import resource

    kind = getattr(resource, "RLIMIT_" + name)
    _, hard = resource.getrlimit(kind)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(kind, (limit, limit))


def _prctl(option: int, value: int) -> bool:
    """Set an option of this process; return whether that worked."""
    import ctypes

    unused = [ctypes.c_ulong(0)] * 3
    return bool(ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *unused) == 0)


def _watch(code: int, ready: int, seconds: float, inodes: int, tables_kib: int) -> int:
    """Return the status to exit with: the code's own, or the status of an exceeded bound."""
    import signal
    import time

    if not _prctl(SET_DUMPABLE, 0) or not _prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL)):
        return NOT_READY
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python installs a handler for this signal only
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    for descriptor in range(3):
        os.close(descriptor)
    end = time.monotonic() + seconds
    os.close(ready)
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == code:
            code_status = os.waitstatus_to_exitcode(status)
            if code_status < 0:  # ended by a signal
                return 128 - code_status
            return code_status
        if ended == 0:
            scratch = os.statvfs("/scratch")
            if scratch.f_files - scratch.f_ffree > inodes:
                return TOO_MANY_FILES
            if _page_tables_kib() > tables_kib:
                return TOO_MANY_TABLES
            if time.monotonic() > end:
                return TOO_LONG
            signal.sigtimedwait([signal.SIGCHLD], WATCH_INTERVAL_S)


def _page_tables_kib() -> int:
    """Return the size of the page tables of all processes in the sandbox [KiB].

    Every thread reports the size of its process, except a first thread that has ended.
    """
    total = 0
    for process in os.listdir("/proc"):
        if process.isdecimal():
            try:
                threads = os.listdir(f"/proc/{process}/task")
            except OSError:  # it has ended
                continue
            sizes = [_page_tables_of_kib(f"/proc/{process}/task/{thread}") for thread in threads]
            total += max(sizes, default=0)
    return total


def _page_tables_of_kib(folder: str) -> int:
    try:
        with open(f"{folder}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(b"VmPTE:"))
