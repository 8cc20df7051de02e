"""A bubblewrap sandbox for a program that plays episodes: it reaches the gateway and nothing else.

It has namespaces of its own, as the Python tool's (envs/tools/sandbox.py). Its network is a
loopback, on which a relay (program_init.py) leads to one Unix socket, the gateway's. It sees /usr,
the folders that the settings name, read-only, and a working folder in memory. Its variables are
those of the settings, and the address and key of its own episode.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import platform
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onepolicy.config import ProgramTask, UsageError
from onepolicy.config.task import GATEWAY_VARIABLES
from onepolicy.envs.multiturn.call_format import finite_json
from onepolicy.envs.tools import sandbox_init, seccomp
from onepolicy.envs.tools.sandbox import (
    FIRST_USER,
    GRACE_S,
    TABLES_MIB,
    USERS,
    kill_sandbox,
    mount_arguments,
    namespace_arguments,
    python_path,
)
from onepolicy.gateway import program_init
from onepolicy.interfaces import EpisodeError

ADDRESS = f"http://127.0.0.1:{program_init.PORT}"
"""The gateway's address inside."""
FOLDER = "/program"
MOST_BYTES, MOST_REPORTED = 2**15, 2**17
"""Bytes of a result file that are read, and of a report, which holds them in base64."""
PRINTED_KEPT, ERRORS_KEPT = 2**18, 2000
"""Bytes of a program's stdout and stderr that are kept: the last ones, where answers are."""
INODES = 2**16
"""Files, folders and links in the working folder."""
FILES = 1024
"""Open files of a process."""
CHECK_SCRIPT = """
import os, socket, sys

def gap(problem, attempt):
    try:
        if attempt() is not False:
            print(problem)
    except OSError:
        pass

names = set(sys.argv[1].split())
gap("its environment has more variables", lambda: bool(set(os.environ) - names))
processes = [name for name in os.listdir("/proc") if name.isdecimal()]
gap("other processes are visible", lambda: len(processes) > 4)
with open("/proc/net/dev") as devices:
    gap("there is another network", lambda: len(devices.readlines()) > 3)
gap("an address outside can be reached", lambda: socket.create_connection(("1.1.1.1", 53), 1))
gap("sockets of virtual machines can be made", lambda: socket.socket(socket.AF_VSOCK).close())
gap("its first process has other limits",
    lambda: open("/proc/1/limits").read() != open("/proc/self/limits").read())
gap("files can be made outside its working folder", lambda: open("/file", "w").close())
import shutil, urllib.request
try:
    with urllib.request.urlopen(sys.argv[2]) as answer:
        gap("something else is in the gateway's place", lambda: b"onepolicy" not in answer.read())
except OSError as error:
    print(f"the gateway cannot be reached: {error}")
if shutil.which(sys.argv[3]) is None:
    print(f"task.command: {sys.argv[3]!r} is not found in it")
print("checked")
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program. status: None for one that was ended at its time limit."""

    status: int | None
    printed: str
    errors: str  # the end of its stderr
    file: str | None  # the end of its result file


