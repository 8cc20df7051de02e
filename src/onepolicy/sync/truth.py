"""The weights that an engine samples with, told by its log-probabilities of a fixed batch.

The engine's and the trainer's log-probabilities of the same tokens are each compared with their own
before any update, when an adapter is 0. So rounding that the engine's dtype puts on the frozen
weights cancels. E is how far the engine has moved, L(now) how far the trainer has with the weights
it holds, L(h) how far it has with those of a row h of HYPOTHESES. On the line from L(h) to L(now)

    share(h) = <E - L(h), L(now) - L(h)> / |L(now) - L(h)|^2

is 1 if the engine has the weights of now, and 0 if h is true. Its standard error is a jackknife
over prompts, because the tokens of one prompt move together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onepolicy.models import lora
from onepolicy.types import Completion

CERTAIN = 0.15
"""Largest standard error of a share that is reported: two hypotheses are 1 apart."""
HALF, ERRORS = 0.5, 5
"""A share below HALF that is at least ERRORS standard errors below 1 is not of the weights of now.
"""


class Hypothesis(NamedTuple):
    """Weights that an engine may sample with in place of the trainer's."""

    words: str  # of an error
    take: Callable[[nn.Module, lora.Factors], AbstractContextManager[None]] | None = None
    """Puts them into the trainer's model, given A and B of the version before. None: it cannot
    have them, and only the engine had (`run/adapter_check.py`)."""
    needs_before: bool = False


UNQUANTISED = (
    "the unquantised base, with the adapter or without (the base of its checkpoint, and not the "
    "dequantised one of train.lora.base = nf4)"
)
HYPOTHESES = {
    "base": Hypothesis(
        "the frozen weights without any adapter (it was never delivered, or is not named in "
        "requests)",
        lambda model, _: lora.adapters_off(model),
    ),
    "stale": Hypothesis(
        "the adapter of the version before (one sync late)", lora.other_factors, needs_before=True
    ),
    "on_top": Hypothesis(
        "the adapter added to weights that hold that of the version before",
        lambda model, before: lora.other_factors(
            model, lora.summed_factors(model, before, lora.factors(model))
        ),
        needs_before=True,
    ),
    "twice": Hypothesis(
        "the frozen weights with the adapter added twice",
        lambda model, _: lora.scaled_adapters(model, 2),
    ),
    "unquantised": Hypothesis(UNQUANTISED),
    "unquantised_alone": Hypothesis(UNQUANTISED),  # log-probabilities hardly tell the two apart
}


def taken(model: nn.Module, before: lora.Factors | None) -> Iterator[str]:
    """Put the weights of every hypothesis that the trainer can have into its model, one by one.

    Yield its name. before: A and B of the version before, None: there was none.
    """
    for name, row in HYPOTHESES.items():
        if row.take is not None and not (row.needs_before and before is None):
            with row.take(model, before or {}):
                yield name


class Answers(NamedTuple):
    """The engine's log-probabilities of the likeliest next tokens of P fixed prompts."""

    ids: Tensor  # [P, K] int64
    logp: Tensor  # [P, K] float32
    completions: list[Completion]

    def beside(self, own: Tensor) -> Answers:
        """Return how far the engine is from the trainer. own: [P, vocabulary] of the trainer."""
        return self._replace(logp=self.logp - own.gather(1, self.ids))

    def since(self, before: Answers) -> tuple[Tensor, Tensor]:
        """Return how far log-probabilities have moved, and which tokens are in both: [P, K]."""
        moved, mask = before.at(self.ids)
        return self.logp - moved, mask

    def at(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities of `ids` [P, K], and which of them there are."""
        same = ids[:, :, None] == self.ids[:, None, :]  # [P, K, K]
        return self.logp.gather(1, same.int().argmax(2)), same.any(2)


class Share(NamedTuple):
    """The part of the weights of now that an engine samples with, beside a hypothesis."""

    value: float  # 1: all of it. 0: the hypothesis is true
    error: float  # standard error; inf if the two do not differ

    @property
    def certain(self) -> bool:
        """True if the share is known well enough to be reported."""
        return self.error <= CERTAIN

    @property
    def excludes_now(self) -> bool:
        """True if the engine cannot have the weights of now."""
        return self.value < HALF and 1 - self.value > ERRORS * self.error


def share(moved: Tensor, now: Tensor, other: Tensor, mask: Tensor) -> Share:
    """Return the share of the weights of now, beside another hypothesis.

    moved: [P, K] nats, E of P prompts with K tokens each. now, other: [P, K], L of the trainer's
    weights and of the hypothesis. mask: [P, K] bool, tokens that all of them have.
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
    return min(fitting, key=lambda name: fitting[name], default=None)


def root_mean_square(values: Tensor, mask: Tensor | None = None) -> float:
    """Return the root of the mean square of the masked values [P, K]."""
    if mask is not None:
        values = values[mask]
    return float(values.double().square().mean().sqrt())


def merge_loss(
    model: nn.Module, dtype: torch.dtype, score: Callable[[], Tensor], base: Tensor, ids: Tensor
) -> tuple[float, float]:
    """Return how far an adapter moves the fixed batch, and how far a merge misses that [nats].

    The merge is into `dtype`. score: returns the trainer's log-probabilities [P, vocabulary].
    base: the same of the frozen weights. ids: [P, K], the tokens that count.
    """
    moved = (score() - base).gather(1, ids)
    with lora.merged_in(model, dtype, adapter=True):
        merged = score()
    with lora.merged_in(model, dtype, adapter=False):
        merged = (merged - score()).gather(1, ids)
    return root_mean_square(moved), root_mean_square(merged - moved)
