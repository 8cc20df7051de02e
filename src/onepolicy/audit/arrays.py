"""Dumps made of arrays: NPZ, safetensors, .pt. Either padded, [S, T], or flat [sum of length] with `length` [S].

Safetensors is read in slices; NPZ and .pt are held in memory whole. Nothing is unpickled beyond tensors.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from onepolicy.audit.check import assemble
from onepolicy.audit.schema import COLUMNS, Array, Block, Ragged, choose
from onepolicy.config import UsageError

BLOCK_TOKENS = 2**18
Part = Callable[[int, int], Array]  # entries [start, stop) of the first axis


def read_npz(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    broken = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("a single array")
            names = [*choose(str(path), file.files, mapping).values(), *(n for n in ("length",) if n in file.files)]
            arrays = {name: file[name] for name in names}
    except UsageError:
        raise
    except (*broken, ValueError, KeyError, SyntaxError) as error:
        raise UsageError(f"{path}: not a readable NPZ file of plain arrays ({str(error)[:160]})") from None
    yield from read_arrays(str(path), {name: array.shape for name, array in arrays.items()}, mapping, _of(arrays))


def read_safetensors(path: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}

            def take(name: str) -> Part:
                return lambda start, stop: as_numpy(slices[name][start:stop])

            yield from read_arrays(str(path), shapes, mapping, take)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not a readable safetensors file ({str(error)[:160]})") from None


def load_pt(path: Path) -> dict[Any, Any]:
    """A torch.save file of a dict. torch.load runs no code with weights_only=True; what it refuses, we do."""
    damaged = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, KeyError, IndexError)
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (*damaged, TypeError, AttributeError, AssertionError) as error:
        reason = (str(error).splitlines() or [""])[0][:160]
        raise UsageError(f"{path}: not tensors only, or damaged ({reason}); write it as safetensors") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: holds {type(found).__name__}; expected a dict of tensors by column")
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
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided:
            raise UsageError(f"{path}: column {name}: holds {type(value).__name__}; expected a dense tensor")
    arrays = {name: as_numpy(value) for name, value in tensors.items()}
    yield from read_arrays(str(path), {name: array.shape for name, array in arrays.items()}, mapping, _of(arrays))


def _of(arrays: Mapping[str, Array]) -> Callable[[str], Part]:
    return lambda name: lambda start, stop: arrays[name][start:stop]


def as_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach()
    return (tensor.float() if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor).numpy()


def read_arrays(
    source: str, shapes: Mapping[str, tuple[int, ...]], mapping: Mapping[str, str], take: Callable[[str], Part]
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
                raw[ours] = _flat(source, ours, take(theirs), shapes[theirs], span, total, lengths[start:stop])
            else:
                part = take(theirs)(start, stop)
                width = part.size // (stop - start)
                raw[ours] = Ragged(part.reshape(-1), np.full(stop - start, width, np.int64))
        yield assemble(source, start, raw, stop / rows)
        start = stop


def _flat(
    source: str, name: str, part: Part, shape: tuple[int, ...], span: tuple[int, int], total: int, lengths: Array
) -> Ragged:
    """Entries of some rows of a flat column; a router column has a fixed number of entries per token."""
    per_token, rest = divmod(shape[0], total) if total else (1, 0)
    if rest:
        raise UsageError(f"{source}: column {name}: {shape[0]} entries are not a multiple of {total} tokens")
    values = part(span[0] * per_token, span[1] * per_token)
    each = values.size // max(1, span[1] - span[0])
    return Ragged(values.reshape(-1), lengths * each)


def _lengths(source: str, shapes: Mapping[str, tuple[int, ...]], tokens: str, take: Callable[[str], Part]) -> Array:
    if "length" not in shapes:
        if len(shapes[tokens]) != 2:
            raise UsageError(
                f"{source}: column {tokens}: shape {list(shapes[tokens])}; expected [samples, tokens], or a flat array "
                "beside `length`, the number of tokens of each sample"
            )
        return np.full(shapes[tokens][0], shapes[tokens][1], np.int64)
    lengths = take("length")(0, shapes["length"][0])
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths.astype(np.int64) < 0).any():
        raise UsageError(f"{source}: column length: expected whole numbers of at least 0, one per sample")
    lengths = lengths.astype(np.int64)
    if lengths.astype(float).sum() != shapes[tokens][0]:
        raise UsageError(f"{source}: column length: sums to {lengths.sum()}, but {tokens} has {shapes[tokens][0]}")
    return lengths
