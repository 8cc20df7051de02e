"""The KL of the policy to its reference (objective.kl), in the loss or in the reward."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig
from onepolicy.config.objective import KLConfig
from onepolicy.objective.surrogate import LOSS_LOG_RATIO_LIMIT
from onepolicy.types import TokenBatch


def kl_estimate(
    logp: Tensor,  # [T] float32, the policy; may carry a graph
    logp_ref: Tensor,  # [T] float32
    config: KLConfig,
) -> Tensor:
    """Return the KL estimate [T] of each slot, in nats (Schulman 2020).

    With d = logp - logp_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. On samples of the policy
    k1 and k3 are unbiased for KL(policy || reference). |d| is bounded by LOSS_LOG_RATIO_LIMIT.
    """
    d = (logp - logp_ref).clamp(-LOSS_LOG_RATIO_LIMIT, LOSS_LOG_RATIO_LIMIT)
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
    return (logp_new - logp_sampled).clamp(
        -LOSS_LOG_RATIO_LIMIT, LOSS_LOG_RATIO_LIMIT
    ).exp() * estimate


def batch_kl(logp_new: Tensor, batch: TokenBatch, config: ObjectiveConfig, mask: Tensor) -> Tensor:
    """Return the KL loss [T] of a micro-batch, 0 outside the mask [T] bool."""
    assert batch.logp_ref is not None, "score() fills logp_ref"
    denominators = {"none": None, "old": batch.logp_old, "rollout": batch.logp_rollout}
    logp_sampled = denominators[config.kl.importance]
    if logp_sampled is not None:
        mask = mask & logp_sampled.isfinite()
        logp_sampled = torch.where(mask, logp_sampled, 0.0)
    kl = kl_loss(
        torch.where(mask, logp_new, 0.0),
        torch.where(mask, batch.logp_ref, 0.0),
        config.kl,
        logp_sampled=logp_sampled,
    )
    return torch.where(mask, kl, 0.0)
