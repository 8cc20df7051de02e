"""Generalised advantage estimation, and the value loss of PPO with a critic."""

from __future__ import annotations

import torch
from torch import Tensor


def gae(
    reward: Tensor,  # [T] float32
    value: Tensor,  # [T] float32, V of the state before the slot's token is chosen
    *,
    mask: Tensor,  # [T] bool, trainable slots
    segment: Tensor,  # [T] int64
    samples: int,
    gamma: float,
    lam: float,
) -> Tensor:
    """Return the advantages of GAE (1506.02438, eq. 16): [T] float32, 0 outside the mask.

    A_t = delta_t + gamma lam A_(t+1), with delta_t = r_t + gamma V_(t+1) - V_t. The value after a
    sample's last trainable slot is 0: there the episode ends, even if the length limit cut it.

    All samples are computed at once in float64: one pass over time on a table of
    [samples, longest], padded.
    """
    slots = mask.nonzero()[:, 0]
    row = segment[slots]
    length = row.new_zeros(samples).index_add(0, row, torch.ones_like(row))
    column = torch.arange(len(slots), device=mask.device) - (length.cumsum(0) - length)[row]
    longest = 0
    if samples:
        longest = int(length.max())
    table = torch.zeros(3, samples, longest + 1, dtype=torch.float64, device=mask.device)
    rewards, values, advantages = table[0], table[1], table[2]
    rewards[row, column] = reward[slots].double()
    values[row, column] = value[slots].double()
    delta = rewards[:, :-1] + gamma * values[:, 1:] - values[:, :-1]
    for t in range(longest - 1, -1, -1):
        advantages[:, t] = delta[:, t] + gamma * lam * advantages[:, t + 1]
    of_slots = advantages[row, column].to(reward.dtype)
    return torch.zeros_like(reward).index_copy(0, slots, of_slots)


def value_loss(
    value_new: Tensor,  # [T] float32, carries the graph
    value_old: Tensor,  # [T] float32, critic before the update
    target: Tensor,  # [T] float32, returns
    *,
    clip: float | None,
) -> tuple[Tensor, Tensor]:
    """Return the value loss [T] of each slot and whether it was clipped [T] bool.

    max((v - R)^2, (v_old + clip(v - v_old, -clip, clip) - R)^2) / 2, as in the PPO authors' code
    (baselines, ppo2). It is pessimistic like the policy's clipping: a value that has already moved
    by more than `clip` towards its return has no gradient. With clip = None: (v - R)^2 / 2.
    """
    plain = (value_new - target).square()
    if clip is None:
        return plain / 2, torch.zeros_like(target, dtype=torch.bool)
    bounded = (value_old + (value_new - value_old).clamp(-clip, clip) - target).square()
    return torch.maximum(plain, bounded) / 2, (bounded > plain).detach()
