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
    ours = adamw(low, CONFIG, torch.device("cpu"))
    rates = {"lr": CONFIG.lr, "betas": CONFIG.betas, "eps": CONFIG.eps, "weight_decay": 0.1}
    plain = torch.optim.AdamW(whole.parameters(), **rates, fused=True)
    for _ in range(40):
        for p, q in zip(low.parameters(), whole.parameters(), strict=True):
            q.grad = torch.rand_like(q)
            p.grad = q.grad.clone()
        ours.step()
        plain.step()
    for p, q, begun in zip(low.parameters(), whole.parameters(), first.parameters(), strict=True):
        assert p.dtype == torch.bfloat16
        assert torch.equal(p, q.bfloat16())
        assert torch.equal(ours.state[p][MASTER], q)
        assert not torch.equal(p, begun)  # 40 updates, each too small for bfloat16, have added up
    assert [p.data_ptr() for p in low.parameters()] == addresses


def test_gradients_of_many_micro_batches_add_up():
    """In bfloat16 the sum of 1,024 shares of 2^-10 ends at 1/4."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    adamw(model, CONFIG, torch.device("cpu"))
    for _ in range(1024):
        (model.weight * 2**-10).sum().backward()
    assert model.weight.grad.dtype == torch.float32
    assert float(model.weight.grad) == 1


def test_float32_parameters_have_no_copy():
    model = nn.Linear(3, 2)
    optimizer = adamw(model, CONFIG, torch.device("cpu"))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert all(MASTER not in optimizer.state[p] for p in model.parameters())


def planted(dtype: torch.dtype) -> tuple[nn.ParameterList, float]:
    """Return parameters with gradients of this dtype, and the norm of exactly those numbers."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(301, 10), (301, 200), (301, 50), (3,)]
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)
    for parameter in model[:3]:  # the last one is without a gradient
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return model, norm_of(model)


def norm_of(model: nn.Module) -> float:
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5


SIZES = [1e-44, 1e-38, 1e-30, 1e-25, 1e-19, 1e-12, 1e-5, 1e5, 1e12, 1e17, 1e18, 1e22, 1e35]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_clipping_norm_is_of_the_gradients_in_float32_of_any_size(dtype, subtests):
    model, exact = planted(dtype)
    assert clip_gradients(model, 1e9) == pytest.approx(exact, rel=1e-5)
    assert norm_of(model) == exact  # nothing to clip
    assert clip_gradients(model, 1.0) == pytest.approx(exact, rel=1e-5)
    assert norm_of(model) == pytest.approx(1.0, rel=1e-4)
    tolerance = {torch.bfloat16: 1e-2}.get(dtype, 1e-4)
    for size in SIZES:
        model, _ = planted(dtype)
        for parameter in model[:3]:
            parameter.grad = (parameter.grad.double() * size).to(dtype)
        exact = norm_of(model)
        with subtests.test(size=size):
            assert clip_gradients(model, 1.0) == pytest.approx(exact, rel=1e-5)
            assert norm_of(model) == pytest.approx(min(exact, 1.0), rel=tolerance)


def one_parameter(count, value):
    model = nn.ParameterList([nn.Parameter(torch.zeros(count))])
    model[0].grad = torch.full((count,), value)
    return model


def test_the_norm_of_a_million_gradients_and_of_none():
    for value in (1e-25, 1e18):
        found = clip_gradients(one_parameter(10**6, value), 1e9)
        assert found == pytest.approx(1e3 * value, rel=1e-3)  # a sum in float32
    assert clip_gradients(nn.Linear(2, 2), 1.0) == 0.0


def test_an_overflowing_norm_is_infinite_and_no_gradient_is_0():
    assert clip_gradients(one_parameter(100, 3e38), 1.0) == math.inf
    assert clip_gradients(one_parameter(100, 0.0), 1.0) == 0


def test_the_norm_of_infinite_gradients_is_not_finite():
    for value in (math.nan, math.inf):
        model, _ = planted(torch.bfloat16)
        model[1].grad[0, 0] = value
        assert not math.isfinite(clip_gradients(model, 1.0))
