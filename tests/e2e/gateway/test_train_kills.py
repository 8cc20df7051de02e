"""Programs of a training run are killed, and the process that trains, which has their gateway."""

import json
import os
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from onepolicy.gateway.socket_folder import PREFIX
from support.faulty_runs import (
    Fault,
    assert_complete,
    assert_same_run,
    finished,
    rows,
    start,
    steps_of,
    wait_for,
)
from support.own_processes import children_of, wait_until_gone
from support.paths import ROOT
from support.sandbox_driver import processes_with

pytest.importorskip("uvicorn", reason="make test-gateway installs it")
pytestmark = [
    *(pytest.mark.gateway, pytest.mark.slow, pytest.mark.process, pytest.mark.needs("bwrap")),
    pytest.mark.timeout(3600),
]
TESTS = ROOT / "tests"
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
STEPS, EPISODES = 5, 4
HELD = f"3600.{os.getpid()}"
"""Seconds for which programs sleep that this test kills: they are known by it."""
POLL_S = 0.05
"""Between two looks at all processes."""


def write_recipe(folder):
    """Write a recipe whose programs wait for their end with every second problem."""
    rows = [json.dumps({"prompt": f"{i}+1=", "answer": f"{i + 1}"}) for i in range(8)]
    (folder / "problems.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "template.jinja").write_text(TEMPLATE)
    program = folder / "program"
    program.mkdir()
    source = (TESTS / "support" / "gateway" / "programs" / "asker.py").read_text()
    (program / "asker.py").write_text(source.replace("go on", "2+2="))
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f"""
        steps = {STEPS}
        numerics = "on-policy"  # else values depend on which programs ask at the same time
        model = {{ path = "{TESTS}/support/policies/small" }}
        rollout.prompts_per_step = 2
        rollout.group_size = {EPISODES // 2}
        rollout.sampling = {{ max_tokens = 8 }}
        objective = {{ entropy_coef = 0.01 }}
        checkpoint = {{ every = 2 }}
        eval = {{ every = 0 }}
        log = {{ tensorboard = false, report = false }}
        train = {{ threads = 1 }}
        [task]
        kind = "program"
        problems = {{ kind = "jsonl", path = "{folder}/problems.jsonl", held_out = 2 }}
        command = ["python3", "/program/asker.py", "hold", "{HELD}"]
        folder = "{program}"
        reward = "exit"
        template = "{folder}/template.jinja"
        seconds = 3000
        """
    )
    return recipe


class Killer:
    """Kills the programs of a run that wait for it."""

    def __init__(self, run):
        self.run, self.killed = run, set()

    def waiting(self):
        return set(processes_with(f"sleep\0{HELD}")) - self.killed

    def until(self, condition):
        """Kill programs until a condition holds."""

        def met():
            for program in self.waiting():
                os.kill(program, signal.SIGKILL)
                self.killed.add(program)
            return condition()

        wait_for(met, poll=POLL_S)


def died(out):
    return sum(round(row["program/died"] * EPISODES) for row in rows(out))


@pytest.fixture
def sockets(monkeypatch):
    """Return the runs' folder of temporary files: a socket's path has 107 bytes at most."""
    with TemporaryDirectory(prefix="sockets-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def test_nothing_is_lost_or_counted_twice(tmp_path, sockets):
    """A killed program is an episode that ended and earns 0. A run whose process is killed amid an
    episode is the run that was not, and leaves no program and no socket behind."""
    recipe = write_recipe(tmp_path)
    whole, out = tmp_path / "whole", tmp_path / "run"
    run = start(recipe, f"out={whole}")
    killer = Killer(run)
    killer.until(lambda: run.poll() is not None)
    finished(run)
    assert died(whole) == len(killer.killed) > 0
    for row in rows(whole):
        assert row["train/reward"] == 1 - row["program/died"]
        assert (row["train/turns"], row["program/broken"]) == (2, 0)
    run = start(recipe, f"out={out}", "--restarts", "2")
    killer = Killer(run)
    killer.until(lambda: len(steps_of(out)) == 3)
    (driver,) = children_of(run.pid)
    left = wait_for(killer.waiting, run, poll=POLL_S)
    (socket,) = sockets.glob(f"{PREFIX}*")
    os.kill(driver, signal.SIGKILL)
    fault = Fault(out)
    wait_until_gone(left)
    killer.until(lambda: run.poll() is not None)
    assert fault.survived(run).count("ended by SIGKILL ") == 1
    assert_complete(out, STEPS)
    assert_same_run(whole, out, STEPS)
    assert not killer.waiting()
    assert not socket.exists()
    assert not list(sockets.glob(f"{PREFIX}*"))
