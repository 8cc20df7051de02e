"""Prompts that the samples of a group share, computed once per forward (train.share_prompts).

Two slots have the same hidden states if they stand at the same position after the same tokens, and
replay routes all of them to the same experts. Siblings share their longest common prefix of tokens
and routes with the first sample of their group in the micro-batch.

A row of the forward holds every distinct slot once. A sample's path is its rows in order: first
those of the sample that it shares a prefix with, then its own. Only its own rows ask; all rows of
the path answer. So a prompt of a group is computed once, and its keys and values get the sum of the
gradients of all siblings.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from onepolicy.config import RunConfig
from onepolicy.config.replay import SoftReplay
from onepolicy.invariant.switch import is_invariant
from onepolicy.models.packed_attention import NAME, Causal, Packing, round_up
from onepolicy.models.prepare import recurrent_layers
from onepolicy.types import RoutingTrace, TokenBatch

LOG = logging.getLogger(__name__)
WORTH = 0.95
"""Prefixes are shared if at most this part of the slots is left: tables of places cost time too."""


@dataclass(frozen=True, slots=True)
class SharedSlots:
    """The rows of a forward that computes each distinct slot of a micro-batch once."""

    slots: Tensor  # [rows] int64, slot that the row computes
    row_of: Tensor  # [T] int64, row of every slot
    packing: SharedPacking


def can_share(model: PreTrainedModel, config: RunConfig, device: torch.device) -> bool:
    """Return whether forwards of this run may share prefixes.

    Not on a GPU, whose flash kernel takes whole samples, nor in soft replay, which measures over
    all slots, nor with recurrent layers, whose samples each begin with no state; that is logged.
    """
    attention = model.config.get_text_config()._attn_implementation
    wanted = (
        config.train.share_prompts
        and device.type == "cpu"
        and (attention == NAME or is_invariant(model))
        and not isinstance(config.replay, SoftReplay)
    )
    if wanted and recurrent_layers(model):
        LOG.warning(
            "train.share_prompts: %s has recurrent layers, so each sample is computed whole",
            type(model).__name__,
        )
        return False
    return wanted


def share_prompts(batch: TokenBatch, *, multiple: int = 1) -> TokenBatch:
    """Set `shared` of a micro-batch on the CPU, if its samples share enough.

    multiple: of the widths of tables in its attention.
    """
    paths, starts = [], []
    leaders: dict[int, int] = {}
    bounds, rows = batch.cu_seqlens.tolist(), 0
    for sample, group in enumerate(batch.group.tolist()):
        leader = leaders.setdefault(group, sample)
        length = bounds[sample + 1] - bounds[sample]
        start = 0
        if leader != sample:
            spans = [slice(bounds[s], bounds[s + 1]) for s in (leader, sample)]
            start = common_prefix(batch, *spans)
        own = torch.arange(rows, rows + length - start)
        paths.append(own)
        if start:
            paths[-1] = torch.cat([paths[leader][:start], own])
        starts.append(start)
        rows += len(own)
    if rows > WORTH * batch.num_slots:
        return batch
    row_of = torch.cat(paths)
    own_slots = [
        torch.arange(first + start, last)
        for first, last, start in zip(bounds[:-1], bounds[1:], starts, strict=True)
    ]
    packing = SharedPacking.of_paths(paths, starts, rows, multiple=multiple)
    return batch.replace(shared=SharedSlots(torch.cat(own_slots), row_of, packing))


def common_prefix(batch: TokenBatch, one: slice, other: slice) -> int:
    """Return how many first slots of two samples have equal tokens and equal routes."""
    length = min(one.stop - one.start, other.stop - other.start)
    one, other = (slice(span.start, span.start + length) for span in (one, other))
    equal = batch.input_ids[one] == batch.input_ids[other]
    for trace in (batch.routing, batch.routing_native):
        if trace is not None:
            equal &= _equal_routes(trace.at(one), trace.at(other))
    return int(equal.long().cumprod(0).sum())


def _equal_routes(one: RoutingTrace, other: RoutingTrace) -> Tensor:
    """Return which rows [T] bool of two traces are equal.

    Rows that both lack are: the trainer routes them itself, whatever their ids hold.
    """
    equal = one.valid == other.valid
    for a, b in ((one.ids, other.ids), (one.weights, other.weights)):
        if a is None or b is None:
            continue
        if a.dtype == torch.uint16:  # it has no comparison
            a, b = a.view(torch.int16), b.view(torch.int16)
        equal = equal & ((a == b).flatten(1).all(1) | ~one.valid)
    return equal


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

    shared: tuple[SharedBucket, ...]

    @classmethod
    def of_paths(
        cls, paths: list[Tensor], starts: list[int], num_rows: int, *, multiple: int = 1
    ) -> SharedPacking:
        """Return the packing of samples.

        paths: of each sample, the rows [slots] int64 of its slots. starts: how many of them are the
        rows of another sample. Every row is another sample's or one sample's own. Widths are a
        `multiple`.
        """
        buckets, own = [], []
        for members in _alike(paths, starts):
            alike, start = [paths[s] for s in members], starts[members[0]]
            bucket, rows = _bucket(alike, start, num_rows, multiple)
            buckets.append(bucket)
            own.append(rows)
        order = torch.argsort(torch.cat(own))
        bounds = torch.tensor([0, num_rows], dtype=torch.int32)
        return cls(order, bounds, num_rows, None, tuple(buckets))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: Causal) -> Tensor:
        """Return causal attention [1, rows, heads, D] of [1, heads, rows, D] along the paths."""
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [rows, heads, D]
        pieces = []
        for bucket in self.shared:
            tables = ((q, bucket.queries), (k, bucket.keys), (v, bucket.keys))
            parts = [_read(x, places, bucket.samples) for x, places in tables]
            attended = causal(*parts, start=bucket.start)
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


def _bucket(
    paths: list[Tensor], start: int, num_rows: int, multiple: int
) -> tuple[SharedBucket, Tensor]:
    """Return the bucket of samples, longest first, and the rows of its queries [n] int64."""
    asking = round_up(len(paths[0]) - start, multiple)
    keys = torch.full((len(paths), round_up(start + asking, multiple)), -1)
    for place, path in zip(keys, paths, strict=True):
        place[: len(path)] = path
    queries = keys[:, start : start + asking].flatten()
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
