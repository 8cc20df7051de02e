"""Resume: the same next steps as an uninterrupted run, to the bit, also after a SIGKILL at any moment."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import rows, timeless
from safetensors.torch import load_file

from onepolicy.cli import main
from onepolicy.train import checkpoint


def assert_same_run(a, b, step):
    assert list(map(timeless, rows(a))) == list(map(timeless, rows(b)))
    for name in ("model.safetensors", "optimizer.safetensors"):
        first, second = (load_file(checkpoint.folder_of(run, step) / name) for run in (a, b))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[k], second[k]) for k in first), name


def test_resume_is_bit_equal(train):
    whole = train("whole", "steps=4", "log.counterfactual_every=1")
    part = train("part", "steps=2", "log.counterfactual_every=1")  # a last step is always probed
    assert main(["train", "--resume", str(part), "steps=4"]) == 0
    assert_same_run(whole, part, 4)
    assert (whole / "samples.jsonl").read_text() == (part / "samples.jsonl").read_text()


def test_finished_run_has_nothing_to_resume(train, capsys):
    run = train("done", "steps=2", "eval.every=0")
    assert main(["train", "--resume", str(run)]) == 2
    assert "already finished 2 of 2 steps" in capsys.readouterr().err


def command(*arguments):
    return [sys.executable, "-m", "onepolicy.cli", *arguments]


def run_and_kill(arguments, after):
    """Start a command, SIGKILL it `after` seconds later. True if it had ended by itself."""
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait(timeout=after) == 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False


def kill_and_resume(recipe, out, kills, seed, steps):
    """Kill at random moments until `kills` are spent, then let it finish. Returns how many kills hit a live run."""
    generator, hit = random.Random(seed), 0
    start = command("train", str(recipe), f"out={out}", f"steps={steps}", "checkpoint.every=1")
    resume = command("train", "--resume", str(out))
    begun = time.monotonic()
    for _ in range(kills):
        arguments = resume if (out / "config.json").exists() else start
        ended = run_and_kill(arguments, generator.uniform(4.0, 12.0))
        if ended:
            break
        hit += 1
        assert time.monotonic() - begun < 3600
    if not checkpoint.folder_of(out, steps).exists():
        arguments = resume if (out / "config.json").exists() else start
        done = subprocess.run(arguments, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return hit


def test_killed_once_resumes_to_the_same_run(train, recipe, tmp_path):
    whole = train("whole", "steps=4", "checkpoint.every=1")
    assert kill_and_resume(recipe, tmp_path / "killed", 1, seed=0, steps=4) <= 1
    assert_same_run(whole, tmp_path / "killed", 4)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_kills_at_random_moments(train, recipe, tmp_path):
    steps = 60
    whole = train("whole", f"steps={steps}", "checkpoint.every=1")
    hits = kill_and_resume(recipe, tmp_path / "killed", 20, seed=1, steps=steps)
    assert hits == 20, f"only {hits} kills hit a running process; raise steps"
    assert_same_run(whole, tmp_path / "killed", steps)
