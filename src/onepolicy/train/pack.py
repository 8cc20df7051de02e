"""Packing: groups of samples -> one TokenBatch -> minibatches -> micro-batches, one a forward.

There is no padding, and no sample is ever split.

A group whose samples have no advantage is left out of the update (train.skip_zero_advantage). The
rewards of such a group are equal: it is solved by all samples, or by none. With a group baseline
and no other term in the loss its gradient is exactly 0. It is scored like the others, in
micro-batches that hold no other group: these need no graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import RunConfig, UsageError
from onepolicy.invariant.switch import TILE, is_invariant
from onepolicy.train.shared_prompts import can_share, share_prompts
from onepolicy.types import Group, Sample, TokenBatch, concat_given, merge_fingerprints

MicroBatches = list[list[int]]
"""Sample indices of each forward."""


def pack(groups: list[Group]) -> TokenBatch:
    """Pack all samples of a step into one batch on the CPU.

    Every sample must have its `outcome`. Either all samples have routes or none has. Raises
    UsageError.
    """
    samples = [sample for group in groups for sample in group.samples]
    _check_samples(samples)
    lengths = torch.tensor([len(s.tokens) - 1 for s in samples], dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    return TokenBatch(
        input_ids=torch.cat([s.tokens[:-1] for s in samples]).long(),
        target_ids=torch.cat([s.tokens[1:] for s in samples]).long(),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        cu_seqlens=torch.cat([zero, lengths.cumsum(0, dtype=torch.int32)]),
        segment=torch.arange(len(samples)).repeat_interleave(lengths),
        trainable=torch.cat([s.trainable for s in samples]),
        version=torch.cat([s.version for s in samples]),
        turn=torch.cat([s.turn for s in samples]),
        logp_rollout=torch.cat([s.logp_rollout.masked_fill(~s.trainable, 0.0) for s in samples]),
        temperature=torch.tensor([s.temperature for s in samples]),
        outcome=torch.tensor([_outcome(s) for s in samples], dtype=torch.float32),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.samples]),
        top_ids=_cat_top([s.top_ids for s in samples]),
        top_logp_rollout=_cat_top([_top_logp(s) for s in samples]),
        episode=torch.tensor([e for group in groups for e in group.episodes]),
        routing=concat_given([s.routing for s in samples]),
        support=concat_given([s.support for s in samples]),
        fingerprints=merge_fingerprints([s.fingerprints for s in samples]),
    )


def _check_samples(samples: list[Sample]) -> None:
    if not samples:
        raise UsageError("pack: no samples; the step collected nothing to train on")
    traces = [sample.routing for sample in samples if sample.routing is not None]
    if len({span.source == "reprefill" for trace in traces for span in trace.spans}) > 1:
        raise UsageError(
            "pack: some routes were recorded by the engine and others by a re-prefill; "
            "never mix them"
        )
    widths = {_num_top(sample) for sample in samples}
    if len(widths) > 1:
        raise UsageError(
            f"pack: samples carry different numbers of top log-probabilities: {sorted(widths)}"
        )


def _num_top(sample: Sample) -> int:
    """Return how many top log-probabilities a slot of the sample has."""
    if sample.top_ids is None:
        return 0
    return sample.top_ids.shape[1]


def _top_logp(sample: Sample) -> Tensor | None:
    """Return [slots, k] float32, 0 where not trainable; None if the sample has none."""
    if sample.top_logp_rollout is None:
        return None
    return sample.top_logp_rollout.masked_fill(~sample.trainable[:, None], 0.0)


def _cat_top(rows: list[Tensor | None]) -> Tensor | None:
    """Concatenate the rows. None if the first is None, because then all are."""
    if rows[0] is None:
        return None
    return torch.cat([each for each in rows if each is not None])


def _outcome(sample: Sample) -> float:
    assert sample.outcome is not None, "compute_outcomes() fills outcome"
    return sample.outcome


def samples_of_groups(batch: TokenBatch) -> dict[int, list[int]]:
    """Return the sample indices of each group."""
    groups: dict[int, list[int]] = {}
    for sample, group in enumerate(batch.group.tolist()):
        groups.setdefault(group, []).append(sample)
    return groups


def minibatches(batch: TokenBatch, count: int) -> list[list[int]]:
    """Return the sample indices of each optimiser step.

    Whole groups are dealt in order into `count` parts, whose numbers of groups differ by 1 at most.
    A step with fewer groups than `count` has one minibatch per group.
    """
    groups = batch.group.unique_consecutive().tolist()
    count = min(count, len(groups))  # dynamic sampling may find fewer groups than asked for
    samples_of, n = samples_of_groups(batch), len(groups)
    parts = [groups[n * i // count : n * (i + 1) // count] for i in range(count)]
    return [[sample for group in part for sample in samples_of[group]] for part in parts]


class Batcher:
    """The micro-batches of a run, as its settings and its model allow."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, device: torch.device) -> None:
        self.budget, self.device = config.train.tokens_per_micro_batch, device
        self.skips_zero_advantage = config.skips_zero_advantage
        self.shares_prompts = can_share(model, config, device)
        """Forwards compute the common prefix of siblings once."""
        self._multiple = TILE if is_invariant(model) else 1  # of the widths of attention's tables

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
            micro = share_prompts(micro, multiple=self._multiple)
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
