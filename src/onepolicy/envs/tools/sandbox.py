"""A Python tool in a process that can reach nothing: bubblewrap gives it kernel namespaces of its own.

No network, no files but a read-only Python and a scratch folder in memory, no capabilities, no view of other processes;
limits on CPU and wall time, memory, processes and output; a filter of system calls (seccomp.py). Where bubblewrap
cannot make namespaces the tool refuses to exist: limits alone keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import shutil
import signal
import subprocess
import sys

from onepolicy.config import PythonTool, UsageError
from onepolicy.envs.tools import seccomp
from onepolicy.interfaces import EpisodeError

PYTHON = "/python"
SCRATCH_MIB = 16
PROCESSES = 16
FILES = 256  # open at a time, per process: what sockets and pipes hold is the kernel's memory
FIRST_USER = 1_000_000  # of 10,000 that own nothing
MEND = "or leave the tool out: it never runs without a sandbox"

# Runs first in the sandbox: gives up root, if it is, and sets limits that what it then runs cannot raise.
BOOTSTRAP = """
import os, resource, sys
if os.geteuid() == 0:
    user = int(sys.argv[1])
    os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
for name, most in {limits}: resource.setrlimit(getattr(resource, "RLIMIT_" + name), (most, most))
code = sys.stdin.read()
del os, resource, sys
exec(compile(code, "<code>", "exec"), {{"__name__": "__main__"}})
"""


class PythonSandbox:
    name, argument = "python", "code"
    description = "Runs Python in an empty sandbox without network and returns what it prints."

    def __init__(self, config: PythonTool) -> None:
        self.config = config
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise UsageError(
                "task.tools: python runs in a bubblewrap sandbox, and bwrap is not installed; install your system's "
                f"package (apt install bubblewrap), {MEND}"
            )
        if not seccomp.known_machine():
            raise UsageError(
                f"task.tools: python has no filter of system calls for a {platform.machine()} processor, only for "
                f"{', '.join(seccomp.MACHINES)}; use one of those, {MEND}"
            )
        script = BOOTSTRAP.format(limits=_limits(config))
        self._bwrap, self._rest = [bwrap, *_namespaces()], ["--", _python(), "-I", "-B", "-u", "-c", script]
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._users = itertools.cycle(range(FIRST_USER, FIRST_USER + 10_000))
        with seccomp.opened() as rules:
            done = subprocess.run(
                self._command(rules), input=b"print(6 * 7)", capture_output=True, check=False, pass_fds=[rules]
            )
        if done.stdout.strip() != b"42":
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise UsageError(
                f"task.tools: python cannot run: bubblewrap made no sandbox here ({said}); allow unprivileged user "
                f"namespaces, raise its memory_mib (now {config.memory_mib}), {MEND}"
            )

    def _command(self, rules: int) -> list[str]:
        """Root gives every call a user of its own, so that the limit on processes counts that call's only."""
        return [*self._bwrap, "--seccomp", str(rules), *self._rest, str(next(self._users))]

    async def call(self, text: str) -> str:
        """What the code printed, errors included, cut to config.output_chars; a limit it ran into stands at the end.

        Calls wait for their turn, so that config.seconds is not spent on waiting for a core.
        """
        async with self._turn():
            return await self._call(text)

    def sources(self) -> tuple[str, ...]:
        return ()  # whatever the code prints

    def _turn(self) -> asyncio.Semaphore:
        """Of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._turns is None or self._turns[0] is not loop:
            self._turns = loop, asyncio.Semaphore(2 * (os.cpu_count() or 1))
        return self._turns[1]

    async def _call(self, text: str) -> str:
        try:
            with seccomp.opened() as rules:
                process = await asyncio.create_subprocess_exec(
                    *self._command(rules),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[rules],
                )
        except OSError as error:  # out of processes, memory or file descriptors
            raise EpisodeError(f"the python tool's sandbox could not be started: {error}") from error
        printed = bytearray()
        try:
            async with asyncio.timeout(self.config.seconds):
                ended = await self._run(process, text, printed)
        except TimeoutError:
            ended = f"error: still running after {self.config.seconds:g} s"
        finally:
            await _kill(process)
        said = printed.decode(errors="replace")[: self.config.output_chars].strip("\n")
        return "\n".join(part for part in (said, ended) if part)

    async def _run(self, process: asyncio.subprocess.Process, text: str, printed: bytearray) -> str:
        """Feed the code, collect what it prints. Returns which limit ended it, or nothing."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it may die before it has read everything
            process.stdin.write(text.encode(errors="replace"))
            await process.stdin.drain()
            process.stdin.close()
        most = 4 * self.config.output_chars  # bytes
        while chunk := await process.stdout.read(1 << 16):
            printed += chunk
            if len(printed) > most or len(printed.decode(errors="replace")) > self.config.output_chars:
                return "error: too much output"
        status = await process.wait()
        return "" if status == 0 or printed else f"error: ended with status {status}"


def _python() -> str:
    """The interpreter's path in the sandbox: outside any virtual environment, and under PYTHON if not under /usr."""
    path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return path if path.startswith("/usr/") else os.path.join(PYTHON, os.path.relpath(path, sys.base_prefix))


def _namespaces() -> list[str]:
    """bwrap's arguments: what the code can see, which is next to nothing."""
    shown: list[str] = []
    for folder in ("/usr", "/lib", "/lib64", "/bin"):
        if os.path.islink(folder):
            shown += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            shown += ["--ro-bind", folder, folder]
    if not _python().startswith("/usr/"):  # elsewhere, as its own parent folders may be closed to other users
        shown += ["--ro-bind", sys.base_prefix, PYTHON, "--setenv", "LD_LIBRARY_PATH", f"{PYTHON}/lib"]
    if os.geteuid() == 0:  # limits do not hold for root, nor for a root that has another name inside
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    return [
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", *user),
        *("--die-with-parent", "--clearenv", *shown, "--proc", "/proc", "--dev", "/dev"),
        *("--size", str(SCRATCH_MIB * 2**20), "--perms", "1777", "--tmpfs", "/scratch", "--chdir", "/scratch"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--setenv", "PATH", "/usr/bin:/bin"),
        *("--setenv", "HOME", "/scratch", "--setenv", "LANG", "C.UTF-8"),
    ]


def _limits(config: PythonTool) -> list[tuple[str, int]]:
    cpu, memory = int(config.seconds) + 1, config.memory_mib * 2**20
    return [
        ("CPU", cpu),
        ("AS", memory),
        ("FSIZE", SCRATCH_MIB * 2**20),
        ("NPROC", PROCESSES),
        ("NOFILE", FILES),
        ("CORE", 0),
    ]


async def _kill(process: asyncio.subprocess.Process) -> None:
    """The whole group: with bubblewrap dies the sandbox's first process, and with that all of its namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError as error:
        raise EpisodeError("the python tool's sandbox did not end within 10 s of being killed") from error
