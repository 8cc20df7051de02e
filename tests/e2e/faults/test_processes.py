"""SIGKILL of the driver and of a learner rank: under `--restarts` the run equals an undisturbed
one."""

import os
import random
import re
import signal
import time

import pytest

from onepolicy.cli import main
from support.faulty_runs import (
    LONG,
    Fault,
    assert_complete,
    assert_same_run,
    finished,
    rank_of,
    start,
    steps_of,
    wait_for,
)
from support.own_processes import children_of, gone

pytestmark = [pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(3600)]


def driver_of(supervisor, not_this=None):
    """Return the run's own process once it exists."""
    return wait_for(
        lambda: [c for c in children_of(supervisor.pid) if c != not_this and not gone(c)],
        supervisor,
    )[0]


def saving(out):
    return list(out.glob("checkpoints/.step_*.writing"))


STOPS_IN_SAVE = """
import sys, time
from onepolicy.cli import main
from onepolicy.launch import agent
from onepolicy.train import checkpoint

finish = checkpoint._finish_checkpoint

def finish_or_stop(temporary, final, state):
    if state["step"] == 4:
        time.sleep(600)
    finish(temporary, final, state)

checkpoint._finish_checkpoint = finish_or_stop
agent.PROGRAM = tuple(sys.orig_argv[1:3])  # the ranks stop too
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("ranks", [0, 2])
def test_driver_killed_in_the_middle_of_a_checkpoint(ranks, recipe, request, tmp_path):
    """The incomplete checkpoint does not count, and the next steps are the same.

    The run stops in its second save, with tensors on disk and no state.json, until the test kills
    it.
    """
    whole, out = request.getfixturevalue("whole_on_ranks" if ranks else "whole"), tmp_path / "run"
    run = start(recipe, f"out={out}", f"train.ranks={ranks}", program=["-c", STOPS_IN_SAVE])
    wait_for(lambda: list(out.glob("checkpoints/.step_00004.writing/**/*.safetensors")), run)
    os.killpg(run.pid, signal.SIGKILL)
    fault = Fault(out)
    run.wait(LONG)
    assert saving(out)
    assert not (out / "checkpoints" / "step_00004").exists()
    fault.resumed()
    assert_complete(out, 6)
    assert_same_run(whole, out, 6)


def test_driver_killed_at_random_moments_under_restarts(recipe, tmp_path):
    """Kills in start-up, rollout, update and save need no action by the user."""
    steps, kills, generator = 40, 6, random.Random(2)
    # so many at 1e-3 and the routers collapse
    settings = [f"steps={steps}", "checkpoint.every=3", "optim.lr=1e-4"]
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert main(["train", str(recipe), f"out={whole}", *settings]) == 0
    run = start(recipe, f"out={out}", *settings, "--restarts", "9")
    driver = None
    for kill in range(kills):
        driver = driver_of(run, driver)
        wait_for(lambda before=kill: len(steps_of(out)) > 5 * before, run)
        moment, most = time.monotonic() + generator.uniform(0, 0.5), 5 * kill + 3
        # or earlier, where a step takes next to nothing
        wait_for(lambda at=moment, n=most: time.monotonic() > at or len(steps_of(out)) > n, run)
        os.kill(driver, signal.SIGKILL)
    errors = Fault(out).survived(run)
    assert errors.count("ended by SIGKILL ") == kills
    assert_complete(out, steps)
    assert_same_run(whole, out, steps)


@pytest.mark.parametrize("number", [0, 1])
def test_rank_killed_under_restarts(number, recipe, whole_on_ranks, tmp_path):
    """After a kill in the middle of a step the agent names the lost rank and ends. All are started
    again."""
    out = tmp_path / "run"
    run = start(recipe, f"out={out}", "train.ranks=2", "--restarts", "2")
    wait_for(lambda: len(steps_of(out)) >= 3, run)
    os.kill(rank_of(driver_of(run), number), signal.SIGKILL)
    errors = Fault(out).survived(run)
    assert re.search(rf"rank {number} \(process \d+ on .*\) has ended by SIGKILL", errors)
    assert re.search(r"ended by exit status 1 in step \d; restart 1 of 2", errors)
    assert_complete(out, 6)
    assert_same_run(whole_on_ranks, out, 6)


@pytest.mark.parametrize("number", [0, 1])
def test_a_stopped_rank_ends_the_run_in_time(number, recipe, whole_on_ranks, tmp_path):
    """The rank is stopped, not killed, so no connection breaks. train.rank_timeout is the bound."""
    out = tmp_path / "run"
    run = start(recipe, f"out={out}", "train.ranks=2", "train.rank_timeout=40")
    wait_for(lambda: len(steps_of(out)) >= 3, run)
    rank = rank_of(run.pid, number)
    os.kill(rank, signal.SIGSTOP)
    fault = Fault(out)
    try:
        errors = finished(run, status=1)
    finally:
        if not gone(rank):
            os.kill(rank, signal.SIGKILL)
    fault.ended()
    assert re.search(
        rf"onepolicy: .*no answer from rank {number} \(process \d+ on .*\), which", errors
    )
    fault.resumed()
    assert_complete(out, 6)
    assert_same_run(whole_on_ranks, out, 6)


def test_a_fault_of_one_step_is_not_restarted_forever(recipe, tmp_path):
    """Equal siblings leave dynamic sampling no group, in the same step every time."""
    out = tmp_path / "run"
    settings = ["objective.dynamic_sampling=1", "rollout.sampling.temperature=0.001"]
    errors = finished(start(recipe, f"out={out}", *settings, "--restarts", "50"), status=1)
    assert errors.count("; restart ") == 2
    assert "where it has ended 3 times; not restarted" in errors
