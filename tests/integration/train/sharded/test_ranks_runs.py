"""More ranks than two, whole runs, and runs whose rank or driver is killed."""

import os
import re
import signal
import subprocess
import sys

import pytest

from onepolicy.cli import main
from onepolicy.train import checkpoint
from support.faulty_runs import gone, rank_of
from support.metrics import rows, timeless
from support.models import MOE, make
from support.rank_cases import CASES, assert_equal_steps, joined
from support.waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = 120  # seconds; what is waited for comes much earlier


def start(*arguments):
    command = [sys.executable, "-m", "onepolicy", "train", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


@pytest.mark.parametrize(
    ("whom", "staleness"), [("rank", "off"), ("driver", "off"), ("rank", 0), ("rank", 1)]
)
def test_a_run_killed_in_the_middle_resumes_to_the_same_run(whom, staleness, recipe, tmp_path):
    """In the asynchronous loop the learner computes in another thread than the one that a lost rank
    interrupts."""
    settings = ["steps=6", "checkpoint.every=1", "train.ranks=2", "eval.every=0"]
    settings += ["train.device=cpu", f"rollout.max_staleness={staleness}"]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    assert main(["train", str(recipe), f"out={whole}", *settings]) == 0
    run = start(recipe, f"out={out}", *settings)
    wait_until(lambda: checkpoint.complete_checkpoints(out), process=run)
    ranks = [rank_of(run.pid, rank) for rank in (0, 1)]
    os.kill(ranks[1] if whom == "rank" else run.pid, signal.SIGKILL)
    _, errors = run.communicate(timeout=LONG)
    if whom == "rank":
        assert run.returncode == 1, errors
        assert re.search(r"onepolicy: rank 1 \(process \d+ on .*\) has ended", errors)
    wait_until(lambda: all(map(gone, ranks)), LONG)  # whose agent is gone go too
    assert main(["train", "--resume", str(out)]) == 0
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4, 5, 6]
    if staleness != 1:  # else it is a matter of time which weights sampled what
        assert list(map(timeless, rows(whole))) == list(map(timeless, rows(out)))


def test_resume_on_other_numbers_of_ranks_and_under_torchrun(recipe, tmp_path):
    """2 -> 3 -> 0 ranks give the weights of an uninterrupted run, but for rounding that sampling
    did not see."""
    settings = ["checkpoint.every=1", "eval.every=0", "train.device=cpu", "optim.lr=1e-5"]
    whole, out = tmp_path / "whole", tmp_path / "changed"
    assert main(["train", str(recipe), f"out={whole}", *settings, "steps=3"]) == 0
    assert main(["train", str(recipe), f"out={out}", *settings, "steps=1", "train.ranks=2"]) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node=3", "-m", "onepolicy"]
    subprocess.run([*torchrun, "train", "--resume", str(out), "steps=2"], check=True, timeout=280)
    assert main(["train", "--resume", str(out), "steps=3", "train.ranks=0"]) == 0
    for expected, found in zip(rows(whole), rows(out), strict=True):
        for name in ("train/reward", "train/response_length"):
            assert found[name] == expected[name]
        for name in ("train/loss", "train/grad_norm", "train/entropy"):
            assert found[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-6), name


def test_a_fork_on_ranks_saves_its_start_and_its_first_checkpoint(recipe, tmp_path):
    """It writes its start in the background, beside the cleaning of its folder."""
    parent, out = tmp_path / "parent", tmp_path / "fork"
    settings = ["checkpoint.every=1", "eval.every=0", "train.device=cpu"]
    assert main(["train", str(recipe), f"out={parent}", *settings, "steps=1"]) == 0
    fork = ["train", "--from", f"{parent}/1", f"out={out}", "train.ranks=2", "steps=2"]
    assert main(fork) == 0
    names = [path.name for path in checkpoint.complete_checkpoints(out)]
    assert names == ["step_00001", "step_00002"]
    for folder in checkpoint.complete_checkpoints(out):
        assert "tokenizer.json" in checkpoint.verify(folder)["files"]


@pytest.mark.parametrize("count", [3, 4])
def test_more_ranks_equal_one(count, tmp_path):
    for family in MOE:
        make(family).save_pretrained(tmp_path / family)
    with joined(count, tmp_path) as others:
        for case in ("idle", "recompute", "critic_kl_entropy", "bypass"):
            assert_equal_steps(CASES[case], others, tmp_path / "qwen3_moe")
        for family in MOE:
            assert_equal_steps(CASES["qwen3_moe"], others, tmp_path / family)
