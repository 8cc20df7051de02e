"""Norms with a backward of one formula: bits of the forward, gradients against float64."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.mixtral.modeling_mixtral import MixtralRMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNorm,
    Qwen3NextRMSNormGated,
)

from onepolicy.invariant.mode import Invariant
from onepolicy.models import few_passes, rms_norm
from onepolicy.models.prepare import prepare_for_training
from support.models import make


def norm_of(kind, size=48):
    """Return a norm whose weights are random."""
    module = kind(size)
    with torch.no_grad():
        module.weight.uniform_(-2, 2)
    return module


KINDS = [Qwen3MoeRMSNorm, MixtralRMSNorm, OlmoeRMSNorm, GptOssRMSNorm]
ONE_PLUS = [Gemma2RMSNorm, Qwen3NextRMSNorm]  # their scale is 1 + weight


@pytest.mark.parametrize("kind", KINDS + ONE_PLUS)
@pytest.mark.parametrize("shape", [(5, 48), (1, 7, 4, 48), (1, 0, 48)])
def test_same_bits_forward_and_gradients_as_near_to_float64(kind, shape):
    torch.manual_seed(0)
    theirs = norm_of(kind)
    ours = copy.deepcopy(theirs)
    exact = copy.deepcopy(theirs).double()
    rms_norm.use_few_passes(ours)
    assert isinstance(ours, kind)
    assert type(ours).__name__ == kind.__name__
    x, grad = torch.randn(shape) * 3, torch.randn(shape)
    found = []
    for module, leaf in ((theirs, x.clone()), (ours, x.clone()), (exact, x.double())):
        out = module(leaf.requires_grad_())
        if module is exact:  # the class itself rounds to float32: compute the formula
            mean = leaf.pow(2).mean(-1, keepdim=True)
            out = (module.weight + (kind in ONE_PLUS)) * leaf * torch.rsqrt(mean + 1e-6)
        found.append((out, *torch.autograd.grad(out, (leaf, module.weight), grad.to(out.dtype))))
    assert torch.equal(found[0][0], found[1][0])
    assert "RMSNormFunction" in found[1][0].grad_fn.name()
    for their, our, right in zip(*(f[1:] for f in found), strict=True):
        assert our.shape == right.shape
        if right.numel() and right.any():
            errors = [((g - right).abs().max() / right.abs().max()).item() for g in (their, our)]
            assert errors[1] <= 2 * errors[0] + 1e-7


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_kernel_is_as_near_to_float64(kind, dtype):
    """On a GPU. In 16 bits it rounds once, and most classes twice."""
    torch.manual_seed(0)
    theirs = norm_of(kind).to(dtype)
    ours = copy.deepcopy(theirs)
    rms_norm.use_few_passes(ours, fused=True)
    assert isinstance(ours, few_passes.Fused)
    x = (torch.randn(5, 7, 48) * 3).to(dtype)
    exact = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    exact = exact * theirs.weight.double()
    errors = [(module(x).double() - exact).norm().item() for module in (theirs, ours)]
    assert errors[1] <= 1.001 * errors[0]
    assert ours(x).dtype == dtype
    assert "Fused" not in type(ours).__name__
    assert rms_norm.own_class(ours) is kind
    with torch.autocast("cpu", torch.bfloat16):  # the input is in 16 bits, the weight is not
        mixed = [copy.deepcopy(module).float()(x.bfloat16()) for module in (theirs, ours)]
    assert torch.equal(*mixed)


def test_only_what_needs_a_gradient_has_one():
    module = norm_of(Qwen3MoeRMSNorm)
    rms_norm.use_few_passes(module)
    module.weight.requires_grad_(False)
    x = torch.randn(3, 48, requires_grad=True)
    module(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad is None
    module.weight.requires_grad_()
    module(x.detach()).sum().backward()
    assert module.weight.grad is not None


def test_norms_of_other_bits_are_left_alone():
    """A norm may round, or have another parameter."""

    class RoundingRMSNorm(Qwen3MoeRMSNorm):
        def forward(self, x):
            return super().forward(x).bfloat16().float()

    class ShiftedRMSNorm(Qwen3MoeRMSNorm):
        def __init__(self, size):
            super().__init__(size)
            self.bias = nn.Parameter(torch.zeros(size))

    kinds = [RoundingRMSNorm, ShiftedRMSNorm, nn.RMSNorm, nn.LayerNorm]
    kinds += [Qwen3NextRMSNormGated, BambaRMSNormGated]  # of recurrent layers: a gate comes too
    model = nn.Sequential(*(kind(48) for kind in kinds))
    for fused in (False, True):
        rms_norm.use_few_passes(model, fused=fused)
        assert [type(module) for module in model] == kinds


@pytest.mark.parametrize("kind", ONE_PLUS)
def test_one_plus_a_weight_in_16_bits_is_left_to_the_class(kind):
    module = norm_of(kind)
    rms_norm.use_few_passes(module, fused=True)
    assert type(module) is kind


def test_without_a_graph_or_in_other_dtypes_the_class_computes(monkeypatch):
    module = norm_of(Qwen3MoeRMSNorm)
    rms_norm.use_few_passes(module)
    monkeypatch.setattr(few_passes, "RMSNormFunction", None)  # a use would raise
    x = torch.randn(3, 48)
    with torch.no_grad():
        assert module(x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        module(x)
    assert module(x.bfloat16()).requires_grad
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_dense", "mixtral", "olmoe"])
def test_a_prepared_model_has_them_and_a_copy_keeps_them(family):
    model = make(family)
    prepare_for_training(model, torch.device("cpu"))
    norms = [m for m in model.modules() if "RMSNorm" in type(m).__name__]
    assert norms
    assert all(isinstance(module, few_passes.FewPasses) for module in norms)
    kinds = [type(module) for module in model.modules()]
    rms_norm.use_few_passes(model)  # twice changes nothing
    assert [type(module) for module in copy.deepcopy(model).modules()] == kinds


@pytest.mark.parametrize("fused", [False, True])
def test_on_policy_mode_has_norms_with_the_bits_of_the_class(fused):
    """Those are what the engine computes. The kernel of a GPU has others."""
    model = make("qwen3_moe")
    norms = [module for module in model.modules() if "RMSNorm" in type(module).__name__]
    own = [type(module) for module in norms]
    rms_norm.use_few_passes(model, fused=fused)
    before = [type(module) for module in norms]
    with Invariant(model):
        assert [type(module) for module in norms] == (own if fused else before)
        for module, kind in zip(norms, own, strict=True):
            x = 3 * torch.randn(5, len(module.weight), requires_grad=True)
            assert torch.equal(module(x), kind.forward(module, x))
    assert [type(module) for module in norms] == before
