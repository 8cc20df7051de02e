"""A Python tool that runs code in a bubblewrap sandbox, with kernel namespaces of its own.

The code has no network and no capabilities. It sees no other process and no files except a
read-only Python and a scratch folder in memory. CPU and wall time, memory, processes and output are
limited, and a filter refuses system calls (seccomp.py). The first process of the sandbox
(sandbox_init.py) sets the limits, starts the code as a second process and watches the bounds that
no limit covers.

The tool refuses to run where bubblewrap cannot make namespaces, because limits alone do not
isolate.
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
from onepolicy.envs.tools import sandbox_init, seccomp
from onepolicy.interfaces import EpisodeError

PYTHON = "/python"
SCRATCH_MIB = 16
INODES = 4096
"""Files, folders and links in the scratch folder: about 1.3 KiB each of the kernel's memory."""
PROCESSES = 16
"""Processes and threads, including the sandbox's first process."""
FILES = 64
"""Open files of a process. A socket or pipe holds up to 208 KiB of the kernel's memory."""
SIGNALS = 64
"""Queued real-time signals and POSIX timers."""
TABLES_MIB = 64
"""Page tables of all processes, beside 1/512 of the memory that they may map."""
GRACE_S = 30.0
"""Time after which the first process ends an overdue call, if the driver is busy or gone [s]."""
FIRST_USER, USERS = 2_000_000_000, 100_000_000
"""Range of user ids that own nothing.

As root every call has another id of it. The first id is random, so several runs hardly share ids.
"""
HINT = "or leave the tool out: it never runs without a sandbox"
CHECK_SCRIPT = """
import os, socket

expected = {"HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PWD"}

def gap(problem, attempt):
    try:
        if attempt() is not False:
            print(problem)
    except OSError:
        pass

def environment(process):
    with open(f"/proc/{process}/environ") as file:
        variables = file.read().split(chr(0))
    return bool({variable.split("=")[0] for variable in variables if variable} - expected)

gap("its environment is not empty", lambda: bool(set(os.environ) - expected))
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
FIRST_SIGNAL = 128
"""Status of code that a signal ended, less the signal's number."""
STATUS_ERRORS = {
    sandbox_init.TOO_MANY_FILES: (
        f"error: more than {INODES} files, folders and links in the scratch folder"
    ),
    sandbox_init.TOO_MANY_TABLES: "error: too much memory for page tables",
}


