"""Groups of samples -> one packed TokenBatch -> micro-batches and mini-steps. No padding, no sample ever split."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.types import Group, RoutingTrace, TokenBatch, merge_fingerprints


def pack(groups: list[Group]) -> TokenBatch:
    """The whole step as one batch on the CPU. Every sample has its `outcome`; routes are all there or none is."""
    samples = [sample for group in groups for sample in group.samples]
    if not samples:
        raise UsageError("pack: no samples; the step collected nothing to train on")
    lengths = torch.tensor([len(s.tokens) - 1 for s in samples], dtype=torch.int32)
    missing = [i for i, s in enumerate(samples) if s.routing is None]
    if missing and len(missing) < len(samples):
        raise UsageError(
            f"pack: sample {missing[0]} has no routes while others do; a trace is never made up"
        )
    if (
        len(
            {
                span.source == "reprefill"
                for s in samples
                if s.routing is not None
                for span in s.routing.spans
            }
        )
        > 1
    ):
        raise UsageError(
            "pack: some routes were recorded by the engine and others by a re-prefill; never mix them"
        )
    widths = {None if s.top_ids is None else s.top_ids.shape[1] for s in samples}
    if len(widths) > 1:
        raise UsageError(
            f"pack: samples carry different numbers of top log-probabilities: {widths}"
        )
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
        outcome=torch.tensor([_outcome(s.outcome) for s in samples], dtype=torch.float32),
        group=torch.tensor([g for g, group in enumerate(groups) for _ in group.samples]),
        top_ids=_joined([s.top_ids for s in samples]),
        top_logp_rollout=_joined(
            [
                None
                if s.top_logp_rollout is None
                else s.top_logp_rollout.masked_fill(~s.trainable[:, None], 0.0)
                for s in samples
            ]
        ),
        episode=torch.tensor([e for group in groups for e in group.episodes]),
        routing=None
        if missing
        else RoutingTrace.concat([s.routing for s in samples if s.routing is not None]),
        fingerprints=merge_fingerprints([s.fingerprints for s in samples]),
    )


def _joined(rows: list[Tensor | None]) -> Tensor | None:
    """All of them one after the other; None if the first is, as then all are."""
    return None if rows[0] is None else torch.cat([each for each in rows if each is not None])


def _outcome(value: float | None) -> float:
    assert value is not None, "compute_outcomes runs before pack"
    return value


def micro_batches(batch: TokenBatch, budget: int) -> list[list[int]]:
    """Sample indices of each micro-batch, at most `budget` slots each (one sample alone may exceed it).

    First-fit over samples sorted by length, so micro-batches are few and hold samples of similar length.
    """
    lengths = batch.cu_seqlens.diff().tolist()
    bins: list[list[int]] = []
    room: list[int] = []
    for sample in sorted(range(len(lengths)), key=lambda s: -lengths[s]):
        fit = next((b for b, free in enumerate(room) if lengths[sample] <= free), None)
        if fit is None:
            bins.append([])
            room.append(budget)
            fit = len(bins) - 1
        bins[fit].append(sample)
        room[fit] -= lengths[sample]
    return [sorted(chosen) for chosen in bins]


def minibatches(batch: TokenBatch, parts: int) -> list[list[int]]:
    """Sample indices of each optimiser step: whole groups, dealt in order into `parts` equal runs."""
    groups = batch.group.unique_consecutive().tolist()
    parts = min(parts, len(groups))  # dynamic sampling may find fewer groups than asked for
    per_part = len(groups) // parts
    of_group: dict[int, list[int]] = {}
    for sample, group in enumerate(batch.group.tolist()):
        of_group.setdefault(group, []).append(sample)
    runs = [groups[p * per_part : (p + 1) * per_part] for p in range(parts - 1)] + [
        groups[(parts - 1) * per_part :]
    ]
    return [[sample for group in run for sample in of_group[group]] for run in runs]
