"""RoPE with a backward of one formula: bits of the forward, gradients against float64."""

import copy
import importlib
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, apply_rotary_pos_emb

from onepolicy.models import rotary
from onepolicy.models.few_passes import RotaryFunction
from support.models import CONFIGS, make


def angles(tokens, size, dtype=torch.float32):
    halves = torch.randn(1, tokens, size // 2).repeat(1, 1, 2)
    return halves.cos().to(dtype), halves.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_forward_and_gradients_as_near_to_float64(dtype):
    torch.manual_seed(0)
    x = torch.randn(2, 5, 4, 16).to(dtype).transpose(1, 2)  # as attention has it: not contiguous
    cos, sin = angles(5, 16, dtype)
    grad = torch.randn_like(x)
    found = []
    for kind in ("theirs", "ours", "exact"):
        leaf = x.detach().clone()
        turn = (cos, sin)
        if kind == "exact":
            leaf, turn = leaf.double(), (cos.double(), sin.double())
        leaf.requires_grad_()
        if kind == "ours":
            out = RotaryFunction.apply(leaf, *(each.unsqueeze(1) for each in turn))
        else:
            out, _ = apply_rotary_pos_emb(leaf, leaf.detach(), *turn)
        found.append((out, *torch.autograd.grad(out, leaf, grad.to(out.dtype))))
    assert torch.equal(found[0][0], found[1][0])
    errors = [(g - found[2][1]).abs().max().item() for _, g in found[:2]]
    assert errors[1] <= 2 * errors[0] + 1e-7


def test_the_gradient_is_that_of_finite_differences():
    cos, sin = (each.double().unsqueeze(1) for each in angles(3, 6))
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda leaf: RotaryFunction.apply(leaf, cos, sin), (x,))


def test_a_rotation_by_a_right_angle_is_computed_by_hand():
    cos, sin = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4).requires_grad_()
    out = RotaryFunction.apply(x, cos, sin)
    assert out.flatten().tolist() == [-3, -4, 1, 2]
    out.backward(torch.tensor([1.0, 10.0, 100.0, 1000.0]).reshape(1, 1, 1, 4))
    assert x.grad.flatten().tolist() == [100, 1000, -1, -10]


def test_functions_of_other_bits_are_left_alone():
    assert rotary.computes_these_bits(apply_rotary_pos_emb)
    assert not rotary.computes_these_bits(lambda q, k, cos, sin: (q * cos.unsqueeze(1), k))


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_has_the_same_logits_to_the_bit_and_the_same_gradients(family):
    theirs = make(family)
    ours = copy.deepcopy(theirs)
    rotary.use_few_passes(ours)
    names = [type(module).__name__ for module in theirs.modules()]
    assert [type(module).__name__ for module in ours.modules()] == names
    ids = torch.arange(3, 12)[None]
    logits = []
    for model in (theirs, ours):
        out = model(input_ids=ids).logits
        (out * torch.linspace(-1, 1, out.shape[-1])).sum().backward()
        logits.append(out)
    assert torch.equal(*logits)
    for name, parameter in theirs.named_parameters():
        if parameter.grad is not None:
            scale = parameter.grad.abs().max().clamp(min=1e-6)
            off = (ours.get_parameter(name).grad - parameter.grad).abs().max() / scale
            assert off < 1e-4, name


def test_attention_of_the_usual_families_turns_so():
    """And without a gradient, or by a part of the head, it turns as its class does."""
    model = make("qwen3_moe")
    rotary.use_few_passes(model)
    attention = model.model.layers[0].self_attn
    assert isinstance(attention, Qwen3MoeAttention)
    assert type(attention) is not Qwen3MoeAttention
    made = type(attention)
    rotary.use_few_passes(model)  # twice changes nothing
    assert type(attention) is made
    turn = made.forward.__globals__[rotary.NAME]
    x, (cos, sin) = torch.randn(1, 2, 3, 8, requires_grad=True), angles(3, 8)
    out, _ = turn(x, x, cos, sin)
    assert "RotaryFunction" in out.grad_fn.name()
    with torch.no_grad():
        assert torch.equal(turn(x, x, cos, sin)[0], out)


@pytest.mark.full
def test_functions_of_the_name_with_other_arguments_stay():
    """Every function of the name in transformers is tried: with few passes, or as it was."""
    outcomes = {}
    for path in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        if f"def {rotary.NAME}(" in path.read_text():
            name = f"transformers.models.{path.parent.name}.{path.stem}"
            theirs = getattr(importlib.import_module(name), rotary.NAME)
            outcomes[path.stem] = rotary.computes_these_bits(theirs)
    assert set(outcomes.values()) == {True, False}
    assert outcomes["modeling_qwen3_moe"]
    assert not outcomes.get("modeling_gemma4", False)  # takes one tensor, not queries and keys
