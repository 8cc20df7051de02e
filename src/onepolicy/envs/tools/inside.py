"""The first process of the Python tool's sandbox: sets limits, starts the code, watches over it.

Its text is what the sandbox's Python runs: it imports nothing of ours, and nothing here is run in the driver. Whatever
runs in the sandbox descends from this process and carries its limits. When the code's own process ends, this one ends,
and with it the kernel ends all that is left. The code has the same user, so it must find nothing here to gain:
this process has an environment of three variables, gives up being read and traced, and ignores signals, which the
kernel sees to for the first process of a PID namespace.
"""

import os

# Exit statuses, beyond those of Python and of signals (128 + number).
TOO_MANY_FILES, TOO_MANY_TABLES, TOO_LONG, NOT_READY = 240, 241, 242, 243
SET_PARENT_DEATH_SIGNAL, SET_DUMPABLE, SET_NO_HUGE_PAGES = 1, 4, 41  # linux/prctl.h
EVERY_S = 0.02
"""Seconds between two looks. What is made in between is the only excess over a bound that is watched."""


def enter(user: int, limits: dict[str, int], seconds: float, inodes: int, tables_kib: int) -> None:
    """Return in the code's process, with every limit set; the first process stays here until the sandbox ends.

    user: whom to become, if this is root. limits: for every process, by name. seconds: until everything ends.
    """
    root = os.geteuid() == 0
    if root:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(
            user, user, 0
        )  # a saved 0 lets bubblewrap, which is root without capabilities, end this process
    if not _prctl(SET_NO_HUGE_PAGES, 1):  # one of them stays whole while any 4 KiB of it are mapped
        os._exit(NOT_READY)
    for name, most in limits.items():
        if name != "NPROC":
            _limit(name, most)
    wait, ready = os.pipe()
    code = os.fork()
    _limit(
        "NPROC", limits["NPROC"]
    )  # only now: Linux before 5.14 counts the user's processes outside too
    if code == 0:
        os.close(ready)
        os.read(wait, 1)  # ends when the watch begins
        os.close(wait)
        if root:
            os.setresuid(user, user, user)
        return
    os._exit(_watched(code, ready, seconds, inodes, tables_kib))


def _limit(name: str, most: int) -> None:
    import resource

    limit = getattr(resource, "RLIMIT_" + name)
    _, hard = resource.getrlimit(limit)
    if hard != resource.RLIM_INFINITY:
        most = min(most, hard)
    resource.setrlimit(limit, (most, most))


def _prctl(option: int, value: int) -> bool:
    """Set an option of this process, and return whether the kernel did."""
    import ctypes

    return bool(
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), *[ctypes.c_ulong(0)] * 3) == 0
    )


def _watched(code: int, ready: int, seconds: float, inodes: int, tables_kib: int) -> int:
    """Return the status to end with: the code's own, or a bound that it passed."""
    import signal
    import time

    if not _prctl(SET_DUMPABLE, 0) or not _prctl(SET_PARENT_DEATH_SIGNAL, int(signal.SIGKILL)):
        return NOT_READY
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one that Python does not leave as it is
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    for descriptor in range(3):
        os.close(descriptor)
    end = time.monotonic() + seconds
    os.close(ready)
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == code:
            code_status = os.waitstatus_to_exitcode(status)
            return code_status if code_status >= 0 else 128 - code_status
        if ended == 0:
            scratch = os.statvfs("/scratch")
            if scratch.f_files - scratch.f_ffree > inodes:
                return TOO_MANY_FILES
            if _page_tables_kib() > tables_kib:
                return TOO_MANY_TABLES
            if time.monotonic() > end:
                return TOO_LONG
            signal.sigtimedwait([signal.SIGCHLD], EVERY_S)


def _page_tables_kib() -> int:
    """Of all processes of the sandbox. Every thread of a process tells the same, but a first one that ended nothing."""
    total = 0
    for process in os.listdir("/proc"):
        if process.isdecimal():
            try:
                threads = os.listdir(f"/proc/{process}/task")
            except OSError:  # it has ended
                continue
            total += max(
                (_page_tables_of_kib(f"/proc/{process}/task/{thread}") for thread in threads),
                default=0,
            )
    return total


def _page_tables_of_kib(folder: str) -> int:
    try:
        with open(f"{folder}/status", "rb") as file:
            lines = file.read().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(b"VmPTE:"))
