"""Parts of the gap that each cause accounts for: k3 of several scorings of the same tokens.

A waterfall starts at k3 between rollout and trainer as they are. Each step changes one more thing
on one side and scores the same tokens again; its bar is the k3 that this removed. The k3 after the
last step is the remainder. Intervals are bootstraps over sequences (record/intervals.py), with the
same draws at every level, so that a bar is a paired difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.record.intervals import FEWEST_UNITS, Interval, bootstrap_tail

DRAWS = 2000


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The gap after one more change: k3 of every token that was compared."""

    name: str
    how: str  # description of the change
    terms: Tensor  # [n] float64, k3_terms of the compared tokens
    sequence: Tensor  # [n] int64; the same number is the same problem at every level

    @classmethod
    def of(
        cls, name: str, how: str, logp: Tensor, rollout: Tensor, mask: Tensor, segment: Tensor
    ) -> Level:
        """Build a level from logp and rollout [T] float32, mask [T] bool and segment [T] int64.

        The mask selects the compared tokens; segment is the sequence of each slot.
        """
        return cls(name, how, k3_terms(logp, rollout)[mask], segment[mask])


@dataclass(frozen=True, slots=True)
class Bar:
    """One step of a waterfall."""

    name: str
    how: str
    removed: Interval  # k3 before minus k3 after; below 0 if the change made the gap larger
    left: Interval  # k3 after


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The whole gap and the part that each change removes."""

    total: Interval
    bars: tuple[Bar, ...]


def waterfall(start: Level, steps: Sequence[Level]) -> Waterfall:
    """Return the waterfall from `start`, both sides as they are, over steps of one more change."""
    kept, tail = _draws([(level.terms, level.sequence) for level in (start, *steps)])
    removed = kept[:, :-1] - kept[:, 1:]
    bars = [
        Bar(step.name, step.how, _interval(removed[:, i], tail), _interval(kept[:, i + 1], tail))
        for i, step in enumerate(steps)
    ]
    return Waterfall(_interval(kept[:, 0], tail), tuple(bars))


def distance(a: Tensor, b: Tensor, mask: Tensor, segment: Tensor) -> Interval:
    """Return k3 of log-probabilities `a` [T] float32 against `b`, the rollout's place."""
    kept, tail = _draws([(k3_terms(a, b)[mask], segment[mask])])
    return _interval(kept[:, 0], tail)


def excess(a: Tensor, b: Tensor, against: Tensor, mask: Tensor, segment: Tensor) -> Interval:
    """Return k3 of `a` minus k3 of `b`, both against the same log-probabilities [T], paired."""
    kept, tail = _draws([(k3_terms(x, against)[mask], segment[mask]) for x in (a, b)])
    return _interval(kept[:, 0] - kept[:, 1], tail)


def k3_terms(logp: Tensor, rollout: Tensor) -> Tensor:
    """Return [T] float64, rho - 1 - log rho of each slot (R3 paper, equation 2)."""
    log_rho = logp.double() - rollout.double()
    return log_rho.expm1() - log_rho


def bootstrap(
    series: Sequence[tuple[Tensor, Tensor]], *, draws: int = DRAWS, seed: int = 0
) -> Tensor:
    """Return [draws + 1, B] float64: means of B series, the first row over all sequences.

    The other rows are over sequences drawn with replacement, the same ones for every series. A
    series is values [n] float64 and their sequences [n] int64; n may differ. Sequences are drawn
    whole because their tokens are not independent. Raises UsageError if a series is empty.
    """
    if not series or not all(len(values) for values, _ in series):
        raise UsageError("bootstrap: no tokens; the mask selects none")
    index = torch.cat([sequence for _, sequence in series]).unique(return_inverse=True)[1]
    count = int(index.max()) + 1
    generator = torch.Generator().manual_seed(seed)
    times = torch.ones(draws + 1, count, dtype=torch.float64)  # of each sequence in each draw
    drawn = torch.randint(count, (draws, count), generator=generator)
    times[1:] = torch.zeros(draws, count, dtype=torch.float64).scatter_add(
        1, drawn, torch.ones_like(times[1:])
    )
    means = []
    indices = index.split([len(values) for values, _ in series])
    for (values, _), sequence in zip(series, indices, strict=True):
        sums = torch.zeros(count, dtype=torch.float64).index_add(0, sequence, values.double())
        sizes = torch.bincount(sequence, minlength=count).double()
        means.append((times @ sums) / (times @ sizes).clamp(min=1))
    return torch.stack(means, dim=1)


def _draws(series: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, float | None]:
    """Return bootstrap(series), and the tail of its intervals: None of too few sequences."""
    sequences = len(torch.cat([sequence for _, sequence in series]).unique())
    if sequences < FEWEST_UNITS:
        return bootstrap(series, draws=0), None
    return bootstrap(series), bootstrap_tail(sequences)


def _interval(draws: Tensor, tail: float | None) -> Interval:
    """Return the interval of draws [draws + 1], the first of all sequences."""
    value = float(draws[0])
    if tail is None:
        return Interval(value, math.nan, math.nan)
    low, high = draws[1:].quantile(torch.tensor([tail, 1 - tail], dtype=draws.dtype)).tolist()
    return Interval(value, low, high)
