"""Ranks under torch's elastic agent. The ranks here are small programs, which need no torch."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from onepolicy.cli import main
from onepolicy.config import TrainingError, resolve
from onepolicy.launch import agent
from support.faulty_runs import gone
from support.report_run import make_fixture_run
from support.waiting import LIMIT_S, wait_until

BASE = {"out": "x", "steps": 1, "model": {"path": "m"}, "task": {"kind": "chain"}}
TWO = resolve(BASE, ["train.ranks=2"])
WAIT = "import time; time.sleep(600)"


def run(monkeypatch, code, *words):
    monkeypatch.setattr(agent, "PROGRAM", ("-c", code))
    return agent.run_on_ranks(words, TWO)


@pytest.mark.process
def test_each_rank_gets_the_command_and_its_number(tmp_path, monkeypatch):
    code = "import os, sys, pathlib; e = os.environ; pathlib.Path(sys.argv[1], e['RANK'])"
    code += ".write_text('|'.join([*sys.argv[2:], e['WORLD_SIZE'], e['OMP_NUM_THREADS']]))"
    before = dict(os.environ), signal.getsignal(signal.SIGTERM)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    two = resolve(BASE, ["train.ranks=2", "train.threads=3"])
    monkeypatch.setattr(agent, "PROGRAM", ("-c", code))
    assert agent.run_on_ranks([str(tmp_path), "a=${local_rank} $$", 'b="x y"'], two) == 0
    for rank in ("0", "1"):
        assert (tmp_path / rank).read_text() == 'a=${local_rank} $$|b="x y"|2|3'
    monkeypatch.setattr(os, "cpu_count", lambda: 64)  # of the machine, of which a job has a part
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(11)))
    for exported, threads in ((["7"], "7"), ([], "5")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        for value in exported:
            monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert agent.run_on_ranks([str(tmp_path)], TWO) == 0
        assert [(tmp_path / rank).read_text() for rank in "01"] == 2 * [f"2|{threads}"]
    monkeypatch.undo()
    assert (dict(os.environ), signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.process
@pytest.mark.parametrize(("rank", "status"), [(0, 2), (1, 75)])
def test_the_status_of_the_rank_that_failed(rank, status, monkeypatch):
    code = f"import os\nif os.environ['RANK'] == '{rank}': raise SystemExit({status})\n{WAIT}"
    assert run(monkeypatch, code) == status


@pytest.mark.process
def test_a_rank_that_a_signal_ended_is_named(monkeypatch):
    code = f"import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n{WAIT}"
    with pytest.raises(TrainingError, match=r"^rank 1 \(process \d+ on .+\) has ended by SIGKILL;"):
        run(monkeypatch, code)


def failure(exitcode, timestamp=100):
    name = signal.Signals(-exitcode).name if exitcode < 0 else ""
    return SimpleNamespace(exitcode=exitcode, timestamp=timestamp, pid=5, signal_name=lambda: name)


def test_the_first_cause_by_hand():
    """The agent sends SIGTERM to the others, and SIGKILL 30 s later to one that stands still."""
    assert agent._status_of({0: failure(2), 1: failure(-15)}) == 2
    assert agent._status_of({1: failure(-15), 2: failure(1)}) == 1
    assert agent._status_of({0: failure(1), 1: failure(-9, 130)}) == 1
    with pytest.raises(TrainingError, match=r"^rank 2 .* SIGKILL"):
        agent._status_of({0: failure(1), 1: failure(1), 2: failure(-9)})
    with pytest.raises(TrainingError, match=r"^rank 1 .* SIGTERM"):
        agent._status_of({1: failure(-15), 0: failure(-15)})


AGENT = """
import sys
from onepolicy.config import resolve
from onepolicy.launch import agent
agent.PROGRAM = ("-c", sys.argv[1])
agent.run_on_ranks([sys.argv[2]], resolve(%r, ["train.ranks=2"]))
"""
RANK = f"""
import os, pathlib, sys
from onepolicy.launch.agent import end_with_agent
assert end_with_agent() and not end_with_agent()
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
{WAIT}
"""


@pytest.mark.full
@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_ranks_end_with_their_agent(number, tmp_path):
    command = [sys.executable, "-c", AGENT % BASE, RANK, str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    ready = wait_until(lambda: len(list(tmp_path.glob("[01]"))) == 2, process=process)
    assert ready
    wait_until(lambda: all(path.read_text() for path in tmp_path.glob("[01]")))
    ranks = [int(path.read_text()) for path in tmp_path.glob("[01]")]
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == -number
    assert not re.search("Traceback", errors), errors
    wait_until(lambda: all(map(gone, ranks)))


def test_when_the_command_starts_ranks(monkeypatch):
    two, there = ["train.ranks=2"], {"RANK": "0", "WORLD_SIZE": "2"}
    for settings, variables, count, needed in [
        ([], {}, None, False),
        (two, {}, None, True),
        (two, {}, 0, False),
        ([], {}, 2, True),
        (two, there, None, False),
        ([*two, "cluster.kind=ray"], {}, None, False),
    ]:
        with monkeypatch.context() as patch:
            for name in there:
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            assert agent.needs_agent(resolve(BASE, settings), count) is needed, (settings, count)


def test_ctrl_c_while_ranks_train_leaves_a_report(recipe, tmp_path, monkeypatch, capsys):
    def stopped(command, config, count):
        (make_fixture_run(Path(config.out), steps=12, tokens=120) / "summary.json").unlink()
        return agent.INTERRUPTED

    monkeypatch.setattr("onepolicy.cli.train.run_on_ranks", stopped)
    out = tmp_path / "new"
    assert main(["train", str(recipe), f"out={out}", "train.ranks=2"]) == 130
    assert f"report of the steps so far: {out / 'report.html'}; " in capsys.readouterr().err
    assert (out / "report.html").is_file()
