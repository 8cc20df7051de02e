"""From rewards to advantages: one outcome per sample, then one advantage per slot."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.objective.gae import gae
from onepolicy.objective.kl import kl_estimate
from onepolicy.types import Group, TokenBatch

STD_EPS = 1e-6
WHITEN_EPS = 1e-8

# Two values are the same if they differ by no more than this, relative to the larger one. That is a
# few roundings of float32: many reward models answer in float32, and rewards are summed in it. A
# grader that tells two answers apart does so by more.
SAME_REWARD = 2.0**-21

# The same bound for values around 0 [reward]. The rest of a sum such as 0.3 - 0.2 - 0.1 is pure
# rounding, so a relative bound would not apply to it.
SAME_NEAR_ZERO = 1e-12


def equal_up_to_rounding(least: Tensor, most: Tensor) -> Tensor:
    """Return [...] bool: whether smallest and largest value differ by rounding only.

    The values may be rewards. False where one of the two is not finite.
    """
    difference = (most - least).abs()
    size = torch.maximum(least.abs(), most.abs())
    bound = (SAME_REWARD * size).clamp(min=SAME_NEAR_ZERO)
    return difference.isfinite() & (difference <= bound)


def has_signal(group: Group) -> bool:
    """Return whether the group's rewards differ.

    A group that is solved by all samples or by none has no advantage (DAPO eq. 11).
    """
    rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
    return not bool(equal_up_to_rounding(rewards.min(), rewards.max()))


def compute_outcomes(
    groups: list[Group], config: ObjectiveConfig, *, max_tokens: int = 0
) -> list[Group]:
    """Return the groups with every sample's `outcome` set.

    The outcome is the sample's shaped reward. With a group baseline it is relative to the other
    samples of the group. With kl.where = reward that comparison needs log-probabilities, so
    `compute_advantages` makes it. max_tokens: limit of a response, for overlong shaping.
    Raises UsageError for a reward that is not finite.
    """
    _check_rewards_finite(groups)
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    if config.overlong_buffer:
        lengths = torch.tensor([s.response_length for s in samples])
        buffer = config.overlong_buffer * max_tokens
        shaping = overlong_reward(lengths, max_tokens=max_tokens, buffer=buffer)
        rewards = rewards + config.overlong_penalty * shaping
    if not (config.kl.coef and config.kl.where == "reward"):
        group_index = torch.tensor([g for g, group in enumerate(groups) for _ in group.samples])
        episode = torch.tensor([e for group in groups for e in group.episodes])
        rewards = apply_group_baseline(rewards, group_index, config, episode=episode)
    outcomes = iter(rewards.tolist())
    return [_with_outcomes(group, [next(outcomes) for _ in group.samples]) for group in groups]


def _check_rewards_finite(groups: list[Group]) -> None:
    for group in groups:
        for index, sample in enumerate(group.samples):
            if not math.isfinite(sample.reward):
                raise UsageError(
                    f"problem {group.problem_id}, sample {index}: reward is {sample.reward}; "
                    "the task's grader must return a finite number"
                )


def _with_outcomes(group: Group, outcomes: list[float]) -> Group:
    samples = tuple(
        dataclasses.replace(sample, outcome=outcome)
        for sample, outcome in zip(group.samples, outcomes, strict=True)
    )
    return dataclasses.replace(group, samples=samples)


def overlong_reward(length: Tensor, *, max_tokens: int, buffer: float) -> Tensor:
    """Return [S] float64 in [-1, 0], the reward shaping for long responses (DAPO eq. 13).

    It is 0 up to max_tokens - buffer, then falls linearly to -1 at max_tokens.
    """
    return ((max_tokens - buffer - length.double()) / buffer).clamp(-1, 0)


def apply_group_baseline(
    reward: Tensor,  # [S] float64
    group: Tensor,  # [S] int64
    config: ObjectiveConfig,
    *,
    episode: Tensor | None = None,  # [S] int64, within the group; None: one episode a sample
) -> Tensor:
    """Return [S] float64: each reward relative to its group, as `baseline` and `normalise` say.

    - group: R - mean, GRPO (DeepSeekMath section 4.1.2). With normalise = std it is divided by
      (std + 1e-6). std is the sample standard deviation (n - 1), as in TRL and verl; the paper does
      not say which one.
    - leave-one-out: R - mean of the group's other samples (RLOO, 2402.14740 eq. 7).
    - none, critic: R.

    Several samples of one episode count once, with the reward of the first. A group whose rewards
    are equal up to rounding has no signal: its result is exactly 0, also for a group of one.
    """
    if config.baseline in ("none", "critic"):
        return reward
    _, unit = group.unique(return_inverse=True)
    zeros = reward.new_zeros(int(unit.max()) + 1)
    counted = _is_first_of_episode(unit, episode).double()  # [S] 1 or 0
    count = zeros.index_add(0, unit, counted)
    centred = reward - (zeros.index_add(0, unit, counted * reward) / count)[unit]
    least = zeros.scatter_reduce(0, unit, reward, "amin", include_self=False)
    most = zeros.scatter_reduce(0, unit, reward, "amax", include_self=False)
    count_minus_one = (count - 1).clamp(min=1)
    if config.baseline == "leave-one-out":
        centred = centred * (count / count_minus_one)[unit]
    elif config.normalise == "std":
        variance = zeros.index_add(0, unit, counted * centred.square()) / count_minus_one
        centred = centred / (variance.sqrt() + STD_EPS)[unit]
    return torch.where(equal_up_to_rounding(least, most)[unit], 0.0, centred)


def _is_first_of_episode(unit: Tensor, episode: Tensor | None) -> Tensor:
    """Return [S] bool: whether a sample is the first of its unit's episode."""
    index, order = _episodes(unit, episode), torch.arange(len(unit))
    first = torch.full_like(order, len(order)).scatter_reduce(0, index, order, "amin")
    return order == first[index]


