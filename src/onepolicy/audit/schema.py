"""The columns of a dump (version 1), a checked block of its rows, and the Parquet writer.

One row per sample. Entry t of a per-token column belongs to tokens[t]: its log-probability given what precedes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

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
        raise UsageError(
            _at(
                source, first_row, "tokens", "holds one value per row; expected a list of token ids"
            )
        )
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


def _column(
    source: str,
    first_row: int,
    name: str,
    ragged: Ragged,
    lengths: Array,
    raw: Mapping[str, Ragged],
) -> Array:
    spec = COLUMNS[name]
    if spec.per == "row":
        if ragged.lengths is not None:
            raise UsageError(
                _at(source, first_row, name, "holds a list; expected one number per row")
            )
        return _typed(
            source, first_row, name, spec, ragged.values, np.ones(len(ragged.values), np.int64)
        )
    if ragged.lengths is None:
        if spec.per != "token or row":
            raise UsageError(
                _at(source, first_row, name, "holds one value per row; expected a list")
            )
        values = _typed(
            source, first_row, name, spec, ragged.values, np.ones(len(ragged.values), np.int64)
        )
        return np.repeat(values, lengths)
    if spec.per == "router":
        return _routes(source, first_row, name, ragged, lengths, raw)
    _same_lengths(source, first_row, name, ragged.lengths, lengths, "tokens")
    return _typed(source, first_row, name, spec, ragged.values, lengths)


def _routes(
    source: str,
    first_row: int,
    name: str,
    ragged: Ragged,
    lengths: Array,
    raw: Mapping[str, Ragged],
) -> Array:
    shape = []
    for key in ("route_layers", "route_top_k"):
        sizes = _column(source, first_row, key, raw[key], lengths, raw)
        if (bad := np.flatnonzero((sizes < 1) | (sizes > 4096))).size:
            raise UsageError(
                _at(source, first_row + int(bad[0]), key, f"is {sizes[bad[0]]}; expected 1 to 4096")
            )
        if (other := np.flatnonzero(sizes != sizes[0])).size:
            raise UsageError(
                _at(
                    source,
                    first_row + int(other[0]),
                    key,
                    "differs from earlier rows; one model only",
                )
            )
        shape.append(int(sizes[0]))
    assert ragged.lengths is not None
    layers, k = shape
    _same_lengths(
        source,
        first_row,
        name,
        ragged.lengths,
        lengths * layers * k,
        "tokens x route_layers x route_top_k",
    )
    ids = _typed(source, first_row, name, COLUMNS[name], ragged.values, ragged.lengths)
    if (wrong := np.flatnonzero((ids < -1) | (ids > LARGEST_EXPERT))).size:
        row, entry = _place(ragged.lengths, int(wrong[0]))
        text = f"entry {entry} is {ids[wrong[0]]}; expected an expert from 0 to {LARGEST_EXPERT}, or -1"
        raise UsageError(_at(source, first_row + row, name, text))
    return ids.astype(np.int32).reshape(-1, layers, k)


def _same_lengths(
    source: str, first_row: int, name: str, found: Array, wanted: Array, of: str
) -> None:
    if (other := np.flatnonzero(found != wanted)).size:
        row = int(other[0])
        text = f"has {found[row]} entries, {of} has {wanted[row]}; one entry per token"
        raise UsageError(_at(source, first_row + row, name, text))


def _typed(
    source: str, first_row: int, name: str, spec: Column, values: Array, lengths: Array
) -> Array:
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
            wrong = (values > LARGEST_INT) | (
                (values < -LARGEST_INT) if values.dtype.kind == "i" else False
            )
            text = "expected whole numbers of 32 bits"
    if wrong.any():
        place = int(np.flatnonzero(wrong)[0])
        row, entry = _place(lengths, place)
        raise UsageError(
            _at(source, first_row + row, name, f"entry {entry} is {values[place]}; {text}")
        )
    return values.astype(bool if spec.kind == "bool" else np.int64)


def _check_logp(source: str, block: Block, name: str) -> None:
    values, mask = block.columns[name], block.columns["mask"]
    _refuse(
        source,
        block,
        name,
        mask & ~np.isfinite(values),
        "not a finite number inside the mask; clear the mask there",
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
        raise UsageError(
            _at(source, block.first_row + row, name, f"entry {entry} is {value:g}: {text}")
        )


def _place(lengths: Array, place: int) -> tuple[int, int]:
    """(row, entry within the row) of a flat position."""
    ends = lengths.cumsum()
    row = int(np.searchsorted(ends, place, side="right"))
    return row, place - int(ends[row] - lengths[row])


def _at(source: str, row: int, name: str, text: str) -> str:
    return f"{source}: row {row}, column {name}: {text}"


Array = np.ndarray
VERSION = 1
VERSION_KEY = b"onepolicy_audit_schema"
ROW_GROUP_ENTRIES = 2**20
"""Entries of all columns in a Parquet row group we write, about."""


@dataclass(frozen=True, slots=True)
class Column:
    kind: Literal["int", "float", "bool"]
    per: Literal[
        "token", "token or row", "row", "router"
    ]  # router: tokens x route_layers x route_top_k, flat
    required: bool = False


COLUMNS = {
    "tokens": Column("int", "token", required=True),
    "mask": Column("bool", "token", required=True),  # true: sampled by the engine, trained on
    "logp_rollout": Column("float", "token", required=True),
    "logp_trainer": Column("float", "token", required=True),
    "step": Column("int", "row"),
    "reward": Column("float", "row"),
    "version": Column("int", "token or row"),  # of the weights that sampled
    "trained_version": Column("int", "token or row"),  # of the weights that scored and trained
    "turn": Column("int", "token or row"),
    "entropy": Column("float", "token"),  # of the trainer's distribution [nats]
    "logp_native": Column(
        "float", "token"
    ),  # the trainer's score without replay, where logp_trainer is with it
    "logp_previous": Column("float", "token"),  # the trainer's score under its previous weights
    "tokens_rollout": Column(
        "int", "token"
    ),  # what the engine sampled, where it can differ from `tokens`
    "routes_rollout": Column("int", "router"),  # expert ids; -1: not recorded
    "routes_trainer": Column("int", "router"),
    "route_layers": Column("int", "row"),
    "route_top_k": Column("int", "row"),
}
ROUTES = ("routes_rollout", "routes_trainer", "route_layers", "route_top_k")


class Ragged(NamedTuple):
    """A column of some rows."""

    values: Array  # [sum of lengths], or [S] if lengths is None
    lengths: Array | None  # [S] int64; None: one value per row


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """S consecutive rows with T tokens in total, checked. Names as in COLUMNS; optional ones may be missing."""

    first_row: int
    lengths: Array  # [S] int64
    columns: dict[
        str, Array
    ]  # per token [T], per row [S], per router [T, L, K]; int64, float64 or bool
    done: float  # share of the dump read after this block

    @property
    def segment(self) -> Array:
        """[T] int64, row of each token within the block."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


