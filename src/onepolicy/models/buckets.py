"""Packed samples of similar length in one padded table: attention where no flash kernel is.

Inside a bucket, keys and queries are padded on the right. The causal mask hides that padding, so no
other mask is built. Nothing outside this file is padded.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onepolicy.models.packed_attention import Causal, Packing, round_up
from onepolicy.models.recurrent.segments import Segments


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples padded to one width, as samples * width places for n slots."""

    samples: int
    width: int
    pad: Tensor  # [samples * width] int64, slot of each place; 0 for padding
    used: Tensor  # [samples * width] bool, False for padding
    slots: Tensor  # [n] int64, slots in this bucket, in the order of their places
    places: Tensor  # [n] int64, place of each of them


@dataclass(frozen=True, slots=True)
class BucketedPacking(Packing):
    """The samples of a packed row, in buckets."""

    buckets: tuple[Bucket, ...]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: Causal) -> Tensor:
        """Return causal attention of every bucket, put together again."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        pieces = []
        for bucket in self.buckets:
            shape = (bucket.samples, bucket.width)
            parts = [_Pad.apply(x, bucket).unflatten(0, shape).transpose(1, 2) for x in (q, k, v)]
            attended = causal(*parts)  # [S, heads, W, D]
            pieces.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.places))
        out = pieces[0]
        if len(pieces) > 1:
            out = torch.cat(pieces)
        if self.order is not None:
            out = out[self.order]
        return out[None]

    @classmethod
    def of(cls, cu_seqlens: Tensor, device: torch.device, *, multiple: int = 1) -> BucketedPacking:
        """Return the packing of the samples that begin at `cu_seqlens` [S + 1].

        No bucket is more than twice as wide as its shortest sample. Widths are a `multiple`.
        """
        pairs = itertools.pairwise(cu_seqlens.tolist())
        spans = sorted(((end - start, start) for start, end in pairs), reverse=True)
        buckets, first = [], 0
        for i in range(1, len(spans) + 1):
            if i == len(spans) or spans[i][0] * 2 < spans[first][0]:
                buckets.append(_bucket(spans[first:i], multiple, device))
                first = i
        slots = torch.cat([bucket.slots for bucket in buckets])
        order = None
        if not bool((slots[1:] > slots[:-1]).all()):
            order = torch.argsort(slots)
        bounds = cu_seqlens.to(device, torch.int32)
        segments = Segments(tuple(cu_seqlens.diff().tolist()), device)
        return cls(order, bounds, spans[0][0], segments, tuple(buckets))


def _bucket(spans: list[tuple[int, int]], multiple: int, device: torch.device) -> Bucket:
    """Return the bucket of samples, given as (length, first slot), longest first."""
    width = round_up(spans[0][0], multiple)
    lengths = torch.tensor([length for length, _ in spans])
    starts = torch.tensor([start for _, start in spans])
    column = torch.arange(width)
    used = (column < lengths[:, None]).flatten()
    pad = torch.where(used, (starts[:, None] + column).flatten(), 0)
    places = used.nonzero()[:, 0]
    return Bucket(len(spans), width, *(t.to(device) for t in (pad, used, pad[places], places)))


class _Pad(torch.autograd.Function):
    """The padding of slots [T, ...] to places [samples * width, ...].

    Forward and backward are gathers, because every slot has exactly one place.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bucket: Bucket) -> Tensor:
        ctx.bucket, ctx.slots = bucket, len(x)
        return x.index_select(0, bucket.pad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_zeros(ctx.slots, *grad.shape[1:])
        return out.index_copy_(0, ctx.bucket.slots, grad.index_select(0, ctx.bucket.places)), None
