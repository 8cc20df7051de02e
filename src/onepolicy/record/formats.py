"""Dumps as a stream of unchecked blocks: Parquet and JSON lines here, arrays in arrays.py.

All of it runs in the child of bounded.py, so it imports neither torch nor pydantic.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onepolicy.bounded import Message
from onepolicy.errors import UsageError, short_repr
from onepolicy.record.arrays import first_line, read_npz, read_pt, read_safetensors
from onepolicy.record.schema import (
    BLOCK_ENTRIES,
    BLOCK_ROWS,
    COLUMNS,
    FRAMEWORK_KEY,
    REPLAYED_KEY,
    VERSION,
    VERSION_KEY,
    Array,
    ColumnSpec,
    RaggedColumn,
    RawBlock,
    check_unique,
    require_pyarrow,
    select_columns,
    unique_pairs,
)
from onepolicy.record.trainers import ROW_MASKS

BLOCK_TOKENS = 2**18
LONGEST_NAME = 100  # of a framework, in the metadata of a file
PARQUET_ROWS = 64


def read_files(files: list[str], mapping: dict[str, str]) -> Iterator[Message | None]:
    """Yield the blocks of some dump files, as a task of bounded.py.

    A message names a file by its number, or is one of `RawBlock.message`.
    """
    suffixes = {Path(file).suffix for file in files}
    if ".parquet" in suffixes:
        require_pyarrow()
    if ".pt" in suffixes:
        import torch  # noqa: F401
    yield None
    for number, file in enumerate(files):
        path = Path(file)
        yield Message({"file": number})
        for block in READERS[path.suffix](path, mapping):
            yield block.message()


def read_parquet(path: Path, mapping: Mapping[str, str]) -> Iterator[RawBlock]:
    """Yield the blocks of a Parquet file."""
    pa, pq = require_pyarrow()
    damage = (pa.ArrowException, OSError, UnicodeDecodeError)
    try:
        # Pre-buffering would hold the whole file in memory.
        file = pq.ParquetFile(_parquet_source(path), pre_buffer=False, buffer_size=2**20)
        names, metadata = file.schema_arrow.names, file.schema_arrow.metadata or {}
    except MemoryError:  # an ArrowException too
        raise
    except damage as error:
        reason = first_line(error)
        raise UsageError(
            f"{path}: not a complete Parquet file ({reason}); was its writer killed?"
        ) from None
    with file:
        _check_version(path, metadata.get(VERSION_KEY))
        framework = metadata.get(FRAMEWORK_KEY, b"")[:LONGEST_NAME].decode(errors="replace")
        replayed = metadata.get(REPLAYED_KEY) == b"1"
        selected = select_columns(str(path), names, mapping)
        check_unique(str(path), [name for name in names if name in selected.values()])
        first, total = 0, file.metadata.num_rows
        wanted = list(dict.fromkeys(selected.values()))
        batches: Iterator[Any] | None = None
        while True:
            try:
                batches = batches or _parquet_batches(file, wanted)
                batch = next(batches, None)
            except MemoryError:
                raise
            except damage as error:
                reason = first_line(error)
                raise UsageError(
                    f"{path}: rows from {first} on cannot be read ({reason}); the file is damaged"
                ) from None
            if batch is None:
                return
            raw = {
                ours: _ragged_from_arrow(pa, path, first, ours, batch.column(name))
                for ours, name in selected.items()
            }
            yield RawBlock(first, raw, (first + batch.num_rows) / total, framework, replayed)
            first += batch.num_rows


def _parquet_source(path: Path) -> Path | BinaryIO:
    """Return the path, or the open file if its name is not UTF-8: pyarrow takes no such name."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return path.open("rb")
    return path


def _check_version(path: Path, version: bytes | None) -> None:
    if version is not None and version != str(VERSION).encode():
        theirs = short_repr(version[:LONGEST_NAME].decode(errors="replace"))
        raise UsageError(f"{path}: schema version {theirs}, this is version {VERSION}")


