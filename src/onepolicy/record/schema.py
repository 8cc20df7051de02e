"""The columns of a scored record (version 1), some of its rows, and the Parquet writer.

A row is a sample. Entry t of a per-token column belongs to tokens[t]. Its log-probability is given
the tokens before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np

from onepolicy.bounded import Message
from onepolicy.errors import UsageError
from onepolicy.nonfinite import LeftOut
from onepolicy.record.trainers import COMPLETE, TRAINERS, recognised

BLOCK_ROWS = 2**14
"""Rows of a block at most, also if they have hardly any tokens."""
BLOCK_ENTRIES = 2**22
"""Entries of all columns in a block, approximately, if it has more than one row."""

Array = np.ndarray
VERSION = 1
VERSION_KEY = b"onepolicy_audit_schema"
FRAMEWORK_KEY = b"onepolicy_framework"
"""In the metadata of a Parquet dump: the trainer whose adapter or exporter wrote it."""
REPLAYED_KEY = b"onepolicy_replayed"
"""There too: b"1" if logp_trainer is with the rollout's routes."""
LENGTHS = ".lengths"  # what a message adds to the name of a column
ROW_GROUP_ENTRIES = 2**20
"""Entries of all columns in a Parquet row group that we write, approximately."""


@dataclass(frozen=True, slots=True)
class ColumnSpec:
    """The type, the shape and the meaning of a column."""

    kind: Literal["int", "float", "bool"]
    # router: tokens x route_layers x route_top_k, flat; support: the row's sum of support_counts
    per: Literal["token", "token or row", "row", "router", "support"]
    meaning: str  # for docs/dump_schema.md
    required: bool = False


COLUMNS = {
    "tokens": ColumnSpec("int", "token", "token ids; with or without the prompt", required=True),
    "mask": ColumnSpec("bool", "token", "1: sampled by the engine and trained on", required=True),
    "logp_rollout": ColumnSpec("float", "token", "of the engine that sampled", required=True),
    "logp_trainer": ColumnSpec(
        "float", "token", "of the trainer, before its update", required=True
    ),
    "step": ColumnSpec(
        "int",
        "row",
        "training step: gives curves and the onset of divergence. Of several files without it, "
        "`step_N` in their names",
    ),
    "reward": ColumnSpec("float", "row", "reward of the sample"),
    "version": ColumnSpec(
        "int", "token or row", "version of the weights that sampled: finds stale weights"
    ),
    "trained_version": ColumnSpec(
        "int",
        "token or row",
        "version of the weights that scored and trained. Where `version` is older, the gap is "
        "expected from age (sampling while learning), and k3 is reported by age",
    ),
    "turn": ColumnSpec(
        "int",
        "token or row",
        "number of the turn: tells a shift that begins at a turn from a lost token",
    ),
    "entropy": ColumnSpec(
        "float",
        "token",
        "of the trainer's distribution [nats]: finds another temperature and narrowed sampling. "
        "Without it the verdict is unclear, or a bug that needs no entropy",
    ),
    "logp_native": ColumnSpec(
        "float",
        "token",
        "the trainer's score without replay, where `logp_trainer` is with it: what replay removes, "
        "and bugs that wrong routes hide",
    ),
    "logp_previous": ColumnSpec(
        "float",
        "token",
        "the trainer's score under its previous weights: finds an update the engine did not take",
    ),
    "logp_base": ColumnSpec(
        "float",
        "token",
        "the trainer's score with its adapter off: finds an adapter that the engine does not apply",
    ),
    "tokens_rollout": ColumnSpec(
        "int", "token", "what the engine sampled, where text was decoded and encoded again"
    ),
    "routes_rollout": ColumnSpec(
        "int",
        "router",
        "expert ids of the engine, tokens x layers x top-k, flattened or nested; -1: not recorded. "
        "Entry t is of the forward that predicts `tokens[t]`",
    ),
    "routes_trainer": ColumnSpec(
        "int", "router", "the same of the trainer: its own choice, not what it replays"
    ),
    "route_layers": ColumnSpec("int", "row", "MoE layers of these routes"),
    "route_top_k": ColumnSpec("int", "row", "experts per token of these routes"),
    "support_ids": ColumnSpec(
        "int",
        "support",
        "the tokens that each token was drawn from (top-p, top-k, min-p), one set after the other. "
        "`logp_rollout`, `logp_trainer` and `entropy` are over them",
    ),
    "support_counts": ColumnSpec(
        "int", "token", "how many of `support_ids` are the token's own set; 0: not captured"
    ),
    "logp_vocabulary": ColumnSpec(
        "float",
        "token",
        "the trainer's score over the whole vocabulary, at the temperature of sampling: tells raw "
        "values, and sets of another top-p, where `support_ids` are given",
    ),
}
SUPPORTS = ("support_ids", "support_counts")
ROUTES = ("routes_rollout", "routes_trainer", "route_layers", "route_top_k")


