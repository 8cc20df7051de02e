"""Policy-gradient surrogates per slot. Pure torch, no loop over samples.

Ratios and means of a whole sample are computed with sums over segments.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig
from onepolicy.config.objective import KLConfig

# A |log ratio| beyond this counts as this, with gradient 0. So exp does not overflow, and the
# branch of torch.where that is not taken gives no NaN gradient.
LOG_RATIO_LIMIT = 20.0


def kl_estimate(
    logp: Tensor,  # [T] float32, the policy; may carry a graph
    logp_ref: Tensor,  # [T] float32
    config: KLConfig,
) -> Tensor:
    """Return the KL estimate [T] of each slot, in nats (Schulman 2020).

    With d = logp - logp_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. On samples of the policy
    k1 and k3 are unbiased for KL(policy || reference). |d| is bounded by LOG_RATIO_LIMIT.
    """
    d = (logp - logp_ref).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match config.estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(-d) + d


def kl_loss(
    logp_new: Tensor,  # [T] float32, carries the graph
    logp_ref: Tensor,  # [T] float32
    config: KLConfig,
    *,
    logp_sampled: Tensor | None,  # [T] float32, denominator of the importance ratio; None: no ratio
) -> Tensor:
    """Return the KL loss [T] of each slot, in nats.

    With a ratio it is exp(logp_new - logp_sampled) * estimate. Both factors carry a gradient. That
    is the unbiased estimate of DeepSeek-V3.2 (2512.02556, section 3.1). On samples of the ratio's
    denominator, value and gradient are those of KL(new || reference), for k1 and k3 alike. A plain
    k3 has the gradient of KL(reference || policy) instead.
    """
    estimate = kl_estimate(logp_new, logp_ref, config)
    if logp_sampled is None:
        return estimate
    return (logp_new - logp_sampled).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * estimate


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
    log_ratio = (logp_new - logp_behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if config.surrogate == "gmpo":
        return gmpo(
            log_ratio,
            advantage,
            mask=usable,
            segment=segment,
            samples=samples,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
        )
    ratio = _at_ratio_level(log_ratio, usable, segment, samples, config).exp()
    return _ratio_surrogate(config, ratio, logp_new, advantage)


def _ratio_surrogate(
    config: ObjectiveConfig, ratio: Tensor, logp_new: Tensor, advantage: Tensor
) -> Surrogate:
    bounds = {"clip_low": config.clip_low, "clip_high": config.clip_high}
    match config.surrogate:
        case "ppo":
            return ppo(ratio, advantage, dual_clip=config.dual_clip, **bounds)
        case "cispo":
            return cispo(ratio, logp_new, advantage, **bounds)
        case "sapo":
            taus = {"tau_positive": config.tau_positive, "tau_negative": config.tau_negative}
            return sapo(ratio, advantage, **taus)
        case "topr":
            return topr(ratio, logp_new, advantage)
        case "pg":
            never = torch.zeros_like(advantage, dtype=torch.bool)
            return Surrogate(-advantage * logp_new, ratio.detach(), never, never)
        case _:
            raise AssertionError(f"gmpo has no ratio: {config.surrogate}")


def _at_ratio_level(
    log_ratio: Tensor, usable: Tensor, segment: Tensor, samples: int, config: ObjectiveConfig
) -> Tensor:
    """Return [T]: the log ratio of each slot at `config.ratio_level`."""
    if config.ratio_level == "token":
        return log_ratio
    mean = config.ratio_level != "trajectory"
    of_sample = _per_sample(log_ratio, usable, segment, samples, mean=mean)
    of_sample = of_sample.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if config.ratio_level == "sequence-token":
        # the value of the sequence, the gradient of the token
        return of_sample.detach() + log_ratio - log_ratio.detach()
    return of_sample


def ppo(
    ratio: Tensor,  # [T], carries the graph
    advantage: Tensor,  # [T]
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Compute -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO-clip (1707.06347 eq. 7), with clip-higher (DAPO section 3.1). It is pessimistic: a ratio is
    clipped only if it has already moved in the direction of its advantage. With the geometric mean
    of a sample's ratios it is GSPO (2507.18071 eq. 5). With dual_clip = c the loss is
    -max(min(...), c A) where A < 0 (1912.09729 eq. 5).
    """
    low, high = 1 - clip_low, 1 + clip_high
    loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
    r = ratio.detach()
    clipped_high = (r > high) & (advantage > 0)
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
        clipped_high = clipped_high | ((r > dual_clip) & (advantage < 0))
    return Surrogate(loss, r, (r < low) & (advantage < 0), clipped_high)


