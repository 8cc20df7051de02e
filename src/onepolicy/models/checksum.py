"""Checksums of weights, computed with torch on their device, for two processes to compare.

Let w[i] be a tensor's bytes as 32-bit words and c[i] 64-bit coefficients. Each row of WIDTH words
is replaced by the sum of w[i] * c[i] modulo 2^64. The row sums are reduced in the same way until
one number is left. The arithmetic is integer only, so the CPU and every GPU agree.

Two different tensors have the same checksum with a probability of about 2^-31, over the choice of
the key that the coefficients are derived from (a multilinear hash; Carter and Wegman 1979). It is
not a cryptographic signature.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from onepolicy.config import TrainingError

WIDTH, LEVELS = 4096, 4  # words of 32 bits in a row, reductions: tensors of up to 2^48 words
CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Words reduced at a time, a multiple of WIDTH.

The products take twice the bytes of the words. On the CPU they should stay in its cache.
"""

ChecksumTable: TypeAlias = dict[str, list[Any]]
"""Name -> [dtype, shape, checksum], as JSON."""


@dataclass(slots=True)
class ChecksumAccumulator:
    """Collects the checksums of a stream of named tensors. key: must be the same on both sides."""

    key: bytes = b""
    _seen: set[str] = field(default_factory=set)
    _found: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Name -> (meta tensor of the same dtype and shape, checksum)."""
    _tables: dict[torch.device, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. Raises TrainingError if a tensor of this name was added before."""
        if name in self._seen:
            raise TrainingError(f"weight sync: {name!r} came twice")
        self._seen.add(name)
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._found[name] = like, self.checksum_of(tensor)

    def add_each(self, named_weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Add every tensor and yield it unchanged."""
        for name, tensor in named_weights:
            self.add(name, tensor)
            yield name, tensor

    def pop_all(self) -> ChecksumTable:
        """Return the checksums added since the last call. Waits for each device once."""
        found, self._found = self._found, {}
        if not found:
            return {}
        on_device: dict[torch.device, list[str]] = {}
        for name, (_, value) in found.items():
            on_device.setdefault(value.device, []).append(name)
        values: dict[str, int] = {}
        for names in on_device.values():
            read = torch.stack([found[name][1] for name in names]).tolist()
            values |= zip(names, read, strict=True)
        return {
            name: [str(like.dtype).removeprefix("torch."), list(like.shape), values[name]]
            for name, (like, _) in found.items()
        }

    @torch.no_grad()
    def checksum_of(self, tensor: Tensor) -> Tensor:
        """Return the checksum of a tensor's bytes, on its device: [] int64."""
        words = _as_words(tensor)
        if tensor.device not in self._tables:
            self._tables[tensor.device] = _make_coefficients(self.key).to(tensor.device)
        for coefficients in self._tables[tensor.device]:
            chunks = words.split(CHUNK.get(words.device.type, CHUNK["cuda"]))
            words = torch.cat([part for chunk in chunks for part in _row_sums(chunk, coefficients)])
            if len(words) <= 1:
                break
        return words.sum()


def weights_checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Return a checksum of named tensors: their names, dtypes, shapes and bytes."""
    sums = ChecksumAccumulator()
    for name, tensor in tensors:
        sums.add(name, tensor)
    return hashlib.sha256(json.dumps(sums.pop_all(), sort_keys=True).encode()).hexdigest()[:16]


def describe_difference(sent: ChecksumTable, received: ChecksumTable) -> str | None:
    """Return the first difference between two tables, by tensor name, or None if they are equal."""
    missing = sent.keys() - received.keys()
    if missing:
        return f"{len(missing)} tensors are missing, first {min(missing)!r}"
    unknown = received.keys() - sent.keys()
    if unknown:
        return f"{len(unknown)} tensors were never sent, first {min(unknown)!r}"
    for name, (dtype, shape, value) in sent.items():
        received_dtype, received_shape, received_value = received[name]
        if [received_dtype, received_shape] != [dtype, shape]:
            return f"{name!r} is {received_dtype} {received_shape}, sent was {dtype} {shape}"
        if received_value != value:
            return (
                f"the bytes of {name!r} are not those that were sent (checksum {received_value}, "
                f"sent {value})"
            )
    return None


def _make_coefficients(key: bytes) -> Tensor:
    """Return the coefficients of every level: [LEVELS, WIDTH] int64."""
    stream = hashlib.shake_128(b"onepolicy weights" + key).digest(8 * LEVELS * WIDTH)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).view(LEVELS, WIDTH)


def _as_words(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as [n] int32, padded with zeros."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    return data.view(torch.int32)


def _row_sums(words: Tensor, coefficients: Tensor) -> list[Tensor]:
    """Return the sums of the full rows and of the remainder; of no words at all, one zero."""
    full = len(words) // WIDTH * WIDTH
    rest = words[full:]
    sums = []
    if full:
        sums.append((words[:full].view(-1, WIDTH) * coefficients).sum(1))
    if len(rest) or not full:
        sums.append((rest * coefficients[: len(rest)]).sum()[None])
    return sums