class RaggedColumn(NamedTuple):
    """A column of some rows, whose entries are concatenated."""

    values: Array  # [sum of lengths], or [S] if lengths is None
    lengths: Array | None  # [S] int64; None: one value per row


class RawBlock(NamedTuple):
    """Consecutive rows of a file as they were read. Nothing of their values is checked."""

    first_row: int
    columns: dict[str, RaggedColumn]  # by the names of COLUMNS
    done: float  # share of the file that has been read after this block
    framework: str = ""  # the file's FRAMEWORK_KEY
    replayed: bool = False  # the file's REPLAYED_KEY

    def message(self) -> Message:
        """Return the block as a message. `from_message` is the inverse."""
        arrays = {name: column.values for name, column in self.columns.items()}
        lengths = {
            f"{name}{LENGTHS}": column.lengths
            for name, column in self.columns.items()
            if column.lengths is not None
        }
        names = ("first_row", "done", "framework", "replayed")
        return Message({name: getattr(self, name) for name in names}, arrays | lengths)

    @classmethod
    def from_message(cls, message: Message) -> RawBlock:
        """Return the block that a child sent. The lengths of its columns fit their values."""
        info, arrays = message
        columns = {
            name: RaggedColumn(values, arrays.get(f"{name}{LENGTHS}"))
            for name, values in arrays.items()
            if not name.endswith(LENGTHS)
        }
        rows = set()
        for values, lengths in columns.values():
            if lengths is None:
                rows.add(len(values))
            else:
                rows.add(len(lengths))
                assert lengths.dtype == np.int64
                assert lengths.min(initial=0) >= 0
                assert int(lengths.sum()) == len(values)
        assert len(rows) == 1
        framework, replayed = info["framework"], info["replayed"]
        assert isinstance(framework, str)
        assert isinstance(replayed, bool)
        return cls(info["first_row"], columns, info["done"], framework, replayed)


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A record: S consecutive rows of T tokens in total, which two sides scored. It is checked.

    Columns are named as in COLUMNS. Optional ones may be missing.
    """

    first_row: int
    lengths: Array  # [S] int64
    # per token [T], per row [S], per router [T, L, K], per support [n]; int64, float64 or bool. The
    # mask lacks the tokens that are left out.
    columns: dict[str, Array]
    done: float  # share of the dump that has been read after this block
    left_out: LeftOut = field(default_factory=LeftOut)  # tokens whose values are not all finite
    first_left_out: str = ""  # file, row, column, entry and value of the first one
    framework: str = ""  # the trainer that the file names; empty for none
    replayed: bool = False  # the file says that logp_trainer is with the rollout's routes
    named: bool = False  # the file's name says the step

    @property
    def segment(self) -> Array:  # [T] int64
        """Row of each token within the block."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def parse_columns(pairs: Sequence[str]) -> dict[str, str]:
    """Read `ours=theirs` texts, or names of trainers, into {ours: theirs}."""
    mapping: dict[str, str] = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if pair in COMPLETE:
            added = dict(TRAINERS[pair].names)
        elif equals and theirs and ours in COLUMNS:
            added = {ours: theirs}
        else:
            raise UsageError(
                f"--columns {pair}: expected ours=theirs with ours one of {', '.join(COLUMNS)}; "
                f"or {', '.join(COMPLETE)}"
            )
        repeated = sorted(added.keys() & mapping.keys())
        if repeated:
            name = repeated[0]
            raise UsageError(
                f"--columns {pair}: {name} is already mapped to {mapping[name]}; give it once"
            )
        mapping |= added
    return mapping


def check_unique(source: str, names: Sequence[str]) -> None:
    """Raise UsageError if a name is there twice: readers differ in which of the two they take."""
    if len(set(names)) == len(names):
        return
    repeated = Counter(names).most_common(1)[0][0]
    raise UsageError(f"{source}: column {repeated}: is there twice; rename or drop one of the two")