class ProgramSandbox:
    """Runs programs, each in a sandbox of its own."""

    def __init__(self, config: ProgramTask) -> None:
        """Store the settings. Raises UsageError where sandboxes cannot be made."""
        bwrap = shutil.which("bwrap")
        if bwrap is None or not seccomp.is_supported_machine():
            raise UsageError(
                "task.kind: a program runs in a bubblewrap sandbox, which needs bwrap (apt install "
                f"bubblewrap) and one of {', '.join(seccomp.MACHINES)}; this is a "
                f"{platform.machine()} with bwrap at {bwrap}"
            )
        self.config = config
        self._bwrap = bwrap
        self._users = itertools.count(secrets.randbelow(USERS))

    async def check(self, gateway: Path) -> None:
        """Raise UsageError unless a sandbox can be made here, holds, and has the command.

        gateway: path of the gateway's socket.
        """
        command = [python_path(), "-I", "-c", CHECK_SCRIPT, " ".join(self._variables("key"))]
        command += [f"{ADDRESS}/", self.config.command[0]]
        try:
            ended = await self.run(command, "", "key", gateway)
        except EpisodeError as error:
            raise UsageError(
                f"task.kind: no sandbox for programs can be made here ({error}); allow "
                "unprivileged user namespaces"
            ) from None
        if ended.status is None:
            raise UsageError(
                f"task.seconds: {self.config.seconds:g} s are too few to start a sandbox here; "
                "raise it"
            )
        *gaps, last = ended.printed.splitlines() or [""]
        if last != "checked":
            raise UsageError(
                "task.kind: the sandbox for programs does not work here "
                f"({ended.errors.strip()[-300:]}); allow unprivileged user namespaces, or raise "
                f"task.memory_mib (now {self.config.memory_mib})"
            )
        if gaps and gaps[0].startswith("task.command"):
            raise UsageError(
                f"{gaps[0]}; name its folder in task.folder or task.readable, and give its path or "
                "set task.env.PATH"
            )
        if gaps:
            raise UsageError(
                f"task.kind: the sandbox for programs does not hold here ({'; '.join(gaps)}); use "
                "another kernel or bubblewrap"
            )

    async def run(self, command: Sequence[str], stdin: str, key: str, gateway: Path) -> Ended:
        """Run a command to its end or its time limit.

        stdin: text that it reads. key: the API key of its episode. gateway: path of the gateway's
        socket. Raises EpisodeError if the sandbox or the program cannot be started.
        """
        given = {
            "command": list(command),
            "stdin": stdin,
            "env": self._variables(key),
            "file": self.config.result_file,
            "most_bytes": MOST_BYTES,
        }
        try:
            process, report = await self._start(gateway)
        except OSError as error:  # out of processes, memory or file descriptors
            raise EpisodeError(f"a program's sandbox could not be started: {error}") from error
        printed, errors = bytearray(), bytearray()
        timely = True
        with _reading(report) as written:
            try:
                async with asyncio.timeout(self.config.seconds):
                    await _feed_and_read(process, json.dumps(given), printed, errors)
                    await process.wait()
            except TimeoutError:
                timely = False
            finally:
                await kill_sandbox(process, "a program's")
        texts = printed.decode(errors="replace"), errors.decode(errors="replace")
        if not timely:
            return Ended(None, *texts, None)
        return _ended(bytes(written), *texts)

    def _variables(self, key: str) -> dict[str, str]:
        """Return the program's environment."""
        ours = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/scratch", "TMPDIR": "/scratch"}
        values = (f"{ADDRESS}/v1", f"{ADDRESS}/v1", key, ADDRESS, key)
        gateway = dict(zip(GATEWAY_VARIABLES, values, strict=True))
        return ours | {"LANG": "C.UTF-8"} | self.config.env | gateway

    async def _start(self, gateway: Path) -> tuple[asyncio.subprocess.Process, int]:
        """Start a sandbox. Return it and the read end of its report.

        As root each has another user id, so that its processes are counted.
        """
        user = FIRST_USER + next(self._users) % USERS
        report, write_end = os.pipe()
        try:
            with seccomp.open_filter(sockets=True) as filter_fd:
                process = await asyncio.create_subprocess_exec(
                    self._bwrap,
                    *_bwrap_arguments(self.config, gateway),
                    *("--seccomp", str(filter_fd), "--", python_path(), "-I", "-B", "-c"),
                    *(_startup_script(self.config), str(write_end), str(user)),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    pass_fds=[filter_fd, write_end],
                    env={},
                )
        except BaseException:
            os.close(report)
            raise
        finally:
            os.close(write_end)
        return process, report


async def _feed_and_read(
    process: asyncio.subprocess.Process, given: str, printed: bytearray, errors: bytearray
) -> None:
    """Feed a sandbox and collect its output until it ends."""
    assert process.stdin is not None

    async def read(stream: asyncio.StreamReader | None, kept: bytearray, most: int) -> None:
        """Keep the last bytes of a stream."""
        assert stream is not None
        while not stream.at_eof():
            kept += await stream.read(1 << 16)
            del kept[:-most]

    reading = asyncio.gather(
        read(process.stdout, printed, PRINTED_KEPT), read(process.stderr, errors, ERRORS_KEPT)
    )
    try:
        with contextlib.suppress(ConnectionError):  # it may end before it has read everything
            process.stdin.write(given.encode())
            await process.stdin.drain()
            process.stdin.close()
        await reading
    finally:
        reading.cancel()


