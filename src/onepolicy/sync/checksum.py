"""A checksum of weights, computed with torch where they lie, for two processes to compare.

Of a tensor's bytes as 32-bit words w[i], with 64-bit coefficients c[i]: sum of w[i] * c[i] modulo 2^64 over rows of
WIDTH words, the rows' sums folded in the same way until one is left. Integers only, so the CPU and every GPU agree. Two
tensors that differ have the same sum with a probability of about 2^-31, over the choice of the key that the
coefficients are made from (a multilinear hash; Carter and Wegman 1979). It is no cryptographic signature.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from onepolicy.config import TrainingError

WIDTH, LEVELS = 4096, 4  # of 32-bit words: tensors of up to 2^48
CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Words at a time: a multiple of WIDTH; the products take twice the bytes, on the CPU in its cache."""

Sums: TypeAlias = dict[str, list[Any]]
"""Name -> [dtype, shape, sum]; JSON."""


@dataclass(slots=True)
class Checksums:
    """Of tensors as they pass by. key: both sides must have the same."""

    key: bytes = b""
    _seen: set[str] = field(default_factory=set)
    _found: dict[str, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # name -> empty tensor like it, sum
    _tables: dict[torch.device, Tensor] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """TrainingError for a name that was there before."""
        if name in self._seen:
            raise TrainingError(f"weight sync: {name!r} came twice")
        self._seen.add(name)
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._found[name] = like, self.of(tensor)

    def passing(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, each added before it is handed on."""
        for name, tensor in weights:
            self.add(name, tensor)
            yield name, tensor

    def take(self) -> Sums:
        """Of all tensors since the last call. Waits for the device once."""
        found, self._found = self._found, {}
        values = torch.stack([value.cpu() for _, value in found.values()]).tolist() if found else []
        return {
            name: [str(like.dtype).removeprefix("torch."), list(like.shape), value]
            for (name, (like, _)), value in zip(found.items(), values, strict=True)
        }

    @torch.no_grad()
    def of(self, tensor: Tensor) -> Tensor:
        """Sum of one tensor's bytes: [] int64, on its device."""
        words = _words(tensor)
        if tensor.device not in self._tables:
            self._tables[tensor.device] = _coefficients(self.key).to(tensor.device)
        for table in self._tables[tensor.device]:
            chunks = words.split(CHUNK.get(words.device.type, CHUNK["cuda"]))
            words = torch.cat([part for chunk in chunks for part in _row_sums(chunk, table)])
            if len(words) <= 1:
                break
        return words.sum()


def difference(sent: Sums, found: Sums) -> str | None:
    """What is wrong with what was found, by name; None if it is what was sent."""
    if missing := sent.keys() - found.keys():
        return f"{len(missing)} tensors are missing, first {min(missing)!r}"
    if unknown := found.keys() - sent.keys():
        return f"{len(unknown)} tensors were never sent, first {min(unknown)!r}"
    for name, (dtype, shape, value) in sent.items():
        if found[name][:2] != [dtype, shape]:
            return f"{name!r} is {found[name][0]} {found[name][1]}, sent was {dtype} {shape}"
        if found[name][2] != value:
            return f"the bytes of {name!r} are not those that were sent (checksum {found[name][2]}, sent {value})"
    return None


def _coefficients(key: bytes) -> Tensor:
    """[LEVELS, WIDTH] int64"""
    stream = hashlib.shake_128(b"onepolicy weights" + key).digest(8 * LEVELS * WIDTH)
    return torch.frombuffer(bytearray(stream), dtype=torch.int64).view(LEVELS, WIDTH)


def _words(tensor: Tensor) -> Tensor:
    """The bytes as [n] int32, zeros after the last."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if data.numel() % 4 or data.storage_offset() % 4:
        data = torch.cat([data, data.new_zeros(-data.numel() % 4)])
    return data.view(torch.int32)


def _row_sums(words: Tensor, table: Tensor) -> list[Tensor]:
    full = len(words) // WIDTH * WIDTH
    rows = [(words[:full].view(-1, WIDTH) * table).sum(1)] if full else []
    rest = words[full:]
    return rows if full and not len(rest) else [*rows, (rest * table[: len(rest)]).sum()[None]]
