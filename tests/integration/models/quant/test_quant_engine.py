"""The embedded engine with quantised weights: its results, its memory, its syncs, and the settings
that it refuses."""

import asyncio

import pytest
import torch
from torch import nn

from onepolicy.config import (
    Fp8,
    Fp8Weight,
    HFEngineConfig,
    Int8,
    ModelConfig,
    RolloutConfig,
    Simulated,
    UsageError,
)
from onepolicy.models.quant.formats import int8_rows
from onepolicy.models.quant.layers import Int8Linear
from onepolicy.models.quant.quantise import check_kernels, quantise
from onepolicy.replay.layers import find_routers
from onepolicy.rollout.copies import load_engine_copy, quantise_policy
from onepolicy.rollout.hf.engine import HFEngine
from support.engine_runs import check_against_stock, prompts, ragged, run
from support.models import MOE, make

FORMATS = [Int8(), Int8(activations="static"), Fp8(), Fp8Weight(), Simulated(bits=4)]


def build(name, quant, **settings):
    config, model = HFEngineConfig(dtype="float32", max_num_seqs=3), make(name, **settings)
    return HFEngine(model, config, return_routes=name in MOE, max_len=64, quant=quant)


def quantised(name, quant):
    model = make(name)
    quantise_policy(model, quant)
    return model


def logps(engine):
    return [done.logp for done in run(engine, ragged(prompts(3)))]


def full(*parameters):
    return pytest.param(*parameters, marks=pytest.mark.full)


CASES = [("gpt_oss", Int8()), ("deepseek_v3", Int8())]
CASES += [("qwen3_moe", quant) for quant in FORMATS[1:]]
CASES += [full("qwen3_moe", Int8()), full("gpt_oss", Fp8())]


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "quant"), CASES, ids=str)
def test_logp_and_routes_are_those_of_the_quantised_model(family, quant):
    """The families have biases and transposed experts (gpt_oss), dense layers and shared experts
    (deepseek_v3)."""
    requests = ragged(prompts(5))
    check_against_stock(quantised(family, quant), requests, run(build(family, quant), requests))


def sizes_of(made):
    return {size.part: size for size in made.sizes().parts}


@pytest.mark.parametrize("family", MOE)
def test_no_expert_stays_in_high_precision(family, subtests):
    for quant in FORMATS[:4]:
        with subtests.test(quant=str(quant)):
            model = make(family)
            whole = {n: p.numel() for n, p in model.named_parameters()}
            sizes = sizes_of(quantise_policy(model, quant))
            assert not [n for n, p in model.named_parameters() if p.ndim == 3]
            counted = [count for n, count in whole.items() if ".experts." in n and "bias" not in n]
            experts = sizes["experts"]
            assert sum(size.parameters for size in sizes.values()) == sum(whole.values())
            assert sum(counted) <= experts.bytes_after <= 0.32 * experts.bytes_before
            for part in ("router", "norms", "embeddings", "lm_head"):
                size = sizes[part]
                assert size.bytes_after == size.bytes_before == 4 * size.parameters


def test_reported_bytes_are_those_of_the_tensors():
    made = quantise_policy(make("qwen3_moe"), Int8())
    sizes = {part: size.bytes_after for part, size in sizes_of(made).items()}
    up, down = 3 * 8 * 64 * (64 + 8), 3 * 8 * 32 * (64 + 8)  # 8 bytes: scale and offset of a row
    assert sizes["experts"] == up + down + 3 * 8 * (64 + 64) * 4
    assert made.sizes().as_json()["parts"][-1]["bytes_after"] == sum(sizes.values())


