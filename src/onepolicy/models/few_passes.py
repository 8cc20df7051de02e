"""Norms and rotary embeddings of a model's own classes in fewer passes over memory.

RMSNorm (arXiv:1910.07467): transformers writes a norm as seven operations, and torch differentiates
each. On a CPU the forward here does the same ones in the same order, some in place, so its bits are
theirs. The backward is one formula, equal to rounding. On a GPU the norm is one kernel of torch's,
which rounds to 16 bits once, where transformers' classes round twice.

Rotary embeddings (arXiv:2104.09864): transformers turns a vector by joining its swapped halves
anew, and torch differentiates each cut and each join with zeros around them. The forward here does
the same operations on the halves, so its bits are theirs. The backward is one formula, equal to
rounding.

`rms_norm.py` and `rotary.py` say which modules are computed so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

Rotate = Callable[..., tuple[Tensor, Tensor]]


class Replaced(nn.Module):
    """The part of a norm's class that puts another function before the class's own forward."""

    weight: Tensor
    few_passes: tuple[float, float]  # of `rms_norm.formula_of`


class Fused(Replaced):
    """The norm as one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return super().forward(x)
        return rms_norm(x, self.weight.shape, self.weight, self.few_passes[1])


class FewPasses(Replaced):
    """The norm by the functions below."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.dtype == self.weight.dtype == torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        offset, epsilon = self.few_passes
        scale = offset + self.weight if offset else self.weight
        if torch.is_grad_enabled():
            return RMSNormFunction.apply(x, scale, epsilon)
        return (x * _reciprocal(x, epsilon)).mul_(scale)


def _reciprocal(x: Tensor, epsilon: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + epsilon) of each row, [..., 1], without a graph."""
    return x.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


class RMSNormFunction(torch.autograd.Function):
    """y = w n, where n = x r and r = 1 / sqrt(mean(x^2) + epsilon)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        reciprocal = _reciprocal(x, epsilon)
        normed = x * reciprocal
        ctx.save_for_backward(normed, weight, reciprocal)
        return weight * normed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        """Return dx = r (w g - n mean(w g n)) and dw = sum of g n over the rows."""
        normed, weight, reciprocal = ctx.saved_tensors
        of_input = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = (grad * normed).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            of_normed = grad * weight
            along = (of_normed * normed).mean(-1, keepdim=True)
            of_input = torch.addcmul(of_normed, normed, along, value=-1).mul_(reciprocal)
        return of_input, of_weight, None


def turning(theirs: Rotate) -> Rotate:
    """Return a function in the place of theirs, which still computes unusual arguments."""

    def turn(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        usual = query.dtype == key.dtype == cos.dtype and query.shape[-1] == cos.shape[-1]
        if others or named or not usual or not torch.is_grad_enabled():
            return theirs(query, key, cos, sin, *others, **named)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return RotaryFunction.apply(query, cos, sin), RotaryFunction.apply(key, cos, sin)

    return turn


class RotaryFunction(torch.autograd.Function):
    """y1 = x1 c1 - x2 s1 and y2 = x2 c2 + x1 s2, where 1 and 2 are the halves of the last axis.

    x: [B, heads, T, D]. cos, sin: [B, 1, T, D], without gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        half = x.shape[-1] // 2
        out = x * cos
        out[..., :half].sub_(x[..., half:] * sin[..., :half])
        out[..., half:].add_(x[..., :half] * sin[..., half:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return dx1 = g1 c1 + g2 s2 and dx2 = g2 c2 - g1 s1."""
        cos, sin = ctx.saved_tensors
        half = grad.shape[-1] // 2
        of_input = grad * cos
        of_input[..., :half].add_(grad[..., half:] * sin[..., half:])
        of_input[..., half:].sub_(grad[..., :half] * sin[..., :half])
        return of_input, None, None
