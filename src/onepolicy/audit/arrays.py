"""Dumps made of arrays: NPZ, safetensors, .pt. Either padded, [S, T], or flat [sum of length] with `length` [S].

Safetensors is read in slices; NPZ and .pt are held in memory whole. Nothing is unpickled beyond tensors.
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

from onepolicy.audit.schema import COLUMNS, Array, Block, Ragged, assemble, choose
from onepolicy.config import UsageError
from onepolicy.replay.payloads.npy import InvalidNpyError, parse_npy

BLOCK_TOKENS = 2**18
MOST_HELD = 2**32  # bytes of a file that is held whole, unpacked
FREELY_HELD = 2**28  # bytes, from which on the file must not be far smaller:
MOST_RATIO = 100  # bytes unpacked over bytes on disk
ENCRYPTED = 0x1  # bit of a zip member's flags
PLAIN = {
    torch.bool,
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ),
}
Part = Callable[[int, int], Array]  # entries [start, stop) of the first axis


def read_npz(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    broken = (
        zipfile.BadZipFile,
        zlib.error,
        lzma.LZMAError,
        EOFError,
        OSError,
        NotImplementedError,
        struct.error,
    )
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = {*choose(str(path), members, mapping).values(), *({"length"} & members.keys())}
            chosen = {name: info for name, info in members.items() if name in wanted}
            check_held(path, sum(info.file_size for info in chosen.values()))
            arrays = {name: _member(archive, path, name, info) for name, info in chosen.items()}
    except UsageError:
        raise
    except (*broken, ValueError, LookupError, OverflowError, MemoryError) as error:
        raise UsageError(
            f"{path}: not a readable NPZ file of plain arrays ({first_line(error)})"
        ) from None
    yield from read_arrays(
        str(path), {name: array.shape for name, array in arrays.items()}, mapping, _of(arrays)
    )


def check_held(path: Path, size: int) -> None:
    """Refuse a file of which `size` bytes would be held in memory at once, before they are."""
    on_disk = path.stat().st_size
    if size > MOST_HELD:
        mend = "write it as Parquet or safetensors, which are read in parts, or in several files"
        raise UsageError(
            f"{path}: holds {size:,} bytes, more than the {MOST_HELD:,} that are held at once; {mend}"
        )
    if size > FREELY_HELD and size > MOST_RATIO * on_disk:
        raise UsageError(
            f"{path}: its {on_disk:,} bytes unpack to {size:,}, more than {MOST_RATIO} times as many, as no dump does; "
            "write it without compression"
        )


def _member(archive: zipfile.ZipFile, path: Path, name: str, info: zipfile.ZipInfo) -> Array:
    if info.flag_bits & ENCRYPTED:
        raise UsageError(f"{path}: {info.filename} is encrypted; write it without a password")
    try:
        return parse_npy(archive.read(info))
    except InvalidNpyError as error:
        raise UsageError(
            f"{path}: not a readable NPZ file of plain arrays ({info.filename}: {error})"
        ) from None


def read_safetensors(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}

            def take(name: str) -> Part:
                return lambda start, stop: _part(f"{path}: column {name}", slices[name][start:stop])

            yield from read_arrays(str(path), shapes, mapping, take)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not a readable safetensors file ({first_line(error)})") from None


def load_pt(path: Path) -> dict[Any, Any]:
    """A torch.save file of a dict. torch.load runs no code with weights_only=True; what it refuses, we do."""
    damaged = (
        pickle.UnpicklingError,
        zipfile.BadZipFile,
        struct.error,
        RuntimeError,
        EOFError,
        ValueError,
        OSError,
    )
    of_pickles = (
        LookupError,
        TypeError,
        AttributeError,
        AssertionError,
        ArithmeticError,
        MemoryError,
    )
    try:
        if zipfile.is_zipfile(path):  # an older file holds its tensors as they are
            with zipfile.ZipFile(path) as archive:
                check_held(path, sum(info.file_size for info in archive.infolist()))
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except UsageError:
        raise
    except (*damaged, *of_pickles) as error:
        reason = first_line(error)
        raise UsageError(
            f"{path}: not tensors only, or damaged ({reason}); write it as safetensors"
        ) from None
    if not isinstance(found, dict):
        raise UsageError(
            f"{path}: holds {type(found).__name__}; expected a dict of tensors by column"
        )
    return found


def read_pt(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    """A dict of tensors."""
    found = load_pt(path)
    if {"samples", "rollout_data"} & found.keys():
        raise UsageError(
            f"{path}: a training dump of slime or miles; python -m onepolicy.audit.export.slime FOLDER OUT turns a "
            "folder of them into a dump"
        )
    wanted = {*choose(str(path), found.keys(), mapping).values(), "length"}
    tensors = {name: value for name, value in found.items() if name in wanted}
    for name, value in tensors.items():
        check_plain(f"{path}: column {name}", value)
    check_held(
        path, sum(value.numel() * value.itemsize for value in tensors.values())
    )  # a view may repeat its entries
    arrays = {name: as_numpy(value) for name, value in tensors.items()}
    yield from read_arrays(
        str(path), {name: array.shape for name, array in arrays.items()}, mapping, _of(arrays)
    )


def _of(arrays: Mapping[str, Array]) -> Callable[[str], Part]:
    return lambda name: lambda start, stop: arrays[name][start:stop]


def _part(where: str, value: torch.Tensor) -> Array:
    check_plain(where, value)
    return as_numpy(value)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def check_plain(where: str, value: Any) -> None:
    """Refuse what is no dense tensor of plain numbers in this process's memory."""
    if not isinstance(value, torch.Tensor) or value.is_nested or value.layout != torch.strided:
        raise UsageError(f"{where}: holds {type(value).__name__}; expected a dense tensor")
    if value.dtype not in PLAIN or value.device.type != "cpu":
        raise UsageError(
            f"{where}: holds {value.dtype} on {value.device}; expected a tensor of plain numbers"
        )