def cispo(
    ratio: Tensor, logp_new: Tensor, advantage: Tensor, *, clip_low: float, clip_high: float
) -> Surrogate:
    """Compute -sg(clip(r)) A log pi (MiniMax-M1, 2506.13585 eq. 4; sg: stop gradient).

    A clipped slot keeps a gradient, of the size of the bound.
    """
    r = ratio.detach()
    low, high = 1 - clip_low, 1 + clip_high
    return Surrogate(-r.clamp(low, high) * advantage * logp_new, r, r < low, r > high)


def sapo(
    ratio: Tensor, advantage: Tensor, *, tau_positive: float, tau_negative: float
) -> Surrogate:
    """Compute -(4 / tau) sigmoid(tau (r - 1)) A (SAPO, 2511.20347).

    With s the sigmoid, the gradient's weight is 4 s (1 - s) r, which is 1 at r = 1.
    """
    tau = torch.where(advantage > 0, tau_positive, tau_negative).to(ratio.dtype)
    loss = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantage
    never = torch.zeros_like(advantage, dtype=torch.bool)
    return Surrogate(loss, ratio.detach(), never, never)


def topr(ratio: Tensor, logp_new: Tensor, advantage: Tensor) -> Surrogate:
    """Compute -sg(w) A log pi (tapered off-policy REINFORCE, 2503.14286; sg: stop gradient).

    w = 1 where A >= 0, and min(r, 1) where A < 0.
    """
    r = ratio.detach()
    high = (r > 1) & (advantage < 0)
    weight = torch.where(advantage < 0, r.clamp(max=1), 1.0)
    return Surrogate(-weight * advantage * logp_new, r, torch.zeros_like(high), high)


def gmpo(
    log_ratio: Tensor,  # [T], carries the graph
    advantage: Tensor,  # [T], one value per sample; 0 where rejected
    *,
    mask: Tensor,
    segment: Tensor,
    samples: int,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Compute -exp(mean over the sample of the clipped log r) A for every slot.

    GMPO, 2507.20673 eq. 4. A slot's log r is clipped pessimistically to
    [log(1 - clip_low), log(1 + clip_high)]: from above where A > 0, from below where A < 0. A
    rejected slot is part of the mean. It is clipped by the sign of its sample's advantage.
    """
    low, high = math.log(max(1 - clip_low, 1e-9)), math.log(1 + clip_high)
    total = _per_sample(advantage, mask, segment, samples, mean=False)
    positive, negative = total > 0, total < 0
    bounded = torch.where(positive, log_ratio.clamp(max=high), log_ratio.clamp(min=low))
    mean = _per_sample(bounded, mask, segment, samples, mean=True)
    log_r = log_ratio.detach()
    loss = -mean.exp() * advantage
    return Surrogate(loss, log_r.exp(), (log_r < low) & negative, (log_r > high) & positive)


def _per_sample(
    values: Tensor, mask: Tensor, segment: Tensor, samples: int, *, mean: bool
) -> Tensor:
    """Return [T]: the sum or mean over the masked slots of each slot's sample."""
    zeros = values.new_zeros(samples)
    total = zeros.index_add(0, segment, torch.where(mask, values, 0.0))
    if mean:
        total = total / zeros.index_add(0, segment, mask.to(values.dtype)).clamp(min=1)
    return total[segment]
