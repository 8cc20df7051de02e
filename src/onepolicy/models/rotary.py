"""The attention that turns queries and keys as `few_passes.py` does: found by trial."""

from __future__ import annotations

from types import FunctionType

import torch
from torch import nn

from onepolicy.models.few_passes import RotaryFunction, Rotate, turning

NAME = "apply_rotary_pos_emb"  # by which attention of every family calls it


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
    own = attention.forward
    assert isinstance(own, FunctionType)
    forward = FunctionType(
        own.__code__,
        own.__globals__ | {NAME: turning(theirs)},
        own.__name__,
        own.__defaults__,
        own.__closure__,
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    body = {"forward": forward, "__module__": attention.__module__}
    MADE[attention] = type(attention.__name__, (attention,), body)
    return MADE[attention]
