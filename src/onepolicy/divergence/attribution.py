"""How much of the gap each cause accounts for: k3 of several scorings of the same tokens, compared in pairs.

A waterfall starts at k3 between rollout and trainer as they are. Each step changes one more thing on one side and
scores the same tokens again; its bar is what that took away. What no step took away is the remainder. Intervals are
percentile bootstraps over sequences, with the same draws at every level, so that a bar is a paired difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.config import UsageError

DRAWS = 2000
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float  # nats a token
    low: float  # bounds of the 95% interval; equal to value where there is only one sequence to draw from
    high: float

    @property
    def sure(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The gap after one more change: k3 of every token that was compared."""

    name: str
    how: str  # what was changed
    terms: Tensor  # [n] float64, k3_terms of the compared tokens
    sequence: Tensor  # [n] int64; the same number is the same problem at every level

    @classmethod
    def of(
        cls, name: str, how: str, logp: Tensor, rollout: Tensor, mask: Tensor, segment: Tensor
    ) -> Level:
        """logp, rollout [T] float32; mask [T] bool, the tokens compared; segment [T] int64, sequence of each slot."""
        return cls(name, how, k3_terms(logp, rollout)[mask], segment[mask])


@dataclass(frozen=True, slots=True)
class Bar:
    name: str
    how: str
    removed: Estimate  # k3 before minus k3 after; below 0 if the change made the gap larger
    left: Estimate  # k3 after


@dataclass(frozen=True, slots=True)
class Waterfall:
    total: Estimate
    bars: tuple[Bar, ...]

    @property
    def remainder(self) -> Estimate:
        return self.bars[-1].left if self.bars else self.total


def waterfall(start: Level, steps: Sequence[Level]) -> Waterfall:
    """start: both sides as they are; every step has one more change than the one before."""
    kept = bootstrap([(level.terms, level.sequence) for level in (start, *steps)])
    removed = kept[:, :-1] - kept[:, 1:]
    bars = [
        Bar(step.name, step.how, _estimate(removed[:, i]), _estimate(kept[:, i + 1]))
        for i, step in enumerate(steps)
    ]
    return Waterfall(_estimate(kept[:, 0]), tuple(bars))


def distance(a: Tensor, b: Tensor, mask: Tensor, segment: Tensor) -> Estimate:
    """k3 of scoring `a` against `b` of the same slots [T] float32, `b` in the place of the rollout."""
    return _estimate(bootstrap([(k3_terms(a, b)[mask], segment[mask])])[:, 0])


def excess(a: Tensor, b: Tensor, against: Tensor, mask: Tensor, segment: Tensor) -> Estimate:
    """k3 of `a` less k3 of `b`, both against the same log-probabilities [T]; paired."""
    kept = bootstrap([(k3_terms(x, against)[mask], segment[mask]) for x in (a, b)])
    return _estimate(kept[:, 0] - kept[:, 1])


def k3_terms(logp: Tensor, rollout: Tensor) -> Tensor:
    """[T] float64: rho - 1 - log rho of each slot (R3 paper eq. 2)."""
    log_rho = logp.double() - rollout.double()
    return log_rho.expm1() - log_rho


def bootstrap(
    series: Sequence[tuple[Tensor, Tensor]], *, draws: int = DRAWS, seed: int = 0
) -> Tensor:
    """[draws + 1, B] float64: mean of each of B series, first over all sequences, then over sequences redrawn.

    A series is values [n] float64 and their sequences [n] int64; n may differ. Sequences are drawn whole, because their
    tokens are not independent, with replacement, and the same for every series.
    """
    if not series or not all(len(values) for values, _ in series):
        raise UsageError("bootstrap: no tokens; the mask selects none")
    index = torch.cat([sequence for _, sequence in series]).unique(return_inverse=True)[1]
    count = int(index.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    times = torch.ones(
        draws + 1, count, dtype=torch.float64
    )  # how often each sequence is in each draw
    drawn = torch.randint(count, (draws, count), generator=generator)
    times[1:] = torch.zeros(draws, count, dtype=torch.float64).scatter_add(
        1, drawn, torch.ones_like(times[1:])
    )
    means = []
    for (values, _), own in zip(
        series, index.split([len(values) for values, _ in series]), strict=True
    ):
        sums = torch.zeros(count, dtype=torch.float64).index_add(0, own, values.double())
        sizes = torch.bincount(own, minlength=count).double()
        means.append((times @ sums) / (times @ sizes).clamp(min=1))
    return torch.stack(means, dim=1)


def _estimate(draws: Tensor) -> Estimate:  # [draws + 1], the first of all sequences
    tail = (1 - LEVEL) / 2
    low, high = draws[1:].quantile(torch.tensor([tail, 1 - tail], dtype=draws.dtype)).tolist()
    return Estimate(float(draws[0]), low, high)
