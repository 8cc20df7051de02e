"""Frozen weights in nf4: what they stand for, and a model that computes with them."""

import copy

import pytest
import torch
from scipy.stats import norm

from onepolicy.config.lora import LoraConfig
from onepolicy.models import lora, nf4
from onepolicy.models.experts import NAME
from onepolicy.sync.adapters import Targets, add_adapter
from support.models import CONFIGS, make

EVERYTHING = ("attention", "dense", "experts", "routers")
IDS = torch.arange(3, 17)[None]


def published_codes():
    """Return the 16 numbers of NF4 by the paper's definition: 8 quantiles of the normal
    distribution below 0 and 8 from 0 on, scaled to [-1, 1]."""
    outermost = (1 - 1 / 32 + 1 - 1 / 30) / 2
    above = norm.ppf([outermost + (0.5 - outermost) * i / 8 for i in range(8)])
    below = norm.ppf([outermost + (0.5 - outermost) * i / 7 for i in range(7)])
    codes = torch.tensor(sorted([*above, 0.0, *(-below)]), dtype=torch.float64)
    return codes / codes.max()


def by_hand(weight):
    """Return a weight rounded to nf4: in blocks of 64 elements, each to the nearest code."""
    codes, elements = published_codes(), weight.double().reshape(-1)
    found = torch.empty_like(elements)
    for start in range(0, len(elements), 64):
        block = elements[start : start + 64]
        largest = block.abs().max()
        nearest = (block[:, None] - largest * codes).abs().argmin(1)
        found[start : start + 64] = largest * codes[nearest]
    return found.view(weight.shape)


def adapted(family="qwen3_moe", targets=None, *, base="nf4", dtype=torch.float32, tensors=None):
    """Return a model with adapters that are not at their zero start. tensors: its base."""
    model = make(family, dtype=dtype)
    if tensors is not None:
        model.load_state_dict(tensors)
    add_adapter(model, LoraConfig(rank=4, targets=targets, base=base), "base", 0)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in lora.adapter_tensors(model).items():
        if ".lora_B." in name:
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator))
    if family != "qwen3_dense":
        model.set_experts_implementation(NAME)
    return model


def targets_of(family):
    found = Targets(make(family))
    return tuple(
        each for each in EVERYTHING if found.modules.get(each) or found.parameters.get(each)
    )


def base_of(model):
    with lora.adapters_off(model):
        return dict(lora.merged_tensors(model))


def logits(model):
    return model(input_ids=IDS, use_cache=False).logits


def gradients(model):
    logits(model).float().log_softmax(-1)[..., 5].sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (96, 48), (8, 96, 32), (3, 5, 7), (1,), (5, 10)])
def test_weights_are_rounded_as_published(shape, dtype):
    """Rows shorter than a block are among them, which bitsandbytes 0.50.2 reads wrongly as rows."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, expected = nf4.rounded(weight), by_hand(weight)
    assert (found.dtype, found.shape) == (dtype, weight.shape)
    places = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=places, atol=0)
    assert not torch.equal(found, weight) or weight.numel() == 1
    assert torch.equal(nf4.rounded(found), found)


def test_slices_are_rounded_like_the_whole(monkeypatch):
    weight = torch.randn(40, 96)
    whole = nf4.rounded(weight)
    monkeypatch.setattr(nf4, "SLICE", 7)
    assert torch.equal(nf4.rounded(weight), whole)
    assert not nf4.rounded(torch.zeros(2, 64)).any()


@pytest.mark.parametrize("family", CONFIGS)
def test_linear_layers_and_experts_are_rounded_and_nothing_else(family):
    plain, found = make(family).state_dict(), base_of(adapted(family, ("attention",)))
    rounded = Targets(make(family)).matrices
    assert found.keys() == plain.keys()
    assert {name for name in plain if not torch.equal(found[name], plain[name])} == rounded
    assert all(torch.equal(found[name], nf4.rounded(plain[name])) for name in rounded)
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router.")
    assert not any(part in name for name in rounded for part in kept)
    assert any("experts" in name for name in rounded) == (family != "qwen3_dense")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CONFIGS)
def test_it_computes_like_lora_on_the_dequantised_base(family, dtype):
    """Also at the second forward, which peft's own layer would give the adapter twice."""
    targets = targets_of(family)
    model = adapted(family, targets, dtype=dtype)
    same = adapted(family, targets, base="same", dtype=dtype, tensors=base_of(model))
    logits(model)
    atol = {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    torch.testing.assert_close(logits(model), logits(same), rtol=0, atol=atol)
    with lora.adapters_off(model), lora.adapters_off(same):
        torch.testing.assert_close(logits(model), logits(same), rtol=0, atol=atol)
    found, expected = gradients(model), gradients(same)
    assert (
        found.keys() == expected.keys() == {n for n, _ in model.named_parameters() if "lora_" in n}
    )
    places = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) <= places * float(grad.abs().max()), name


