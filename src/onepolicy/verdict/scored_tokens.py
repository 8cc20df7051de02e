"""Slots that both engines scored. Every sign of a bug is looked for in them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from torch import Tensor

Cause = Literal[
    "fill",
    "not_log",
    "constant",
    "shift",
    "retokenised",
    "scale",
    "temperature",
    "support",
    "stale",
    "rows",
    "copy",
    "context",
    "mask",
]
EXPLAINED = 0.25
"""A change of one side explains the gap if less than this share of the gap remains."""
FEWEST = 32
"""Fewest slots for a verdict. With fewer, only impossible values are named."""
SURE = 0.005
"""Nats: a token whose log-probabilities are nearer to 0 was certain. It shows no difference."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A bug that was found."""

    cause: Cause
    evidence: str  # the numbers, and where to look


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
    group: Tensor | None = None  # [n] int64: rows of one training step, whose gaps are of one size

    @property
    def gap(self) -> Tensor:
        """|log rho|, [n] float64."""
        return (self.old - self.rollout).abs()

    @property
    def open(self) -> Tensor:
        """[n] bool, True where the token was not certain."""
        return (self.old + self.rollout) / 2 < -SURE

    def at(self, which: Tensor) -> Pairs:
        """Return the pairs of the slots that `which`, [n] bool, selects."""
        selected = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                selected[field.name] = value[which]
        return replace(self, **selected)

    def before_update(self) -> Pairs:
        """Return the pairs as scored by the trainer's previous weights.

        The entropy stays that of the new weights, which is near enough for a fit.
        """
        assert self.previous is not None
        return replace(self, old=self.previous)

    def newest(self) -> Pairs:
        """Return the slots that the newest weights sampled."""
        assert self.version is not None
        return self.at(self.version == self.version.max())
