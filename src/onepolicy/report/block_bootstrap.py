"""Intervals for a statistic of two runs' means, whose steps one after the other may be alike."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LONGEST_BLOCK, FEWEST_BLOCKS = 10, 6  # steps of a block; blocks of a run
FEWEST_STEPS = 4 * FEWEST_BLOCKS
DRAWS = 5000
COVERAGE = 0.95
Array = np.ndarray


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval; NaN where there are too few steps for one."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Return whether the interval lies on one side of the value; False if there is none."""
        return self.low > value or self.high < value


def interval(pairs: Array, statistic: Callable[[Array], Array]) -> Interval:
    """Return statistic(means [2]) with its 95% interval.

    Blocks of consecutive steps are drawn, the same in both runs. A block may go on from the last
    step to the first, so every step is drawn equally often (circular block bootstrap, Politis and
    Romano 1992). The percentiles are those of a Student t with as many values as blocks (expanded
    percentile interval, Hesterberg 2015): plain ones of 6 blocks cover too seldom.

    pairs: [2, steps] float64, finite. statistic: takes means [2, ...], returns [...].
    """
    steps = pairs.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(pairs.mean(axis=1)))
        if steps < FEWEST_STEPS:
            return Interval(value, math.nan, math.nan)
        block = min(LONGEST_BLOCK, steps // FEWEST_BLOCKS)
        at = (np.arange(steps)[:, None] + np.arange(block)) % steps
        blocks = pairs[:, at].mean(axis=2)  # [2, steps]: means of the blocks from every step on
        count = round(steps / block)
        drawn = np.random.default_rng(0).integers(0, steps, (DRAWS, count))
        found = statistic(blocks[:, drawn].mean(axis=2))  # [DRAWS]
        tail = _tail(count)
        # no value between two draws: one of them may be infinite
        low, high = np.nanquantile(found, [tail, 1 - tail], method="nearest")
    return Interval(value, float(low), float(high))


def _tail(count: int) -> float:
    """Return the share of draws beyond each end of the interval.

    The quantile of t is that of a normal distribution with four terms of its expansion in 1/free
    (Abramowitz and Stegun 26.7.5), within 0.5% from 5 degrees of freedom.
    """
    normal, free = NormalDist(), count - 1
    z = normal.inv_cdf((1 + COVERAGE) / 2)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return normal.cdf(-math.sqrt(count / free) * t)
