"""Prompts that the samples of a group share, computed once per forward (train.share_prompts).

Two slots have the same hidden states if they stand at the same position after the same tokens, and
replay routes all of them to the same experts. Siblings share their longest common prefix of tokens
and routes with the first sample of their group in the micro-batch.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import RunConfig
from onepolicy.config.replay import SoftReplay
from onepolicy.invariant.switch import is_invariant
from onepolicy.models.packed_attention import NAME
from onepolicy.models.shared_packing import SharedPacking
from onepolicy.types import RoutingTrace, TokenBatch

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

    Not on a GPU, whose flash kernel takes whole samples, nor with invariant operators, whose
    attention has its own packing, nor in soft replay, which measures over all slots.
    """
    attention = model.config.get_text_config()._attn_implementation
    return (
        config.train.share_prompts
        and device.type == "cpu"
        and attention == NAME
        and not is_invariant(model)
        and not isinstance(config.replay, SoftReplay)
    )


def share_prompts(batch: TokenBatch) -> TokenBatch:
    """Set `shared` of a micro-batch on the CPU, if its samples share enough."""
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
    packing = SharedPacking.of_paths(paths, starts, rows)
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


def shared_prefixes(batch: TokenBatch) -> list[int]:
    """Return how many first slots each sample could share with the first sample of its group.

    It is all of them for that first sample.
    """
    bounds = batch.cu_seqlens.tolist()
    spans = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    leaders: dict[int, int] = {}
    return [
        common_prefix(batch, spans[leaders.setdefault(group, sample)], spans[sample])
        for sample, group in enumerate(batch.group.tolist())
    ]


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
