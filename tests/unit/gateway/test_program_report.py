"""What the sandbox of a program reports, and what is no report."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from onepolicy.config import ProgramTask, UsageError
from onepolicy.gateway import program_init
from onepolicy.gateway.episodes import MOST_OPEN
from onepolicy.gateway.program_sandbox import Ended, ProgramSandbox, _ended, _feed_and_read
from onepolicy.interfaces import EpisodeError

PRODUCTS = {"kind": "gym", "name": "products", "params": {"min_digits": 1, "max_digits": 1}}
REPORT = {"status": 0, "error": "", "file": None}


def ended(report, errors=""):
    return _ended(report, "printed", errors)


def test_a_report_and_its_file():
    given = REPORT | {"status": 3, "file": "aGk="}
    assert ended(b" " + json.dumps(given).encode()) == Ended(3, "printed", "", "hi")


@pytest.mark.parametrize(
    "report",
    [
        *(b"", b" ", b"{}", b"[]", b"7", b"null", b'"x"', b"\xff", b"[" * 60_000),
        *(
            json.dumps(REPORT | wrong).encode()
            for wrong in (
                *({"status": "x"}, {"status": None}, {"status": True}, {"status": 0.0}),
                *({"file": "!"}, {"file": 3}, {"file": "a"}, {"file": "é"}, {"file": [1]}),
                *({"error": None}, {"error": 1}, {"error": ["x"]}, {"more": 1}),
            )
        ),
    ],
)
def test_what_is_no_report_is_a_program_that_ended_badly(report):
    assert ended(report) == Ended(-1, "printed", "", None)


def test_a_program_that_did_not_start_is_no_episode():
    with pytest.raises(EpisodeError, match="did not start: no such file"):
        ended(json.dumps(REPORT | {"status": None, "error": "no such file"}).encode())
    with pytest.raises(EpisodeError, match="no sandbox: bwrap: no namespaces"):
        ended(b"", "bwrap: no namespaces")
    said = "bwrap: a program says so"  # and ends its parent
    assert ended(b" ", said) == Ended(-1, "printed", said, None)


def test_a_result_that_is_a_pipe_is_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    held = os.open(tmp_path / "pipe", os.O_RDWR)  # without data, a read gives None
    (tmp_path / "file").write_text("hi")
    assert program_init._read(str(tmp_path / "pipe"), 9) is None
    assert program_init._read(str(tmp_path / "none"), 9) is None
    assert program_init._read(str(tmp_path / "file"), 9) == "aGk="
    assert program_init._read(str(tmp_path / "file"), 1) == "aQ=="  # an answer is at the end
    os.close(held)


def test_the_end_of_what_a_program_prints_is_kept():
    async def kept():
        process = SimpleNamespace(stdin=Mock(drain=AsyncMock()))
        process.stdout, process.stderr = asyncio.StreamReader(), asyncio.StreamReader()
        process.stdout.feed_data(b"x" * 300_000 + b" #### 42")
        process.stderr.feed_data(b"y" * 3000 + b" no")
        process.stdout.feed_eof()
        process.stderr.feed_eof()
        printed, errors = bytearray(), bytearray()
        await _feed_and_read(process, "", printed, errors)
        return printed, errors

    printed, errors = asyncio.run(kept())
    assert (len(printed), printed[-9:]) == (2**18, b"x #### 42")
    assert (len(errors), errors[-4:]) == (2000, b"y no")


def test_all_programs_that_may_run_have_an_episode():
    (most,) = (m.le for m in ProgramTask.model_fields["concurrency"].metadata if hasattr(m, "le"))
    assert most == MOST_OPEN


def test_a_start_up_check_that_runs_out_of_time_names_the_time(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    sandbox = ProgramSandbox(ProgramTask(problems=PRODUCTS, command=("x",), seconds=2))

    async def run(*_):
        return Ended(None, "", "", None)

    monkeypatch.setattr(sandbox, "run", run)
    with pytest.raises(UsageError, match=r"^task\.seconds: 2 s are too few"):
        asyncio.run(sandbox.check(Path("gateway.sock")))


def test_a_sandbox_without_a_pipe_is_no_episode(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: name)
    sandbox = ProgramSandbox(ProgramTask(problems=PRODUCTS, command=("x",)))

    def fail():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("os.pipe", fail)
    loop = asyncio.new_event_loop()  # before: it needs pipes of its own
    with pytest.raises(EpisodeError, match=r"could not be started: .*Too many open files"):
        loop.run_until_complete(sandbox.run(["x"], "", "key", Path("gateway.sock")))
    loop.close()
