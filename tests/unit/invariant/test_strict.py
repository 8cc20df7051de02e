"""Strict mode admits no operator whose result for a row depends on the rows beside it."""

from itertools import product

import torch
from torch import nn
from torch.nn import functional as F

from onepolicy.invariant.strict import NotInvariantError, StrictMode

UNARY = """
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh
    tanh asinh acosh atanh erf erfc sigmoid reciprocal neg abs square floor trunc round
    frac sign relu selu celu logit
"""
NEURAL = "elu silu gelu mish softplus logsigmoid relu6"
ELEMENTWISE = {
    **{name: getattr(torch, name) for name in UNARY.split()},
    **{name: getattr(F, name) for name in NEURAL.split()},
    **{f"pow {p}": (lambda x, p=p: x.pow(p)) for p in (1, 2, 3, 0.5, -0.5, -1, -2, 1.5, 0.25, 4)},
    "a power of x": lambda x: torch.pow(10000.0, x),
    "add alpha": lambda x: torch.add(x, x * 1.7, alpha=0.3),
    "sub alpha": lambda x: torch.sub(x, x * 1.7, alpha=0.3),
    "logaddexp": lambda x: torch.logaddexp(x, x * 0.3),
    "atan2": lambda x: torch.atan2(x, x * 0.3 + 1),
    "division": lambda x: x / (x * 0.3 + 7),
    "addcmul": lambda x: torch.addcmul(x, x, x),
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


def test_an_elementwise_operator_is_consistent_or_refused(subtests):
    """The vector body and the scalar rest of its kernel agree, or strict mode refuses it."""
    normal = torch.randn(1400, generator=torch.Generator().manual_seed(0))
    x = torch.cat([normal, torch.linspace(-110, 110, 1401)])
    for (name, function), some in product(ELEMENTWISE.items(), (x, x.bfloat16())):
        with subtests.test(name, dtype=some.dtype):
            parts = torch.cat([function(part) for part in some.split(7)])
            assert same(function(some), parts) or refused(function, some)


def test_operators_of_real_families_are_not_refused():
    for name in ("exp", "rsqrt", "tanh", "cos", "pow 2", "pow -0.5", "division", "relu"):
        assert not refused(ELEMENTWISE[name], torch.rand(9)), name


def test_a_bfloat16_power_that_is_a_reciprocal_root_is_refused():
    assert refused(torch.rsqrt, torch.rand(9).bfloat16())
    assert refused(lambda x: x.pow(-0.5), torch.rand(9).bfloat16())


def test_rows_that_are_not_adjacent_are_summed_together():
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    apart = rows.T.contiguous().T
    for function in (lambda x: x.sum(-1), lambda x: x.pow(2).mean(-1, keepdim=True)):
        parts = [torch.cat([function(part) for part in x.split(7)]) for x in (rows, apart)]
        assert torch.equal(function(rows), parts[0])
        assert not torch.equal(function(apart), parts[1])  # why
        assert not refused(function, rows)
        assert refused(function, apart)