def _parquet_batches(file: Any, wanted: list[str]) -> Iterator[Any]:
    """Return batches of rows that have about BLOCK_ENTRIES entries, but at least one row.

    The longest of the first rows decides. They are read one by one. The file's own counts would be
    cheaper, but asking for them aborts the process if they are damaged.
    """
    first = itertools.islice(file.iter_batches(1, columns=wanted, use_threads=False), PARQUET_ROWS)
    sizes = [sum(_entries(batch.column(name)) for name in wanted) for batch in first]
    longest = max(1, max(sizes, default=1))
    rows = max(1, min(PARQUET_ROWS, BLOCK_ENTRIES // longest))
    batches: Iterator[Any] = file.iter_batches(rows, columns=wanted, use_threads=False)
    return batches


def _entries(column: Any) -> int:
    # Lists, and lists of lists, have a value type.
    while hasattr(column, "flatten") and hasattr(column.type, "value_type"):
        column = column.flatten()
    return len(column)


def _ragged_from_arrow(pa: Any, path: Path, first: int, name: str, column: Any) -> RaggedColumn:
    kinds = pa.types
    if column.null_count:
        row = first + column.is_null().to_pylist().index(True)
        raise UsageError(f"{path}: row {row}, column {name}: is null; every row needs a value")
    lengths = None
    if _is_list(kinds, column):
        lengths, column = _flattened(column)
    if COLUMNS[name].per == "router":  # [T][L][K] as well as flat
        while _is_list(kinds, column) and not column.null_count:
            inner, column = _flattened(column)
            if len(set(inner.tolist())) > 1:
                raise UsageError(
                    f"{path}: row {first}, column {name}: lists inside of it differ in length; "
                    "expected tokens x route_layers x route_top_k"
                )
            assert lengths is not None
            lengths = lengths * inner.max(initial=0)
    number_kinds = (kinds.is_floating, kinds.is_integer, kinds.is_boolean)
    if not any(is_kind(column.type) for is_kind in number_kinds):
        raise UsageError(
            f"{path}: row {first}, column {name}: holds {column.type}; "
            "expected numbers or lists of them"
        )
    # Not to_pandas_dtype(): pyarrow 18 needs pandas for it.
    dtype = pa.array([], column.type).to_numpy(zero_copy_only=False).dtype
    if column.null_count:  # of entries, which become NaN
        dtype = np.float64
    return RaggedColumn(column.to_numpy(zero_copy_only=False).astype(dtype), lengths)


def _is_list(kinds: Any, column: Any) -> bool:
    list_kinds = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
    return any(is_kind(column.type) for is_kind in list_kinds)


def _flattened(column: Any) -> tuple[Array, Any]:
    """Return the length of each list, [n] int64, and their entries."""
    import pyarrow.compute

    counts = pyarrow.compute.list_value_length(column)
    return counts.to_numpy(zero_copy_only=False).astype(np.int64), column.flatten()


def read_jsonl(path: Path, mapping: Mapping[str, str]) -> Iterator[RawBlock]:
    """Yield the blocks of a file of JSON lines."""
    size = max(path.stat().st_size, 1)
    rows: list[dict[str, Array]] = []
    selected: dict[str, str] = {}
    first = tokens = entries = done = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if not line.strip():
                continue
            row = _parse_line(path, number, line)
            index = first + len(rows)
            if index == 0:
                selected = select_columns(str(path), row.keys(), mapping)
            rows.append(row_arrays(str(path), index, row, selected, mapping))
            tokens += rows[-1]["tokens"].size
            entries += sum(array.size for array in rows[-1].values())
            full = tokens >= BLOCK_TOKENS or entries >= BLOCK_ENTRIES
            if full or len(rows) >= BLOCK_ROWS:
                yield block_from_rows(str(path), first, rows, done / size)
                first, tokens, entries, rows = first + len(rows), 0, 0, []
    if rows:
        yield block_from_rows(str(path), first, rows, 1.0)


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=partial(unique_pairs, f"{path}: line {number}"))
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:  # also bad UTF-8; thousands of digits or brackets
        reason = first_line(error)
        raise UsageError(
            f"{path}: line {number} is not JSON ({reason}); was its writer killed?"
        ) from None
    if not isinstance(row, dict):
        raise UsageError(
            f"{path}: line {number} holds {type(row).__name__}; expected an object: write one row "
            "a line, not an array of all"
        )
    return row


def row_arrays(
    source: str,
    index: int,
    row: Mapping[str, Any],
    selected: Mapping[str, str],
    mapping: Mapping[str, str],
) -> dict[str, Array]:
    """Convert a row of lists and numbers to arrays of rank 1 or 0.

    Every row must have the columns of the first one.
    """
    for ours in COLUMNS:
        present = mapping.get(ours, ours) in row
        if present != (ours in selected):
            state = "there, but row 0 lacks it" if present else "missing, but row 0 has it"
            raise UsageError(f"{source}: row {index}, column {ours}: {state}")
    arrays = {ours: _json_array(source, index, ours, row[name]) for ours, name in selected.items()}
    row_mask = ROW_MASKS.get(selected["mask"], "")
    if row_mask in row and not _flag(source, index, row_mask, row[row_mask]):
        arrays["mask"] = np.zeros_like(arrays["mask"])
    if arrays["tokens"].ndim == 0:
        raise UsageError(
            f"{source}: row {index}, column tokens: is a number; expected a list of token ids"
        )
    return arrays


def _flag(source: str, index: int, name: str, value: Any) -> bool:
    """Return the 0 or 1 of a row, which may stand in a list."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if value not in (0, 1):
        raise UsageError(
            f"{source}: row {index}, column {name}: is {short_repr(value)}; expected 0 or 1"
        )
    return bool(value)


def _json_array(source: str, index: int, name: str, value: Any) -> Array:
    spec = COLUMNS[name]
    if isinstance(value, list):
        value = _without_wrapping(spec, value)
    if spec.kind == "float" and isinstance(value, list) and None in value:  # null is JSON's NaN
        value = [np.nan if entry is None else entry for entry in value]
    try:
        if np.size(value):
            array = np.asarray(value)
        else:
            array = np.zeros(np.shape(value))
    except (ValueError, OverflowError, TypeError):
        array = np.empty(0, object)
    max_rank = 4 if spec.per == "router" else 1
    if array.dtype.kind not in "biuf" or array.ndim > max_rank:
        raise UsageError(
            f"{source}: row {index}, column {name}: expected a number or a flat list of numbers"
        )
    if array.ndim:
        return array.reshape(-1)
    return array


def _without_wrapping(spec: ColumnSpec, value: list[Any]) -> Any:
    """Return the values of a row that a framework has written inside of something else.

    NeMo-RL writes a micro-batch of one sample, [[1, 2]] for [1, 2], and [0.5] for a reward. SGLang
    writes [log-probability, token id, text] for each token.
    """
    if len(value) == 1 and (spec.per == "row" or isinstance(value[0], list)):
        only = value[0]
        if spec.per == "row" or not _is_triple(only):
            return only
    if spec.kind == "float" and value and all(map(_is_triple, value)):
        return [entry[0] for entry in value]
    return value


def _is_triple(value: Any) -> bool:
    match value:
        case [int() | float() | None, int(), str() | None]:
            return True
    return False


def block_from_rows(source: str, first: int, rows: list[dict[str, Array]], done: float) -> RawBlock:
    """Concatenate rows of arrays."""
    raw = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        rank = parts[0].ndim
        for index, part in enumerate(parts):
            if part.ndim != rank:
                raise UsageError(
                    f"{source}: row {first + index}, column {name}: a list here and a number "
                    "elsewhere; use one of both"
                )
        if rank == 0:
            raw[name] = RaggedColumn(np.stack(parts), None)
        else:
            lengths = np.array([part.size for part in parts], np.int64)
            raw[name] = RaggedColumn(np.concatenate(parts), lengths)
    return RawBlock(first, raw, done)


READERS: dict[str, Callable[[Path, Mapping[str, str]], Iterator[RawBlock]]] = {
    ".parquet": read_parquet,
    ".jsonl": read_jsonl,
    ".npz": read_npz,
    ".safetensors": read_safetensors,
    ".pt": read_pt,
}
