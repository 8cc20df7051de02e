"""The on-policy switch: entered, left, nested, interrupted. Operators that strict mode refuses, and
the two paths of the experts."""

import copy
import threading
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from onepolicy.invariant import experts, ops
from onepolicy.invariant.enable import check_model
from onepolicy.invariant.mode import Invariant, InvariantLinear, install_invariant
from onepolicy.invariant.strict import NotInvariantError
from onepolicy.invariant.switch import TILE, is_invariant
from onepolicy.models import decode_experts
from onepolicy.models.buckets import BucketedPacking
from support.invariant_models import trainer_of
from support.models import CONFIGS, MOE, make
from support.replay_models import same_bits, take_grads


def state_of(model):
    return (
        [type(module) for module in model.modules()],
        model.config._attn_implementation,
        getattr(model.config, "_experts_implementation", None),
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def logits(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 9)[None], use_cache=False).logits


@pytest.mark.parametrize("family", CONFIGS)
def test_left_as_it_was(family):
    model = make(family)
    before, computed = state_of(model), logits(model)
    assert not is_invariant(model)
    with Invariant(model) as outer:
        inside = state_of(model)
        assert is_invariant(model)
        assert any(type(module) is InvariantLinear for module in model.modules())
        with Invariant(model, strict=True):
            assert is_invariant(model)
        assert is_invariant(model)
        assert state_of(model) == inside
        with outer:  # the same object again
            assert is_invariant(model)
        assert is_invariant(model)
    assert not is_invariant(model)
    assert state_of(model) == before
    assert torch.equal(logits(model), computed)


def test_an_exception_leaves_it():
    model = make("qwen3_moe")
    before = state_of(model)
    for strict in (False, True):
        with pytest.raises(KeyError), Invariant(model), Invariant(model, strict=strict):
            raise KeyError
        assert not is_invariant(model)
        assert state_of(model) == before


def test_another_model_and_another_thread_are_unaffected():
    inside, outside = make("qwen3_moe"), make("qwen3_moe", seed=1)
    expected = logits(outside)
    seen = []
    with Invariant(inside):
        assert torch.equal(logits(outside), expected)
        found = lambda: (is_invariant(inside), is_invariant(outside), logits(outside))  # noqa: E731
        thread = threading.Thread(target=lambda: seen.extend(found()))
        thread.start()
        thread.join()
    assert seen[:2] == [True, False]
    assert torch.equal(seen[2], expected)


