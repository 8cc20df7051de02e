"""Arms that do not end when they are told to."""

import signal

import pytest

from onepolicy.config import TrainingError
from onepolicy.launch import arms
from support.waiting import wait_until


class Shell(arms.Arm):
    """An arm whose process runs a line of a shell."""

    def command(self, recipe):
        return ["sh", "-c", self.settings[0]]


@pytest.mark.process
def test_an_arm_that_is_deaf_to_its_end_is_killed(monkeypatch, tmp_path):
    """The other arm fails, and its last lines are the error's."""
    monkeypatch.setattr(arms, "EXIT_TIMEOUT_S", 0.2)
    deaf = Shell("deaf", 0, ("trap '' TERM; echo $$; exec sleep 20",), 1, tmp_path / "deaf")
    fails = Shell("fails", 1, ("read line; echo lost; exit 1",), 1, tmp_path / "fails")
    started, running = arms._start, []

    def start(recipe, arm):
        process = started(recipe, arm)
        if arm is deaf:
            running.append(process)
            wait_until(lambda: deaf.console.read_bytes().endswith(b"\n"), process=process)
        else:
            process.stdin.write(b"go on\n")
            process.stdin.flush()
        return process

    monkeypatch.setattr(arms, "_start", start)
    with pytest.raises(TrainingError, match=r"(?s)fails, seed 1: .*\nlost"):
        arms.play_arms(tmp_path / "recipe.toml", [deaf, fails], jobs=2)
    (process,) = running
    assert int(deaf.console.read_text()) == process.pid
    assert process.returncode == -signal.SIGKILL
