"""Weights travel in the engine's dtype and have the bits that the engine itself would round to."""

import asyncio

import pytest
import torch

from onepolicy.config import HFEngineConfig
from onepolicy.interfaces import EngineCaps
from onepolicy.models.load import cast_model
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.sync.push import SentTensors, push_weights
from support.families import TABLE
from support.models import make


def engine_of(model, **settings):
    config = HFEngineConfig(max_num_seqs=4, **settings)
    return HFEngine(model, config, return_routes=True, max_len=64)


class Learner:
    version = 5

    def __init__(self, model):
        self.model = model

    def named_weights(self, dtype=None):
        yield from SentTensors(self.model).cast(dtype)


class CountingEngine:
    """An engine that takes weights and keeps them."""

    version = 0

    def __init__(self, dtype):
        self.caps = EngineCaps(returns_routes=True, max_len=8, weights_dtype=dtype)

    async def load_weights(self, weights, version):
        self.received, self.version = dict(weights), version


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_push_to_a_bfloat16_engine_sends_half_the_bytes(family):
    model = make(family)
    engine, unrounded = CountingEngine("bfloat16"), CountingEngine(None)
    asyncio.run(push_weights(Learner(model), engine, unrounded))
    state = model.state_dict()
    assert engine.received.keys() == unrounded.received.keys() == state.keys()
    assert all(torch.equal(unrounded.received[name], state[name]) for name in state)
    whole = sum(tensor.nbytes for tensor in state.values())
    assert sum(tensor.nbytes for tensor in engine.received.values()) < 0.6 * whole
    for name, tensor in engine.received.items():
        if tensor.dtype == torch.bfloat16:
            assert torch.equal(tensor, state[name].bfloat16())
        else:  # an engine may hold these in float32
            assert torch.equal(tensor, state[name])
            assert tensor.dim() < 2 or ".mlp.gate." in name


@pytest.mark.parametrize(
    "family",
    ["hy_v4", "deepseek_v4", "inkling_text", "qwen3_moe", "hunyuan_v1_moe", "lfm2_moe", "zaya"],
)
def test_an_engine_gets_the_bits_that_it_would_cast_itself(family):
    """Some families keep more than routers in float32, and `cast_model` does."""
    model = TABLE[family].model()
    sent = dict(SentTensors(model).cast("bfloat16"))
    for name, tensor in cast_model(model, torch.bfloat16).state_dict().items():
        if tensor.is_floating_point():
            assert torch.equal(sent[name].to(tensor.dtype), tensor), name


def test_a_bfloat16_learner_is_not_widened():
    model = make("qwen3_moe", dtype=torch.bfloat16)
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in SentTensors(model).cast("float32"))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_embedded_engine_has_the_same_bits_either_way(family):
    engine, cast = (engine_of(make(family, seed=1)) for _ in range(2))
    model = make(family)
    assert cast.caps.weights_dtype == "bfloat16"
    asyncio.run(engine.load_weights(model.state_dict().items(), 5))
    asyncio.run(push_weights(Learner(model), cast))
    state = cast.model.state_dict()
    assert all(torch.equal(state[name], t) for name, t in engine.model.state_dict().items())


def test_a_float32_head_is_made_of_unrounded_weights():
    engine = engine_of(make("qwen3_moe"), lm_head="float32")
    assert engine.caps.weights_dtype is None
