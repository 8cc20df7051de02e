"""Which rank computes which samples of a batch, and in which micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onepolicy.train.pack import micro_batches
from onepolicy.types import RoutingTrace, TokenBatch


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's samples of a batch. Every rank has the same number of rounds, because FSDP2 gathers in step."""

    samples: list[int]  # of the whole batch, in this order
    rounds: list[
        list[int]
    ]  # indices into the part: the micro-batches; one index past `samples` is the idle sample
    batch: TokenBatch  # the part, the idle sample last if there is one

    @property
    def idle(self) -> bool:
        return self.batch.num_samples > len(self.samples)


def divide_batch(batch: TokenBatch, budget: int, ranks: int) -> list[RankBatch]:
    """The batch over `ranks`: as few rounds as `budget` slots per micro-batch allow, balanced by slots in each round.

    A rank with nothing to do in a round computes an idle sample, which has no trainable slot and no route.
    """
    rounds = assign_micro_batches(batch, budget, ranks)
    return [_part(batch, mine) for mine in rounds]


def assign_micro_batches(batch: TokenBatch, budget: int, ranks: int) -> list[list[list[int]]]:
    """[ranks][rounds]: sample indices of each micro-batch; [] where a rank is idle. One rank: as `micro_batches`."""
    packed = micro_batches(batch, budget)
    if ranks == 1:
        return [packed]
    lengths = batch.cu_seqlens.diff().tolist()
    rounds = -(-len(packed) // ranks)
    bins = _spread(lengths, rounds * ranks, budget)
    if bins is None:  # levelled out they do not fit: as they were packed, and empty ones
        bins = packed + [[] for _ in range(rounds * ranks - len(packed))]
    bins.sort(
        key=lambda chosen: -sum(lengths[s] for s in chosen)
    )  # those of a round are about equally long
    dealt: list[list[list[int]]] = [[] for _ in range(ranks)]
    for r in range(rounds):
        order = range(ranks) if r % 2 == 0 else reversed(range(ranks))
        for rank, chosen in zip(order, bins[r * ranks : (r + 1) * ranks], strict=True):
            dealt[rank].append(chosen)
    return dealt


def _spread(lengths: list[int], count: int, budget: int) -> list[list[int]] | None:
    """Samples in `count` bins of about the same number of slots: the longest first, each into the emptiest bin.

    None if a bin of several samples would hold more than `budget`.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for sample in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        emptiest = filled.index(min(filled))
        bins[emptiest].append(sample)
        filled[emptiest] += lengths[sample]
    if any(len(chosen) > 1 and slots > budget for chosen, slots in zip(bins, filled, strict=True)):
        return None
    return [sorted(chosen) for chosen in bins]


def _part(batch: TokenBatch, mine: list[list[int]]) -> RankBatch:
    samples = [sample for chosen in mine for sample in chosen]
    place = {sample: i for i, sample in enumerate(samples)}
    rounds = [[place[s] for s in chosen] if chosen else [len(samples)] for chosen in mine]
    if all(mine):
        return RankBatch(samples, rounds, batch.select(samples))
    shortest = int(batch.cu_seqlens.diff().argmin())
    return RankBatch(samples, rounds, _idle_last(batch.select([*samples, shortest])))


def _idle_last(batch: TokenBatch) -> TokenBatch:
    """The last sample counts for nothing: no trainable slot, no routes, no share in the loss."""
    real = batch.segment < batch.num_samples - 1
    changed: dict[str, object] = {"trainable": batch.trainable & real}
    if batch.keep is not None:
        changed["keep"] = batch.keep & real
    if batch.loss_weight is not None:
        changed["loss_weight"] = torch.where(real, batch.loss_weight, 0.0)
    for name in ("routing", "routing_native"):
        if (trace := getattr(batch, name)) is not None:
            changed[name] = _without(trace, real)
    return batch.replace(**changed)


def _without(trace: RoutingTrace, real: torch.Tensor) -> RoutingTrace:  # real [T] bool
    rows = real[:, None, None]
    weights = None if trace.weights is None else trace.weights * rows
    ids = (trace.ids.int() * rows).to(trace.ids.dtype)
    return RoutingTrace(ids, trace.valid & real, trace.layers, trace.num_experts, (), weights)
