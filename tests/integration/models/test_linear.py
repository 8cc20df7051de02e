"""Linear layers by oneDNN against torch's own, values and gradients."""

import copy

import pytest
import torch
from torch import nn

from onepolicy.models import linear


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 48), (1, 300, 48), (2, 3, 40, 48)])
def test_same_values_and_gradients(shape, bias, always):
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(48, 24, bias=bias), nn.Linear(24, 16, bias=bias))
    ours = copy.deepcopy(theirs)
    linear.use_onednn_linear(ours, torch.device("cpu"))
    assert [type(layer) for layer in ours] == [linear.CPULinear] * 2
    x, grad = torch.randn(shape), torch.randn(*shape[:-1], 16)
    results = []
    for model in (theirs, ours):
        leaf = x.clone().requires_grad_()
        out = model(leaf)
        assert model is theirs or out._base is None
        out.backward(grad)
        results.append([out, leaf.grad, *(p.grad for p in model.parameters())])
    with torch.no_grad():
        assert torch.equal(ours(x), results[1][0])
    for theirs_, ours_ in zip(*results, strict=True):
        torch.testing.assert_close(ours_, theirs_, atol=1e-4, rtol=1e-5)


def test_other_dtypes_and_autocast_are_torchs_own(monkeypatch):
    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", 0)
    monkeypatch.setattr(linear, "onednn_linear", None)  # a call would raise
    layer = linear.CPULinear(8, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 8)).dtype == torch.bfloat16
    assert layer.bfloat16()(torch.randn(3, 8).bfloat16()).dtype == torch.bfloat16
    monkeypatch.setattr(linear, "MIN_MULTIPLICATIONS", 10**9)
    assert layer.float()(torch.randn(3, 8)).shape == (3, 4)


def test_prepare_skips_subclasses_and_other_devices(monkeypatch):
    monkeypatch.setattr(linear, "prefers_onednn", lambda: True)

    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), Other(2, 2))
    linear.use_onednn_linear(model, torch.device("cuda"))
    assert type(model[0]) is nn.Linear
    linear.use_onednn_linear(model, torch.device("cpu"))
    assert [type(layer) for layer in model] == [linear.CPULinear, Other]


@pytest.mark.parametrize("shape", [(70, 8, 20), (70, 20, 8)])
def test_products_without_a_graph(shape, always):
    torch.manual_seed(0)
    rows, inner, outer = shape
    x, weight, y = torch.randn(rows, inner), torch.randn(outer, inner).T, torch.randn(rows, outer)
    out = torch.empty(rows, outer)
    linear.matmul_into(x, weight, out)
    torch.testing.assert_close(out, x @ weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(linear.transposed_matmul(x, y), x.T @ y, atol=1e-5, rtol=1e-5)
