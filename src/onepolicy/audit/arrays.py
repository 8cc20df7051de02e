"""Dumps made of arrays: NPZ, safetensors, .pt.

They are padded, [S, T], or flat, [sum of length] with `length` [S]. Safetensors are read in slices.
NPZ and .pt files are held in memory whole. Nothing but tensors is unpickled.
"""

from __future__ import annotations

import lzma
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from onepolicy.audit.schema import COLUMNS, Array, Block, RaggedColumn, select_columns
from onepolicy.audit.validate import checked_block
from onepolicy.config import UsageError
from onepolicy.replay.payloads.npy import InvalidNpyError, parse_npy

BLOCK_TOKENS = 2**18
MAX_IN_MEMORY = 2**32  # bytes of an unpacked file that is held in memory
UNSUSPICIOUS_SIZE = 2**28  # bytes up to which any compression is accepted
MAX_COMPRESSION = 100  # beyond that: bytes unpacked over bytes on disk
ENCRYPTED = 0x1  # bit of a zip member's flags
PLAIN_DTYPES = {
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16),
    *(torch.float32, torch.float64),
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
    MemoryError,
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
    MemoryError,
)
"""Errors of reading a damaged torch.save file, or one that is not tensors only."""
ReadSlice = Callable[[int, int], Array]
"""Reads the entries [start, stop) of a column's first axis."""


