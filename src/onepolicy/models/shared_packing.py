"""Packed attention in which samples share the slots of a common prefix.

A row holds every distinct slot once. A sample's path is its rows in order: first those of the
sample that it shares a prefix with, then its own. Only its own rows ask; all rows of the path
answer. So a prompt of a group is computed once, and its keys and values get the sum of the
gradients of all siblings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onepolicy.models.packed_attention import Packing, causal_attention


@dataclass(frozen=True, slots=True)
class Places:
    """A table of places, each of which reads a row."""

    rows: Tensor  # [places] int64, row that the place reads; 0 for padding
    readers: Tensor  # [n] int64, places that are not padding, in the order of their rows
    offsets: Tensor  # [rows of the batch] int64, first of each row's readers


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """Samples whose first `start` rows belong to others, as tables of one width."""

    samples: int
    start: int  # key at which the first query stands
    queries: Places  # [samples * width]
    keys: Places  # [samples * (start + width)]
    used: Tensor  # [n] int64, places of `queries` that are not padding


@dataclass(frozen=True, slots=True)
class SharedPacking(Packing):
    """A packing whose `order` maps each row to its place in the results of all `shared` buckets."""

    shared: tuple[SharedBucket, ...] = ()

    @classmethod
    def of_paths(cls, paths: list[Tensor], starts: list[int], num_rows: int) -> SharedPacking:
        """Return the packing of samples.

        paths: of each sample, the rows [slots] int64 of its slots. starts: how many of them are the
        rows of another sample. Every row is another sample's or one sample's own.
        """
        buckets, own = [], []
        for members in _alike(paths, starts):
            bucket, rows = _bucket([paths[s] for s in members], starts[members[0]], num_rows)
            buckets.append(bucket)
            own.append(rows)
        order = torch.argsort(torch.cat(own))
        bounds = torch.tensor([0, num_rows], dtype=torch.int32)
        return cls((), order, bounds, num_rows, tuple(buckets))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Return causal attention [1, rows, heads, D] of [1, heads, rows, D] along the paths."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [rows, heads, D]
        pieces = []
        for bucket in self.shared:
            tables = ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
            parts = [_read(x, places, bucket.samples) for x, places in tables]
            attended = causal_attention(*parts, start=bucket.start, **options)
            pieces.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.used))
        return torch.cat(pieces)[self.order][None]


def _alike(paths: list[Tensor], starts: list[int]) -> list[list[int]]:
    """Return the samples of each bucket: of one start, none more than twice as long as another.

    A sample without a row of its own is in none.
    """
    own = [len(path) - start for path, start in zip(paths, starts, strict=True)]
    buckets: list[list[int]] = []
    for sample in sorted(range(len(paths)), key=lambda s: (starts[s], -own[s])):
        if not own[sample]:
            continue
        first = buckets[-1][0] if buckets else sample
        if not buckets or starts[first] != starts[sample] or own[sample] * 2 < own[first]:
            buckets.append([])
        buckets[-1].append(sample)
    return buckets


def _bucket(paths: list[Tensor], start: int, num_rows: int) -> tuple[SharedBucket, Tensor]:
    """Return the bucket of samples, longest first, and the rows of its queries [n] int64."""
    width = len(paths[0])
    keys = torch.full((len(paths), width), -1)
    for place, path in zip(keys, paths, strict=True):
        place[: len(path)] = path
    queries = keys[:, start:].flatten()
    used = (queries >= 0).nonzero()[:, 0]
    of_queries, of_keys = (_places(rows, num_rows) for rows in (queries, keys.flatten()))
    return SharedBucket(len(paths), start, of_queries, of_keys, used), queries[used]


def _places(rows: Tensor, num_rows: int) -> Places:
    """Return the places that read these rows, -1 for padding."""
    readers = torch.argsort(rows, stable=True)[int((rows < 0).sum()) :]
    counts = torch.bincount(rows[readers], minlength=num_rows)
    return Places(rows.clamp(min=0), readers, counts.cumsum(0) - counts)


def _read(x: Tensor, places: Places, samples: int) -> Tensor:
    """Return [samples, heads, width, D] of the rows x [rows, heads, D] that the places read."""
    read: Tensor = _Read.apply(x, places)
    return read.unflatten(0, (samples, -1)).transpose(1, 2)


class _Read(torch.autograd.Function):
    """A gather of rows, whose backward adds up the gradients of all places that read a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x.index_select(0, places.rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        places = ctx.places
        # a sum over the bag of each row's readers, in the order of the places
        added = F.embedding_bag(places.readers, grad.flatten(1), places.offsets, mode="sum")
        return added.view(-1, *grad.shape[1:]), None