KNOWN_NAMES = {
    "prime-rl": {  # its trainer.enable_token_export
        "tokens": "token_ids",
        "mask": "loss_mask",
        "logp_rollout": "inference_logprobs",
        "logp_trainer": "trainer_logprobs",
    }
}
"""Frameworks whose own files hold everything, under other names."""


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """`ours=theirs` of the command line, or a name of KNOWN_NAMES -> {ours: theirs}."""
    mapping: dict[str, str] = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if pair in KNOWN_NAMES:
            found = KNOWN_NAMES[pair]
        elif equals and theirs and ours in COLUMNS:
            found = {ours: theirs}
        else:
            raise UsageError(
                f"--columns {pair}: expected ours=theirs with ours one of {', '.join(COLUMNS)}; "
                f"or {', '.join(KNOWN_NAMES)}"
            )
        if both := sorted(found.keys() & mapping.keys()):
            raise UsageError(
                f"--columns {pair}: {both[0]} is already mapped to {mapping[both[0]]}; give it once"
            )
        mapping |= found
    return mapping


def choose(source: str, available: Collection[str], mapping: Mapping[str, str]) -> dict[str, str]:
    """{our name: name in the dump} of the columns to read. UsageError names what is missing."""
    chosen = {}
    for ours, column in COLUMNS.items():
        theirs = mapping.get(ours, ours)
        if theirs in available:
            chosen[ours] = theirs
        elif column.required or ours in mapping:
            has = ", ".join(sorted(map(str, available))) or "none"
            mend = f"--columns {ours}=THEIRS names another"
            raise UsageError(f"{source}: column {theirs} is missing; it has {has}; {mend}")
    routes = [name for name in ROUTES if name in chosen]
    if routes and len(routes) < len(ROUTES):
        lacking = ", ".join(name for name in ROUTES if name not in chosen)
        raise UsageError(f"{source}: column {lacking} is missing; routes need {', '.join(ROUTES)}")
    return chosen


def require_pyarrow() -> tuple[ModuleType, ModuleType]:
    """(pyarrow, pyarrow.parquet)"""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            "Parquet dumps need pyarrow; pip install 'onepolicy[audit]', or write JSONL"
        ) from None
    return pyarrow, pyarrow.parquet


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of schema version 1: {column: list or number}, all with the same columns. Values are not checked
    beyond their type: reading does that. UsageError: unknown or missing columns."""
    pa, pq = require_pyarrow()
    if not rows:
        raise UsageError(f"{path}: no rows to write")
    if unknown := set(rows[0]) - set(COLUMNS):
        raise UsageError(
            f"{path}: unknown columns {', '.join(sorted(unknown))}; there are {', '.join(COLUMNS)}"
        )
    choose(str(path), rows[0].keys(), {})
    types = {"int": pa.int32(), "float": pa.float32(), "bool": pa.bool_()}
    fields = []
    for name, column in COLUMNS.items():
        if name in rows[0]:
            scalar = column.per == "row" or (
                column.per == "token or row" and np.ndim(rows[0][name]) == 0
            )
            fields.append(
                pa.field(name, types[column.kind] if scalar else pa.list_(types[column.kind]))
            )
    schema = pa.schema(fields, metadata={VERSION_KEY: str(VERSION).encode()})
    sizes = np.array(
        [sum(np.size(row[field.name]) for field in fields if field.name in row) for row in rows]
    )
    group = (sizes.cumsum() - sizes) // ROW_GROUP_ENTRIES
    starts = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    with pq.ParquetWriter(path, schema) as writer:
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            part = [_values(rows[start:stop], field.name) for field in fields]
            try:
                arrays = [
                    pa.array(values, field.type) for values, field in zip(part, fields, strict=True)
                ]
            except (pa.ArrowException, OverflowError, TypeError) as error:
                raise UsageError(
                    f"{path}: rows {start} to {stop - 1} cannot be written: {error}"
                ) from None
            writer.write_table(pa.table(arrays, schema=schema))


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    found = [row.get(name) for row in rows]
    if COLUMNS[name].kind == "bool":  # frameworks keep masks as numbers
        return [None if value is None else list(map(bool, value)) for value in found]
    return found
