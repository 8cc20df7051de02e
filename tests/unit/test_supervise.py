"""`onepolicy train --restarts N`: what is started again, how often, and what never is."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from onepolicy.cli import main
from onepolicy.loop import supervise

FIRST, RESUME = ["train", "recipe"], ["train", "--resume", "run"]


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run([(exit status, last step logged or None), ...], restarts) -> status, commands started, waits, texts."""
    out = tmp_path / "run"

    def go(ends, restarts):
        commands, waits, texts, left = [], [], [], list(ends)

        def end(command):
            commands.append(command[3:])
            status, step = left.pop(0)
            if step is not None:
                out.mkdir(exist_ok=True)
                (out / "config.json").write_text("{}")
                (out / "metrics.jsonl").write_text("".join(json.dumps({"step": s + 1}) + "\n" for s in range(step)))
            return status

        monkeypatch.setattr(supervise, "_run", end)
        status = supervise.supervise(out, FIRST, RESUME, restarts, texts.append, waits.append)
        assert not left
        return status, commands, waits, texts

    return go


def test_a_run_that_dies_is_resumed_until_it_has_finished(run):
    status, commands, waits, texts = run([(-9, 2), (1, 5), (-6, 5), (0, 9)], restarts=4)
    assert status == 0
    assert commands == [FIRST, RESUME, RESUME, RESUME]
    assert waits == [1, 1, 2]
    assert "ended by SIGKILL after step 2; restart 1 of 4 in 1 s" in texts[0]
    assert "exit status 1 after step 5" in texts[1]


def test_before_there_is_a_run_folder_it_is_started_anew(run):
    assert run([(-9, None), (-9, 0), (0, 3)], restarts=2)[1] == [FIRST, FIRST, RESUME]


@pytest.mark.parametrize("status", [0, 2, 130, 143])
def test_what_is_never_restarted(run, status):
    assert run([(status, 1)], restarts=5)[:2] == (status, [FIRST])


def test_a_fault_of_one_step_is_given_up(run):
    status, _, waits, texts = run([(1, 7)] * 3, restarts=50)
    assert (status, waits) == (1, [1, 2])
    assert "after step 7, where it has ended 3 times in a row; not restarted" in texts[-1]


def test_restarts_are_counted(run):
    status, commands, _, texts = run([(-9, 1), (-9, 2), (-9, 3)], restarts=2)
    assert (status, len(commands)) == (1, 3)
    assert "all 2 restarts are used up" in texts[-1]


def test_sigterm_ends_the_run_and_its_supervision():
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    began = time.monotonic()
    assert supervise._run([sys.executable, "-c", "import time; time.sleep(60)"]) == supervise.STOPPED
    assert time.monotonic() - began < 30
    timer.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_signal_that_ended_a_run_is_its_status():
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert supervise._run([sys.executable, "-c", code]) == -signal.SIGKILL
    assert supervise._run([sys.executable, "-c", "raise SystemExit(3)"]) == 3


def test_settings_that_cannot_take_effect(capsys, monkeypatch, tmp_path):
    (tmp_path / "recipe.toml").write_text("optim.lrr = 1")
    assert main(["train", str(tmp_path / "recipe.toml"), f"out={tmp_path}", "--restarts", "3"]) == 2
    assert "optim.lrr" in capsys.readouterr().err
    assert main(["train", str(tmp_path / "recipe.toml"), "--restarts", "-1"]) == 2
    assert "--restarts: -1; 0 or more" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", str(tmp_path / "recipe.toml"), "--restarts", "3"]) == 2
    assert "--max-restarts" in capsys.readouterr().err


def test_importing_it_loads_no_torch():
    code = "import sys, onepolicy.loop.supervise; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
