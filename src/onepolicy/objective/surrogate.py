"""Policy-gradient surrogates per slot. Pure torch, no loop over samples.

A surrogate is a function of LossInputs and the settings that its row of config/surrogates.toml
names. Ratios and means of a whole sample are computed with sums over segments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig
from onepolicy.config.surrogates import SURROGATES

# A |log ratio| beyond this counts as this, with gradient 0. So exp does not overflow, and the
# branch of torch.where that is not taken gives no NaN gradient.
LOSS_LOG_RATIO_LIMIT = 20.0


class LossInputs(NamedTuple):
    """The inputs of a surrogate. [T] fields are 0 or False outside the mask."""

    log_ratio: Tensor  # [T], log r at the config's ratio level; carries the graph of logp_new
    logp_new: Tensor  # [T], carries the graph
    advantage: Tensor  # [T]
    mask: Tensor  # [T] bool, slots with a finite log r
    segment: Tensor  # [T] int64, sample of each slot; samples are whole
    samples: int

    @property
    def ratio(self) -> Tensor:
        """[T], r = new / behaviour policy, carries the graph."""
        return self.log_ratio.exp()

    def per_sample(self, values: Tensor, *, mean: bool) -> Tensor:
        """Return [T]: the sum or mean over the masked slots of each slot's sample."""
        zeros = values.new_zeros(self.samples)
        total = zeros.index_add(0, self.segment, torch.where(self.mask, values, 0.0))
        if mean:
            counts = zeros.index_add(0, self.segment, self.mask.to(values.dtype))
            total = total / counts.clamp(min=1)
        return total[self.segment]


class Surrogate(NamedTuple):
    """Per-slot losses of a surrogate, and where its ratio was clipped."""

    loss: Tensor  # [T], to be minimised; carries the graph of logp_new
    ratio: Tensor  # [T], r = new / behaviour policy at the config's ratio level, detached
    clipped_low: Tensor  # [T] bool, r was clipped from below
    clipped_high: Tensor  # [T] bool, r was clipped from above


def surrogate(
    config: ObjectiveConfig,
    logp_new: Tensor,  # [T] float32, carries the graph
    logp_behaviour: Tensor,  # [T] float32: logp_old, or logp_rollout with ratio = new/rollout
    advantage: Tensor,  # [T] float32
    *,
    mask: Tensor,  # [T] bool, slots that count; a sequence's ratio is over all of them
    segment: Tensor,  # [T] int64, sample of each slot; samples are whole
    samples: int,
) -> Surrogate:
    """Compute the loss of `config.surrogate` per slot.

    A slot outside the mask, or without a finite `logp_behaviour`, counts as r = 1. A `logp_new`
    that is not finite is not hidden: the gradient is then not finite either.
    """
    usable = mask & logp_behaviour.isfinite()
    logp_new = torch.where(usable, logp_new, 0.0)
    logp_behaviour = torch.where(usable, logp_behaviour, 0.0)
    log_ratio = (logp_new - logp_behaviour).clamp(-LOSS_LOG_RATIO_LIMIT, LOSS_LOG_RATIO_LIMIT)
    inputs = LossInputs(log_ratio, logp_new, advantage, usable, segment, samples)
    inputs = inputs._replace(log_ratio=_at_ratio_level(inputs, ratio_level(config)))
    settings = {name: getattr(config, name) for name in SURROGATES[config.surrogate].reads}
    return FUNCTIONS[config.surrogate](inputs, **settings)


def ratio_level(config: ObjectiveConfig) -> str:
    """Return the level of the ratio that the surrogate takes: token if it reads no ratio_level."""
    if not SURROGATES[config.surrogate].levels:
        return "token"
    return config.ratio_level


