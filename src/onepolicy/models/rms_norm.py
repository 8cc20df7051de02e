"""RMSNorm (arXiv:1910.07467) of a model's own classes in fewer passes over memory.

Some families (Gemma, Qwen3.5) keep a norm's scale as its distance from 1. transformers writes a
norm as seven operations, each with an output of its own, and torch differentiates each. On a CPU
the forward here does the same operations in the same order, some in place, so its bits are theirs.
The backward is one formula, equal to rounding. On a GPU the norm is one kernel of torch's, which
rounds to 16 bits once, where transformers' classes round twice.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import rms_norm


def use_few_passes(model: nn.Module, *, fused: bool = False) -> None:
    """Let every norm of this formula be computed so. Names and hooks stay the same.

    fused: by torch's kernel, for a GPU.
    """
    way: type[Replaced] = Fused if fused else FewPasses
    for module in model.modules():
        offset = offset_of(module)
        if offset is None or (fused and offset):  # 1 + w would be rounded to 16 bits
            continue
        module.__class__ = _made(way, type(module), offset)


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of this module without fewer passes."""
    own = type(module)
    return own.__bases__[1] if isinstance(module, Replaced) else own


def offset_of(module: nn.Module) -> float | None:
    """Return 0 or 1, whichever gives `(w + offset) x / rms(x)` the bits of this module's output.

    None if neither does. The output is tried in float32.
    """
    parameters = dict(module.named_parameters())
    if (
        "RMSNorm" not in type(module).__name__
        or isinstance(module, Replaced)
        or list(parameters) != ["weight"]
        or list(inspect.signature(type(module).forward).parameters)[2:]  # a gate
        or _epsilon_of(module) is None
    ):
        return None
    random = torch.Generator("cpu").manual_seed(0)
    x, weight = (
        torch.randn(shape, generator=random, device="cpu")
        for shape in ((3, *parameters["weight"].shape), parameters["weight"].shape)
    )
    with torch.no_grad():
        theirs = functional_call(module, {"weight": weight}, (x,))
        for offset in (0.0, 1.0):
            ours = RMSNormFunction.apply(x, _scale(weight, offset), _epsilon_of(module))
            if torch.equal(theirs, ours):
                return offset
    return None


def _epsilon_of(module: nn.Module) -> float | None:
    """Return the number under the root, by either name of transformers; None if there is none."""
    for name in ("variance_epsilon", "eps"):
        found = getattr(module, name, None)
        if isinstance(found, float):
            return found
    return None


def _scale(weight: Tensor, offset: float) -> Tensor:
    """Return the factor of the normed values."""
    if offset == 0:
        return weight
    return offset + weight


class Replaced(nn.Module):
    """The part of a norm's class that puts another function before the class's own forward."""

    weight: Tensor
    offset: float  # of the scale from the weight

    def of_few_passes(self) -> tuple[Tensor, float]:
        """Return the scale, and the number under the root."""
        epsilon = _epsilon_of(self)
        assert epsilon is not None
        return _scale(self.weight, self.offset), epsilon


class Fused(Replaced):
    """The norm as one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.weight.dtype:
            return super().forward(x)
        scale, epsilon = self.of_few_passes()
        return rms_norm(x, scale.shape, scale, epsilon)


class FewPasses(Replaced):
    """The norm by the functions below."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.dtype == self.weight.dtype == torch.float32 or torch.is_autocast_enabled("cpu"):
            return super().forward(x)
        scale, epsilon = self.of_few_passes()
        if torch.is_grad_enabled():
            return RMSNormFunction.apply(x, scale, epsilon)
        return (x * _reciprocal(x, epsilon)).mul_(scale)


def _reciprocal(x: Tensor, epsilon: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + epsilon) of each row, [..., 1], without a graph."""
    return x.pow(2).mean(-1, keepdim=True).add_(epsilon).rsqrt_()


MADE: dict[tuple[type, type, float], type[nn.Module]] = {}  # our subclasses of norms' classes


def _made(way: type[Replaced], norm: type[nn.Module], offset: float) -> type[nn.Module]:
    key = way, norm, offset
    if key not in MADE:
        parts = {"__module__": norm.__module__, "offset": offset}
        MADE[key] = type(norm.__name__, (way, norm), parts)
    return MADE[key]


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
