"""Slots that both engines scored. Every sign of a bug is looked for in them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

CAUSES = {
    "fill": "log-probabilities are missing or filled in, or prompts or padding are inside the mask",
    "not_log": "values are probabilities, not their logarithms",
    "constant": "one number stands in the place of a row's log-probabilities",
    "shift": "the two sides are a token or two apart",
    "retokenised": "the two sides scored different tokens",
    "scale": "one side's log-probabilities are multiples of the other's (another base, or divided "
    "by a length)",
    "temperature": "the engine samples at another temperature than the trainer scores at, or "
    "returns raw log-probabilities, before temperature, where processed ones are needed",
    "support": "sampling is narrowed (top-p, top-k), or is at a low temperature, and the "
    "log-probabilities of one side do not show it (raw against processed ones)",
    "stale": "the engine holds other weights than the trainer",
    "rows": "values of some rows are those of other rows",
    "copy": "one side is a copy of the other in some rows",
    "context": "the two sides saw other prompts (system prompt, chat template)",
    "mask": "prompts are inside the mask",
    "routes": "the rollout's routes are not those of these tokens",
    "sets": "sampling supports (top-p, top-k) are missing, or are not those of these tokens",
}
EXPLAINED = 0.25
"""A change of one side explains the gap if less than this share of the gap remains."""
FEWEST = 32
"""Fewest slots for a verdict. With fewer, only impossible values are named."""
FEWEST_OF_CLASS = 8
"""Fewest likely, and fewest unlikely, tokens for a statement about them."""
LIKELY, UNLIKELY = -0.5, -1.0
"""Nats: log-probabilities of the trainer above which a token was likely, below which unlikely."""
SURE = 0.005
"""Nats: a token whose log-probabilities are nearer to 0 was certain. Its log rho is near 0."""
VISIBLE = 1e-5
"""Nats: a log-probability nearer to 0 is known to float32 with an error of 1% and more."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A bug that was found."""

    cause: str  # a name of CAUSES
    evidence: str  # the numbers, and where to look
    sure: bool = True  # False: one of several that may explain the same tokens


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """n slots that both engines scored."""

    old: Tensor  # [n] float64
    rollout: Tensor  # [n] float64
    segment: Tensor  # [n] int64
    slot: Tensor  # [n] int64, place in the batch
    version: Tensor | None  # [n] int64
    previous: Tensor | None  # [n] float64
    entropy: Tensor | None  # [n] float64
    turn: Tensor | None = None  # [n] int64
    base: Tensor | None = None  # [n] float64
    group: Tensor | None = None  # [n] int64: rows of one training step, whose gaps are of one size
    context: Tensor | None = None  # [n] int64: equal where prefix and token are; see `contexts`
    token: Tensor | None = None  # [n] int64: what the trainer scored
    vocabulary: Tensor | None = None  # [n] float64, of the trainer over all tokens

    @property
    def gap(self) -> Tensor:
        """|log rho|, [n] float64."""
        return (self.old - self.rollout).abs()

    @property
    def place(self) -> Tensor:
        """[n] int64, the place of each slot in its row."""
        return torch.arange(len(self.segment)) - _starts(self.segment)

    @property
    def last(self) -> Tensor:
        """[n] bool, True at the last slot of each row."""
        last = torch.ones(len(self.segment), dtype=torch.bool)
        last[:-1] = self.segment[1:] != self.segment[:-1]
        return last

    @property
    def open(self) -> Tensor:
        """[n] bool, True where the token was not certain."""
        return (self.old + self.rollout) / 2 < -SURE

    @property
    def visible(self) -> Tensor:
        """[n] bool, True where a side has a log-probability that is more than rounding."""
        return torch.minimum(self.old, self.rollout) < -VISIBLE

    @property
    def logit_gap(self) -> Tensor:
        """Distance of the two sides' logits, log p - log(1 - p), [n] float64.

        Other weights and other arithmetic move a certain token's logit as they move any other's.
        What float32 rounds counts as VISIBLE.
        """
        old, rollout = (logit(side.clamp(max=-VISIBLE)) for side in (self.old, self.rollout))
        return (old - rollout).abs()

    @property
    def distinct(self) -> Tensor:
        """[n] bool, True at the first slot of each context.

        Siblings with one prefix have one value, however many they are: it is one observation.
        """
        if self.context is None:
            return torch.ones(len(self.old), dtype=torch.bool)
        ids, index = self.context.unique(return_inverse=True)
        places = torch.arange(len(index))
        first = torch.full((len(ids),), len(index)).scatter_reduce(0, index, places, "amin")
        out = torch.zeros(len(index), dtype=torch.bool)
        out[first] = True
        return out

    def at(self, which: Tensor) -> Pairs:
        """Return the pairs of the slots that `which`, [n] bool, selects."""
        selected = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                selected[field.name] = value[which]
        return replace(self, **selected)

    def under(self, other: Tensor) -> Pairs:
        """Return the pairs as scored by other weights of the trainer, [n].

        The entropy stays that of the weights of now, which is near enough for a fit.
        """
        return replace(self, old=other)

    def newest(self) -> Pairs:
        """Return the slots that the newest weights sampled."""
        assert self.version is not None
        return self.at(self.version == self.version.max())


def logit(logp: Tensor) -> Tensor:
    """Return log p - log(1 - p) of log-probabilities, of any shape."""
    return logp - (-logp.expm1()).clamp(min=1e-12).log()


def correlation(x: Tensor, y: Tensor, none: float = 0.0) -> float:
    """Return the correlation of [n] and [n]; `none` if one is constant, or n is below 3."""
    if len(x) < 3:
        return none
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1].nan_to_num(none))


def contexts(
    tokens: Tensor | None, segment: Tensor, mask: Tensor, old: Tensor, rollout: Tensor
) -> Tensor:
    """Return [n] int64 of the masked slots: equal where they are one observation.

    tokens, segment, mask: [T]. old, rollout: [n]. It is one if prefix and token are equal, and the
    value of that side which repeats its values more often. Without `tokens`: if the place in the
    row and both values are equal.
    """
    starts = _starts(segment)
    prefix = _hashed(torch.arange(len(segment)) - starts, 1)
    if tokens is None:
        return prefix[mask] + _hashed(_bits(old), 2) + _hashed(_bits(rollout), 3)
    total = _hashed(tokens.long() + prefix, 4).cumsum(0)  # int64 wraps around, as a hash may
    prefix = total - torch.where(starts > 0, total[(starts - 1).clamp(min=0)], 0)
    sides = (prefix[mask] + _hashed(_bits(side), 5) for side in (old, rollout))
    return min(sides, key=lambda ids: len(ids.unique()))


def _starts(segment: Tensor) -> Tensor:
    """Return [T] int64, the first slot of each slot's row."""
    fresh = torch.ones(len(segment), dtype=torch.bool)
    fresh[1:] = segment[1:] != segment[:-1]
    return fresh.nonzero()[:, 0][fresh.long().cumsum(0) - 1]


def _bits(values: Tensor) -> Tensor:
    return values.double().view(torch.int64)


def _hashed(values: Tensor, salt: int) -> Tensor:
    """Return other int64 numbers, equal where these are."""
    x = values + salt * 0x632BE59BD9B4E01
    for factor in (0x2545F4914F6CDD1D, 0x1B03738712FAD5C9):
        x = (x ^ (x >> 31)) * factor
    return x ^ (x >> 29)
