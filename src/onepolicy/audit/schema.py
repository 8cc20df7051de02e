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

Array = np.ndarray
VERSION = 1
VERSION_KEY = b"onepolicy_audit_schema"
ROW_GROUP_ENTRIES = 2**20
"""Entries of all columns in a Parquet row group we write, about."""


@dataclass(frozen=True, slots=True)
class Column:
    kind: Literal["int", "float", "bool"]
    per: Literal["token", "token or row", "row", "router"]  # router: tokens x route_layers x route_top_k, flat
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
    "logp_native": Column("float", "token"),  # the trainer's score without replay, where logp_trainer is with it
    "logp_previous": Column("float", "token"),  # the trainer's score under its previous weights
    "tokens_rollout": Column("int", "token"),  # what the engine sampled, where it can differ from `tokens`
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
    columns: dict[str, Array]  # per token [T], per row [S], per router [T, L, K]; int64, float64 or bool
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
            raise UsageError(f"--columns {pair}: {both[0]} is already mapped to {mapping[both[0]]}; give it once")
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
        raise UsageError("Parquet dumps need pyarrow; pip install 'onepolicy[audit]', or write JSONL") from None
    return pyarrow, pyarrow.parquet


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows of schema version 1: {column: list or number}, all with the same columns. Values are not checked
    beyond their type: reading does that. UsageError: unknown or missing columns."""
    pa, pq = require_pyarrow()
    if not rows:
        raise UsageError(f"{path}: no rows to write")
    if unknown := set(rows[0]) - set(COLUMNS):
        raise UsageError(f"{path}: unknown columns {', '.join(sorted(unknown))}; there are {', '.join(COLUMNS)}")
    choose(str(path), rows[0].keys(), {})
    types = {"int": pa.int32(), "float": pa.float32(), "bool": pa.bool_()}
    fields = []
    for name, column in COLUMNS.items():
        if name in rows[0]:
            scalar = column.per == "row" or (column.per == "token or row" and np.ndim(rows[0][name]) == 0)
            fields.append(pa.field(name, types[column.kind] if scalar else pa.list_(types[column.kind])))
    schema = pa.schema(fields, metadata={VERSION_KEY: str(VERSION).encode()})
    sizes = np.array([sum(np.size(row[field.name]) for field in fields if field.name in row) for row in rows])
    group = (sizes.cumsum() - sizes) // ROW_GROUP_ENTRIES
    starts = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    with pq.ParquetWriter(path, schema) as writer:
        for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
            part = [_values(rows[start:stop], field.name) for field in fields]
            try:
                arrays = [pa.array(values, field.type) for values, field in zip(part, fields, strict=True)]
            except (pa.ArrowException, OverflowError, TypeError) as error:
                raise UsageError(f"{path}: rows {start} to {stop - 1} cannot be written: {error}") from None
            writer.write_table(pa.table(arrays, schema=schema))


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    found = [row.get(name) for row in rows]
    if COLUMNS[name].kind == "bool":  # frameworks keep masks as numbers
        return [None if value is None else list(map(bool, value)) for value in found]
    return found
