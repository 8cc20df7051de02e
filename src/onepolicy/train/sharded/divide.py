"""Division of a batch over the ranks, into micro-batches."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from onepolicy.train.pack import first_fit, samples_of_groups
from onepolicy.train.shared_prompts import common_prefix
from onepolicy.types import RoutingTrace, TokenBatch


@dataclass(frozen=True, slots=True)
class Sizes:
    """Slots of a batch's samples, and how many of them siblings share."""

    lengths: list[int]  # slots of each sample
    groups: list[int]  # group of each sample
    # first slots of each sample that siblings compute once for all of them; 0 without sharing
    prefixes: list[int]

    @classmethod
    def of(cls, batch: TokenBatch, *, share: bool) -> Sizes:
        """Return the sizes of a batch's samples. share: see `assign_micro_batches`."""
        prefixes = [0] * batch.num_samples
        if share:
            # without the trainer's own routes, which an update knows and its scoring did not:
            # both get the same division
            prefixes = _shared_prefixes(batch.replace(routing_native=None))
        return cls(batch.cu_seqlens.diff().tolist(), batch.group.tolist(), prefixes)

    def slots(self, samples: list[int]) -> int:
        return sum(self.lengths[s] for s in samples)

    def rows(self, samples: list[int]) -> int:
        """Return the rows that a micro-batch computes: its slots, less those shared."""
        rows, leaders = 0, dict[int, int]()
        for sample in samples:
            rows += self.lengths[sample]
            prefix, group = self.prefixes[sample], self.groups[sample]
            if group in leaders:
                rows -= min(prefix, leaders[group])
            leaders.setdefault(group, prefix)
        return rows


def assign_micro_batches(
    batch: TokenBatch, budget: int, ranks: int, *, share: bool = False
) -> list[list[list[int]]]:
    """Return [ranks][rounds]: the sample indices of each micro-batch.

    There are as few rounds as `budget` slots per micro-batch allow. In each the ranks have about
    the same number of slots; a rank without samples has []. For one rank without `share` it is the
    same as `micro_batches`.

    share: forwards compute the common prefix of siblings once, so siblings stay together where it
    pays. There are then several divisions: single samples, and groups in 1, 2, 4, ... pieces. The
    ranks get the one whose slowest ranks compute the fewest rows.
    """
    sizes = Sizes.of(batch, share=share)
    singles = [[sample] for sample in range(batch.num_samples)]
    divisions = [_deal(singles, sizes, budget, ranks)]
    if share:
        groups = list(samples_of_groups(batch).values())
        pieces, largest = 1, max(len(samples) for samples in groups)
        while pieces < largest:
            units = [unit for samples in groups for unit in _cut(samples, pieces, sizes, budget)]
            divisions.append(_deal(units, sizes, budget, ranks))
            pieces *= 2
    return min(divisions, key=lambda division: _slowest(division, sizes))


def _cut(samples: list[int], pieces: int, sizes: Sizes, budget: int) -> list[list[int]]:
    """Divide a group into this many pieces of about the same size, or more to fit the budget."""
    singles = [[sample] for sample in samples]
    even = _balance(singles, min(pieces, len(samples)), sizes, budget)
    return even or first_fit(singles, sizes.lengths, budget)


def _slowest(division: list[list[list[int]]], sizes: Sizes) -> int:
    """Return the rows that the slowest ranks of all rounds compute. They wait for each other."""
    return sum(max(map(sizes.rows, of_round)) for of_round in zip(*division, strict=True))


def _deal(units: list[list[int]], sizes: Sizes, budget: int, ranks: int) -> list[list[list[int]]]:
    """Return [ranks][rounds]: the samples of each micro-batch.

    units: samples that stay together.
    """
    packed = first_fit(units, sizes.lengths, budget)
    if ranks == 1:
        return [packed]
    rounds = -(-len(packed) // ranks)
    bins = _balance(units, rounds * ranks, sizes, budget)
    if bins is None:  # balanced bins exceed the budget: keep the packed ones, and add empty ones
        bins = packed + [[] for _ in range(rounds * ranks - len(packed))]
    # sorted, so that the micro-batches of a round are about equally long
    bins.sort(key=lambda samples: -sizes.rows(samples))
    assignment: list[list[list[int]]] = [[] for _ in range(ranks)]
    for r in range(rounds):
        order = list(range(ranks))
        if r % 2 == 1:
            order.reverse()
        for rank, samples in zip(order, bins[r * ranks : (r + 1) * ranks], strict=True):
            assignment[rank].append(samples)
    return assignment


def _balance(
    units: list[list[int]], count: int, sizes: Sizes, budget: int
) -> list[list[int]] | None:
    """Put the units into `count` bins that compute about the same number of rows.

    Each unit is put into the emptiest bin, the largest unit first. None if a bin of several
    samples would exceed `budget` slots.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for unit in sorted(units, key=lambda samples: -sizes.rows(samples)):
        emptiest = filled.index(min(filled))
        bins[emptiest] += unit
        filled[emptiest] += sizes.rows(unit)
    if any(len(samples) > 1 and sizes.slots(samples) > budget for samples in bins):
        return None
    return [sorted(samples) for samples in bins]


def idle_batch(batch: TokenBatch) -> TokenBatch:
    """Return the shortest sample, without trainable slots, routes and loss weights."""
    idle = batch.select([int(batch.cu_seqlens.diff().argmin())])
    changed: dict[str, object] = {"trainable": torch.zeros_like(idle.trainable)}
    for name in ("keep", "loss_weight"):
        value = getattr(idle, name)
        if value is not None:
            changed[name] = torch.zeros_like(value)
    for name in ("routing", "routing_native"):
        trace = getattr(idle, name)
        if trace is not None:
            changed[name] = _without_routes(trace)
    return idle.replace(**changed)


def _without_routes(trace: RoutingTrace) -> RoutingTrace:
    weights = None
    if trace.weights is not None:
        weights = torch.zeros_like(trace.weights)
    ids, valid = torch.zeros_like(trace.ids), torch.zeros_like(trace.valid)
    return RoutingTrace(ids, valid, trace.layers, trace.num_experts, (), weights)


def _shared_prefixes(batch: TokenBatch) -> list[int]:
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
