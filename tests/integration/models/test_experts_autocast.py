"""Experts under autocast on a GPU: grouped_mm gets weights of autocast's dtype, for which it has a
kernel. The results are shown on the CPU, and the choice on the meta device, which is no CPU."""

import pytest
import torch

from onepolicy.models import experts, experts_autocast
from support.models import make


def experts_of(model):
    return next(m for m in model.modules() if hasattr(m, "gate_up_proj"))


def inputs(module, tokens=12, top_k=2):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, 64, generator=generator)
    weights, ids = torch.rand(tokens, module.num_experts, generator=generator).topk(top_k)
    return hidden, ids, weights


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_it_computes_what_bfloat16_parameters_compute(family):
    model, rounded = make(family), make(family, dtype=torch.bfloat16)
    module, low = experts_of(model), experts_of(rounded)
    hidden, ids, weights = inputs(module)
    found = experts_autocast.run_in_dtype(module, hidden, ids, weights, torch.bfloat16)
    expected = experts_autocast.grouped_mm_experts_forward(low, hidden.bfloat16(), ids, weights)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())
    found.sum().backward()
    expected.float().sum().backward()
    for name, parameter in module.named_parameters(recurse=False):
        assert parameter.grad.dtype == torch.float32
        assert torch.equal(parameter.grad, low.get_parameter(name).grad.float()), name


def test_autocast_of_another_device_reaches_the_experts(monkeypatch):
    seen = []

    def grouped_mm(module, hidden, *_):
        seen.append((module.gate_up_proj.dtype, module.down_proj.dtype, hidden.dtype))
        return hidden

    monkeypatch.setattr(experts_autocast, "grouped_mm_experts_forward", grouped_mm)
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: device == "meta")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "meta")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: torch.bfloat16)
    module = experts_of(make("qwen3_moe").to("meta"))
    hidden, ids, weights = (each.to("meta") for each in inputs(module))
    out = experts.grouped_experts(module, hidden, ids, weights)
    assert seen == [(torch.bfloat16,) * 3]
    assert out.dtype == torch.float32


def test_a_device_without_autocast_has_experts_too(monkeypatch):
    """torch raises when it is asked whether autocast is on for one."""
    monkeypatch.setattr(experts, "grouped_mm_experts_forward", lambda module, hidden, *_: hidden)
    module = experts_of(make("qwen3_moe").to("meta"))
    hidden, ids, weights = (each.to("meta") for each in inputs(module))
    assert experts.grouped_experts(module, hidden, ids, weights) is hidden