def unique_pairs(source: str, pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises UsageError if a key is there twice."""
    check_unique(source, [name for name, _ in pairs])
    return dict(pairs)


def select_columns(
    source: str, available: Collection[str], mapping: Mapping[str, str]
) -> dict[str, str]:
    """Return the columns to read as {our name: name in the dump}.

    Raises UsageError if a required or a mapped column is missing, or some but not all of ROUTES
    or of SUPPORTS.
    """
    selected: dict[str, str] = {}
    lacking: dict[str, str] = {}
    for ours, spec in COLUMNS.items():
        theirs = mapping.get(ours, ours)
        if theirs in available:
            selected[ours] = theirs
        elif spec.required or ours in mapping:
            if theirs == ours and recognised(available):
                raise UsageError(f"{source}: is {recognised(available)} (docs/audit.md)")
            lacking[ours] = theirs
    if lacking:
        has = ", ".join(sorted(map(str, available))) or "none"
        fix = " ".join(f"--columns {ours}=THEIRS" for ours in lacking)
        lacks, verb = f"column {', '.join(lacking.values())} is", "names another"
        if len(lacking) > 1:
            lacks, verb = f"columns {', '.join(lacking.values())} are", "name others"
        raise UsageError(f"{source}: {lacks} missing; it has {has}; {fix} {verb}")
    for what, needed in (("routes", ROUTES), ("supports", SUPPORTS)):
        missing = [name for name in needed if name not in selected]
        if missing and len(missing) < len(needed):
            raise UsageError(
                f"{source}: column {', '.join(missing)} is missing; {what} need {', '.join(needed)}"
            )
    return selected


def require_pyarrow() -> tuple[ModuleType, ModuleType]:
    """Return pyarrow and pyarrow.parquet. Raises UsageError if they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UsageError(
            "Parquet dumps need pyarrow; pip install 'onepolicy[audit]', or write JSONL"
        ) from None
    return pyarrow, pyarrow.parquet


def write_parquet(
    path: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    framework: str = "",
    replayed: bool = False,
) -> None:
    """Write rows of schema version 1: {column: list or number}, all with the same columns.

    framework: the trainer that they are of, by its name in config/frameworks.toml. replayed: the
    trainer's log-probabilities are with the rollout's routes. Values are only checked for their
    type; reading checks the rest. Raises UsageError for unknown or missing columns, and for rows
    whose columns differ.
    """
    pa, pq = require_pyarrow()
    if not rows:
        raise UsageError(f"{path}: no rows to write")
    unknown = sorted(set(rows[0]) - set(COLUMNS))
    if unknown:
        raise UsageError(
            f"{path}: unknown columns {', '.join(unknown)}; there are {', '.join(COLUMNS)}"
        )
    select_columns(str(path), rows[0].keys(), {})
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            other = ", ".join(sorted(row.keys() ^ rows[0].keys()))
            raise UsageError(f"{path}: row {number} or row 0 lacks {other}; give all rows the same")
    schema = _arrow_schema(pa, rows[0], framework, replayed=replayed)
    with pq.ParquetWriter(path, schema) as writer:
        for start, stop in _row_groups(rows, schema.names):
            columns = [_column_values(rows[start:stop], name) for name in schema.names]
            try:
                arrays = [
                    pa.array(values, field.type)
                    for values, field in zip(columns, schema, strict=True)
                ]
            except (pa.ArrowException, OverflowError, TypeError) as error:
                raise UsageError(
                    f"{path}: rows {start} to {stop - 1} cannot be written: {error}"
                ) from None
            writer.write_table(pa.table(arrays, schema=schema))


def _arrow_schema(pa: Any, row: Mapping[str, Any], framework: str, *, replayed: bool) -> Any:
    types = {"int": pa.int32(), "float": pa.float32(), "bool": pa.bool_()}
    fields = []
    for name, spec in COLUMNS.items():
        if name not in row:
            continue
        is_scalar = spec.per == "row" or (spec.per == "token or row" and np.ndim(row[name]) == 0)
        dtype = types[spec.kind]
        if not is_scalar:
            dtype = pa.list_(dtype)
        fields.append(pa.field(name, dtype))
    metadata = {VERSION_KEY: str(VERSION).encode()}
    if framework:
        metadata[FRAMEWORK_KEY] = framework.encode()
    if replayed:
        metadata[REPLAYED_KEY] = b"1"
    return pa.schema(fields, metadata=metadata)


def _row_groups(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Iterator[tuple[int, int]]:
    """Yield the first row and the end of each Parquet row group."""
    entries = np.array([sum(np.size(row[name]) for name in names if name in row) for row in rows])
    group = (entries.cumsum() - entries) // ROW_GROUP_ENTRIES
    starts = np.flatnonzero(np.diff(group, prepend=-1)).tolist()
    yield from zip(starts, [*starts[1:], len(rows)], strict=True)


def _column_values(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    values = [row.get(name) for row in rows]
    if COLUMNS[name].kind != "bool":
        return values
    # Frameworks keep masks as numbers.
    return [None if value is None else list(map(bool, value)) for value in values]
