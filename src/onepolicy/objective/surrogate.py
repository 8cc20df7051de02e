"""The clipped policy-gradient surrogate, slot by slot."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""|log r| beyond this is taken as this (gradient 0): no exp overflow, so no NaN gradient from the branch not taken."""


class Surrogate(NamedTuple):
    loss: Tensor  # [T], to be minimised; carries the graph of logp_new
    ratio: Tensor  # [T], r = pi_new / pi_old, detached
    clipped_low: Tensor  # [T] bool, r < 1 - clip_low with a negative advantage: no gradient
    clipped_high: Tensor  # [T] bool, r > 1 + clip_high with a positive advantage: no gradient


def grpo_surrogate(
    logp_new: Tensor,  # [T] float32
    logp_old: Tensor,  # [T] float32
    advantage: Tensor,  # [T] float32
    *,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): PPO-clip (PPO eq. 7) with clip-higher (DAPO section 3.1).

    Pessimistic: only a ratio that has already moved the way its advantage asks for is clipped.
    """
    low, high = 1 - clip_low, 1 + clip_high
    ratio = (logp_new - logp_old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    r = ratio.detach()
    return Surrogate(loss, r, (r < low) & (advantage < 0), (r > high) & (advantage > 0))
