"""Moments that rest on the host: on an emulated device, and in a learner's checkpoints."""

import json
import subprocess
import sys

import pytest
import torch

from onepolicy.tiny.model import make_tokenizer
from onepolicy.train import checkpoint
from support.learner_steps import batch_of, learner_of, one_step
from support.paths import ROOT

COMMAND = "import support.emulated_device, support.emulated_adamw as adamw; adamw.main()"
LAYER = 2 * 4 * 51 * 50  # bytes of a layer's moments


@pytest.mark.full
@pytest.mark.process
def test_moments_are_on_the_device_a_layer_at_a_time():
    command = [sys.executable, "-c", COMMAND]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {"equal": True, "host": 4 * LAYER, "device": 0, "device_in_a_step": LAYER}
    assert json.loads(done.stdout.splitlines()[-1]) == expected | {"buckets": 4}


@pytest.mark.parametrize(("before", "after"), [("device", "host"), ("host", "device")])
def test_a_run_may_change_where_its_moments_are(before, after, tmp_path):
    """With a critic, whose moments are kept in the same way."""
    settings = "objective.preset=ppo"
    learner = learner_of(settings, f"optim.state={before}")
    one_step(learner, batch_of())
    path = checkpoint.save(tmp_path, learner, make_tokenizer("abc"), step=1, extra={})
    again = learner_of(settings, f"optim.state={after}")
    again.model.load_state_dict(learner.model.state_dict())
    checkpoint.restore_optimizer(path, again)
    _, first, weights = one_step(learner, batch_of())
    _, second, restored = one_step(again, batch_of())
    assert first == second
    assert all(torch.equal(weights[n], restored[n]) for n in weights)
