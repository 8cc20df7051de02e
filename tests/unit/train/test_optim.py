"""AdamW with float32 weights behind parameters of another dtype, and the norm that clips."""

import copy
import math

import pytest
import torch
from torch import nn

from onepolicy.config.model import OptimConfig
from onepolicy.train.optim import MASTER, clip_gradients
from onepolicy.train.optimizers import adamw

CONFIG = OptimConfig(lr=1e-4, weight_decay=0.1)


def test_bfloat16_parameters_are_float32_weights_rounded():
    torch.manual_seed(0)
    low, whole = nn.Linear(7, 5).bfloat16(), nn.Linear(7, 5)
    whole.load_state_dict(low.state_dict())
    first = copy.deepcopy(low)
    addresses = [p.data_ptr() for p in low.parameters()]
    ours, plain = (
        adamw(low, CONFIG, torch.device("cpu")),
        torch.optim.AdamW(
            whole.parameters(),
            lr=CONFIG.lr,
            betas=CONFIG.betas,
            eps=CONFIG.eps,
            weight_decay=0.1,
            fused=True,
        ),
    )
    for _ in range(40):
        for p, q in zip(low.parameters(), whole.parameters(), strict=True):
            p.grad = torch.rand_like(p)
            q.grad = p.grad.float()
        ours.step()
        plain.step()
    for p, q, begun in zip(low.parameters(), whole.parameters(), first.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, q.bfloat16())
        assert torch.equal(ours.state[p][MASTER], q)
        assert not torch.equal(p, begun)  # 40 updates, each too small for bfloat16, have added up
    assert [p.data_ptr() for p in low.parameters()] == addresses


def test_float32_parameters_have_no_copy():
    model = nn.Linear(3, 2)
    optimizer = adamw(model, CONFIG, torch.device("cpu"))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(MASTER not in optimizer.state[p] for p in model.parameters())


def planted(dtype: torch.dtype) -> tuple[nn.ParameterList, float]:
    """Return parameters with gradients of this dtype, and the norm of exactly those numbers."""
    generator = torch.Generator().manual_seed(0)
    model = nn.ParameterList(
        [nn.Parameter(torch.zeros(301, n, dtype=dtype)) for n in (10, 200, 50)]
    )
    model.append(nn.Parameter(torch.zeros(3, dtype=dtype)))  # without a gradient
    for parameter in model[:3]:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return model, norm_of(model)


def norm_of(model: nn.Module) -> float:
    return (
        sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
        ** 0.5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_clipping_norm_is_of_the_gradients_in_float32(dtype):
    model, exact = planted(dtype)
    assert clip_gradients(model, 1e9) == pytest.approx(exact, rel=1e-5)
    assert norm_of(model) == exact  # nothing to clip
    assert clip_gradients(model, 1.0) == pytest.approx(exact, rel=1e-5)
    assert norm_of(model) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "size", [1e-44, 1e-38, 1e-30, 1e-25, 1e-19, 1e-12, 1e-5, 1e5, 1e12, 1e17, 1e18, 1e22, 1e35]
)
def test_the_norm_is_right_for_tiny_and_huge_gradients(dtype, size):
    model, _ = planted(dtype)
    for parameter in model[:3]:
        parameter.grad = (parameter.grad.double() * size).to(dtype)
    exact = norm_of(model)
    assert clip_gradients(model, 1.0) == pytest.approx(exact, rel=1e-5)
    assert norm_of(model) == pytest.approx(
        min(exact, 1.0), rel=1e-2 if dtype == torch.bfloat16 else 1e-4
    )


@pytest.mark.parametrize("value", [1e-25, 1e18])
def test_the_norm_of_a_million_gradients(value):
    model = nn.ParameterList([nn.Parameter(torch.zeros(10**6))])
    model[0].grad = torch.full((10**6,), value)
    assert clip_gradients(model, 1e9) == pytest.approx(1e3 * value, rel=1e-3)  # a sum in float32


def test_an_overflowing_norm_is_infinite_and_no_gradient_is_0():
    model = nn.ParameterList([nn.Parameter(torch.zeros(100))])
    model[0].grad = torch.full((100,), 3e38)
    assert clip_gradients(model, 1.0) == math.inf
    model[0].grad = torch.zeros(100)
    assert clip_gradients(model, 1.0) == 0


def test_a_model_without_gradients_has_norm_0():
    assert clip_gradients(nn.Linear(2, 2), 1.0) == 0.0


def test_the_norm_of_infinite_gradients_is_not_finite():
    for value in (math.nan, math.inf):
        model, _ = planted(torch.bfloat16)
        model[1].grad[0, 0] = value
        assert not math.isfinite(clip_gradients(model, 1.0))
