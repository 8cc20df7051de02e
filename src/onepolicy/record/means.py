"""Means of tokens by a label, with standard errors: exact sums, as of statistics.py; intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Self

import numpy as np

from onepolicy.notation import number
from onepolicy.record.statistics import (
    UNIT,
    Array,
    Total,
    exact_sums,
    ratio,
    row_starts,
    sum_of_totals,
)


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of values of tokens, with its standard error."""

    tokens: int = 0
    total: Total = 0
    squares: Total = 0

    @classmethod
    def of(cls, values: Array, row: Array) -> Self:
        """Build it from values [n] float64 of tokens and their rows [n] int64, ascending."""
        if not len(values):
            return cls()
        starts = row_starts(row)
        with np.errstate(over="ignore", invalid="ignore"):
            sums = np.add.reduceat(np.stack([values, np.square(values)]), starts, axis=1)
        return cls(len(values), *exact_sums(sums))

    def __add__(self, other: Mean) -> Mean:
        total = sum_of_totals([self.total, other.total])
        return Mean(self.tokens + other.tokens, total, sum_of_totals([self.squares, other.squares]))

    @property
    def mean(self) -> float:
        return ratio(self.total, max(1, self.tokens) * UNIT)

    @property
    def error(self) -> float:
        n = max(2, self.tokens)
        spread = ratio(self.squares, n * UNIT) - ratio(self.total, n * UNIT) ** 2
        return math.sqrt(max(0.0, spread) / n)


NO_TOKEN = Mean()
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


def means_by(label: Array, values: Array, row: Array) -> dict[int, Mean]:
    """Return the mean of the values of each label [n] int64. values, row: as of Mean."""
    order = label.argsort(kind="stable")  # rows stay ascending within a label
    found, starts = np.unique(label[order], return_index=True)
    groups = np.split(order, starts[1:])
    return {
        value: Mean.of(values[which], row[which])
        for value, which in zip(found.tolist(), groups, strict=True)
        if len(which)
    }