@pytest.mark.few(1)
@pytest.mark.parametrize("quant", [full(Int8()), *FORMATS[1:3], full(Fp8Weight()), FORMATS[4]])
def test_after_a_sync_it_equals_a_fresh_engine(quant):
    engine, other = build("qwen3_moe", quant), make("qwen3_moe", seed=1)
    before = logps(engine)
    asyncio.run(engine.load_weights(other.state_dict().items(), 1))
    fresh = logps(build("qwen3_moe", quant, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(logps(engine), fresh, strict=True))
    assert not torch.equal(before[0], fresh[0])


def test_weights_are_quantised_from_unrounded_ones():
    """Rounding to the bfloat16 of the engine first would move codes."""
    config = HFEngineConfig(dtype="bfloat16", max_num_seqs=3)
    engine = HFEngine(make("qwen3_moe"), config, return_routes=True, max_len=64, quant=Int8())
    held = engine.model.model.layers[0].self_attn.q_proj.codes
    exact = make("qwen3_moe").model.layers[0].self_attn.q_proj.weight.detach()
    scale = exact.abs().amax(1, keepdim=True) / 127
    assert torch.equal(held, torch.round(exact / scale).to(torch.int8))


def test_a_sync_without_a_quantised_tensor_is_refused():
    engine = build("qwen3_moe", Int8())
    weights = dict(make("qwen3_moe").state_dict())
    del weights["model.layers.1.mlp.experts.down_proj"]
    words = r"1 tensors are missing, first 'model\.layers\.1\.mlp\.experts\.down_proj'"
    with pytest.raises(UsageError, match=words):
        asyncio.run(engine.load_weights(weights.items(), 1))


def test_extra_modules_are_quantised():
    extra = ("embeddings", "lm_head")
    for quant in (Int8(extra_modules=extra), Fp8(extra_modules=extra)):
        sizes = sizes_of(quantise_policy(make("qwen3_moe"), quant))
        assert all(sizes[part].bytes_after < 0.4 * sizes[part].bytes_before for part in extra)
    config = HFEngineConfig(dtype="bfloat16", max_num_seqs=3)
    quant = Int8(extra_modules=("embeddings",))
    engine = HFEngine(make("qwen3_moe"), config, return_routes=False, max_len=64, quant=quant)
    assert engine.model.model.embed_tokens(torch.tensor([1])).dtype == torch.bfloat16
    rounded = quantised("qwen3_moe", Simulated(bits=3, extra_modules=("router",)))
    assert len(rounded.model.layers[0].mlp.gate.weight[0].unique()) <= 7


@pytest.mark.parametrize("kind", ["hf", "vllm"])
def test_the_trainers_copy_has_the_engines_weights(kind, tmp_path):
    """vLLM rounds to bfloat16 first. int8 rounds experts only, to 255 values a row."""
    model = make("qwen3_moe")
    model.save_pretrained(tmp_path)
    rollout = RolloutConfig.model_validate({"engine": {"kind": kind}, "quant": "int8"})
    copy = load_engine_copy(ModelConfig(path=str(tmp_path)), rollout, torch.device("cpu"))
    assert isinstance(copy.model.layers[0].self_attn.q_proj, Int8Linear) == (kind == "hf")
    if kind == "vllm":
        made, given = (m.model.layers[0] for m in (copy, model))
        codes, scale = int8_rows(given.mlp.experts.down_proj.detach().bfloat16())
        assert torch.equal(made.mlp.experts.down_proj.float(), (codes * scale).bfloat16().float())
        weights = (each.self_attn.q_proj.weight.detach().bfloat16() for each in (made, given))
        assert torch.equal(*weights)


def test_calibrated_scales_are_kept_over_syncs():
    engine = build("qwen3_moe", Int8(activations="static"))
    dynamic = logps(engine)
    engine.quantised.calibrate()
    scales = engine.quantised.scales()
    asyncio.run(engine.load_weights(make("qwen3_moe", seed=1).state_dict().items(), 1))
    moved = logps(engine)
    assert engine.quantised.scales() == scales
    assert set(engine.take_metrics()) == {"quant/clipped", "quant/drift_mean", "quant/drift_max"}
    other = build("qwen3_moe", Int8(activations="static"), seed=1)
    other.quantised.use_scales(scales)
    assert all(torch.equal(a, b) for a, b in zip(moved, logps(other), strict=True))
    asyncio.run(engine.load_weights(make("qwen3_moe").state_dict().items(), 2))
    static = logps(engine)
    assert not torch.equal(static[0], dynamic[0])
    assert (static[0] - dynamic[0]).abs().max() < 0.2  # the same policy, coarser activations


class TwoExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi = nn.Parameter(torch.zeros(2, 4, 4))


def unknown_experts(model):
    model.model.layers[0].mlp = TwoExperts()


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def test_a_model_that_was_just_quantised_has_seen_no_values():
    """Its own trial forward does not count."""
    scales = quantised("qwen3_moe", Int8(activations="static")).quantised.static.values()
    assert [float(scale.largest) for scale in scales] == [0] * len(scales)
    assert scales


def test_models_that_cannot_be_quantised_are_refused():
    for change, quant, message in (
        (unknown_experts, Int8(), r"model\.layers\.0\.mlp"),
        (lambda model: None, Int8(extra_modules=("router",)), "leave router out"),
        (tie, Int8(extra_modules=("lm_head",)), "one tensor"),
    ):
        model = make("qwen3_moe")
        routers = [router.path for router in find_routers(model)]
        change(model)
        with pytest.raises(UsageError, match=message):
            quantise(model, quant, routers=routers)


def test_a_device_without_kernels_is_refused(monkeypatch):
    check_kernels(Simulated(), torch.device("cuda"))

    def missing(*args):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(torch, "_int_mm", missing)
    with pytest.raises(UsageError, match="no kernels for int8 here: no such kernel"):
        check_kernels(Int8(), torch.device("cpu"))
