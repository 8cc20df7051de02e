"""Dumps made of arrays: NPZ, safetensors, .pt.

They are padded, [S, T], or flat, [sum of length] with `length` [S]. Safetensors are read in slices.
NPZ and .pt files are held in memory whole. Nothing but tensors is unpickled.
"""

from __future__ import annotations

import json
import lzma
import math
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from onepolicy.errors import UsageError
from onepolicy.npy import InvalidNpyError, parse_npy
from onepolicy.record.schema import (
    BLOCK_ENTRIES,
    BLOCK_ROWS,
    COLUMNS,
    Array,
    RaggedColumn,
    RawBlock,
    check_unique,
    select_columns,
    unique_pairs,
)

if TYPE_CHECKING:  # only .pt files need torch
    import torch

BLOCK_TOKENS = 2**18
ENCRYPTED = 0x1  # bit of a zip member's flags
LARGEST_HEADER = 100_000_000  # bytes of a safetensors header, the library's own bound
PLAIN_DTYPES = {
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
}
"""Kinds of tensors of plain numbers, by torch's names."""
STORED = {  # safetensors' names -> how the bytes are read
    **{"BOOL": "?", "F64": "<f8", "F32": "<f4", "F16": "<f2"},
    **{f"I{8 * size}": f"<i{size}" for size in (1, 2, 4, 8)},
    **{f"U{8 * size}": f"<u{size}" for size in (1, 2, 4, 8)},
    **{"BF16": "<u2", "F8_E4M3": "<u1", "F8_E5M2": "<u1"},
}
NPZ_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    OSError,
    NotImplementedError,
    struct.error,
    ValueError,
    LookupError,
    OverflowError,
)
"""Errors of reading a damaged NPZ file."""
PT_ERRORS = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    RuntimeError,
    EOFError,
    ValueError,
    OSError,
    # of damaged pickles:
    LookupError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""Errors of reading a damaged torch.save file, or one that is not tensors only."""
ReadSlice = Callable[[int, int], Array]
"""Reads the entries [start, stop) of a column's first axis."""


def read_npz(path: Path, mapping: Mapping[str, str]) -> Iterator[RawBlock]:
    """Yield the blocks of an NPZ file. Raises UsageError if it is not one of plain arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            check_unique(str(path), [info.filename.removesuffix(".npy") for info in infos])
            members = {info.filename.removesuffix(".npy"): info for info in infos}
            names = {*select_columns(str(path), members, mapping).values(), "length"}
            arrays = {
                name: _read_member(archive, path, info)
                for name, info in members.items()
                if name in names
            }
    except UsageError:
        raise
    except NPZ_ERRORS as error:
        reason = first_line(error)
        raise UsageError(f"{path}: not a readable NPZ file of plain arrays ({reason})") from None
    yield from _read_in_memory(str(path), arrays, mapping)


def _read_member(archive: zipfile.ZipFile, path: Path, info: zipfile.ZipInfo) -> Array:
    if info.flag_bits & ENCRYPTED:
        raise UsageError(f"{path}: {info.filename} is encrypted; write it without a password")
    try:
        return parse_npy(archive.read(info))
    except InvalidNpyError as error:
        raise UsageError(
            f"{path}: not a readable NPZ file of plain arrays ({info.filename}: {error})"
        ) from None


def read_safetensors(path: Path, mapping: Mapping[str, str]) -> Iterator[RawBlock]:
    """Yield the blocks of a safetensors file, reading a slice at a time."""
    with Safetensors(path) as file:
        shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
        yield from read_arrays(
            str(path), shapes, mapping, lambda name: lambda *rows: file.read(name, *rows)
        )


class StoredTensor(NamedTuple):
    """The kind, the shape and the place of a tensor in a safetensors file."""

    kind: str  # a name of safetensors
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file


class Safetensors:
    """A safetensors file whose tensors become arrays, without torch.

    The library checks the file. Its arrays have no bfloat16, so the numbers are read here.
    """

    def __init__(self, path: Path) -> None:
        """Open a file. Raises UsageError if it is damaged, or names a tensor twice."""
        self.path = path
        try:
            with safe_open(path, framework="np"):  # checks names, shapes and places
                self._file = path.open("rb")
            header = self._header()
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(
                f"{path}: not a readable safetensors file ({first_line(error)})"
            ) from None
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self.tensors = {
            name: StoredTensor(
                about["dtype"], tuple(about["shape"]), self._data + about["data_offsets"][0]
            )
            for name, about in header.items()
        }

    def _header(self) -> dict[str, Any]:
        size = int.from_bytes(self._file.read(8), "little")
        self._data = 8 + size
        header: dict[str, Any] = json.loads(
            self._file.read(min(size, LARGEST_HEADER)),
            object_pairs_hook=partial(unique_pairs, str(self.path)),
        )
        return header

    def __enter__(self) -> Safetensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Read the entries [start, stop) of a tensor's first axis. Narrow floats become float32.

        Raises UsageError for a kind of numbers that is not in STORED.
        """
        kind, shape, place = self.tensors[name]
        if kind not in STORED:
            raise UsageError(
                f"{self.path}: column {name}: holds {kind}; expected one of {', '.join(STORED)}"
            )
        rows = shape[:1] if stop is None else (max(0, min(stop, shape[0]) - start),)
        dtype, inner = np.dtype(STORED[kind]), math.prod(shape[1:])
        self._file.seek(place + start * inner * dtype.itemsize)
        count = math.prod(rows) * inner
        values = np.fromfile(self._file, dtype, count)
        if len(values) != count:
            raise UsageError(f"{self.path}: was cut while it was read; copy it whole")
        return _widened(values, kind).reshape(rows + shape[1:])


