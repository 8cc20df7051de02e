"""Means of tokens by a label, with standard errors: exact sums, as of statistics.py."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

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
