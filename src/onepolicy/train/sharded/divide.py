"""Division of a batch over the ranks, into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from onepolicy.train.pack import micro_batches
from onepolicy.types import RoutingTrace, TokenBatch


@dataclass(frozen=True, slots=True)
class RankBatch:
    """One rank's samples of a batch.

    Every rank has the same number of rounds, because FSDP2 gathers parameters on all ranks at once.
    A rank without samples in a round computes a dummy sample.
    """

    samples: list[int]  # indices into the whole batch, in this order
    # micro-batches: indices into `batch`; the index one past `samples` is the dummy sample
    rounds: list[list[int]]
    batch: TokenBatch  # the samples, then the dummy sample if there is one


def divide_batch(batch: TokenBatch, budget: int, ranks: int) -> list[RankBatch]:
    """Divide the batch over the ranks.

    There are as few rounds as `budget` slots per micro-batch allow. In each round the ranks have
    about the same number of slots. A dummy sample has no trainable slot and no route.
    """
    assignment = assign_micro_batches(batch, budget, ranks)
    return [_rank_batch(batch, rounds) for rounds in assignment]


def assign_micro_batches(batch: TokenBatch, budget: int, ranks: int) -> list[list[list[int]]]:
    """Return [ranks][rounds]: the sample indices of each micro-batch.

    It is [] where a rank has no samples in a round. For one rank it is the same as `micro_batches`.
    """
    packed = micro_batches(batch, budget)
    if ranks == 1:
        return [packed]
    lengths = batch.cu_seqlens.diff().tolist()
    rounds = -(-len(packed) // ranks)
    bins = _balance(lengths, rounds * ranks, budget)
    if bins is None:  # balanced bins exceed the budget: keep the packed ones, and add empty ones
        bins = packed + [[] for _ in range(rounds * ranks - len(packed))]
    # sorted, so that the micro-batches of a round are about equally long
    bins.sort(key=lambda samples: -sum(lengths[s] for s in samples))
    assignment: list[list[list[int]]] = [[] for _ in range(ranks)]
    for r in range(rounds):
        order = list(range(ranks))
        if r % 2 == 1:
            order.reverse()
        for rank, samples in zip(order, bins[r * ranks : (r + 1) * ranks], strict=True):
            assignment[rank].append(samples)
    return assignment


def _balance(lengths: list[int], count: int, budget: int) -> list[list[int]] | None:
    """Put the samples into `count` bins with about the same number of slots.

    Each sample is put into the emptiest bin, the longest sample first. None if a bin of several
    samples would exceed `budget`.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for sample in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        emptiest = filled.index(min(filled))
        bins[emptiest].append(sample)
        filled[emptiest] += lengths[sample]
    if any(len(samples) > 1 and n > budget for samples, n in zip(bins, filled, strict=True)):
        return None
    return [sorted(samples) for samples in bins]


def _rank_batch(batch: TokenBatch, assigned: list[list[int]]) -> RankBatch:
    """Return the batch of one rank. assigned: the samples of each round."""
    samples = [sample for of_round in assigned for sample in of_round]
    index = {sample: i for i, sample in enumerate(samples)}
    dummy = [len(samples)]
    rounds = [[index[s] for s in of_round] or dummy for of_round in assigned]
    if all(assigned):
        return RankBatch(samples, rounds, batch.select(samples))
    shortest = int(batch.cu_seqlens.diff().argmin())
    return RankBatch(samples, rounds, _make_last_dummy(batch.select([*samples, shortest])))


def _make_last_dummy(batch: TokenBatch) -> TokenBatch:
    """Remove the last sample's trainable slots, routes and loss weights."""
    real = batch.segment < batch.num_samples - 1
    changed: dict[str, object] = {"trainable": batch.trainable & real}
    if batch.keep is not None:
        changed["keep"] = batch.keep & real
    if batch.loss_weight is not None:
        changed["loss_weight"] = torch.where(real, batch.loss_weight, 0.0)
    for name in ("routing", "routing_native"):
        trace = getattr(batch, name)
        if trace is not None:
            changed[name] = _keep_rows(trace, real)
    return batch.replace(**changed)


def _keep_rows(trace: RoutingTrace, kept: torch.Tensor) -> RoutingTrace:
    """Return the trace with only the rows of `kept` [T] bool valid."""
    rows = kept[:, None, None]
    weights = None
    if trace.weights is not None:
        weights = trace.weights * rows
    ids = (trace.ids.int() * rows).to(trace.ids.dtype)
    return RoutingTrace(ids, trace.valid & kept, trace.layers, trace.num_experts, (), weights)