def as_numpy(tensor: torch.Tensor) -> Array:
    """The numbers of a tensor that `check_plain` lets pass; narrow floats as float32."""
    tensor = tensor.detach().resolve_neg()
    return (
        tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
    ).numpy()


def read_arrays(
    source: str,
    shapes: Mapping[str, tuple[int, ...]],
    mapping: Mapping[str, str],
    take: Callable[[str], Part],
) -> Iterator[Block]:
    chosen = choose(source, [name for name in shapes if name != "length"], mapping)
    for name in (*chosen.values(), *(n for n in ("length",) if n in shapes)):
        if len(shapes[name]) == 0:
            raise UsageError(f"{source}: column {name}: is a single number; expected an array")
    flat = "length" in shapes
    lengths = _lengths(source, shapes, chosen["tokens"], take)
    rows, ends = len(lengths), lengths.cumsum()
    total = int(ends[-1]) if rows else 0
    per_row = {}
    for ours, theirs in chosen.items():
        shape, per = shapes[theirs], COLUMNS[ours].per
        per_row[ours] = per == "row" or (per == "token or row" and shape == (rows,))
        expected = rows if per_row[ours] or not flat else total
        if flat and per == "router":
            expected = shape[0]  # any of [T, L, K] and flat: checked with the block
        if shape[0] != expected or (per_row[ours] and len(shape) > 1):
            wanted = f"[{expected}{', ...' if not flat and not per_row[ours] else ''}]"
            raise UsageError(f"{source}: column {theirs}: shape {list(shape)}, expected {wanted}")
    start = 0
    while start < rows:
        before = int(ends[start] - lengths[start])
        stop = max(start + 1, int(np.searchsorted(ends, before + BLOCK_TOKENS, side="right")))
        span = (before, int(ends[stop - 1]))
        raw = {}
        for ours, theirs in chosen.items():
            if per_row[ours]:
                raw[ours] = Ragged(take(theirs)(start, stop), None)
            elif flat:
                raw[ours] = _flat(
                    source, ours, take(theirs), shapes[theirs], span, total, lengths[start:stop]
                )
            else:
                part = take(theirs)(start, stop)
                width = part.size // (stop - start)
                raw[ours] = Ragged(part.reshape(-1), np.full(stop - start, width, np.int64))
        yield assemble(source, start, raw, stop / rows)
        start = stop


def _flat(
    source: str,
    name: str,
    part: Part,
    shape: tuple[int, ...],
    span: tuple[int, int],
    total: int,
    lengths: Array,
) -> Ragged:
    """Entries of some rows of a flat column; a router column has a fixed number of entries per token."""
    per_token, rest = divmod(shape[0], total) if total else (1, 0)
    if rest:
        raise UsageError(
            f"{source}: column {name}: {shape[0]} entries are not a multiple of {total} tokens"
        )
    values = part(span[0] * per_token, span[1] * per_token)
    each = values.size // max(1, span[1] - span[0])
    return Ragged(values.reshape(-1), lengths * each)


def _lengths(
    source: str, shapes: Mapping[str, tuple[int, ...]], tokens: str, take: Callable[[str], Part]
) -> Array:
    if "length" not in shapes:
        if len(shapes[tokens]) != 2:
            raise UsageError(
                f"{source}: column {tokens}: shape {list(shapes[tokens])}; expected [samples, tokens], or a flat array "
                "beside `length`, the number of tokens of each sample"
            )
        rows, width = shapes[tokens]
        if not rows * width:
            raise UsageError(f"{source}: column {tokens}: shape {[rows, width]} has no tokens")
        return np.full(rows, width, np.int64)
    lengths = take("length")(0, shapes["length"][0])
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths.astype(np.int64) < 0).any():
        raise UsageError(
            f"{source}: column length: expected whole numbers of at least 0, one per sample"
        )
    lengths = lengths.astype(np.int64)
    if lengths.astype(float).sum() != shapes[tokens][0]:
        raise UsageError(
            f"{source}: column length: sums to {lengths.sum()}, but {tokens} has {shapes[tokens][0]}"
        )
    return lengths
