"""A Python tool in a process that can reach nothing: bubblewrap gives it kernel namespaces of its own.

No network, no files but a read-only Python and a scratch folder in memory, no capabilities, no view of other processes;
limits on CPU and wall time, memory, processes and output; a filter of system calls (seccomp.py). The first process of
the sandbox (inside.py) sets the limits, starts the code as a second process and watches over what no limit counts.
Where bubblewrap cannot make namespaces the tool refuses to exist: limits alone keep nobody out.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from onepolicy.config import PythonTool, UsageError
from onepolicy.envs.tools import inside, seccomp
from onepolicy.interfaces import EpisodeError

PYTHON = "/python"
SCRATCH_MIB = 16
INODES = 4096
"""Files, folders and links in the scratch folder: about 1.3 KiB each of the kernel's memory."""
PROCESSES = 16
"""Threads count. One of them is the sandbox's first process."""
FILES = 64
"""Open at a time, per process: what sockets and pipes hold is the kernel's memory, up to 208 KiB each."""
SIGNALS = 64
"""Queued real-time signals and POSIX timers."""
TABLES_MIB = 64
"""Page tables of all processes, beside 1/512 of the memory that they may map."""
GRACE_S = 30.0
"""The first process ends a call this long after its time if the driver does not: it may be busy, or gone."""
FIRST_USER, USERS = 2_000_000_000, 100_000_000
"""Users that own nothing: as root every call is one of them, and starts of several runs hardly meet."""
MEND = "or leave the tool out: it never runs without a sandbox"
CHECK = """
import os, socket

own = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PWD"}

def gap(what, attempt):
    try:
        if attempt() is not False:
            print(what)
    except OSError:
        pass

def environment(process):
    with open(f"/proc/{process}/environ") as file:
        return bool({variable.split("=")[0] for variable in file.read().split(chr(0)) if variable} - own)

gap("its environment is not empty", lambda: bool(set(os.environ) - own))
processes = [name for name in os.listdir("/proc") if name.isdecimal()]
for process in processes:
    gap(f"the environment of process {process} is not empty", lambda: environment(process))
gap("other processes are visible", lambda: set(processes) != {"1", str(os.getpid())})
with open("/proc/1/limits") as first, open("/proc/self/limits") as own_limits:
    gap("its first process has other limits", lambda: first.read() != own_limits.read())
gap("the memory of its first process can be written", lambda: open("/proc/1/mem", "wb").close())
gap("sockets can be made", lambda: socket.socket(socket.AF_VSOCK).close())
gap("files in its scratch folder are not counted", lambda: os.statvfs("/scratch").f_files == 0)
gap("files can be made outside its scratch folder", lambda: open("/file", "w").close())
print("checked")
"""
SAID = {
    inside.TOO_MANY_FILES: f"error: more than {INODES} files, folders and links in the scratch folder",
    inside.TOO_MANY_TABLES: "error: too much memory for page tables",
}


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
        self._bwrap, self._rest = (
            [bwrap, *_namespaces()],
            ["--", _python(), "-I", "-B", "-u", "-c", _script(config)],
        )
        self._turns: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._users = itertools.count(secrets.randbelow(USERS))
        self._check()

    def _check(self) -> None:
        """UsageError unless a sandbox can be made here and holds what the kernel must hold for it."""
        with seccomp.opened() as rules:
            done = subprocess.run(
                self._command(rules),
                input=CHECK.encode(),
                capture_output=True,
                check=False,
                pass_fds=[rules],
                env={},
            )
        if not done.stdout.endswith(b"checked\n"):
            said = done.stderr.decode(errors="replace").strip()[-300:]
            raise UsageError(
                f"task.tools: python cannot run: bubblewrap made no sandbox here ({said}); allow unprivileged user "
                f"namespaces, raise its memory_mib (now {self.config.memory_mib}), {MEND}"
            )
        gaps = done.stdout.decode(errors="replace").splitlines()[:-1]
        if gaps:
            raise UsageError(
                f"task.tools: python cannot run: the sandbox that bubblewrap made here does not hold ({'; '.join(gaps)}"
                f"); bubblewrap, the kernel or its settings are of a kind that was not tried, {MEND}"
            )

    def _command(self, rules: int) -> list[str]:
        """Root gives every call a user of its own, so that the limit on processes counts that call's only."""
        user = FIRST_USER + next(self._users) % USERS
        return [*self._bwrap, "--seccomp", str(rules), *self._rest, str(user)]

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
                    env={},
                )
        except OSError as error:  # out of processes, memory or file descriptors
            raise EpisodeError(
                f"the python tool's sandbox could not be started: {error}"
            ) from error
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
            if (
                len(printed) > most
                or len(printed.decode(errors="replace")) > self.config.output_chars
            ):
                return "error: too much output"
        status = await process.wait()
        if status in SAID:
            return SAID[status]
        return "" if status == 0 or printed else f"error: ended with status {status}"


