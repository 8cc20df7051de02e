"""Strict mode admits no operator whose result for a row depends on the rows beside it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from onepolicy.invariant.strict import NotInvariantError, StrictMode

UNARY = """
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh
    tanh asinh acosh atanh erf erfc sigmoid reciprocal neg abs square floor trunc round
    frac sign relu selu celu logit
"""
OTHERS = {
    name: getattr(F, name)
    for name in ["elu", "silu", "gelu", "mish", "softplus", "logsigmoid", "relu6"]
}
POWERS = {f"pow {p}": (lambda x, p=p: x.pow(p)) for p in (1, 2, 3, 0.5, -0.5, -1, -2, 1.5, 0.25, 4)}
BINARY = {
    "a power of x": lambda x: torch.pow(10000.0, x),
    "add alpha": lambda x: torch.add(x, x * 1.7, alpha=0.3),
    "sub alpha": lambda x: torch.sub(x, x * 1.7, alpha=0.3),
    "logaddexp": lambda x: torch.logaddexp(x, x * 0.3),
    "atan2": lambda x: torch.atan2(x, x * 0.3 + 1),
    "division": lambda x: x / (x * 0.3 + 7),
    "addcmul": lambda x: torch.addcmul(x, x, x),
}
ELEMENTWISE = {
    **{name: getattr(torch, name) for name in UNARY.split()},
    **OTHERS,
    **POWERS,
    **BINARY,
}


def refused(function, x):
    try:
        with StrictMode(nn.Identity()):
            function(x)
    except NotInvariantError:
        return True
    return False


def same(a, b):
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_an_elementwise_operator_is_consistent_or_refused(name, dtype):
    """The vector body and the scalar rest of its kernel agree, or strict mode refuses it."""
    generator, function = torch.Generator().manual_seed(0), ELEMENTWISE[name]
    x = torch.cat([torch.randn(6000, generator=generator), torch.linspace(-110, 110, 4001)]).to(
        dtype
    )
    even = same(function(x), torch.cat([function(part) for part in x.split(7)]))
    assert even or refused(function, x)


@pytest.mark.parametrize(
    "name", ["exp", "rsqrt", "tanh", "cos", "pow 2", "pow -0.5", "division", "relu"]
)
def test_operators_of_real_families_are_not_refused(name):
    assert not refused(ELEMENTWISE[name], torch.rand(9))


def test_a_bfloat16_power_that_is_a_reciprocal_root_is_refused():
    assert refused(torch.rsqrt, torch.rand(9).bfloat16())
    assert refused(lambda x: x.pow(-0.5), torch.rand(9).bfloat16())


@pytest.mark.parametrize(
    "function", [lambda x: x.sum(-1), lambda x: x.pow(2).mean(-1, keepdim=True)]
)
def test_rows_that_are_not_adjacent_are_summed_together(function):
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    apart = rows.T.contiguous().T
    assert torch.equal(function(rows), torch.cat([function(part) for part in rows.split(7)]))
    assert not torch.equal(
        function(apart), torch.cat([function(part) for part in apart.split(7)])
    )  # why
    assert not refused(function, rows)
    assert refused(function, apart)
