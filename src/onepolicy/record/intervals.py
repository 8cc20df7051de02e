"""Intervals of bootstraps: of sequences in divergence/attribution.py, of steps in contrast.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from onepolicy.notation import number

COVERAGE = 0.95
FEWEST_UNITS = 6  # what is drawn for an interval: sequences, or blocks of steps


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with the ends of its 95% interval; NaN where FEWEST_UNITS were not there."""

    value: float
    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Return whether the interval lies on one side of the value; False if there is none."""
        return self.low > value or self.high < value

    def describe(self, *, share: bool = False) -> str:
        low, high = (number(bound, share=share) for bound in (self.low, self.high))
        return f"{number(self.value, share=share)} [{low}, {high}]"


def bootstrap_tail(units: int) -> float:
    """Return the share of draws beyond each end of an interval, of so many units drawn whole.

    The percentiles are those of a Student t with as many values (expanded percentile interval,
    Hesterberg 2015): plain ones of 6 units cover too seldom. The quantile of t is that of a normal
    distribution with four terms of its expansion in 1/free (Abramowitz and Stegun 26.7.5), within
    0.5% from 5 degrees of freedom.
    """
    normal, free = NormalDist(), units - 1
    z = normal.inv_cdf((1 + COVERAGE) / 2)
    t = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
    return normal.cdf(-math.sqrt(units / free) * t)
