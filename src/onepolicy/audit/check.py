"""Raw columns of some rows -> a Block, or one error that names row and column."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from onepolicy.audit.schema import COLUMNS, Array, Block, Column, Ragged
from onepolicy.config import UsageError

ABOVE_ZERO = 1e-3
"""Log-probabilities may round to slightly above 0."""
SMALLEST_LOGP = -1e6
"""Below this stands a constant for a token that cannot be sampled."""
LARGEST_ENTROPY = 100.0
LARGEST_INT = 2**31 - 1
LARGEST_EXPERT = 2**16 - 1


def assemble(source: str, first_row: int, raw: Mapping[str, Ragged], done: float) -> Block:
    """Check everything that makes statistics meaningless. Rows are counted from 0 in messages."""
    lengths = raw["tokens"].lengths
    if lengths is None:
        raise UsageError(_at(source, first_row, "tokens", "holds one value per row; expected a list of token ids"))
    columns: dict[str, Array] = {}
    for name, ragged in raw.items():
        columns[name] = _column(source, first_row, name, ragged, lengths, raw)
    block = Block(first_row, lengths, columns, done)
    for name in ("logp_rollout", "logp_trainer", "logp_native", "logp_previous"):
        if name in columns:
            _check_logp(source, block, name)
    if "entropy" in columns:
        sane = (columns["entropy"] >= -ABOVE_ZERO) & (columns["entropy"] <= LARGEST_ENTROPY)
        text = f"expected an entropy from 0 to {LARGEST_ENTROPY:g} nats inside the mask"
        _refuse(source, block, "entropy", columns["mask"] & ~sane, text)
    if "reward" in columns and not (finite := np.isfinite(columns["reward"])).all():
        row = int(np.flatnonzero(~finite)[0])
        raise UsageError(_at(source, first_row + row, "reward", "is not a finite number"))
    return block


def _column(source: str, first_row: int, name: str, ragged: Ragged, lengths: Array, raw: Mapping[str, Ragged]) -> Array:
    spec = COLUMNS[name]
    if spec.per == "row":
        if ragged.lengths is not None:
            raise UsageError(_at(source, first_row, name, "holds a list; expected one number per row"))
        return _typed(source, first_row, name, spec, ragged.values, np.ones(len(ragged.values), np.int64))
    if ragged.lengths is None:
        if spec.per != "token or row":
            raise UsageError(_at(source, first_row, name, "holds one value per row; expected a list"))
        values = _typed(source, first_row, name, spec, ragged.values, np.ones(len(ragged.values), np.int64))
        return np.repeat(values, lengths)
    if spec.per == "router":
        return _routes(source, first_row, name, ragged, lengths, raw)
    _same_lengths(source, first_row, name, ragged.lengths, lengths, "tokens")
    return _typed(source, first_row, name, spec, ragged.values, lengths)


def _routes(source: str, first_row: int, name: str, ragged: Ragged, lengths: Array, raw: Mapping[str, Ragged]) -> Array:
    shape = []
    for key in ("route_layers", "route_top_k"):
        sizes = _column(source, first_row, key, raw[key], lengths, raw)
        if (bad := np.flatnonzero((sizes < 1) | (sizes > 4096))).size:
            raise UsageError(_at(source, first_row + int(bad[0]), key, f"is {sizes[bad[0]]}; expected 1 to 4096"))
        if (other := np.flatnonzero(sizes != sizes[0])).size:
            raise UsageError(_at(source, first_row + int(other[0]), key, "differs from earlier rows; one model only"))
        shape.append(int(sizes[0]))
    assert ragged.lengths is not None
    layers, k = shape
    _same_lengths(source, first_row, name, ragged.lengths, lengths * layers * k, "tokens x route_layers x route_top_k")
    ids = _typed(source, first_row, name, COLUMNS[name], ragged.values, ragged.lengths)
    if (wrong := np.flatnonzero((ids < -1) | (ids > LARGEST_EXPERT))).size:
        row, entry = _place(ragged.lengths, int(wrong[0]))
        text = f"entry {entry} is {ids[wrong[0]]}; expected an expert from 0 to {LARGEST_EXPERT}, or -1"
        raise UsageError(_at(source, first_row + row, name, text))
    return ids.astype(np.int32).reshape(-1, layers, k)


def _same_lengths(source: str, first_row: int, name: str, found: Array, wanted: Array, of: str) -> None:
    if (other := np.flatnonzero(found != wanted)).size:
        row = int(other[0])
        text = f"has {found[row]} entries, {of} has {wanted[row]}; one entry per token"
        raise UsageError(_at(source, first_row + row, name, text))


def _typed(source: str, first_row: int, name: str, spec: Column, values: Array, lengths: Array) -> Array:
    """[n] float64, int64 or bool."""
    if values.dtype.kind not in "biuf":
        raise UsageError(_at(source, first_row, name, f"holds {values.dtype}; expected numbers"))
    if spec.kind == "float":
        return values.astype(np.float64)
    with np.errstate(invalid="ignore"):
        if spec.kind == "bool":
            wrong, text = ~((values == 0) | (values == 1)), "expected 0 or 1"
        elif values.dtype.kind == "f":
            wrong = ~((np.abs(values) <= LARGEST_INT) & (values == np.floor(values)))
            text = "expected whole numbers of 32 bits"
        elif values.dtype.kind == "b":
            wrong, text = np.zeros(len(values), bool), ""
        else:
            wrong = (values > LARGEST_INT) | ((values < -LARGEST_INT) if values.dtype.kind == "i" else False)
            text = "expected whole numbers of 32 bits"
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        row, entry = _place(lengths, place)
        raise UsageError(_at(source, first_row + row, name, f"entry {entry} is {values[place]}; {text}"))
    return values.astype(bool if spec.kind == "bool" else np.int64)


def _check_logp(source: str, block: Block, name: str) -> None:
    values, mask = block.columns[name], block.columns["mask"]
    _refuse(
        source, block, name, mask & ~np.isfinite(values), "not a finite number inside the mask; clear the mask there"
    )
    text = "below any log-probability: the token was masked out of that side's vocabulary; clear the mask there"
    _refuse(source, block, name, mask & (values < SMALLEST_LOGP), text)
    if (mask & (values > ABOVE_ZERO)).any():
        chosen = values[mask]
        text = "a log-probability is never above 0"
        if chosen.min() >= 0 and chosen.max() <= 1 + ABOVE_ZERO:
            text = "all values are between 0 and 1: probabilities instead of their logarithms? Take the logarithm"
        _refuse(source, block, name, mask & (values > ABOVE_ZERO), text)


def _refuse(source: str, block: Block, name: str, wrong: Array, text: str) -> None:
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        row, entry = _place(block.lengths, place)
        value = block.columns[name][place]
        raise UsageError(_at(source, block.first_row + row, name, f"entry {entry} is {value:g}: {text}"))


def _place(lengths: Array, place: int) -> tuple[int, int]:
    """(row, entry within the row) of a flat position."""
    ends = lengths.cumsum()
    row = int(np.searchsorted(ends, place, side="right"))
    return row, place - int(ends[row] - lengths[row])


def _at(source: str, row: int, name: str, text: str) -> str:
    return f"{source}: row {row}, column {name}: {text}"
