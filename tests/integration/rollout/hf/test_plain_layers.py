"""Decoding with plain layers as functions: the bits of the modules, and their hooks."""

import asyncio

import pytest
import torch

from onepolicy.config import HFEngineConfig
from onepolicy.rollout.hf import prepare
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.rollout.hf.plain_layer import PlainLayer
from onepolicy.types import Sampling
from support.engine_runs import run
from support.models import make

PLAIN = ("qwen3_moe", "qwen3_dense")


def engine_of(model_type, dtype="float32", **options):
    config, model = HFEngineConfig(dtype=dtype, max_num_seqs=6), make(model_type)
    routes = model_type != "qwen3_dense"
    return HFEngine(model, config, return_routes=routes, max_len=96, **options)


def plain_layers(engine):
    found = [module.__dict__.get("forward") for module in engine.model.modules()]
    return [forward for forward in found if isinstance(forward, PlainLayer)]


def sample(engine):
    """Return 8 completions of unequal lengths, of which 6 run at a time."""
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 30, (5 + i % 4,), generator=random).tolist() for i in range(8)]
    return run(engine, [(p, Sampling(1.0, 6 + 3 * i), i) for i, p in enumerate(prompts)])


@pytest.mark.few(1)
@pytest.mark.parametrize("numerics", ["fast", "on-policy"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model_type", PLAIN)
def test_the_bits_and_routes_of_the_modules(model_type, dtype, numerics, monkeypatch):
    ours = engine_of(model_type, dtype, numerics=numerics)
    assert len(plain_layers(ours)) == ours.model.config.num_hidden_layers
    monkeypatch.setattr(prepare, "_decode_by_functions", lambda *_: None)
    theirs = engine_of(model_type, dtype, numerics=numerics)
    assert not plain_layers(theirs)
    for mine, other in zip(sample(ours), sample(theirs), strict=True):
        assert torch.equal(mine.token_ids, other.token_ids)
        assert torch.equal(mine.logp, other.logp)
        if mine.routing is not None:
            assert torch.equal(mine.routing.ids, other.routing.ids)


def test_layers_decode_with_weights_that_were_loaded_later():
    engine = engine_of("qwen3_moe")
    before = sample(engine)[0].logp
    changed = {name: 1.5 * tensor for name, tensor in engine.model.state_dict().items()}
    asyncio.run(engine.load_weights(changed.items(), 1))
    assert not torch.equal(sample(engine)[0].logp, before)
    for name, tensor in engine.model.state_dict().items():
        assert torch.equal(tensor, changed[name])


def test_a_hook_inside_a_layer_sees_every_step():
    engine = engine_of("qwen3_moe")
    for inside in ("self_attn.q_proj", "input_layernorm", "mlp.experts"):
        seen = []
        module = engine.model.model.layers[0].get_submodule(inside)
        with module.register_forward_hook(lambda *_, seen=seen: seen.append(1)):
            asyncio.run(engine.reset_cache())
            asyncio.run(engine.generate([5, 6, 7], Sampling(1.0, 4), seed=0))
        assert len(seen) == 4, inside  # a prefill and three decode steps


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "deepseek_v3", "olmoe"])
def test_other_families_and_windows_keep_their_own_forward(model_type):
    assert not plain_layers(engine_of(model_type))


def test_a_scaled_residual_is_noticed():
    """A layer with the parts of a plain one that computes something else is left alone."""
    model = make("qwen3_moe")
    layer = model.model.layers[0]
    plain = layer.forward
    layer.__dict__["forward"] = lambda *args, **kwargs: 1.01 * plain(*args, **kwargs)
    config = HFEngineConfig(dtype="float32", max_num_seqs=6)
    engine = HFEngine(model, config, return_routes=True, max_len=96)
    assert len(plain_layers(engine)) == model.config.num_hidden_layers - 1
