"""Rotary embeddings (arXiv:2104.09864) in fewer passes over memory.

transformers turns a vector by joining its swapped halves anew, and torch differentiates each cut
and each join with zeros around them. The forward here does the same operations on the halves, so
its bits are theirs. The backward is one formula, equal to rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

NAME = "apply_rotary_pos_emb"  # by which attention of every family calls it
Rotate = Callable[..., tuple[Tensor, Tensor]]


def use_few_passes(model: nn.Module) -> None:
    """Let attention that turns by these bits turn so. Names and hooks stay the same."""
    for module in model.modules():
        theirs = _function_of(type(module))
        if theirs is not None and computes_these_bits(theirs):
            module.__class__ = _with_few_passes(type(module), theirs)


def _function_of(attention: type[nn.Module]) -> Rotate | None:
    """Return the function by which this class turns queries and keys, None if it calls none."""
    forward = attention.forward
    if attention in MADE.values() or not isinstance(forward, FunctionType):
        return None
    if NAME not in forward.__code__.co_names:
        return None
    found: Rotate | None = forward.__globals__.get(NAME)
    return found


def computes_these_bits(theirs: Rotate) -> bool:
    """Return whether this function turns halves, with the bits of ours."""
    random = torch.Generator("cpu").manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        query, key, cos, sin = (
            torch.randn(shape, generator=random, device="cpu").to(dtype)
            for shape in ((1, 2, 3, 8), (1, 1, 3, 8), (1, 3, 8), (1, 3, 8))
        )
        with torch.no_grad():
            try:
                expected = theirs(query, key, cos, sin)
            except (RuntimeError, TypeError):  # gpt-oss halves cos and sin, gemma4 turns one vector
                return False
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
            ours = [RotaryFunction.apply(x, cos, sin) for x in (query, key)]
        if not all(map(torch.equal, expected, ours)):
            return False
    return True


MADE: dict[type[nn.Module], type[nn.Module]] = {}  # our subclass of each attention's class


def _with_few_passes(attention: type[nn.Module], theirs: Rotate) -> type[nn.Module]:
    """Return a subclass whose forward finds our function under the name of theirs."""
    if attention in MADE:
        return MADE[attention]

    def turn(
        query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        usual = query.dtype == key.dtype == cos.dtype and query.shape[-1] == cos.shape[-1]
        if others or named or not usual or not torch.is_grad_enabled():
            return theirs(query, key, cos, sin, *others, **named)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return RotaryFunction.apply(query, cos, sin), RotaryFunction.apply(key, cos, sin)

    own = attention.forward
    assert isinstance(own, FunctionType)
    forward = FunctionType(
        own.__code__,
        own.__globals__ | {NAME: turn},
        own.__name__,
        own.__defaults__,
        own.__closure__,
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    body = {"forward": forward, "__module__": attention.__module__}
    MADE[attention] = type(attention.__name__, (attention,), body)
    return MADE[attention]


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
