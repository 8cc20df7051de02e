"""How much of the gap each cause accounts for: k3 of several scorings of the same tokens, compared in pairs.

A waterfall starts at k3 between rollout and trainer as they are. Each step changes one more thing of the trainer's side
and scores the same tokens again; its bar is what that took away. What no step took away is the remainder. Intervals are
percentile bootstraps over sequences, with the same draws for every scoring, so that a bar is a paired difference.
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


@dataclass(frozen=True, slots=True)
class Scoring:
    name: str
    how: str  # what was changed and what was scored
    logp: Tensor  # [T] float32


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


def waterfall(
    rollout: Tensor,  # [T] float32
    start: Tensor,  # [T] float32, the trainer as it is
    steps: Sequence[Scoring],  # each with one more change than the one before
    mask: Tensor,  # [T] bool
    segment: Tensor,  # [T] int64, sequence of each slot
) -> Waterfall:
    terms = torch.stack([k3_terms(logp, rollout)[mask] for logp in (start, *(step.logp for step in steps))])
    kept = bootstrap(terms, segment[mask])
    removed = kept[:, :-1] - kept[:, 1:]
    bars = [
        Bar(step.name, step.how, _estimate(removed[:, i]), _estimate(kept[:, i + 1])) for i, step in enumerate(steps)
    ]
    return Waterfall(_estimate(kept[:, 0]), tuple(bars))


def distance(a: Tensor, b: Tensor, mask: Tensor, segment: Tensor) -> Estimate:
    """k3 of scoring `a` against `b` of the same slots [T] float32, `b` in the place of the rollout."""
    return _estimate(bootstrap(k3_terms(a, b)[mask][None], segment[mask])[:, 0])


def excess(a: Tensor, b: Tensor, against: Tensor, mask: Tensor, segment: Tensor) -> Estimate:
    """k3 of `a` less k3 of `b`, both against the same log-probabilities [T]; paired."""
    kept = bootstrap(torch.stack([k3_terms(x, against)[mask] for x in (a, b)]), segment[mask])
    return _estimate(kept[:, 0] - kept[:, 1])


def k3_terms(logp: Tensor, rollout: Tensor) -> Tensor:
    """[T] float64: rho - 1 - log rho of each slot (R3 paper eq. 2)."""
    log_rho = logp.double() - rollout.double()
    return log_rho.expm1() - log_rho


def bootstrap(values: Tensor, segment: Tensor, *, draws: int = DRAWS, seed: int = 0) -> Tensor:
    """[draws + 1, B] float64: means over tokens of values [B, n], first of all sequences, then of sequences redrawn.

    Sequences are drawn whole, because their tokens are not independent, with replacement, the same for every row.
    """
    if values.shape[1] == 0:
        raise UsageError("bootstrap: no tokens; the mask selects none")
    index = segment.unique(return_inverse=True)[1]
    count = int(index.max()) + 1
    sums = values.new_zeros(len(values), count).index_add(1, index, values)
    sizes = torch.bincount(index).to(values.dtype)
    generator = torch.Generator().manual_seed(seed)
    times = torch.ones(draws + 1, count, dtype=values.dtype)  # how often each sequence is in each draw
    drawn = torch.randint(count, (draws, count), generator=generator)
    times[1:] = torch.zeros(draws, count, dtype=values.dtype).scatter_add(1, drawn, torch.ones_like(times[1:]))
    return (times @ sums.T) / (times @ sizes)[:, None]


def _estimate(draws: Tensor) -> Estimate:  # [draws + 1], the first of all sequences
    tail = (1 - LEVEL) / 2
    low, high = draws[1:].quantile(torch.tensor([tail, 1 - tail], dtype=draws.dtype)).tolist()
    return Estimate(float(draws[0]), low, high)
