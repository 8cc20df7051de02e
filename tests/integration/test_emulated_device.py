"""A whole RL step on a device that refuses tensors of the CPU, and how often its host waits."""

import json
import subprocess
import sys

import pytest

from support.paths import ROOT

COMMAND = "import support.emulated_device, support.emulated_run as run; run.main({family!r})"
STEPS, REQUESTS = 12, 4  # most tokens of a request, requests


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_dense"])
def found(request):
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(family=request.param)],
        cwd=ROOT / "tests",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_trainer_and_engine_agree_there(found):
    assert found["gap"] < 1e-5
    assert found["grad_norm"] > 0
    assert (found["version"], found["moved"]) == (1, True)


def test_a_decode_step_reads_once(found):
    """Every further read would make a GPU wait for Python once per token."""
    per_step = {place for place, count in found["engine_reads"].items() if count > REQUESTS}
    (place,) = per_step
    assert place.startswith("rollout/hf/continuous_batch.py")
    assert found["engine_reads"][place] <= STEPS


def test_reads_of_the_trainer_do_not_grow_with_layers_or_tokens(found):
    """Each line reads at most a few times for its scoring and its update."""
    assert max(found["learner_reads"].values()) <= 4, found["learner_reads"]
    assert sum(found["learner_reads"].values()) <= 40, found["learner_reads"]
