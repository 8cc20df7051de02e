"""The RMSNorms of a model that `few_passes.py` computes: found by trial, not by name.

Gemma and Qwen3.5 keep a scale less 1.
"""

from __future__ import annotations

import inspect

import torch
from torch import nn
from torch.func import functional_call

from onepolicy.models.few_passes import FewPasses, Fused, Replaced, RMSNormFunction


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


MADE: dict[tuple[type, type], type[nn.Module]] = {}  # our subclasses of norms' classes


def _made(way: type[Replaced], norm: type[nn.Module]) -> type[nn.Module]:
    if (way, norm) not in MADE:
        MADE[way, norm] = type(norm.__name__, (way, norm), {"__module__": norm.__module__})
    return MADE[way, norm]
