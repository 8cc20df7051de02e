"""Micro-batches: the samples of each forward.

A group whose samples have no advantage is left out of the update (train.skip_zero_advantage). The
rewards of such a group are equal: it is solved by all samples, or by none. With a group baseline
and no other term in the loss its gradient is exactly 0. It is scored like the others, in
micro-batches that hold no other group: these need no graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import RunConfig
from onepolicy.train.pack import samples_of_groups
from onepolicy.train.shared_prompts import can_share, share_prompts
from onepolicy.types import TokenBatch

MicroBatches = list[list[int]]
"""Sample indices of each forward."""


class Batcher:
    """The micro-batches of a run, as its settings and its model allow."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, device: torch.device) -> None:
        self.budget, self.device = config.train.tokens_per_micro_batch, device
        self.skips_zero_advantage = config.skips_zero_advantage
        self.shares_prompts = can_share(model, config, device)
        """Forwards compute the common prefix of siblings once."""

    def micro_batches(self, batch: TokenBatch) -> MicroBatches:
        """Return the samples of each scoring forward."""
        if not self.skips_zero_advantage:
            return self._divide(batch)
        # A group baseline makes every slot's advantage its sample's outcome, which is known before
        # the scores.
        live = _of_groups(batch, batch.outcome != 0)
        found: MicroBatches = []
        for chosen in (live, ~live):
            samples: list[int] = chosen.nonzero()[:, 0].tolist()
            if samples:
                parts = self._divide(batch.select(samples))
                found += [[samples[index] for index in part] for part in parts]
        return found

    def updated(self, batch: TokenBatch) -> MicroBatches:
        """Return those of `micro_batches` that an update computes.

        They are all of them in a step in which no group has an advantage, so that the optimiser
        sees gradients of 0 and not none.
        """
        micro_batches = self.micro_batches(batch)
        if not self.skips_zero_advantage:
            return micro_batches
        live = batch.outcome != 0
        if batch.advantage is not None:
            live = _any_of(batch.advantage != 0, batch.segment, batch.num_samples)
        live = _of_groups(batch, live)
        return [samples for samples in micro_batches if live[samples].any()] or micro_batches

    def micro_batch(self, batch: TokenBatch, samples: list[int]) -> TokenBatch:
        """Return the micro-batch of these samples, on the model's device."""
        micro = batch.select(samples)
        if self.shares_prompts:
            micro = share_prompts(micro)
        return micro.to(self.device)

    def _divide(self, batch: TokenBatch) -> MicroBatches:
        if self.shares_prompts:
            return micro_batches_of_groups(batch, self.budget)
        return micro_batches(batch, self.budget)


def micro_batches(batch: TokenBatch, budget: int) -> MicroBatches:
    """Return the samples of each micro-batch, at most `budget` slots each.

    A single sample may exceed the budget: it then has a micro-batch of its own. Micro-batches are
    few and hold samples of similar length.
    """
    units = [[sample] for sample in range(batch.num_samples)]
    return first_fit(units, batch.cu_seqlens.diff().tolist(), budget)


def micro_batches_of_groups(batch: TokenBatch, budget: int) -> MicroBatches:
    """Return the samples of each micro-batch, siblings together where they fit.

    Groups are put, longest first, into the first micro-batch that has room for all of a group. A
    group that exceeds the budget is divided like a batch of its own.
    """
    if batch.num_slots <= budget:
        return [list(range(batch.num_samples))]
    units: list[list[int]] = []
    for samples in samples_of_groups(batch).values():
        parts = micro_batches(batch.select(samples), budget)
        units += [[samples[i] for i in part] for part in parts]
    return first_fit(units, batch.cu_seqlens.diff().tolist(), budget)


def first_fit(units: list[list[int]], lengths: list[int], budget: int) -> list[list[int]]:
    """Put units, longest first, into the first bin of `budget` slots that has room for all of one.

    units: samples that stay together. lengths: slots of every sample. A unit that exceeds the
    budget has a bin of its own. Returns the samples of each bin.
    """
    bins: list[list[int]] = []
    free_slots: list[int] = []
    for unit in sorted(units, key=lambda samples: -sum(lengths[s] for s in samples)):
        size = sum(lengths[s] for s in unit)
        fit = next((b for b, free in enumerate(free_slots) if size <= free), None)
        if fit is None:
            bins.append([])
            free_slots.append(budget)
            fit = len(bins) - 1
        bins[fit] += unit
        free_slots[fit] -= size
    return [sorted(samples) for samples in bins]


def _of_groups(batch: TokenBatch, samples: Tensor) -> Tensor:
    """Return [S] bool: whether a sample of the group is True in `samples` [S] bool."""
    _, group = batch.group.unique(return_inverse=True)
    return _any_of(samples, group, int(group.max()) + 1)[group]


def _any_of(values: Tensor, unit: Tensor, units: int) -> Tensor:
    """Return [units] bool: whether a value of the unit is True. values: bool, unit: its unit."""
    return (
        torch.zeros(units, dtype=torch.int64, device=unit.device).index_add(0, unit, values.long())
        > 0
    )