@contextlib.contextmanager
def _reading(pipe: int) -> Iterator[bytearray]:
    """Give the bytes of a pipe, read while it is written: one may hold a page only.

    At the end what is left in it is read, and it is closed.
    """
    kept, loop = bytearray(), asyncio.get_running_loop()

    def read() -> bool:
        """Read what is there. Return whether there may be more, now or later."""
        try:
            chunk = os.read(pipe, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            loop.remove_reader(pipe)
        kept.extend(chunk[: MOST_REPORTED - len(kept)])
        return bool(chunk)

    os.set_blocking(pipe, False)
    loop.add_reader(pipe, read)
    try:
        yield kept
        while read():
            pass
    finally:
        loop.remove_reader(pipe)
        os.close(pipe)


def _ended(report: bytes, printed: str, errors: str) -> Ended:
    """Return how a program ended. Raises EpisodeError if none ran.

    Status -1 if the report is none: the program ended its parent, or it was killed for memory.
    """
    if not report and "bwrap: " in errors:
        raise EpisodeError(f"no sandbox: {errors.strip()[-300:]}")
    try:
        told = finite_json(report)
        status, error, file = told["status"], told["error"], told["file"]
        if file is not None:
            file = base64.b64decode(file, validate=True).decode(errors="replace")
    except (ValueError, TypeError, KeyError, RecursionError):
        return Ended(-1, printed, errors, None)
    if error and isinstance(error, str):
        raise EpisodeError(f"the program did not start: {error}")
    if error != "" or type(status) is not int or len(told) != 3:
        return Ended(-1, printed, errors, None)
    return Ended(status, printed, errors, file)


def _startup_script(config: ProgramTask) -> str:
    """Return the script for the sandbox's Python: the limits, the relay and the program."""
    tables_kib = TABLES_MIB * 2**10 + config.processes * config.memory_mib * 2**10 // 512
    seconds = config.seconds + GRACE_S
    return "\n".join(
        [
            Path(sandbox_init.__file__).read_text(encoding="utf-8"),
            Path(program_init.__file__).read_text(encoding="utf-8"),
            f"enter_sandbox(int(sys.argv.pop()), {_resource_limits(config)!r}, {seconds!r}, "
            f"{INODES}, {tables_kib})",
            # Else the program, which is of the same user, could open the report and write its own.
            "_prctl(SET_DUMPABLE, 0) or os._exit(NOT_READY)",
            "run_program(int(sys.argv.pop()))",
        ]
    )


def _resource_limits(config: ProgramTask) -> Mapping[str, int]:
    """Return the resource limits of every process in the sandbox.

    DATA and not AS: runtimes such as node reserve far more addresses than they use. No CPU time:
    it counts threads together, and all processes end at task.seconds.
    """
    return {
        "DATA": config.memory_mib * 2**20,
        "FSIZE": config.scratch_mib * 2**20,
        "NPROC": config.processes,
        "NOFILE": FILES,
        "MSGQUEUE": 0,
        "CORE": 0,
    }


def _bwrap_arguments(config: ProgramTask, gateway: Path) -> list[str]:
    """Return bwrap's arguments, which decide how much can be seen inside."""
    arguments = [*namespace_arguments(), "--die-with-parent", "--clearenv", *mount_arguments()]
    for path in sorted(config.readable):
        # bubblewrap would close the folders above it to the sandbox's user.
        for parent in [*Path(path).parents][-2::-1]:
            arguments += ["--perms", "0755", "--dir", str(parent)]
        arguments += ["--ro-bind", path, path]
    if config.folder is not None:
        arguments += ["--ro-bind", str(Path(config.folder).resolve()), FOLDER]
    size = str(config.scratch_mib * 2**20)
    # Read-only, an ordinary user's program cannot close it to others. Connections need no more.
    arguments += ["--ro-bind", str(gateway), program_init.SOCKET]
    arguments += ["--proc", "/proc", "--dev", "/dev", "--size", size, "--perms", "1777"]
    arguments += ["--tmpfs", "/scratch", "--chdir", "/scratch"]
    if not any(Path(path).parts[:2] == ("/", "tmp") for path in config.readable):
        arguments += ["--symlink", "/scratch", "/tmp"]
    # No pseudo terminals: the whole machine shares 4096.
    arguments += ["--tmpfs", "/dev/pts", "--remount-ro", "/dev/pts", "--remount-ro", "/dev"]
    return [*arguments, "--remount-ro", "/", "--setenv", "LANG", "C.UTF-8"]
