"""Rewards -> one outcome per sample (needs siblings) -> one advantage per slot."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.objective.gae import gae, returns_to_go
from onepolicy.objective.surrogate import kl_estimate
from onepolicy.types import Group, TokenBatch

STD_EPS = 1e-6
WHITEN_EPS = 1e-8
SAME_REWARD = 2.0**-21
"""Values that differ by no more than this, relative to the larger one, are the same: a few roundings of float32, in
which many reward models answer and rewards are summed. A grader that tells answers apart does so by more."""
SAME_NEAR_ZERO = 1e-12
"""The same for values around 0, where what is left of a sum such as 0.3 - 0.2 - 0.1 has no size of its own [reward]."""


def equal_up_to_rounding(least: Tensor, most: Tensor) -> Tensor:
    """[...] bool: nothing but rounding lies between the smallest and the largest of some values, which may be rewards.

    False where one of them is not finite.
    """
    apart = (most - least).abs()
    size = torch.maximum(least.abs(), most.abs())
    return apart.isfinite() & (apart <= (SAME_REWARD * size).clamp(min=SAME_NEAR_ZERO))


def has_signal(group: Group) -> bool:
    """Whether its rewards differ: a group solved by all or by none has no advantage (DAPO eq. 11)."""
    rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
    return not bool(equal_up_to_rounding(rewards.min(), rewards.max()))


def compute_outcomes(
    groups: list[Group], config: ObjectiveConfig, *, max_tokens: int = 0
) -> list[Group]:
    """The same groups, every sample's `outcome` set: its shaped reward, against its siblings' if the baseline is one.

    With kl.where = reward the comparison waits for log-probabilities (`compute_advantages`). `max_tokens`: of a response, for
    overlong shaping. Raises UsageError on a reward that is not finite.
    """
    for group in groups:
        for index, sample in enumerate(group.samples):
            if not math.isfinite(sample.reward):
                where = f"problem {group.problem_id}, sample {index}"
                raise UsageError(
                    f"{where}: reward is {sample.reward}; the task's grader must return a finite number"
                )
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    if config.overlong_buffer:
        lengths = torch.tensor([s.response_length for s in samples])
        rewards = rewards + config.overlong_penalty * overlong_reward(
            lengths, max_tokens=max_tokens, buffer=config.overlong_buffer * max_tokens
        )
    if config.kl.where == "loss":
        unit = torch.tensor([g for g, group in enumerate(groups) for _ in group.samples])
        rewards = apply_group_baseline(
            rewards,
            unit,
            config,
            episode=torch.tensor([e for group in groups for e in group.episodes]),
        )
    values = iter(rewards.tolist())
    return [
        dataclasses.replace(
            group,
            samples=tuple(dataclasses.replace(s, outcome=next(values)) for s in group.samples),
        )
        for group in groups
    ]


def overlong_reward(length: Tensor, *, max_tokens: int, buffer: float) -> Tensor:
    """[S] float64 in [-1, 0]: 0 up to max_tokens - buffer, then linear down to -1 at max_tokens (DAPO eq. 13)."""
    return ((max_tokens - buffer - length.double()) / buffer).clamp(-1, 0)


def apply_group_baseline(
    reward: Tensor,  # [S] float64
    group: Tensor,  # [S] int64
    config: ObjectiveConfig,
    *,
    episode: Tensor | None = None,  # [S] int64, of each sample within its group; None: each its own
) -> Tensor:
    """[S] float64: each reward against its group's, as `baseline` and `normalise` say.

    Several samples of one episode count once, by the reward of the first.

    group: R - mean, GRPO (DeepSeekMath section 4.1.2) with normalise = std: / (std + 1e-6), the sample standard
    deviation (n - 1) as in TRL and verl, the paper does not say. leave-one-out: R - mean of the others (RLOO,
    2402.14740 eq. 7). Equal rewards (`equal_up_to_rounding`) carry no signal: exactly 0, also for a group of one. none, critic: R.
    """
    if config.baseline in ("none", "critic"):
        return reward
    _, unit = group.unique(return_inverse=True)
    units = int(unit.max()) + 1
    zeros = reward.new_zeros(units)
    counts = (
        torch.ones_like(reward) if episode is None else _first_of_each(unit, episode).double()
    )  # [S] 1 or 0
    count = zeros.index_add(0, unit, counts)
    centred = reward - (zeros.index_add(0, unit, counts * reward) / count)[unit]
    least = zeros.scatter_reduce(0, unit, reward, "amin", include_self=False)
    most = zeros.scatter_reduce(0, unit, reward, "amax", include_self=False)
    others = (count - 1).clamp(min=1)
    if config.baseline == "leave-one-out":
        centred = centred * (count / others)[unit]
    elif config.normalise == "std":
        std = (zeros.index_add(0, unit, counts * centred.square()) / others).sqrt()
        centred = centred / (std + STD_EPS)[unit]
    return torch.where(equal_up_to_rounding(least, most)[unit], 0.0, centred)


def _first_of_each(unit: Tensor, episode: Tensor) -> Tensor:  # [S] bool
    _, which = torch.stack([unit, episode]).unique(dim=1, return_inverse=True)
    order = torch.arange(len(which))
    first = torch.full((int(which.max()) + 1,), len(which)).scatter_reduce(0, which, order, "amin")
    return order == first[which]


def compute_advantages(batch: TokenBatch, config: ObjectiveConfig) -> TokenBatch:
    """Set `advantage` [T] float32, 0 outside the trainable slots (and `value_target` with a critic).

    Group baselines give each slot the outcome of its sample. baseline = none: the return to go (REINFORCE++); critic:
    GAE. Their reward is the outcome at a sample's last trainable slot. kl.where = reward subtracts kl.coef * KL of
    every token: from the token's own reward, or with a group baseline from the sample's before siblings are compared.
    normalise = global then whitens over all trainable slots of the step.
    """
    grouped = config.baseline in ("group", "leave-one-out")
    kl = _reward_kl(batch, config)
    if grouped:
        outcome = batch.outcome
        if kl is not None:
            total = outcome.new_zeros(batch.num_samples).index_add(0, batch.segment, kl)
            outcome = apply_group_baseline(
                (outcome - total).double(), batch.group, config, episode=batch.episode
            ).float()
        advantage = torch.where(batch.trainable, outcome[batch.segment], 0.0)
        return batch.replace(advantage=_normalised(advantage, batch, config))
    reward = _at_last_slot(batch)
    if kl is not None:
        reward = reward - kl
    mask, segment, samples = batch.trainable, batch.segment, batch.num_samples
    if config.baseline == "none":
        advantage = returns_to_go(
            reward, mask=mask, segment=segment, samples=samples, gamma=config.gamma
        )
        return batch.replace(advantage=_normalised(advantage, batch, config))
    assert batch.value is not None, "score_values() fills value"
    advantage = gae(
        reward,
        batch.value,
        mask=mask,
        segment=segment,
        samples=samples,
        gamma=config.gamma,
        lam=config.lam,
    )
    target = torch.where(mask, advantage + batch.value, 0.0)
    return batch.replace(advantage=_normalised(advantage, batch, config), value_target=target)


def _normalised(advantage: Tensor, batch: TokenBatch, config: ObjectiveConfig) -> Tensor:
    return whiten(advantage, batch.trainable) if config.normalise == "global" else advantage


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """[T]: (x - mean) / sqrt(var + 1e-8) over the mask, 0 elsewhere (REINFORCE++, 2501.03262 eq. 9).

    Variance with n - 1 as in verl. Equal values (`equal_up_to_rounding`) carry no signal: exactly 0.
    """
    chosen = values[mask].double()
    if len(chosen) < 2 or bool(equal_up_to_rounding(chosen.min(), chosen.max())):
        return torch.zeros_like(values)
    white = (chosen - chosen.mean()) / (chosen.var() + WHITEN_EPS).sqrt()
    return torch.zeros_like(values).masked_scatter(mask, white.to(values.dtype))


def _reward_kl(batch: TokenBatch, config: ObjectiveConfig) -> Tensor | None:
    """[T] kl.coef * KL estimate of each trainable slot, if the reward carries it."""
    if not config.kl.coef or config.kl.where != "reward":
        return None
    assert batch.logp_old is not None
    assert batch.logp_ref is not None, "score_reference() fills logp_ref"
    return torch.where(
        batch.trainable,
        config.kl.coef * kl_estimate(batch.logp_old, batch.logp_ref, config.kl),
        0.0,
    )


def _at_last_slot(batch: TokenBatch) -> Tensor:
    """[T] float32: each sample's outcome on its last trainable slot."""
    where = batch.trainable.nonzero()[:, 0]
    row = batch.segment[where]
    last = torch.full((batch.num_samples,), -1).scatter_reduce(0, row, where, "amax")
    some = last >= 0
    return torch.zeros(batch.num_slots).index_copy(0, last[some], batch.outcome[some])
