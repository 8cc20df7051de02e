"""Calls of the Python tool: ordinary programs work, time and output are limited, and without a
whole sandbox there is none."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import pytest

from onepolicy.config import PythonTool, UsageError
from onepolicy.envs.tools import PythonSandbox
from onepolicy.envs.tools import sandbox as sandboxing
from onepolicy.interfaces import EpisodeError
from support.needs import need
from support.sandbox_driver import processes_with
from support.waiting import LIMIT_S, wait_until

pytestmark = pytest.mark.process


def call(tool, text):
    return asyncio.run(tool.call(text))


SIGNAL = "import os, signal; signal.raise_signal(signal.SIG"
SAYS = [  # code, end of what it says
    ("import math\nprint(math.comb(10, 3))", "120"),
    ("print('a'); 1 / 0", "ZeroDivisionError: division by zero"),
    ("print(", "SyntaxError: '(' was never closed"),
    ("", ""),
    ("import sys; sys.exit(3)", "error: ended with status 3"),
    (f"{SIGNAL}KILL)", "error: ended with status 137"),
    (f"{SIGNAL}ALRM)", "error: ended with status 142"),
    (f"print('a'); {SIGNAL}SEGV)", "error: ended with status 139"),
    ("import asyncio; print(asyncio.run(asyncio.sleep(0, 7)))", "7"),
    ("import subprocess; print(subprocess.check_output(['echo', 'a'], text=True))", "a"),
    (
        "from concurrent.futures import ThreadPoolExecutor as P\n"
        "print(list(P(8).map(abs, range(-3, 1))))",
        "[3, 2, 1, 0]",
    ),
    (
        "import sqlite3; d = sqlite3.connect('a.db'); d.execute('create table t (x)'); "
        "d.commit(); print('made')",
        "made",
    ),
    (
        "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(1, 2)\n"
        "unittest.main()",
        "FAILED (failures=1)",
    ),
    (
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))).__name__)",
        "A",
    ),
    (
        "import tempfile\n"
        "with tempfile.TemporaryDirectory() as f: open(f + '/a', 'w').close(); print('made')",
        "made",
    ),
]
LISTED = "import os; print(os.listdir('.'))"


@pytest.mark.smoke
def test_ordinary_programs_work_and_errors_come_back(driver, subtests):
    codes, ends = zip(*SAYS, strict=True)
    for code, end, said in zip(codes, ends, driver.replies(*codes), strict=True):
        with subtests.test(code):
            last = "\n".join(said.splitlines()[-1:])
            assert last == end, said
    assert driver.call("print('\u00e9\ud800'.encode('utf8', 'replace'))") != ""
    assert driver.call(f"open('a', 'w').write('x'); {LISTED}") == "['a']"
    assert driver.call(LISTED) == "[]"  # the scratch folder of a call is its own


def test_calls_with_a_fallback_work_where_the_filter_refuses(driver):
    """They are copies and sending of files (sendfile), private mappings, and libc's cache of
    character sets."""
    code = """
import ctypes, mmap, shutil, socket, subprocess, threading
data = bytes(range(256)) * 1000
with open('a', 'wb') as file: file.write(data)
shutil.copyfile('a', 'b')
print(open('b', 'rb').read() == data)
sender, receiver = socket.socketpair()
with open('a', 'rb') as file:
    sending = threading.Thread(target=lambda: (sender.sendfile(file), sender.close()))
    sending.start()
    print(b''.join(iter(lambda: receiver.recv(2**16), b'')) == data)
    sending.join()
    print(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)[:] == data)
print(len(mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))
print(ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int)(abs)(-3))
command = ['iconv', '-f', 'KOI8-R', '-t', 'UTF-8']
print(subprocess.run(command, input=bytes([0xc1]), stdout=-1).stdout.decode())
"""
    assert driver.call(code).split() == ["True", "True", "True", "4096", "3", "\u0430"]


def test_a_database_with_a_write_ahead_log_works_for_one_connection(driver):
    """SQLite keeps the log's index in a shared mapping unless the connection has the file to
    itself."""
    code = """
