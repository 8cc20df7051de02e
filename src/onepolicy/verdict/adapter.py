"""The adapter that an engine samples with, told by its log-probabilities of a fixed batch.

The engine's and the trainer's log-probabilities of the same tokens are each compared with their own
before any update, when the adapter is 0. So rounding that the engine's dtype puts on the frozen
weights cancels. E is how far the engine has moved, L(h) how far the trainer has under hypothesis h:
its adapter of now, that of the last version, the sum of these two, none, or the adapter twice;
on a base in 4 bits also the adapter on the unquantised base (run/nf4_check.py).
Along the line from L(h) to L(now)

    share(h) = <E - L(h), L(now) - L(h)> / |L(now) - L(h)|^2

is 1 if the engine has the adapter of now, and 0 if h is true. Its standard error is a jackknife
over prompts, because the tokens of one prompt move together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

CERTAIN = 0.15
"""Largest standard error of a share that is reported: two hypotheses are 1 apart."""
HALF, ERRORS = 0.5, 5
"""A share below HALF that is at least ERRORS standard errors below 1 is not of the adapter of now.
"""
FAULTS = {
    "base": "the frozen weights without any adapter (it was never delivered, or is not named in "
    "requests)",
    "stale": "the adapter of the version before (one sync late)",
    "twice": "the frozen weights with the adapter added twice",
    "on_top": "the adapter added to weights that hold that of the version before",
    "unquantised": "the unquantised base, with the adapter or without (the base of its checkpoint, "
    "and not the dequantised one of train.lora.base = nf4)",
}
"""Hypothesis -> the words of an error."""


class Share(NamedTuple):
    """The part of the adapter of now that an engine samples with, beside a hypothesis."""

    value: float  # 1: all of it. 0: the hypothesis is true
    error: float  # standard error; inf if the two do not differ

    @property
    def certain(self) -> bool:
        """True if the share is known well enough to be reported."""
        return self.error <= CERTAIN

    @property
    def excludes_now(self) -> bool:
        """True if the engine cannot have the adapter of now."""
        return self.value < HALF and 1 - self.value > ERRORS * self.error


def share(moved: Tensor, now: Tensor, other: Tensor, mask: Tensor) -> Share:
    """Return the share of the adapter of now, beside another hypothesis.

    moved: [P, K] nats, E of P prompts with K tokens each. now, other: [P, K], L of the trainer's
    adapter and of the hypothesis. mask: [P, K] bool, tokens that all of them have.
    """
    line = torch.where(mask, now - other, 0).double()
    along = (torch.where(mask, moved - other, 0).double() * line).sum(1)  # [P]
    length = line.square().sum(1)
    if not float(length.sum()) > 0:
        return Share(1.0, float("inf"))
    value = along.sum() / length.sum()
    left_out = (along.sum() - along) / (length.sum() - length)  # inf or NaN with one prompt
    prompts = len(along)
    error = ((prompts - 1) / prompts * (left_out - left_out.mean()).square().sum()).sqrt()
    found = float(error)
    if not found >= 0:
        found = float("inf")
    return Share(float(value), found)


def root_mean_square(values: Tensor, mask: Tensor) -> float:
    """Return the root of the mean square of the masked values [P, K]."""
    return float(values[mask].double().square().mean().sqrt())


def find_fault(
    moved: Tensor, now: Tensor, others: Mapping[str, Tensor], mask: Tensor
) -> str | None:
    """Return the hypothesis that the engine's log-probabilities are of; None if it is `now`.

    others: hypothesis -> [P, K]. None too if they cannot be told apart. Among several that fit
    better than `now` it is the one that the values are nearest to.
    """
    fitting = {}
    for name, other in others.items():
        if share(moved, now, other, mask).excludes_now:
            fitting[name] = root_mean_square(moved - other, mask)
    if not fitting:
        return None
    return min(fitting, key=lambda name: fitting[name])
