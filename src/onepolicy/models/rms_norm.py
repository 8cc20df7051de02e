"""RMSNorm (arXiv:1910.07467) of a model's own classes in fewer passes over memory.

transformers writes a norm as seven operations, and torch differentiates each. On a CPU the forward
here does the same ones in the same order, some in place, so its bits are theirs. The backward is
one formula, equal to rounding. On a GPU the norm is one kernel of torch's, which rounds to 16 bits
once, where transformers' classes round twice. Gemma and Qwen3.5 keep a scale less 1.
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
        found = formula_of(module)
        if found and not (fused and found[0]):  # 1 + w would be rounded to 16 bits
            module.__class__ = _made(way, type(module))
            vars(module)["few_passes"] = found


def own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of this module without fewer passes."""
    return type(module).__bases__[1] if isinstance(module, Replaced) else type(module)


def formula_of(module: nn.Module) -> tuple[float, float] | None:
    """Return offset and epsilon of `(offset + w) x / sqrt(mean(x^2) + epsilon)`.

    None if it does not have the bits of this module's float32 output.
    """
    parameters = dict(module.named_parameters())
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if (
        "RMSNorm" not in type(module).__name__
        or isinstance(module, Replaced)
        or list(parameters) != ["weight"]
        or list(inspect.signature(type(module).forward).parameters)[2:]  # a gate
        or not isinstance(epsilon, float)
    ):
        return None
    shape, random = parameters["weight"].shape, torch.Generator("cpu").manual_seed(0)
    table = torch.randn(4, *shape, generator=random, device="cpu")
    x, weight = table[1:], table[0]
    with torch.no_grad():
        theirs = functional_call(module, {"weight": weight}, (x,))
        for offset in (0.0, 1.0):
            if torch.equal(theirs, RMSNormFunction.apply(x, offset + weight, epsilon)):
                return offset, epsilon
    return None


class Replaced(nn.Module):
    """The part of a norm's class that puts another function before the class's own forward."""

    weight: Tensor
    few_passes: tuple[float, float]  # of `formula_of`


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


MADE: dict[tuple[type, type], type[nn.Module]] = {}  # our subclasses of norms' classes


def _made(way: type[Replaced], norm: type[nn.Module]) -> type[nn.Module]:
    if (way, norm) not in MADE:
        MADE[way, norm] = type(norm.__name__, (way, norm), {"__module__": norm.__module__})
    return MADE[way, norm]


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
