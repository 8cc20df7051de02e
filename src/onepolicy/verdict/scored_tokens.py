"""What every mark of a bug is looked for in: slots that both engines scored."""

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
"""A change of one side explains the gap if less than this share of it is left."""
FEWEST = 32
"""Slots below which nothing but impossible values is named."""
SURE = 0.005
"""Nats: where both sides are nearer to 0 than this, the token was certain and says nothing of how they differ."""


@dataclass(frozen=True, slots=True)
class Finding:
    cause: Cause
    evidence: str  # with the numbers, and what to look at


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """n slots both engines scored."""

    old: Tensor  # [n] float64
    rollout: Tensor  # [n] float64
    segment: Tensor  # [n] int64
    slot: Tensor  # [n] int64, place in the batch
    version: Tensor | None  # [n] int64
    previous: Tensor | None  # [n] float64
    entropy: Tensor | None  # [n] float64
    turn: Tensor | None = None  # [n] int64
    group: Tensor | None = (
        None  # [n] int64: rows of one training step, which share a size of the gap
    )

    @property
    def gap(self) -> Tensor:
        return (self.old - self.rollout).abs()

    @property
    def open(self) -> Tensor:
        """[n] bool: where the token was not certain."""
        return (self.old + self.rollout) / 2 < -SURE

    def at(self, which: Tensor) -> Pairs:
        """These slots: [n] bool."""
        known = {
            f.name: value[which]
            for f in fields(self)
            if (value := getattr(self, f.name)) is not None
        }
        return replace(self, **known)

    def before_update(self) -> Pairs:
        """Scored by the trainer's previous weights. The entropy stays that of the new ones: near enough for a fit."""
        assert self.previous is not None
        return replace(self, old=self.previous)

    def newest(self) -> Pairs:
        """Sampled by the newest weights."""
        assert self.version is not None
        return self.at(self.version == self.version.max())
