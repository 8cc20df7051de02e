"""Divergence from a reference model, estimated on the sampled tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config.objective import KLConfig
from onepolicy.objective.surrogate import LOG_RATIO_LIMIT


def kl_estimate(
    logp: Tensor,  # [T] float32, the policy; may carry a graph
    logp_ref: Tensor,  # [T] float32
    config: KLConfig,
) -> Tensor:
    """[T], nats: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = logp - logp_ref (Schulman 2020).

    Under samples of the policy k1 and k3 are unbiased for KL(policy || reference). |d| is bounded by LOG_RATIO_LIMIT.
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
    """[T], nats. With a ratio: exp(logp_new - logp_sampled) * estimate, the gradient through both factors.

    That is the unbiased estimate of DeepSeek-V3.2 (2512.02556, section 3.1): under samples of the ratio's denominator,
    value and gradient are those of KL(new || reference), for k1 and k3 alike. A plain k3 has the gradient of
    KL(reference || policy) instead.
    """
    estimate = kl_estimate(logp_new, logp_ref, config)
    if logp_sampled is None:
        return estimate
    return (logp_new - logp_sampled).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp() * estimate