def test_contexts_left_in_another_order():
    """Two tasks on one event loop leave their contexts in another order than they entered them."""
    model = make("qwen3_dense")
    first, second = Invariant(model), Invariant(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_invariant(model)
    second.__exit__(None, None, None)
    assert not is_invariant(model)


def test_a_copy_of_an_installed_model_is_independent():
    model = trainer_of(make("qwen3_moe"))
    twin = copy.deepcopy(model)
    assert is_invariant(twin)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    check_model(model)
    check_model(twin)
    mine, its = (each.model.layers[0].mlp.gate(torch.ones(1, 64))[0] for each in (model, twin))
    assert its.abs().max() > 0
    assert not torch.equal(its, mine)  # its own weights, not those of the model it was copied from


class Convolution(nn.Linear):
    def forward(self, x):
        return F.conv1d(x.transpose(1, 2), self.weight[..., None]).transpose(1, 2)


class Cumulative(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight) + x.mean(1, keepdim=True)


def test_an_operator_without_an_invariant_version_is_named():
    for fault, named in (
        (Convolution, r"aten\.convolution.*o_proj"),
        (Cumulative, r"aten\.mean\.dim.*layers\.1.*o_proj"),
    ):
        model = make("qwen3_dense")
        model.model.layers[1].self_attn.o_proj.__class__ = fault
        install_invariant(model)
        with pytest.raises(NotInvariantError, match=named):
            check_model(model)


def test_errors_in_strict_mode_leave_no_hooks():
    model = make("qwen3_dense")
    before = state_of(model)
    model.model.norm.forward = lambda x: torch.sigmoid(x)
    with pytest.raises(NotInvariantError, match=r"aten\.sigmoid"), Invariant(model, strict=True):
        torch.sigmoid(torch.ones(3))
    assert state_of(model) == before


def experts_of(name, dtype):
    model = make(name, dtype=dtype)
    decode_experts.use_decode_experts(model, torch.device("cpu"))
    modules = model.modules()
    return next(m for m in modules if hasattr(m, "down_proj") and hasattr(m, "has_bias"))


same_experts = cache(experts_of)  # for tests that leave them as they are


@pytest.mark.parametrize("family", MOE)
@settings(max_examples=8)
@given(
    tokens=st.integers(1, 130),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    skew=st.sampled_from([0.0, 4.0]),
    seed=st.integers(0, 1000),
)
def test_an_experts_token_is_the_same_in_any_batch(family, tokens, dtype, skew, seed):
    """Few tokens read rows of weights, many are sorted by expert. With a graph they are always
    sorted."""
    module, generator = same_experts(family, dtype), torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, module.num_experts, generator=generator)
    scores[:, 0] += skew
    weights, ids = scores.softmax(-1).topk(2, -1)
    hidden, weights = torch.randn(tokens, 64, generator=generator).to(dtype), weights.to(dtype)
    with torch.no_grad():
        whole = experts.invariant_experts(module, hidden, ids, weights)
        alone = experts.invariant_experts(module, hidden[-1:], ids[-1:], weights[-1:])
        flipped = (each.flip(0) for each in (hidden, ids, weights))
        turned = experts.invariant_experts(module, *flipped).flip(0)
    graph = experts.invariant_experts(module, hidden, ids, weights)
    assert torch.equal(whole[-1:], alone)
    assert torch.equal(whole, turned)
    assert torch.equal(whole, graph)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    module.config._experts_implementation = "eager"
    torch.testing.assert_close(whole, module(hidden, ids, weights), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_gradients_of_the_experts_are_the_familys(family):
    generator = torch.Generator().manual_seed(0)
    found = []
    for implementation in ("eager", experts.NAME):
        module = experts_of(family, torch.float32)
        module.config._experts_implementation = implementation
        hidden = torch.randn(40, 64, generator=generator.manual_seed(1)).requires_grad_()
        scores = torch.randn(40, module.num_experts, generator=generator).softmax(-1)
        weights, ids = scores.topk(2, -1)
        weights = weights.detach().requires_grad_()
        module(hidden, ids, weights).square().sum().backward()
        found.append([hidden.grad, weights.grad, *(p.grad for p in module.parameters())])
    for eager, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_from_run_to_run(dtype):
    model, found = trainer_of(make("qwen3_moe", dtype=dtype)), []
    places = torch.cat([torch.arange(40), torch.arange(33)])[None]
    inputs = {"input_ids": torch.arange(73)[None] % 60, "position_ids": places}
    bounds = torch.tensor([0, 40, 73], dtype=torch.int32)
    for _ in range(2):
        packing = BucketedPacking.of(bounds, model.device, multiple=TILE)
        out = model(**inputs, use_cache=False, packing=packing)
        out.logits.square().sum().backward()
        found.append(take_grads(model))
    assert found[0].keys() == dict(model.named_parameters()).keys()
    assert same_bits(*found)


FEW = {"input_ids": torch.arange(3, 19)[None], "position_ids": torch.arange(16)[None]}


@pytest.mark.parametrize(
    ("family", "by_name"), [("qwen3_moe", True), ("qwen3_dense", True), ("gpt_oss", False)]
)
def test_functions_that_are_called_by_name_need_no_mode(family, by_name, monkeypatch):
    """A mode costs about 1 us a call. Who calls a tensor's method or has its own gate needs it."""
    model, entered = make(family), []
    enter = ops.InvariantFunctions.__enter__

    def watched(mode):
        entered.append(mode)
        return enter(mode)

    packing = BucketedPacking.of(torch.tensor([0, 16]), model.device, multiple=TILE)
    with Invariant(model):
        model(**FEW, use_cache=False, packing=packing)  # what is tried once is tried
        monkeypatch.setattr(ops.InvariantFunctions, "__enter__", watched)
        model(**FEW, use_cache=False, packing=packing)
    assert (not entered) == by_name


@pytest.mark.parametrize(("family", "expected"), [("qwen3_moe", True), ("gpt_oss", False)])
def test_a_gate_of_silu_is_found_by_trying(family, expected):
    module = experts_of(family, torch.float32)
    up = getattr(module, decode_experts.up_name(module))
    width = up.shape[2 if module.is_transposed else 1]
    assert experts.is_silu_gate(module, width) == expected