def _python() -> str:
    """The interpreter's path in the sandbox: outside any virtual environment, and under PYTHON if not under /usr."""
    path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    return (
        path
        if path.startswith("/usr/")
        else os.path.join(PYTHON, os.path.relpath(path, sys.base_prefix))
    )


def _script(config: PythonTool) -> str:
    """What the sandbox's Python runs: inside.py, and in the code's process the code."""
    tables_kib = TABLES_MIB * 2**10 + PROCESSES * config.memory_mib * 2**10 // 512
    given = f"{_limits(config)!r}, {config.seconds + GRACE_S!r}, {INODES}, {tables_kib}"
    return "\n".join(
        [
            Path(inside.__file__).read_text(encoding="utf-8"),
            "import sys",
            f"enter(int(sys.argv.pop()), {given})",
            'exec(compile(sys.stdin.read(), "<code>", "exec"), {"__name__": "__main__"})',
        ]
    )


def _namespaces() -> list[str]:
    """bwrap's arguments: what the code can see, which is next to nothing."""
    shown: list[str] = []
    for folder in ("/usr", "/lib", "/lib64", "/bin"):
        if os.path.islink(folder):
            shown += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            shown += ["--ro-bind", folder, folder]
    if not _python().startswith(
        "/usr/"
    ):  # elsewhere, as its own parent folders may be closed to other users
        shown += [
            "--ro-bind",
            sys.base_prefix,
            PYTHON,
            "--setenv",
            "LD_LIBRARY_PATH",
            f"{PYTHON}/lib",
        ]
    if (
        os.geteuid() == 0
    ):  # limits do not hold for root, nor for a root that has another name inside
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    return [
        *(
            "--as-pid-1",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-ipc",
            "--unshare-uts",
            "--unshare-cgroup-try",
            *user,
        ),
        *("--die-with-parent", "--clearenv", *shown, "--proc", "/proc", "--dev", "/dev"),
        *(
            "--size",
            str(SCRATCH_MIB * 2**20),
            "--perms",
            "1777",
            "--tmpfs",
            "/scratch",
            "--chdir",
            "/scratch",
        ),
        *(
            "--tmpfs",
            "/dev/pts",
            "--remount-ro",
            "/dev/pts",
        ),  # no pseudo terminals: all of the machine share 4096
        *("--remount-ro", "/dev", "--remount-ro", "/", "--setenv", "PATH", "/usr/bin:/bin"),
        *("--setenv", "HOME", "/scratch", "--setenv", "LANG", "C.UTF-8"),
    ]


def _limits(config: PythonTool) -> dict[str, int]:
    """Resource limits of every process in the sandbox."""
    return {
        "CPU": int(config.seconds) + 1,
        "AS": config.memory_mib * 2**20,
        "FSIZE": SCRATCH_MIB * 2**20,
        "NPROC": PROCESSES,
        "NOFILE": FILES,
        "SIGPENDING": SIGNALS,
        "MSGQUEUE": 0,
        "MEMLOCK": 0,
        "CORE": 0,
    }


async def _kill(process: asyncio.subprocess.Process) -> None:
    """The whole group: with bubblewrap dies the sandbox's first process, and with that all of its namespace."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError as error:
        raise EpisodeError(
            "the python tool's sandbox did not end within 10 s of being killed"
        ) from error
