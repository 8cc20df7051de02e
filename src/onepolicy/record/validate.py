"""Checks of a dump's values: everything that would make statistics meaningless is a UsageError.

Messages count rows from 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from onepolicy.config import UsageError
from onepolicy.nonfinite import (
    ABOVE_ZERO,
    CLEARLY_ABOVE_ZERO,
    FEWEST_JUDGED,
    above_zero,
    leave_out,
)
from onepolicy.record.schema import COLUMNS, Array, ColumnSpec, RaggedColumn, Scored

SMALLEST_LOGP = -1e6
"""A smaller value is a constant that stands for a token that cannot be sampled."""
LARGEST_ENTROPY = 100.0
LOGPS = (
    *("logp_rollout", "logp_trainer", "logp_native"),
    *("logp_previous", "logp_base", "logp_vocabulary"),
)
LARGEST_INT = 2**31 - 1
LARGEST_EXPERT = 2**16 - 1
LARGEST_SIZES = {"route_layers": 4096, "route_top_k": 256}


def checked_block(
    source: str, first_row: int, raw: Mapping[str, RaggedColumn], done: float
) -> Scored:
    """Check the columns of some rows and return them as a block.

    Tokens with a value that is not finite are left out of its mask and counted. source: file, for
    messages.
    """
    rows = _Rows(source, first_row, raw)
    columns = {name: rows.column(name) for name in raw}
    block = _without_nonfinite(source, Scored(first_row, rows.lengths, columns, done))
    for name in LOGPS:
        if name in columns:
            _check_logp(source, block, name)
    if "entropy" in columns:
        entropy = columns["entropy"]
        in_range = (entropy >= -ABOVE_ZERO) & (entropy <= LARGEST_ENTROPY)
        text = f"expected an entropy from 0 to {LARGEST_ENTROPY:g} nats inside the mask"
        _refuse_first(source, block, "entropy", block.columns["mask"] & ~in_range, text)
    if "version" in columns and "trained_version" in columns:
        newer = block.columns["mask"] & (columns["trained_version"] < columns["version"])
        text = "below `version` there, but weights train after they sampled; count both alike"
        _refuse_first(source, block, "trained_version", newer, text)
    if "reward" in columns:
        infinite = np.flatnonzero(~np.isfinite(columns["reward"]))
        if infinite.size:
            row = first_row + int(infinite[0])
            raise _error(source, row, "reward", "is not a finite number")
    return block


def _without_nonfinite(source: str, block: Scored) -> Scored:
    """Leave tokens with a value that is not finite out of the mask, count them, name the first."""
    columns = block.columns
    mask = columns["mask"]
    values = {name: columns[name] for name in (*LOGPS, "entropy") if name in columns}
    kept, left = leave_out(
        torch.from_numpy(mask), {name: torch.from_numpy(each) for name, each in values.items()}
    )
    first = ""
    if left.count:
        name = next(iter(left.columns))
        position = int(np.flatnonzero(mask & ~np.isfinite(values[name]))[0])
        row, entry = _locate(block.lengths, position)
        text = f"entry {entry} is {values[name][position]:g}"
        first = str(_error(source, block.first_row + row, name, text))
    return dataclasses.replace(
        block, columns=columns | {"mask": kept.numpy()}, left_out=left, first_left_out=first
    )


class _Rows:
    """Some rows of a dump, of which each column is checked for type and lengths."""

    def __init__(self, source: str, first_row: int, raw: Mapping[str, RaggedColumn]) -> None:
        self.source, self.first_row, self.raw = source, first_row, raw
        lengths = raw["tokens"].lengths
        if lengths is None:
            raise self._error("tokens", "holds one value per row; expected a list of token ids")
        self.lengths: Array = lengths

    def column(self, name: str) -> Array:
        """Return a column as [T], [S], [T, L, K] or [n]. See Scored.columns."""
        spec, ragged = COLUMNS[name], self.raw[name]
        if spec.per == "row":
            if ragged.lengths is not None:
                raise self._error(name, "holds a list; expected one number per row")
            return self._typed(name, ragged)
        if ragged.lengths is None:
            if spec.per != "token or row":
                raise self._error(name, "holds one value per row; expected a list")
            return np.repeat(self._typed(name, ragged), self.lengths)
        if spec.per == "router":
            return self._routes(name, ragged)
        if spec.per == "support":
            return self._sets(name, ragged)
        self._check_lengths(name, ragged.lengths, self.lengths, "tokens")
        return self._typed(name, ragged)

    def _routes(self, name: str, ragged: RaggedColumn) -> Array:  # [T, L, K] int32
        layers, top_k = self._shared_size("route_layers"), self._shared_size("route_top_k")
        assert ragged.lengths is not None
        expected = self.lengths * layers * top_k
        self._check_lengths(name, ragged.lengths, expected, "tokens x route_layers x route_top_k")
        ids = self._typed(name, ragged)
        wrong = np.flatnonzero((ids < -1) | (ids > LARGEST_EXPERT))
        wrong = wrong[self.column("mask")[wrong // (layers * top_k)]]  # others may be anything
        if wrong.size:
            row, entry = _locate(ragged.lengths, int(wrong[0]))
            text = (
                f"entry {entry} is {ids[wrong[0]]}; expected an expert from 0 to "
                f"{LARGEST_EXPERT}, or -1"
            )
            raise self._error(name, text, row)
        return ids.astype(np.int32).reshape(-1, layers, top_k)

    def _sets(self, name: str, ragged: RaggedColumn) -> Array:  # [n] int32
        counts = self.column("support_counts")
        self._refuse_negative("support_counts", counts, self.lengths)
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        expected = np.zeros(len(self.lengths), np.int64)
        np.add.at(expected, rows, counts)
        assert ragged.lengths is not None
        self._check_lengths(name, ragged.lengths, expected, "the sum of support_counts")
        ids = self._typed(name, ragged)
        self._refuse_negative(name, ids, ragged.lengths)
        return ids.astype(np.int32)

    def _refuse_negative(self, name: str, values: Array, lengths: Array) -> None:
        wrong = np.flatnonzero(values < 0)
        if wrong.size:
            row, entry = _locate(lengths, int(wrong[0]))
            text = f"entry {entry} is {values[wrong[0]]}; expected 0 or more"
            raise self._error(name, text, row)

    def _shared_size(self, name: str) -> int:
        """Return the size in a per-row column, which must be the same in all rows."""
        sizes = self.column(name)
        most = LARGEST_SIZES[name]
        wrong = np.flatnonzero((sizes < 1) | (sizes > most))
        if wrong.size:
            text = f"is {sizes[wrong[0]]}; expected 1 to {most}"
            raise self._error(name, text, int(wrong[0]))
        differing = np.flatnonzero(sizes != sizes[0])
        if differing.size:
            text = "differs from earlier rows; one model only"
            raise self._error(name, text, int(differing[0]))
        return int(sizes[0])

    def _check_lengths(self, name: str, found: Array, expected: Array, of: str) -> None:
        differing = np.flatnonzero(found != expected)
        if differing.size:
            row = int(differing[0])
            text = f"has {found[row]} entries, {of} has {expected[row]}; one entry per token"
            if COLUMNS[name].per == "support":
                text = f"has {found[row]} entries, but {of} is {expected[row]}"
            raise self._error(name, text, row)

    def _typed(self, name: str, ragged: RaggedColumn) -> Array:  # [n] float64, int64 or bool
        values, spec = ragged.values, COLUMNS[name]
        if values.dtype.kind not in "biuf":
            raise self._error(name, f"holds {values.dtype}; expected numbers")
        if spec.kind == "float":
            return values.astype(np.float64)
        wrong, expected = _wrong_values(values, spec)
        if wrong.any():
            lengths = ragged.lengths
            if lengths is None:
                lengths = np.ones(len(values), np.int64)
            position = int(np.flatnonzero(wrong)[0])
            row, entry = _locate(lengths, position)
            raise self._error(
                name, f"entry {entry} is {values[position]}; expected {expected}", row
            )
        dtype = bool if spec.kind == "bool" else np.int64
        return values.astype(dtype)

    def _error(self, name: str, text: str, row: int = 0) -> UsageError:
        return _error(self.source, self.first_row + row, name, text)


def _wrong_values(values: Array, spec: ColumnSpec) -> tuple[Array, str]:
    """Return which values do not fit a column of integers or bools, and the expected values."""
    whole = "whole numbers of 32 bits"
    kind = values.dtype.kind
    with np.errstate(invalid="ignore"):
        if spec.kind == "bool":
            return ~((values == 0) | (values == 1)), "0 or 1"
        if kind == "f":
            values = values.astype(np.float64)  # in half precision the bound is infinity
            return ~((np.abs(values) <= LARGEST_INT) & (values == np.floor(values))), whole
        if kind == "b":
            return np.zeros(len(values), bool), whole
        too_large = values > LARGEST_INT
        if kind == "i":
            return too_large | (values < -LARGEST_INT), whole
        return too_large, whole


def _check_logp(source: str, block: Scored, name: str) -> None:
    values, mask = block.columns[name], block.columns["mask"]
    text = (
        "below any log-probability: the token was masked out of that side's vocabulary; "
        "clear the mask there"
    )
    _refuse_first(source, block, name, mask & (values < SMALLEST_LOGP), text)
    positive = mask & (values > ABOVE_ZERO)
    if not positive.any():
        return
    inside = values[mask]
    if len(inside) < FEWEST_JUDGED or (inside < 0).any():  # as nonfinite.no_logarithms
        positive &= values > CLEARLY_ABOVE_ZERO
    if not positive.any():
        return
    text = above_zero(inside.min(), inside.max())
    _refuse_first(source, block, name, positive, text)


def _refuse_first(source: str, block: Scored, name: str, wrong: Array, text: str) -> None:
    """Raise UsageError with the first entry that is wrong, if any is."""
    if wrong.any():
        position = int(np.flatnonzero(wrong)[0])
        row, entry = _locate(block.lengths, position)
        value = block.columns[name][position]
        raise _error(source, block.first_row + row, name, f"entry {entry} is {value:g}: {text}")


def _locate(lengths: Array, position: int) -> tuple[int, int]:
    """Return the row of a flat position, and the entry within the row."""
    ends = lengths.cumsum()
    row = int(np.searchsorted(ends, position, side="right"))
    return row, position - int(ends[row] - lengths[row])


def _error(source: str, row: int, name: str, text: str) -> UsageError:
    return UsageError(f"{source}: row {row}, column {name}: {text}")
