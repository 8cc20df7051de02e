"""The tools of an episode: exact answers, errors as text, and a sandbox that nothing gets out of."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import platform
import subprocess
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onepolicy.config import CalculatorTool, PythonTool, SearchTool, UsageError
from onepolicy.envs.tools import Calculator, PythonSandbox, Search, build_tools, schema
from onepolicy.envs.tools import sandbox as sandboxing
from onepolicy.envs.tools.calculator import calculate
from onepolicy.interfaces import EpisodeError


# --- calculator -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("813 * 92", "74796"),
        ("2 ** 10 - 24", "1000"),
        ("1 / 8", "0.125"),
        ("-1 / 8", "-0.125"),
        ("1 / 3", "1/3"),
        ("0.1 + 0.2", "0.3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("gcd(84, 36) + lcm(4, 6)", "24"),
        ("max(3, min(9, 5))", "5"),
        ("abs(-3.50)", "3.5"),
        ("2 ** -2", "0.25"),
    ],
)
def test_values(text, value):
    assert calculate(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "1 / 0",
        "0 ** -1",
        "9 ** 9 ** 9",
        "2 ** 100000",
        "10 ** 1000 * 10 ** 1000",
        "gcd(1/2, 3)",
        "abs(1, 2)",
        "__import__('os').system('id')",
        "(lambda: 1)()",
        "[1] * 10 ** 9",
        "'a' * 3",
        "True + 1",
        "x",
        "1 if 2 else 3",
        "1e999",
        "1 +",
        "",
        "(" * 300,
        "1" * 401,
        "\0",
        "2 ** 0.5",
    ],
)
def test_what_it_refuses_is_an_answer_too(text):
    start = time.perf_counter()
    assert calculate(text).startswith("error: ")
    assert time.perf_counter() - start < 1


def test_what_it_reads_prints_no_warnings(recwarn):
    assert calculate("12or 3").startswith("error: ")
    assert not recwarn.list


def test_operations_can_be_rationed():
    assert calculate("1 + 2", operations=1) == "3"
    assert calculate("-1 + +2", operations=1) == "1"
    assert calculate("1 + 2 + 3", operations=1) == "error: 2 operations; at most 1 at a time"
    assert calculate("gcd(1 + 2, 3)", operations=1).startswith("error: 2")


@given(st.text("0123456789+-*/%() .", max_size=24))
@settings(max_examples=300, deadline=None)
def test_agrees_with_python_on_whole_numbers(text):
    """Where Python finds an integer (in fractions, so that / is exact), the calculator finds the same."""

    class Exact(ast.NodeTransformer):
        def visit_Constant(self, node):
            return ast.parse(f"Fraction({ast.unparse(node)!r})", mode="eval").body

    try:
        tree = ast.fix_missing_locations(Exact().visit(ast.parse(text.strip(), mode="eval")))
        if sum(isinstance(n, ast.Pow) for n in ast.walk(tree)):
            return
        expected = eval(compile(tree, "", "eval"), {"Fraction": Fraction})
    except (SyntaxError, ValueError, ZeroDivisionError, TypeError):
        assert calculate(text).startswith("error: ")
        return
    if isinstance(expected, Fraction | int) and Fraction(expected).denominator == 1:
        assert calculate(text) == str(Fraction(expected).numerator)


# --- Python in a sandbox --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def python():
    return PythonSandbox(PythonTool(seconds=5, memory_mib=128, output_chars=3000))


def call(tool, text):
    return asyncio.run(tool.call(text))


def test_prints_come_back_and_errors_too(python):
    assert call(python, "import math\nprint(math.comb(10, 3))") == "120"
    assert call(python, "print('a'); 1 / 0").splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "SyntaxError" in call(python, "print(")
    assert call(python, "") == ""
    assert call(python, "import sys; sys.exit(3)") == "error: ended with status 3"
    assert call(python, "print('é\ud800'.encode('utf8', 'replace'))") != ""


def test_scratch_is_writable_and_forgotten(python):
    assert call(python, "open('a', 'w').write('x'); import os; print(os.listdir('.'))") == "['a']"
    assert call(python, "import os; print(os.listdir('.'))") == "[]"


LIBC = "import ctypes; l = ctypes.CDLL(None); "
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine())
MOUNT = f"""{LIBC}import os
user = os.getuid()
assert l.unshare(0x10020000) == 0  # CLONE_NEWUSER | CLONE_NEWNS
open('/proc/self/uid_map', 'w').write(f'0 {{user}} 1')
assert l.mount(b'x', b'/scratch', b'tmpfs', 0, b'size=200m') == 0
print('got through')
"""
ESCAPES = {
    "read the host's files": "print(open('/etc/passwd').read())",
    "read this repository": f"print(open({str(Path(__file__).resolve())!r}).read())",
    "read the home folder": f"import os; print(os.listdir({os.path.expanduser('~')!r} + '/.ssh'))",
    "write outside the scratch folder": "open('/usr/x', 'w')",
    "write to the root": "open('/x', 'w')",
    "fill memory through /dev": "open('/dev/shm/x', 'w').write('x')",
    "reach the network": "import socket; socket.create_connection(('1.1.1.1', 53), 2)",
    "reach this host": "import socket; socket.create_connection(('127.0.0.1', {port}), 2)",
    "resolve a name": "import socket; print(socket.getaddrinfo('localhost.example', 80))",
    "mount": f"{LIBC}assert l.mount(b'x', b'/scratch', b'tmpfs', 0, 0) == 0",
    "a user namespace": f"{LIBC}assert l.unshare(0x10000000) == 0",
    "a user namespace by clone": f"{LIBC}pid = l.syscall({CLONE}, 0x10000000 | 17, 0, 0, 0, 0)\n"
    "if pid == 0: import os; os._exit(0)\nassert pid > 0",
    "mount in a user namespace": f"import os, sys; os.execv(sys.executable, [sys.executable, '-c', {MOUNT!r}])",
    "memory in files of no folder": "import os; f = [os.memfd_create(str(i)) for i in range(9)]",
    "memory of no process": f"{LIBC}assert l.shmget(0, 2**28, 0o1600) >= 0",
    "trace a process": f"{LIBC}assert l.ptrace(0, 0, 0, 0) == 0",
    "open files without end": "f = [open('/dev/null') for _ in range(500)]",
    "become root": "import os; os.setuid(0)",
    "raise a limit": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "signal a process outside": "import os; os.kill({pid}, 0)",
    "trace the parent": "print(open('/proc/{pid}/environ').read())",
    "make a device": "import os; os.mknod('disk', 0o600 | 0o060000, os.makedev(8, 0)); open('disk')",
    "fill the scratch folder": "f = open('a', 'wb')\nfor i in range(64): f.write(bytes(2**20))\nf.flush()",
    "take memory": "x = bytearray(2**29)",
    "start many processes": "import os, time\nfor i in range(200):\n  if os.fork() == 0: time.sleep(9)",
}


@pytest.mark.parametrize("what", ESCAPES)
def test_no_way_out(python, what):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        code = ESCAPES[what].replace("{port}", str(server.getsockname()[1])).replace("{pid}", str(os.getppid() or 1))
        said = call(python, code + "\nprint('got through')")
    assert "got through" not in said, said
    assert "rror" in said, said


def test_environment_and_processes_are_hidden(python, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "s3cret")
    code = "import os; print(sorted(os.environ)); print([p for p in os.listdir('/proc') if p.isdigit()])"
    variables, processes = call(python, code).splitlines()
    assert "SECRET" not in variables
    assert len(ast.literal_eval(processes)) <= 3


def test_time_and_output_are_limited_and_nothing_is_left_running():
    tool = PythonSandbox(PythonTool(seconds=1, memory_mib=128, output_chars=50))
    marker = f"left-{os.getpid()}"
    spawn = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60) # {marker}'])"
    )
    for code, ended in (
        ("print('before', flush=True)\nwhile True: pass", "error: still running after 1 s"),
        ("import time; time.sleep(60)", "error: still running after 1 s"),
        ("while True: print('x' * 40)", "error: too much output"),
        (f"{spawn}\nimport time; time.sleep(60)", "error: still running after 1 s"),
        (
            f"import os; os.setsid() if os.fork() == 0 else None\n{spawn}\nimport time; time.sleep(60)",
            "error: still running after 1 s",
        ),
    ):
        start = time.perf_counter()
        said = call(tool, code)
        assert said.splitlines()[-1] == ended
        assert len(said) < 50 + 40
        assert time.perf_counter() - start < 10
    assert call(tool, "print('before', flush=True)\nwhile True: pass").startswith("before")
    time.sleep(0.2)
    assert marker not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


def test_calls_run_side_by_side_but_not_all_at_once(monkeypatch):
    """8 calls of 0.6 s under a limit of 2 s on one core: two at a time take longer, which no call is charged for."""
    monkeypatch.setattr(sandboxing.os, "cpu_count", lambda: 1)
    tool = PythonSandbox(PythonTool(seconds=2, memory_mib=128))
    running: list[int] = []
    most = 0

    async def counted(i: int) -> str:
        return await tool.call(f"import time; time.sleep(0.6); print({i})")

    inner = tool._call

    async def watched(text: str) -> str:
        nonlocal most
        running.append(1)
        most = max(most, len(running))
        try:
            return await inner(text)
        finally:
            running.pop()

    monkeypatch.setattr(tool, "_call", watched)

    async def together() -> list[str]:
        return await asyncio.gather(*(counted(i) for i in range(8)))

    for _ in range(2):  # in one event loop after another
        assert asyncio.run(together()) == [str(i) for i in range(8)]
    assert most == 2


def test_a_sandbox_that_cannot_be_started_fails_the_episode(python, monkeypatch):
    monkeypatch.setattr(python, "_command", lambda rules: ["/nowhere/bwrap"])
    with pytest.raises(EpisodeError, match="could not be started"):
        call(python, "print(1)")


def test_without_bubblewrap_it_refuses_to_exist(monkeypatch, tmp_path):
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: None)
    with pytest.raises(UsageError, match=r"bwrap is not installed.*never runs without a sandbox"):
        PythonSandbox(PythonTool())
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no permissions to create a new namespace >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sandboxing.shutil, "which", lambda name: str(broken))
    with pytest.raises(UsageError, match=r"made no sandbox here \(no permissions.*never runs without a sandbox"):
        PythonSandbox(PythonTool())


def test_without_a_filter_for_the_processor_it_refuses_to_exist(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UsageError, match=r"riscv64 processor, only for x86_64, aarch64; .*never runs without"):
        PythonSandbox(PythonTool())


# --- search ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def corpus(tmp_path):
    passages = ["The heron eats fish.", "A mountain of granite.", "Fish swim in rivers; the heron waits."]
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    return path


def test_search_ranks_by_bm25(corpus):
    tool = Search(SearchTool(corpus=str(corpus), passages=2))
    assert call(tool, "granite") == "[1] A mountain of granite."
    assert call(tool, "heron").splitlines() == ["[1] The heron eats fish.", "[2] Fish swim in rivers; the heron waits."]
    assert call(tool, "rivers heron").splitlines()[0] == "[1] Fish swim in rivers; the heron waits."
    for nothing in ("zeppelin", "", "?!"):
        assert call(tool, nothing) == "nothing found"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"txt": "b"}\n', r"corpus.jsonl:2: expected .*txt"),
        ("oops\n", r"corpus.jsonl:1: expected"),
        ('{"text": " "}\n', r"corpus.jsonl:1: expected"),
        ("", r"is empty"),
        ("[" * 5000, r"corpus.jsonl:1: expected"),
        ('{"text": ' + "1" * 5000 + "}", r"corpus.jsonl:1: expected"),
        ('{"text": "\\ud800"}', r"corpus.jsonl:1: expected"),
        ('{"text": "?!"}\n', r"corpus.jsonl: no passage has a word"),
    ],
)
def test_bad_corpus(tmp_path, content, message):
    path = tmp_path / "corpus.jsonl"
    path.write_text(content)
    with pytest.raises(UsageError, match=message):
        Search(SearchTool(corpus=str(path)))
    with pytest.raises(UsageError, match="cannot read its corpus"):
        Search(SearchTool(corpus=str(tmp_path / "none.jsonl")))


def test_a_passage_may_hold_any_line_separator_of_unicode(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"text": "one\u2028two\x85three"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert call(Search(SearchTool(corpus=str(path))), "two") == "[1] one\u2028two\x85three"


def test_tools_by_name():
    tools = build_tools([CalculatorTool(operations=1)])
    assert list(tools) == ["calculator"]
    assert isinstance(tools["calculator"], Calculator)
    assert schema(tools["calculator"])["function"]["parameters"]["required"] == ["expression"]