class PythonSandbox:
    """The Python tool. Every call runs in a new sandbox."""

    name, argument = "python", "code"
    description = "Runs Python in an empty sandbox without network and returns what it prints."

    def __init__(self, config: PythonTool) -> None:
        """Check that sandboxes can be made here. Raises UsageError."""
        self.config = config
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise UsageError(
                "task.tools: python runs in a bubblewrap sandbox, and bwrap is not installed; "
                f"install your system's package (apt install bubblewrap), {HINT}"
            )
        if not seccomp.is_supported_machine():
            raise UsageError(
                f"task.tools: python has no filter of system calls for a {platform.machine()} "
                f"processor, only for {', '.join(seccomp.MACHINES)}; use one of those, {HINT}"
            )
        self._bwrap = [bwrap, *_bwrap_arguments()]
        self._python = ["--", python_path(), "-I", "-B", "-u", "-c", _startup_script(config)]
        self._semaphore: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None
        self._users = itertools.count(secrets.randbelow(USERS))
        self._check()

    def _check(self) -> None:
        """Raise UsageError unless a sandbox can be made here and isolates the code."""
        with seccomp.open_filter() as filter_fd:
            done = subprocess.run(
                self._command(filter_fd),
                input=CHECK_SCRIPT.encode(),
                capture_output=True,
                check=False,
                pass_fds=[filter_fd],
                env={},
            )
        if not done.stdout.endswith(b"checked\n"):
            problem = done.stderr.decode(errors="replace").strip()[-300:]
            raise UsageError(
                f"task.tools: python cannot run: bubblewrap made no sandbox here ({problem}); "
                "allow unprivileged user namespaces, raise its memory_mib (now "
                f"{self.config.memory_mib}), {HINT}"
            )
        gaps = done.stdout.decode(errors="replace").splitlines()[:-1]
        if gaps:
            raise UsageError(
                "task.tools: python cannot run: the sandbox that bubblewrap made here does not "
                f"hold ({'; '.join(gaps)}); use another kernel, bubblewrap or settings of them, "
                f"{HINT}"
            )

    def _command(self, filter_fd: int) -> list[str]:
        """Return a call's command.

        As root every call has its own user id, so that the limit on processes counts only this
        call.
        """
        user = FIRST_USER + next(self._users) % USERS
        return [*self._bwrap, "--seccomp", str(filter_fd), *self._python, str(user)]

    async def call(self, text: str) -> str:
        """Run the code and return its output, errors included, cut to config.output_chars.

        The error of an exceeded limit is the last line. Calls beyond a number per core wait here,
        so that waiting for a core does not count as run time.
        """
        async with self._concurrency_limit():
            return await self._call_now(text)

    def reply_texts(self) -> tuple[str, ...]:
        return ()  # unknown: the code can print any text

    def _concurrency_limit(self) -> asyncio.Semaphore:
        """Return the semaphore of the running event loop."""
        loop = asyncio.get_running_loop()
        if self._semaphore is None or self._semaphore[0] is not loop:
            self._semaphore = loop, asyncio.Semaphore(2 * (os.cpu_count() or 1))
        return self._semaphore[1]

    async def _call_now(self, text: str) -> str:
        process = await self._start()
        printed = bytearray()
        try:
            async with asyncio.timeout(self.config.seconds):
                error = await self._feed_and_read(process, text, printed)
        except TimeoutError:
            error = f"error: still running after {self.config.seconds:g} s"
        finally:
            await kill_sandbox(process, "the python tool's")
        output = printed.decode(errors="replace")[: self.config.output_chars].strip("\n")
        return "\n".join(part for part in (output, error) if part)

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            with seccomp.open_filter() as filter_fd:
                return await asyncio.create_subprocess_exec(
                    *self._command(filter_fd),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=[filter_fd],
                    env={},
                )
        except OSError as error:  # out of processes, memory or file descriptors
            raise EpisodeError(
                f"the python tool's sandbox could not be started: {error}"
            ) from error

    async def _feed_and_read(
        self, process: asyncio.subprocess.Process, text: str, printed: bytearray
    ) -> str:
        """Feed the code and collect its output in `printed`.

        Returns the error of the limit that ended the code, or an empty string.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it may end before it has read everything
            process.stdin.write(text.encode(errors="replace"))
            await process.stdin.drain()
            process.stdin.close()
        max_chars = self.config.output_chars
        while chunk := await process.stdout.read(1 << 16):
            printed += chunk
            # A character has at most 4 bytes.
            if len(printed) > 4 * max_chars or len(printed.decode(errors="replace")) > max_chars:
                return "error: too much output"
        status = await process.wait()
        if status in STATUS_ERRORS:
            return STATUS_ERRORS[status]
        if status == 0 or (printed and 0 < status < FIRST_SIGNAL):  # a traceback says why
            return ""
        return f"error: ended with status {status}"


def python_path() -> str:
    """Return the interpreter's path in the sandbox, outside any virtual environment.

    An interpreter that is not under /usr is found under PYTHON.
    """
    path = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if path.startswith("/usr/"):
        return path
    return os.path.join(PYTHON, os.path.relpath(path, sys.base_prefix))


def _startup_script(config: PythonTool) -> str:
    """Return the script for the sandbox's Python: sandbox_init.py, then the code in its process."""
    tables_kib = TABLES_MIB * 2**10 + PROCESSES * config.memory_mib * 2**10 // 512
    limits, seconds = _resource_limits(config), config.seconds + GRACE_S
    return "\n".join(
        [
            Path(sandbox_init.__file__).read_text(encoding="utf-8"),
            "import sys, types",
            f"enter_sandbox(int(sys.argv.pop()), {limits!r}, {seconds!r}, {INODES}, {tables_kib})",
            # unittest, doctest and pickle look the code's names up in its module
            'start, main = sys.modules["__main__"], types.ModuleType("__main__")',
            'sys.modules["__main__"] = main',
            'exec(compile(sys.stdin.read(), "<code>", "exec"), main.__dict__)',
        ]
    )


def _bwrap_arguments() -> list[str]:
    """Return bwrap's arguments, which decide what the code can see."""
    scratch_bytes = str(SCRATCH_MIB * 2**20)
    return [
        *namespace_arguments(),
        *("--die-with-parent", "--clearenv", *mount_arguments()),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--size", scratch_bytes, "--perms", "1777", "--tmpfs", "/scratch", "--chdir", "/scratch"),
        # No pseudo terminals: the whole machine shares 4096.
        *("--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--setenv", "PATH", "/usr/bin:/bin"),
        *("--setenv", "HOME", "/scratch", "--setenv", "LANG", "C.UTF-8"),
    ]


def namespace_arguments() -> list[str]:
    namespaces = ["--as-pid-1", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    namespaces.append("--unshare-cgroup-try")
    # Resource limits bind neither root nor a user that is root outside the user namespace.
    if os.geteuid() == 0:
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    return [*namespaces, *user]


def mount_arguments() -> list[str]:
    """Return the arguments that show the system's folders and Python, read-only."""
    arguments: list[str] = []
    for folder in ("/usr", "/lib", "/lib64", "/bin"):
        if os.path.islink(folder):
            arguments += ["--symlink", os.readlink(folder), folder]
        elif os.path.isdir(folder):
            arguments += ["--ro-bind", folder, folder]
    # Python is shown at another path, because its parent folders may be closed to other users.
    if not python_path().startswith("/usr/"):
        arguments += ["--ro-bind", sys.base_prefix, PYTHON]
        arguments += ["--setenv", "LD_LIBRARY_PATH", f"{PYTHON}/lib"]
    return arguments


def _resource_limits(config: PythonTool) -> dict[str, int]:
    """Return the resource limits of every process in the sandbox."""
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


async def kill_sandbox(process: asyncio.subprocess.Process, whose: str) -> None:
    """Kill bubblewrap's process group. whose: for the error.

    The sandbox's first process dies with bubblewrap, and all of its namespace with that process.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError as error:
        raise EpisodeError(f"{whose} sandbox did not end within 10 s of being killed") from error