import sqlite3
database = sqlite3.connect('a.db')
database.execute('pragma locking_mode = exclusive')
print(database.execute('pragma journal_mode = wal').fetchone()[0])
database.execute('create table t (x)')
database.commit()
print('made')
"""
    assert driver.call(code).split() == ["wal", "made"]


def test_the_first_process_ends_the_sandbox_of_a_lost_driver(monkeypatch):
    """The driver is busy, or was lost before it asked the kernel to end the sandbox with it."""
    need("bwrap")
    monkeypatch.setattr(sandboxing, "GRACE_S", -999.0)
    tool = PythonSandbox(PythonTool(seconds=1000, memory_mib=128))
    assert call(tool, "import signal; signal.pause()") == "error: ended with status 242"


@pytest.mark.parametrize(
    ("left_out", "message"),
    [
        (("--seccomp", 1), "sockets can be made"),
        (("--as-pid-1", 0), "its first process has other limits"),
        (("--clearenv", 0), "its environment is not empty"),
    ],
)
def test_a_leaking_sandbox_is_refused(monkeypatch, tmp_path, left_out, message):
    """The bubblewrap of this test leaves out a part of the isolation."""
    need("bwrap")
    option, values = left_out
    weak = tmp_path / "bwrap"
    weak.write_text(
        f"#!{sys.executable}\nimport os, sys\ngiven = sys.argv[1:]\nat = given.index('{option}')\n"
        f"os.environ['ENGINE_TOKEN'] = 'x'\ndel given[at : at + 1 + {values}]\n"
        f"os.execv('{shutil.which('bwrap')}', ['bwrap', *given])\n"
    )
    weak.chmod(0o755)
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: str(weak))
    with pytest.raises(UsageError, match=rf"does not hold \(.*{message}"):
        PythonSandbox(PythonTool())


def test_time_and_output_are_limited_and_nothing_is_left_running():
    need("bwrap")
    tool = PythonSandbox(PythonTool(seconds=1, memory_mib=128, output_chars=50))
    marker = f"left-{os.getpid()}"
    left = f"import time; time.sleep(60) # {marker}"
    spawn = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {left!r}])"
    codes = (
        "import time; time.sleep(60)",
        f"{spawn}\nimport time; time.sleep(60)",
        f"import os; os.setsid() if os.fork() == 0 else None\n{spawn}\nimport time; time.sleep(60)",
    )

    async def all_of():
        return await asyncio.gather(*map(tool.call, codes))

    assert asyncio.run(all_of()) == ["error: still running after 1 s"] * 3
    wait_until(lambda: not processes_with(marker))


def test_output_before_a_limit_is_kept():
    need("bwrap")
    for seconds in (1, 10, 100):  # until that is enough for Python to start
        tool = PythonSandbox(PythonTool(seconds=seconds, memory_mib=128))
        said = call(tool, "print('before', flush=True)\nwhile True: pass")
        if said.startswith("before"):
            break
    assert said == f"before\nerror: still running after {seconds} s"
    tool = PythonSandbox(PythonTool(seconds=LIMIT_S, memory_mib=128, output_chars=50))
    said = call(tool, "while True: print('x' * 40)")
    assert said.splitlines()[-1] == "error: too much output"
    assert len(said) < 50 + 40


def test_calls_run_in_parallel_within_a_bound(monkeypatch):
    """Two run at a time on one core. A call's time limit begins with its turn: no call is charged
    for waiting."""
    need("bwrap")
    monkeypatch.setattr(sandboxing.os, "cpu_count", lambda: 1)
    tool = PythonSandbox(PythonTool(seconds=LIMIT_S, memory_mib=128))
    running, most = Counter(), Counter()

    @contextmanager
    def counted(what: str) -> Iterator[None]:
        running[what] += 1
        most[what] = max(most[what], running[what])
        try:
            yield
        finally:
            running[what] -= 1

    timeout, inner = asyncio.timeout, tool._call_now

    @asynccontextmanager
    async def counted_timeout(seconds: float) -> AsyncIterator[None]:
        with counted("limits"):
            async with timeout(seconds):
                yield

    async def counted_call(text: str) -> str:
        with counted("calls"):
            return await inner(text)

    monkeypatch.setattr(asyncio, "timeout", counted_timeout)
    monkeypatch.setattr(tool, "_call_now", counted_call)

    async def together() -> list[str]:
        return await asyncio.gather(*(tool.call(f"print({i})") for i in range(4)))

    for _ in range(2):  # in one event loop after another
        assert asyncio.run(together()) == [str(i) for i in range(4)]
    assert most == {"calls": 2, "limits": 2}


def test_a_sandbox_that_cannot_start_fails_the_episode(monkeypatch):
    need("bwrap")
    tool = PythonSandbox(PythonTool(seconds=LIMIT_S, memory_mib=128))
    monkeypatch.setattr(tool, "_command", lambda rules: ["/nowhere/bwrap"])
    with pytest.raises(EpisodeError, match="could not be started"):
        call(tool, "print(1)")


def test_without_bubblewrap_it_refuses_to_exist(monkeypatch, tmp_path):
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"bwrap is not installed.*never runs without a sandbox"):
        PythonSandbox(PythonTool())
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no permissions to create a new namespace >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: str(broken))
    with pytest.raises(UsageError, match=r"made no sandbox here \(no permissions.*never runs"):
        PythonSandbox(PythonTool())


@pytest.mark.needs("bwrap")
def test_without_a_filter_for_the_processor_it_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    words = r"riscv64 processor, only for x86_64, aarch64; .*never runs without"
    with pytest.raises(UsageError, match=words):
        PythonSandbox(PythonTool())