def test_gradients_are_those_of_a_hand_made_loop():
    """The reference has neither peft nor bitsandbytes: weights rounded by hand, plus B A alpha /
    rank, in a plain model."""
    model = adapted()
    logits(model)
    gradients(model)
    plain, factors = make("qwen3_moe"), {}
    effective = {name: tensor.detach() for name, tensor in plain.state_dict().items()}
    for name in Targets(plain).matrices:
        effective[name] = by_hand(effective[name]).float()
    for name, layer in lora.adapted_layers(model).items():
        a, b = (each.detach().clone().requires_grad_() for each in lora.factors_of(layer))
        factors[name], experts = (a, b), len(effective[name])
        added = b @ a
        if effective[name].dim() == 3:
            rows, columns = a.view(experts, 4, -1), b.view(len(b), 4, experts)
            added = torch.stack([columns[..., e] @ rows[e] for e in range(experts)])
        effective[name] = effective[name] + 2.0 * added
    out = torch.func.functional_call(plain, effective, kwargs={"input_ids": IDS})
    out.logits.log_softmax(-1)[..., 5].sum().backward()
    for name, layer in lora.adapted_layers(model).items():
        for found, expected in zip(lora.factors_of(layer), factors[name], strict=True):
            scale = float(expected.grad.abs().max())
            assert scale > 0
            assert float((found.grad - expected.grad).abs().max()) < 1e-4 * scale, name


def kept_for_the_backward(model, weights):
    """Return the names of the weights that a graph keeps a copy of, or the weight itself."""
    kept = []
    keep = lambda tensor: kept.append(tensor) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits(model)
    is_kept = lambda weight: any(  # noqa: E731
        each.shape == other.shape and torch.equal(each, other)
        for each in kept
        for other in (weight, weight.T)
    )
    return {name for name, weight in weights.items() if is_kept(weight)}


def test_linear_layers_keep_no_dequantised_weight_for_the_backward():
    model = adapted("qwen3_dense")
    weights = {name: base_of(model)[name] for name in lora.stored_names(model)}
    same = adapted("qwen3_dense", base="same", tensors=base_of(model))
    assert len(kept_for_the_backward(same, weights)) > 10
    assert not kept_for_the_backward(model, weights)


def test_a_weight_takes_four_and_a_half_bits():
    model = adapted()
    now, before = nf4.stored_bytes(model)
    names = Targets(make("qwen3_moe")).matrices
    elements = sum(make("qwen3_moe").get_parameter(name).numel() for name in names)
    assert (now, before) == (elements * (0.5 + 4 / 64), 4 * elements)
    assert sorted(lora.stored_names(model)) == sorted(names)
    kept = sum(tensor.nbytes for tensor in model.state_dict().values())
    plain = sum(tensor.nbytes for tensor in adapted(base="same").state_dict().values())
    scales = elements / 64 * 4  # no part of the state
    assert kept + scales == plain - before + now


def test_contexts_leave_the_model_as_it_was():
    model = adapted("deepseek_v3", EVERYTHING)
    before, weights = logits(model), copy.deepcopy(model.state_dict())
    same = adapted("deepseek_v3", EVERYTHING, base="same", tensors=base_of(model))
    for adapter in (True, False):
        with (
            lora.merged_in(model, torch.bfloat16, adapter=adapter),
            lora.merged_in(same, torch.bfloat16, adapter=adapter),
        ):
            rounded = logits(model)
            torch.testing.assert_close(rounded, logits(same), rtol=0, atol=1e-5)
        assert not torch.equal(rounded, before)
    with lora.scaled_adapters(model, 2):
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