def _widened(values: Array, kind: str) -> Array:
    """Return the numbers that the bits of a narrow float of this kind mean, as float32."""
    if kind == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if kind == "F8_E5M2":  # the upper half of a float16
        return (values.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    if kind == "F8_E4M3":
        return _E4M3.take(values)
    if kind == "F16":
        return values.astype(np.float32)
    return values


def _e4m3_table() -> Array:
    """Return the 256 numbers of float8_e4m3fn [256] float32: bias 7, no infinity, NaN at 0x7f."""
    bits = np.arange(256)
    exponent, fraction = (bits >> 3) & 15, (bits & 7) / 8
    size = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7.0))
    size[(bits & 127) == 127] = np.nan
    return np.where(bits & 128, -size, size).astype(np.float32)


_E4M3 = _e4m3_table()


def load_pt(path: Path) -> dict[Any, Any]:
    """Load a torch.save file of a dict. Call it in a child only: a small file may take all memory.

    torch.load runs no code with weights_only=True. Raises UsageError for a file that it refuses.
    """
    import torch

    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except PT_ERRORS as error:
        if "allocate memory" in str(error):
            raise MemoryError from None
        reason = first_line(error)
        raise UsageError(
            f"{path}: not tensors only, or damaged ({reason}); write it as safetensors"
        ) from None
    if not isinstance(loaded, dict):
        raise UsageError(
            f"{path}: holds {type(loaded).__name__}; expected a dict of tensors by column"
        )
    return loaded


def read_pt(path: Path, mapping: Mapping[str, str]) -> Iterator[RawBlock]:
    """Yield the blocks of a torch.save file of a dict of tensors."""
    loaded = load_pt(path)
    names = {*select_columns(str(path), loaded.keys(), mapping).values(), "length"}
    tensors = {name: value for name, value in loaded.items() if name in names}
    for name, value in tensors.items():
        check_plain_tensor(f"{path}: column {name}", value)
    arrays = {name: as_numpy(value) for name, value in tensors.items()}
    yield from _read_in_memory(str(path), arrays, mapping)


