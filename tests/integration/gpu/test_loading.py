"""Checkpoints stored in 4 bits, and checked pushes of weights, on a device."""

import asyncio

import pytest
import torch

from onepolicy.config import HFEngineConfig, ModelConfig, TrainingError
from onepolicy.models.load import load_model
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.sync.push import checked_push
from support.fake_learner import FakeLearner
from support.models import CONFIGS, VOCAB, make
from support.mxfp4 import write_mxfp4


def test_mxfp4_is_dequantised_on_the_device(tmp_path, device):
    """transformers has kernels for packed experts there, which would not train."""
    expected = write_mxfp4(tmp_path)
    model = load_model(ModelConfig(path=str(tmp_path)), torch.bfloat16, device)
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert state[name].device.type == device.type
        assert torch.equal(state[name].cpu(), tensor.bfloat16()), name


def engine_of(family, dtype, device):
    model = make(family).to(device)
    config = HFEngineConfig(dtype=dtype, max_num_seqs=4)
    return HFEngine(model, config, return_routes=family != "qwen3_dense", max_len=64)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_push_of_the_same_weights_passes_its_check(family, dtype, device):
    """Again and again: a rare order of additions must not stop a run."""
    engine = engine_of(family, dtype, device)
    learner = FakeLearner(make(family).to(device))
    for version in range({"cpu": 1, "cuda": 3}[device.type]):
        learner.version = version
        asyncio.run(checked_push(learner, engine, vocab=VOCAB))


def test_a_push_of_other_weights_does_not(device):
    engine = engine_of("qwen3_moe", "bfloat16", device)
    other = make("qwen3_moe").to(device)
    with torch.no_grad():
        other.model.layers[0].self_attn.o_proj.weight.mul_(1.5)
    with pytest.raises(TrainingError, match="moved the log-probabilities"):
        asyncio.run(checked_push(FakeLearner(other), engine, vocab=VOCAB))
