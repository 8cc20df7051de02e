"""Dumps as a stream of checked blocks: Parquet and JSON lines here, arrays (NPZ, safetensors, .pt) in arrays.py."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.audit.arrays import first_line, read_npz, read_pt, read_safetensors
from onepolicy.audit.own import is_run, read_run
from onepolicy.audit.schema import (
    COLUMNS,
    VERSION,
    VERSION_KEY,
    Array,
    Block,
    Ragged,
    assemble,
    choose,
    require_pyarrow,
)
from onepolicy.config import UsageError

BLOCK_TOKENS = 2**18
PARQUET_ROWS = 64
PARQUET_ENTRIES = 2**22
"""Decoded at once: at most so many rows, and about so many entries of all columns (but one row at least)."""


def read_dump(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    """Blocks of a file by its suffix, of every such file of a folder, or of a run folder of ours. Every fault of the
    content is a UsageError that names file, row (counted within the file) and column; a block's rows are counted over
    the whole dump."""
    if is_run(path):
        yield from read_run(path, mapping)
        return
    files = _files(path)
    rows, columns = 0, set[str]()
    for number, file in enumerate(files):
        last = 0
        for block in READERS[file.suffix](file, mapping):
            columns = columns or set(block.columns)
            if other := sorted(columns ^ block.columns.keys()):
                raise UsageError(
                    f"{file}: column {other[0]}: in some files of the dump only; all need the same"
                )
            done = (number + block.done) / len(files)
            yield dataclasses.replace(block, first_row=rows + block.first_row, done=done)
            last = block.first_row + len(block.lengths)
        rows += last
    if rows == 0:
        raise UsageError(f"{path}: empty; a dump has at least one row")


def _files(path: Path) -> list[Path]:
    known = ", ".join(READERS)
    if path.is_dir():
        found = sorted(
            file for file in path.rglob("*") if file.suffix in READERS and file.is_file()
        )
        if not found:
            raise UsageError(f"{path}: no dump in this folder; a file of one ends in {known}")
        for file in found:
            if not file.resolve().is_relative_to(path.resolve()):
                raise UsageError(
                    f"{file}: a link out of the dump's folder; name the folder it leads to instead"
                )
        return found
    if path.suffix not in READERS:
        raise UsageError(f"{path}: unknown kind of dump; the suffix must be one of {known}")
    try:
        path.open("rb").close()
    except OSError as error:
        raise UsageError(f"{path}: cannot be opened ({error.strerror})") from None
    return [path]


def read_parquet(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    pa, pq = require_pyarrow()
    damage = (pa.ArrowException, OSError, UnicodeDecodeError)
    try:
        file = pq.ParquetFile(
            path, pre_buffer=False, buffer_size=2**20
        )  # pre-buffering holds the whole file
        names, about = file.schema_arrow.names, file.schema_arrow.metadata or {}
    except damage as error:
        raise UsageError(
            f"{path}: not a complete Parquet file ({first_line(error)}); was its writer killed?"
        ) from None
    with file:
        version = about.get(VERSION_KEY)
        if version is not None and version != str(VERSION).encode():
            raise UsageError(
                f"{path}: schema version {version.decode(errors='replace')}, this is version {VERSION}"
            )
        chosen = choose(str(path), names, mapping)
        first, total = 0, file.metadata.num_rows
        wanted = list(dict.fromkeys(chosen.values()))
        batches: Iterator[Any] | None = None
        while True:
            try:
                batches = batches or file.iter_batches(
                    batch_size=_rows_at_once(file, wanted), columns=wanted
                )
                batch = next(batches, None)
            except damage as error:
                raise UsageError(
                    f"{path}: rows from {first} on cannot be read ({first_line(error)}); the file is damaged"
                ) from None
            if batch is None:
                return
            raw = {
                ours: _from_arrow(pa, path, first, ours, batch.column(name))
                for ours, name in chosen.items()
            }
            yield assemble(str(path), first, raw, (first + batch.num_rows) / total)
            first += batch.num_rows


def _rows_at_once(file: Any, wanted: list[str]) -> int:
    """So that rows like the longest of the first ones stay within PARQUET_ENTRIES. Read one by one: the file's own
    counts would be cheaper, but asking for them aborts the process if they are damaged."""
    first = itertools.islice(file.iter_batches(batch_size=1, columns=wanted), PARQUET_ROWS)
    longest = max(
        (sum(_entries(batch.column(name)) for name in wanted) for batch in first), default=1
    )
    return max(1, min(PARQUET_ROWS, PARQUET_ENTRIES // max(1, longest)))


def _entries(column: Any) -> int:
    while hasattr(column, "flatten") and hasattr(
        column.type, "value_type"
    ):  # lists, and lists of lists
        column = column.flatten()
    return len(column)


def _from_arrow(pa: Any, path: Path, first: int, name: str, column: Any) -> Ragged:
    kinds = pa.types
    if column.null_count:
        row = first + column.is_null().to_pylist().index(True)
        raise UsageError(f"{path}: row {row}, column {name}: is null; every row needs a value")
    lengths = None
    if (
        kinds.is_list(column.type)
        or kinds.is_large_list(column.type)
        or kinds.is_fixed_size_list(column.type)
    ):
        import pyarrow.compute

        lengths = (
            pyarrow.compute.list_value_length(column)
            .to_numpy(zero_copy_only=False)
            .astype(np.int64)
        )
        column = column.flatten()
    if not (
        kinds.is_floating(column.type)
        or kinds.is_integer(column.type)
        or kinds.is_boolean(column.type)
    ):
        raise UsageError(
            f"{path}: row {first}, column {name}: holds {column.type}; expected numbers or lists of them"
        )
    return Ragged(
        column.to_numpy(zero_copy_only=False).astype(_plain(column)), lengths
    )  # a null entry is NaN


def _plain(column: Any) -> Any:
    return np.float64 if column.null_count else column.type.to_pandas_dtype()


def read_jsonl(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    size = max(path.stat().st_size, 1)
    rows: list[dict[str, Array]] = []
    chosen: dict[str, str] = {}
    first = held = done = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if not line.strip():
                continue
            row = _parse(path, number, line)
            index = first + len(rows)
            if index == 0:
                chosen = choose(str(path), row.keys(), mapping)
            rows.append(row_arrays(str(path), index, row, chosen, mapping))
            held += rows[-1]["tokens"].size
            if held >= BLOCK_TOKENS:
                yield from_rows(str(path), first, rows, done / size)
                first, held, rows = first + len(rows), 0, []
    if rows:
        yield from_rows(str(path), first, rows, 1.0)


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # also bad UTF-8; thousands of digits or brackets
        raise UsageError(
            f"{path}: line {number} is not JSON ({first_line(error)}); was its writer killed?"
        ) from None
    if not isinstance(row, dict):
        raise UsageError(f"{path}: line {number} holds {type(row).__name__}; expected an object")
    return row


def row_arrays(
    source: str,
    index: int,
    row: Mapping[str, Any],
    chosen: Mapping[str, str],
    mapping: Mapping[str, str],
) -> dict[str, Array]:
    """One row of lists and numbers -> arrays of rank 1 or 0. Every row must have the columns of the first."""
    for ours in COLUMNS:
        if (mapping.get(ours, ours) in row) != (ours in chosen):
            state = "missing, but row 0 has it" if ours in chosen else "there, but row 0 lacks it"
            raise UsageError(f"{source}: row {index}, column {ours}: {state}")
    arrays = {}
    for ours, theirs in chosen.items():
        value = row[theirs]
        nullable = COLUMNS[ours].kind == "float" and isinstance(value, list)
        if nullable and None in value:  # JSON's NaN
            value = [np.nan if each is None else each for each in value]
        try:
            array = np.asarray(value if np.size(value) else np.zeros(np.shape(value)))
        except (ValueError, OverflowError, TypeError):
            array = np.empty(0, object)
        if array.dtype.kind not in "biuf" or array.ndim > (
            4 if COLUMNS[ours].per == "router" else 1
        ):
            raise UsageError(
                f"{source}: row {index}, column {ours}: expected a number or a flat list of numbers"
            )
        arrays[ours] = array.reshape(-1) if array.ndim else array
    if arrays["tokens"].ndim == 0:
        raise UsageError(
            f"{source}: row {index}, column tokens: is a number; expected a list of token ids"
        )
    return arrays


def from_rows(source: str, first: int, rows: list[dict[str, Array]], done: float) -> Block:
    raw = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        for index, part in enumerate(parts):
            if part.ndim != parts[0].ndim:
                raise UsageError(
                    f"{source}: row {first + index}, column {name}: a list here and a number elsewhere; use one of both"
                )
        if parts[0].ndim == 0:
            raw[name] = Ragged(np.stack(parts), None)
        else:
            raw[name] = Ragged(
                np.concatenate(parts), np.array([part.size for part in parts], np.int64)
            )
    return assemble(source, first, raw, done)


READERS: dict[str, Callable[[Path, Mapping[str, str]], Iterator[Block]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".npz": read_npz,
    ".safetensors": read_safetensors,
    ".pt": read_pt,
}