def _read_in_memory(
    source: str, arrays: Mapping[str, Array], mapping: Mapping[str, str]
) -> Iterator[RawBlock]:
    def open_column(name: str) -> ReadSlice:
        return lambda start, stop: arrays[name][start:stop]

    shapes = {name: array.shape for name, array in arrays.items()}
    yield from read_arrays(source, shapes, mapping, open_column)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, at most 160 characters."""
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:160]


def check_plain_tensor(where: str, value: Any) -> None:
    """Raise UsageError if `value` is no dense tensor of plain numbers on the CPU."""
    import torch

    if not isinstance(value, torch.Tensor) or value.is_nested or value.layout != torch.strided:
        raise UsageError(f"{where}: holds {type(value).__name__}; expected a dense tensor")
    if str(value.dtype).removeprefix("torch.") not in PLAIN_DTYPES or value.device.type != "cpu":
        raise UsageError(
            f"{where}: holds {value.dtype} on {value.device}; expected a tensor of plain numbers"
        )


def as_numpy(tensor: torch.Tensor) -> Array:
    """Convert a tensor that `check_plain_tensor` accepts. Narrow floats become float32."""
    tensor = tensor.detach().resolve_neg()
    if tensor.is_floating_point() and tensor.itemsize < 8:
        tensor = tensor.float()
    array: Array = tensor.numpy()
    return array


def read_arrays(
    source: str,
    shapes: Mapping[str, tuple[int, ...]],
    mapping: Mapping[str, str],
    open_column: Callable[[str], ReadSlice],
) -> Iterator[RawBlock]:
    """Yield the blocks of a dump of arrays, padded or flat."""
    arrays = _DumpArrays(source, shapes, mapping, open_column)
    rows, ends = len(arrays.lengths), arrays.ends
    entries = arrays.entries().cumsum()
    start, before, entries_before = 0, 0, 0.0
    while start < rows:
        stop = min(
            int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right")),
            int(np.searchsorted(entries, entries_before + BLOCK_ENTRIES, side="right")),
            start + BLOCK_ROWS,
        )
        stop = max(start + 1, stop)
        before, entries_before = int(ends[stop - 1]), float(entries[stop - 1])
        yield RawBlock(start, arrays.read_rows(start, stop), stop / rows)
        start = stop


def _counts(values: Array) -> Array:
    """Return counts as whole numbers of at least 0; what is none is found with other values."""
    return np.nan_to_num(values.astype(np.float64)).clip(0, 2**31).astype(np.int64)


class _DumpArrays:
    """The columns of a dump of arrays, whose shapes have been checked."""

    def __init__(
        self,
        source: str,
        shapes: Mapping[str, tuple[int, ...]],
        mapping: Mapping[str, str],
        open_column: Callable[[str], ReadSlice],
    ) -> None:
        self.source, self.shapes, self.open_column = source, shapes, open_column
        names = [name for name in shapes if name != "length"]
        self.selected = select_columns(source, names, mapping)
        self.flat = "length" in shapes
        for name in self.selected.values():
            self._check_is_array(name)
        if self.flat:
            self._check_is_array("length")
        self.lengths = self._read_lengths(self.selected["tokens"])
        self.ends = self.lengths.cumsum()
        self.tokens = int(self.ends[-1]) if len(self.lengths) else 0
        self.per_row = {ours: self._check_shape(ours) for ours in self.selected}
        if self.flat and "support_ids" in self.selected:
            self.set_sizes = self._read_set_sizes()
            self.set_ends = self.set_sizes.cumsum()

    def _check_is_array(self, name: str) -> None:
        if len(self.shapes[name]) == 0:
            raise UsageError(f"{self.source}: column {name}: is a single number; expected an array")

    def _check_shape(self, ours: str) -> bool:
        """Return whether a column has one value per row. Raises UsageError for a wrong shape."""
        rows, theirs, per = len(self.lengths), self.selected[ours], COLUMNS[ours].per
        shape = self.shapes[theirs]
        per_row = per == "row" or (per == "token or row" and shape == (rows,))
        expected, more = rows, ", ..."
        if per_row:
            more = ""
        elif self.flat:
            expected, more = self.tokens, ""
            if per in ("router", "support"):
                expected = shape[0]  # [T, L, K] or flat, which is checked with each block
        if shape[0] != expected or (per_row and len(shape) > 1):
            raise UsageError(
                f"{self.source}: column {theirs}: shape {list(shape)}, expected [{expected}{more}]"
            )
        return per_row

    def entries(self) -> Array:
        """Return the entries of all columns of each row, [S] float64."""
        found = np.zeros(len(self.lengths))
        for ours, theirs in self.selected.items():
            size = math.prod(self.shapes[theirs])
            if self.per_row[ours] or not self.flat:
                found += size / max(1, len(found))
            elif COLUMNS[ours].per == "support":
                found += self.set_sizes
            else:
                found += self.lengths * (size / max(1, self.tokens))
        return found

    def read_rows(self, start: int, stop: int) -> dict[str, RaggedColumn]:
        """Read all columns of the rows [start, stop)."""
        raw = {}
        for ours, theirs in self.selected.items():
            if self.per_row[ours]:
                raw[ours] = RaggedColumn(self.open_column(theirs)(start, stop), None)
            elif COLUMNS[ours].per == "support":
                raw[ours] = self._read_sets(theirs, start, stop)
            elif self.flat:
                raw[ours] = self._read_flat(ours, start, stop)
            else:
                part = self.open_column(theirs)(start, stop)
                width = part.size // (stop - start)
                lengths = np.full(stop - start, width, np.int64)
                raw[ours] = RaggedColumn(part.reshape(-1), lengths)
        return raw

    def _read_set_sizes(self) -> Array:
        """Return the number of support ids of each row [S]. Raises UsageError for another sum."""
        counts = _counts(self.open_column(self.selected["support_counts"])(0, self.tokens))
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        sizes = np.zeros(len(self.lengths), np.int64)
        np.add.at(sizes, rows, counts)
        theirs = self.selected["support_ids"]
        entries = self.shapes[theirs][0]
        if sizes.sum() != entries or len(self.shapes[theirs]) > 1:
            raise UsageError(
                f"{self.source}: column {theirs}: shape {list(self.shapes[theirs])}, but "
                f"support_counts adds up to {sizes.sum()}"
            )
        return sizes

    def _read_sets(self, theirs: str, start: int, stop: int) -> RaggedColumn:
        """Read the ids of some rows' supports, of which a row has as many as its counts add up to.

        Padded rows may hold anything behind them. Wrong sums are found with the other values.
        """
        if not self.flat:
            counts = self.open_column(self.selected["support_counts"])
            sizes = _counts(counts(start, stop)).reshape(stop - start, -1).sum(1)
            part = self.open_column(theirs)(start, stop).reshape(stop - start, -1)
            sizes = np.minimum(sizes, part.shape[1])
            kept = np.arange(part.shape[1]) < sizes[:, None]
            return RaggedColumn(part[kept], sizes)
        sizes = self.set_sizes[start:stop]
        end = int(self.set_ends[stop - 1])
        values = self.open_column(theirs)(end - int(sizes.sum()), end).reshape(-1)
        return RaggedColumn(values, sizes)

    def _read_flat(self, ours: str, start: int, stop: int) -> RaggedColumn:
        """Read some rows of a flat column.

        A router column has a fixed number of entries per token.
        """
        theirs, lengths = self.selected[ours], self.lengths[start:stop]
        entries = self.shapes[theirs][0]
        per_token, rest = 1, 0
        if self.tokens:
            per_token, rest = divmod(entries, self.tokens)
        if rest:
            raise UsageError(
                f"{self.source}: column {ours}: {entries} entries are not a multiple of "
                f"{self.tokens} tokens"
            )
        first, end = int(self.ends[start] - lengths[0]), int(self.ends[stop - 1])
        values = self.open_column(theirs)(first * per_token, end * per_token)
        token_size = values.size // max(1, end - first)
        return RaggedColumn(values.reshape(-1), lengths * token_size)

    def _read_lengths(self, tokens: str) -> Array:
        shape = self.shapes[tokens]
        if self.flat:
            return self._read_length_column(tokens, shape[0])
        if len(shape) != 2:
            raise UsageError(
                f"{self.source}: column {tokens}: shape {list(shape)}; expected "
                "[samples, tokens], or a flat array beside `length`, the number of tokens of each "
                "sample"
            )
        rows, width = shape
        if not rows * width:
            raise UsageError(f"{self.source}: column {tokens}: shape {[rows, width]} has no tokens")
        return np.full(rows, width, np.int64)

    def _read_length_column(self, tokens: str, total: int) -> Array:
        lengths = self.open_column("length")(0, self.shapes["length"][0])
        is_whole = lengths.ndim == 1 and lengths.dtype.kind in "iu"
        if not is_whole or (lengths.astype(np.int64) < 0).any():
            raise UsageError(
                f"{self.source}: column length: expected whole numbers of at least 0, "
                "one per sample"
            )
        lengths = lengths.astype(np.int64)
        if lengths.astype(float).sum() != total:
            raise UsageError(
                f"{self.source}: column length: sums to {lengths.sum()}, but {tokens} has {total}"
            )
        return lengths
