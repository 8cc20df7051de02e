"""Rewards -> one outcome per sample (needs siblings) -> one advantage per slot."""

from __future__ import annotations

import dataclasses
import math
import statistics

import torch

from onepolicy.config import GRPOConfig, UsageError
from onepolicy.types import Group, TokenBatch, Totals

STD_EPS = 1e-6


def outcomes(groups: list[Group], config: GRPOConfig) -> list[Group]:
    """The same groups, every sample's `outcome` set to its reward against its siblings'.

    normalise = std: (reward - mean) / (std + 1e-6), GRPO (DeepSeekMath section 4.1.2); std is the sample standard
    deviation (n - 1), as in TRL and verl; the paper does not say. none: reward - mean (Dr. GRPO).
    Equal rewards carry no signal: exactly 0, also for a group of one. Raises UsageError on a reward that is not finite.
    """
    return [_with_outcomes(group, divide=config.normalise == "std") for group in groups]


def _with_outcomes(group: Group, *, divide: bool) -> Group:
    rewards = [sample.reward for sample in group.samples]
    for index, reward in enumerate(rewards):
        if not math.isfinite(reward):
            where = f"problem {group.problem_id}, sample {index}"
            raise UsageError(f"{where}: reward is {reward}; the task's grader must return a finite number")
    if min(rewards) == max(rewards):
        values = [0.0] * len(rewards)
    else:
        mean = statistics.fmean(rewards)
        scale = statistics.stdev(rewards) + STD_EPS if divide else 1.0
        values = [(reward - mean) / scale for reward in rewards]
    samples = (dataclasses.replace(s, outcome=v) for s, v in zip(group.samples, values, strict=True))
    return dataclasses.replace(group, samples=tuple(samples))


def credit(batch: TokenBatch, config: GRPOConfig) -> TokenBatch:
    """Set `advantage`: GRPO gives each trainable slot the outcome of its sample; the other slots get 0."""
    match config:
        case GRPOConfig():
            return batch.replace(advantage=torch.where(batch.trainable, batch.outcome[batch.segment], 0.0))


def totals(batch: TokenBatch) -> Totals:
    """Counts of a whole optimiser step, before anything is rejected."""
    return Totals(
        slots=int(batch.trainable.sum()),
        samples=batch.num_samples,
        groups=len(batch.group.unique()),
    )