def _episodes(unit: Tensor, episode: Tensor | None) -> Tensor:
    """Return [S] int64: each sample's episode. None: it has one of its own."""
    if episode is None:
        return torch.arange(len(unit))
    index: Tensor = torch.stack([unit, episode]).unique(dim=1, return_inverse=True)[1]
    return index


def compute_advantages(batch: TokenBatch, config: ObjectiveConfig) -> TokenBatch:
    """Return the batch with `advantage` [T] float32 set; it is 0 outside the trainable slots.

    - Group baselines give every slot of a sample the sample's outcome.
    - baseline = none gives the return to go (REINFORCE++).
    - baseline = critic gives GAE, and sets `value_target` too.

    The last two take the outcome as the reward of a sample's last trainable slot. kl.where = reward
    subtracts kl.coef * KL of every token from the token's own reward. With a group baseline it is
    subtracted from the episode's reward, before those of a group are compared. normalise = global
    whitens the advantages over all trainable slots of the step.
    """
    kl = _reward_kl(batch, config)
    if config.baseline in ("group", "leave-one-out"):
        advantage = _group_advantage(batch, kl, config)
        return batch.replace(advantage=_normalise(advantage, batch, config))
    reward = _outcome_at_last_slot(batch)
    if kl is not None:
        reward = reward - kl
    advantage = _advantage_over_time(reward, batch, config)
    if config.baseline == "critic":
        assert batch.value is not None
        target = torch.where(batch.trainable, advantage + batch.value, 0.0)
        batch = batch.replace(value_target=target)
    return batch.replace(advantage=_normalise(advantage, batch, config))


def _group_advantage(batch: TokenBatch, kl: Tensor | None, config: ObjectiveConfig) -> Tensor:
    """Return [T] float32: the outcome of each slot's sample, less its episode's KL, if any."""
    outcome = batch.outcome
    if kl is not None:
        of_sample = _episodes(batch.group, batch.episode)
        total = outcome.new_zeros(batch.num_samples).index_add(0, of_sample[batch.segment], kl)
        reward = (outcome - total[of_sample]).double()
        relative = apply_group_baseline(reward, batch.group, config, episode=batch.episode)
        outcome = relative.float()
    return torch.where(batch.trainable, outcome[batch.segment], 0.0)


def _advantage_over_time(reward: Tensor, batch: TokenBatch, config: ObjectiveConfig) -> Tensor:
    """Return [T] float32: GAE with a critic, else the return to go. reward: [T] float32."""
    value, lam = torch.zeros_like(reward), 1.0  # with these GAE is the return to go
    if config.baseline == "critic":
        assert batch.value is not None, "score() fills value"
        value, lam = batch.value, config.lam
    return gae(
        reward,
        value,
        mask=batch.trainable,
        segment=batch.segment,
        samples=batch.num_samples,
        gamma=config.gamma,
        lam=lam,
    )


def _normalise(advantage: Tensor, batch: TokenBatch, config: ObjectiveConfig) -> Tensor:
    if config.normalise == "global":
        return whiten(advantage, batch.trainable)
    return advantage


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return [T]: (x - mean) / sqrt(var + 1e-8) over the mask, 0 elsewhere.

    REINFORCE++, 2501.03262 eq. 9. The variance divides by n - 1, as in verl. Values that are equal
    up to rounding have no signal: the result is then exactly 0.
    """
    chosen = values[mask].double()
    if len(chosen) < 2 or bool(equal_up_to_rounding(chosen.min(), chosen.max())):
        return torch.zeros_like(values)
    white = (chosen - chosen.mean()) / (chosen.var() + WHITEN_EPS).sqrt()
    return torch.zeros_like(values).masked_scatter(mask, white.to(values.dtype))


def _reward_kl(batch: TokenBatch, config: ObjectiveConfig) -> Tensor | None:
    """Return [T]: kl.coef * KL estimate of each trainable slot; None unless kl.where = reward."""
    if not (config.kl.coef and config.kl.where == "reward"):
        return None
    assert batch.logp_old is not None
    assert batch.logp_ref is not None, "score() fills logp_ref"
    estimate = kl_estimate(batch.logp_old, batch.logp_ref, config.kl)
    return torch.where(batch.trainable, config.kl.coef * estimate, 0.0)


def _outcome_at_last_slot(batch: TokenBatch) -> Tensor:
    """Return [T] float32: each sample's outcome on its last trainable slot, 0 elsewhere."""
    slots = batch.trainable.nonzero()[:, 0]
    sample = batch.segment[slots]
    none_yet = torch.full((batch.num_samples,), -1)
    last = none_yet.scatter_reduce(0, sample, slots, "amax")
    has_slot = last >= 0
    zeros = torch.zeros(batch.num_slots)
    return zeros.index_copy(0, last[has_slot], batch.outcome[has_slot])
