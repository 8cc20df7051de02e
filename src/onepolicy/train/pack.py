"""Packing: groups of samples -> one TokenBatch -> minibatches.

There is no padding, and no sample is ever split.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.support.trace import SupportTrace
from onepolicy.types import Group, RoutingTrace, Sample, TokenBatch, merge_fingerprints


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
        routing=_cat_routes(samples),
        support=SupportTrace.concat_if_given([s.support for s in samples]),
        fingerprints=merge_fingerprints([s.fingerprints for s in samples]),
    )


def _check_samples(samples: list[Sample]) -> None:
    if not samples:
        raise UsageError("pack: no samples; the step collected nothing to train on")
    missing = [i for i, sample in enumerate(samples) if sample.routing is None]
    if missing and len(missing) < len(samples):
        raise UsageError(
            f"pack: sample {missing[0]} has no routes while others do; a trace is never made up"
        )
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


def _cat_routes(samples: list[Sample]) -> RoutingTrace | None:
    """Concatenate the routes. None if the samples have none."""
    traces = [sample.routing for sample in samples if sample.routing is not None]
    if not traces:
        return None
    return RoutingTrace.concat(traces)


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

    Whole groups are dealt in order into `count` equal parts; the last part also has the remainder.
    A step with fewer groups than `count` has one minibatch per group.
    """
    groups = batch.group.unique_consecutive().tolist()
    count = min(count, len(groups))  # dynamic sampling may find fewer groups than asked for
    size = len(groups) // count
    samples_of = samples_of_groups(batch)
    starts = [size * i for i in range(count)]
    parts = [groups[start : start + size] for start in starts[:-1]] + [groups[starts[-1] :]]
    return [[sample for group in part for sample in samples_of[group]] for part in parts]