def _at_ratio_level(inputs: LossInputs, level: str) -> Tensor:
    """Return [T]: the log ratio of each slot at this level. inputs: at level token."""
    log_ratio = inputs.log_ratio
    if level == "token":
        return log_ratio
    of_sample = inputs.per_sample(log_ratio, mean=level != "trajectory")
    of_sample = of_sample.clamp(-LOSS_LOG_RATIO_LIMIT, LOSS_LOG_RATIO_LIMIT)
    if level == "sequence-token":
        # the value of the sequence, the gradient of the token
        return of_sample.detach() + log_ratio - log_ratio.detach()
    return of_sample


def ppo(
    inputs: LossInputs, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """Compute -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO-clip (1707.06347 eq. 7), with clip-higher (DAPO section 3.1). It is pessimistic: a ratio is
    clipped only if it has already moved in the direction of its advantage. With the geometric mean
    of a sample's ratios it is GSPO (2507.18071 eq. 5). With dual_clip = c the loss is
    -max(min(...), c A) where A < 0 (1912.09729 eq. 5).
    """
    ratio, advantage = inputs.ratio, inputs.advantage
    low, high = 1 - clip_low, 1 + clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    r = ratio.detach()
    clipped_high = (r > high) & (advantage > 0)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
        clipped_high = clipped_high | ((r > dual_clip) & (advantage < 0))
    return Surrogate(loss, r, (r < low) & (advantage < 0), clipped_high)


def cispo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Compute -sg(clip(r)) A log pi (MiniMax-M1, 2506.13585 eq. 4; sg: stop gradient).

    A clipped slot keeps a gradient, of the size of the bound.
    """
    r = inputs.ratio.detach()
    low, high = 1 - clip_low, 1 + clip_high
    loss = -r.clamp(low, high) * inputs.advantage * inputs.logp_new
    return Surrogate(loss, r, r < low, r > high)


def pg(inputs: LossInputs) -> Surrogate:
    """Compute -A log pi."""
    never = torch.zeros_like(inputs.mask)
    return Surrogate(-inputs.advantage * inputs.logp_new, inputs.ratio.detach(), never, never)


def sapo(inputs: LossInputs, *, tau_positive: float, tau_negative: float) -> Surrogate:
    """Compute -(4 / tau) sigmoid(tau (r - 1)) A (SAPO, 2511.20347).

    With s the sigmoid, the gradient's weight is 4 s (1 - s) r, which is 1 at r = 1.
    """
    ratio, advantage = inputs.ratio, inputs.advantage
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage
    never = torch.zeros_like(inputs.mask)
    return Surrogate(loss, ratio.detach(), never, never)


def topr(inputs: LossInputs) -> Surrogate:
    """Compute -sg(w) A log pi (tapered off-policy REINFORCE, 2503.14286; sg: stop gradient).

    w = 1 where A >= 0, and min(r, 1) where A < 0.
    """
    r, advantage = inputs.ratio.detach(), inputs.advantage
    high = (r > 1) & (advantage < 0)
    weight = torch.where(advantage < 0, r.clamp(max=1), 1.0)
    return Surrogate(-weight * advantage * inputs.logp_new, r, torch.zeros_like(high), high)


def gmpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Compute -exp(mean over the sample of the clipped log r) A for every slot.

    GMPO, 2507.20673 eq. 4. A slot's log r is clipped pessimistically to
    [log(1 - clip_low), log(1 + clip_high)]: from above where A > 0, from below where A < 0. A has
    one value per sample, 0 where rejected. A rejected slot is part of the mean. It is clipped by
    the sign of its sample's advantage.
    """
    low, high = math.log(max(1 - clip_low, 1e-9)), math.log(1 + clip_high)
    total = inputs.per_sample(inputs.advantage, mean=False)
    positive, negative = total > 0, total < 0
    log_ratio = inputs.log_ratio
    bounded = torch.where(positive, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    mean = inputs.per_sample(bounded, mean=True)
    log_r = log_ratio.detach()
    loss = -mean.exp() * inputs.advantage
    return Surrogate(loss, log_r.exp(), (log_r < low) & negative, (log_r > high) & positive)


FUNCTIONS: dict[str, Callable[..., Surrogate]] = {name: globals()[name] for name in SURROGATES}
"""The function of each row, which has its name."""