def read_npz(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    """Yield the blocks of an NPZ file. Raises UsageError if it is not one of plain arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            names = {*select_columns(str(path), members, mapping).values(), "length"}
            selected = {name: info for name, info in members.items() if name in names}
            check_size_in_memory(path, sum(info.file_size for info in selected.values()))
            arrays = {name: _read_member(archive, path, info) for name, info in selected.items()}
    except UsageError:
        raise
    except NPZ_ERRORS as error:
        reason = first_line(error)
        raise UsageError(f"{path}: not a readable NPZ file of plain arrays ({reason})") from None
    yield from _read_in_memory(str(path), arrays, mapping)


def check_size_in_memory(path: Path, size: int) -> None:
    """Raise UsageError for a file of which too many bytes would be in memory at once.

    size: bytes after unpacking. Call it before they are unpacked.
    """
    on_disk = path.stat().st_size
    if size > MAX_IN_MEMORY:
        fix = "write it as Parquet or safetensors, which are read in parts, or in several files"
        raise UsageError(
            f"{path}: holds {size:,} bytes, more than the {MAX_IN_MEMORY:,} that are held at once; "
            f"{fix}"
        )
    if size > UNSUSPICIOUS_SIZE and size > MAX_COMPRESSION * on_disk:
        raise UsageError(
            f"{path}: its {on_disk:,} bytes unpack to {size:,}, more than {MAX_COMPRESSION} times "
            "as many, as no dump does; write it without compression"
        )


def _read_member(archive: zipfile.ZipFile, path: Path, info: zipfile.ZipInfo) -> Array:
    if info.flag_bits & ENCRYPTED:
        raise UsageError(f"{path}: {info.filename} is encrypted; write it without a password")
    try:
        return parse_npy(archive.read(info))
    except InvalidNpyError as error:
        raise UsageError(
            f"{path}: not a readable NPZ file of plain arrays ({info.filename}: {error})"
        ) from None


def read_safetensors(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    """Yield the blocks of a safetensors file, reading a slice at a time."""
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # not a dict, so it cannot be iterated itself
            slices = {name: file.get_slice(name) for name in names}
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}

            def open_column(name: str) -> ReadSlice:
                def read_slice(start: int, stop: int) -> Array:
                    part = slices[name][start:stop]
                    check_plain_tensor(f"{path}: column {name}", part)
                    return as_numpy(part)

                return read_slice

            yield from read_arrays(str(path), shapes, mapping, open_column)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not a readable safetensors file ({first_line(error)})") from None


def load_pt(path: Path) -> dict[Any, Any]:
    """Load a torch.save file of a dict.

    torch.load runs no code with weights_only=True. Raises UsageError for a file that it refuses.
    """
    try:
        if zipfile.is_zipfile(path):  # an older file holds its tensors unpacked
            with zipfile.ZipFile(path) as archive:
                check_size_in_memory(path, sum(info.file_size for info in archive.infolist()))
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except PT_ERRORS as error:
        reason = first_line(error)
        raise UsageError(
            f"{path}: not tensors only, or damaged ({reason}); write it as safetensors"
        ) from None
    if not isinstance(loaded, dict):
        raise UsageError(
            f"{path}: holds {type(loaded).__name__}; expected a dict of tensors by column"
        )
    return loaded


def read_pt(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    """Yield the blocks of a torch.save file of a dict of tensors."""
    loaded = load_pt(path)
    if {"samples", "rollout_data"} & loaded.keys():
        raise UsageError(
            f"{path}: a training dump of slime or miles; "
            "python -m onepolicy.audit.export.slime FOLDER OUT turns a folder of them into a dump"
        )
    names = {*select_columns(str(path), loaded.keys(), mapping).values(), "length"}
    tensors = {name: value for name, value in loaded.items() if name in names}
    for name, value in tensors.items():
        check_plain_tensor(f"{path}: column {name}", value)
    # A view may repeat its entries, so the size is checked again.
    size = sum(value.numel() * value.itemsize for value in tensors.values())
    check_size_in_memory(path, size)
    arrays = {name: as_numpy(value) for name, value in tensors.items()}
    yield from _read_in_memory(str(path), arrays, mapping)


def _read_in_memory(
    source: str, arrays: Mapping[str, Array], mapping: Mapping[str, str]
) -> Iterator[Block]:
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
    if not isinstance(value, torch.Tensor) or value.is_nested or value.layout != torch.strided:
        raise UsageError(f"{where}: holds {type(value).__name__}; expected a dense tensor")
    if value.dtype not in PLAIN_DTYPES or value.device.type != "cpu":
        raise UsageError(
            f"{where}: holds {value.dtype} on {value.device}; expected a tensor of plain numbers"
        )


def as_numpy(tensor: torch.Tensor) -> Array:
    """Convert a tensor that `check_plain_tensor` accepts. Narrow floats become float32."""
    tensor = tensor.detach().resolve_neg()
    if tensor.is_floating_point() and tensor.dtype != torch.float64:
        tensor = tensor.float()
    return tensor.numpy()


def read_arrays(
    source: str,
    shapes: Mapping[str, tuple[int, ...]],
    mapping: Mapping[str, str],
    open_column: Callable[[str], ReadSlice],
) -> Iterator[Block]:
    """Yield the blocks of a dump of arrays, padded or flat."""
    arrays = _DumpArrays(source, shapes, mapping, open_column)
    rows, ends = len(arrays.lengths), arrays.ends
    start = 0
    while start < rows:
        before = int(ends[start] - arrays.lengths[start])
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right")))
        yield checked_block(source, start, arrays.read_rows(start, stop), stop / rows)
        start = stop


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
            if per == "router":
                expected = shape[0]  # [T, L, K] or flat, which is checked with each block
        if shape[0] != expected or (per_row and len(shape) > 1):
            raise UsageError(
                f"{self.source}: column {theirs}: shape {list(shape)}, expected [{expected}{more}]"
            )
        return per_row

    def read_rows(self, start: int, stop: int) -> dict[str, RaggedColumn]:
        """Read all columns of the rows [start, stop)."""
        raw = {}
        for ours, theirs in self.selected.items():
            if self.per_row[ours]:
                raw[ours] = RaggedColumn(self.open_column(theirs)(start, stop), None)
            elif self.flat:
                raw[ours] = self._read_flat(ours, start, stop)
            else:
                part = self.open_column(theirs)(start, stop)
                width = part.size // (stop - start)
                lengths = np.full(stop - start, width, np.int64)
                raw[ours] = RaggedColumn(part.reshape(-1), lengths)
        return raw

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
