"""Frozen weights in nf4: what they stand for, and a model that computes with them."""

import copy
from itertools import product
from statistics import NormalDist

import pytest
import torch

from onepolicy.models import lora, nf4
from onepolicy.models.experts import NAME
from onepolicy.sync.adapters import Targets
from support import lora_models
from support.lora_models import EVERYTHING, check_gradients_by_hand, gradients, logits, targets_of
from support.models import CONFIGS, make
from support.replay_models import same_bits


def published_codes():
    """Return the 16 numbers of NF4 by the paper's definition: 8 quantiles of the normal
    distribution below 0 and 8 from 0 on, scaled to [-1, 1]."""
    outermost = (1 - 1 / 32 + 1 - 1 / 30) / 2
    quantile = NormalDist().inv_cdf
    above = [quantile(outermost + (0.5 - outermost) * i / 8) for i in range(8)]
    below = [-quantile(outermost + (0.5 - outermost) * i / 7) for i in range(7)]
    codes = torch.tensor(sorted([*above, 0.0, *below]), dtype=torch.float64)
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


def adapted(family="qwen3_moe", targets=None, *, base="nf4", **options):
    model = lora_models.adapted(family, targets, base=base, **options)
    if family != "qwen3_dense":
        model.set_experts_implementation(NAME)
    return model


def base_of(model):
    with lora.adapters_off(model):
        return dict(lora.merged_tensors(model))


def test_weights_are_rounded_as_published(subtests):
    """Rows shorter than a block are among them, which bitsandbytes 0.50.2 reads wrongly as rows."""
    shapes = (64, 64), (96, 48), (8, 96, 32), (3, 5, 7), (1,), (5, 10)
    for shape, dtype in product(shapes, (torch.float32, torch.bfloat16)):
        with subtests.test(shape=shape, dtype=dtype):
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


CASES = [(family, torch.float32) for family in CONFIGS]
CASES += [
    ("qwen3_moe", torch.bfloat16),
    pytest.param("gpt_oss", torch.bfloat16, marks=pytest.mark.full),
    pytest.param("deepseek_v3", torch.bfloat16, marks=pytest.mark.full),
]


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "dtype"), CASES)
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
    trained = {n for n, _ in model.named_parameters() if "lora_" in n}
    assert found.keys() == expected.keys() == trained
    places = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) <= places * float(grad.abs().max()), name


def test_gradients_are_those_of_a_hand_made_loop():
    """The reference has no bitsandbytes either: weights are rounded by hand."""
    base = make("qwen3_moe").state_dict()
    base |= {name: by_hand(base[name]).float() for name in Targets(make("qwen3_moe")).matrices}
    model = adapted()
    logits(model)
    check_gradients_by_hand(model, base)


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
        both = [lora.merged_in(each, torch.bfloat16, adapter=adapter) for each in (model, same)]
        with both[0], both[1]:
            rounded = logits(model)
            torch.testing.assert_close(rounded, logits(same), rtol=0, atol=1e-5)
        assert not torch.equal(rounded, before)
    with lora.scaled_adapters(model, 2):
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)
    assert same_bits(weights, model.state_dict())
