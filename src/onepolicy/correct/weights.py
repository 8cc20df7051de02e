"""Importance weights against rollout/trainer mismatch, once per step, over all slots of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from onepolicy.config import TIS, CorrectionConfig, CorrectionOff, UsageError

LOG_RATIO_LIMIT = 80.0
"""|log rho| beyond this is taken as this: exp stays finite in float32, far above any cap."""


@dataclass(frozen=True, slots=True, eq=False)
class Applied:
    """What the loss multiplies in: sum(keep * weight * surrogate) / denominator."""

    weight: Tensor  # [T] float32, detached; 0 where not kept
    keep: Tensor  # [T] bool, the mask minus rejected slots
    denominator: int  # slots of the original mask: rejecting some never makes the others louder
    report: dict[str, float]


@torch.no_grad()
def reweight(
    logp_old: Tensor,  # [T] float32, trainer before the update
    logp_rollout: Tensor,  # [T] float32, rollout engine
    mask: Tensor,  # [T] bool, trainable slots; the other slots may hold anything
    config: CorrectionConfig,
) -> Applied:
    """Weight of every slot's surrogate, from rho = exp(logp_old - logp_rollout) = pi_trainer / pi_rollout.

    off: 1. tis: min(rho, cap), token-level truncated importance sampling (TIS slides, general case): without the cap
    this is the exact change of measure from rollout to trainer; the cap buys bounded variance with a bias.
    A slot whose log-ratio is not finite is rejected (keep False, weight 0) and counted, whatever the correction.
    Raises UsageError on an empty mask.
    """
    if not logp_old.shape == logp_rollout.shape == mask.shape or mask.dtype != torch.bool:
        raise UsageError(
            f"reweight: logp_old {list(logp_old.shape)}, logp_rollout {list(logp_rollout.shape)} and mask "
            f"{list(mask.shape)} {mask.dtype} must have one shape, the mask bool"
        )
    denominator = int(mask.sum())
    if denominator == 0:
        raise UsageError(f"reweight: the mask selects none of {mask.numel()} slots; there is nothing to train on")
    log_ratio = logp_old.double() - logp_rollout.double()
    keep = mask & log_ratio.isfinite()
    rho = torch.where(keep, log_ratio, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    match config:
        case CorrectionOff():
            weight, cap = torch.ones_like(rho), math.inf
        case TIS(cap=cap):
            weight = rho.clamp(max=cap)
        case _:
            assert_never(config)
    weight = torch.where(keep, weight, 0.0).float()
    return Applied(weight, keep, denominator, _report(weight[keep].double(), rho[keep], cap, denominator))


def _report(weight: Tensor, rho: Tensor, cap: float, denominator: int) -> dict[str, float]:
    """weight, rho [n] float64 of the kept slots. Shares, ess and weight_mean count rejected slots, with weight 0."""
    kept = len(rho)
    nan = rho.new_tensor(math.nan)
    numbers = {
        "weight_mean": weight.sum() / denominator,  # the factor by which the correction scales the step
        "weight_min": weight.min() if kept else nan,
        "weight_max": weight.max() if kept else nan,
        "capped": (rho > cap).double().sum() / denominator,
        "rejected": rho.new_tensor(1 - kept / denominator),
        "ratio_mean": rho.mean(),
        "ratio_max": rho.max() if kept else nan,
        "ratio_ess": effective_share(rho, denominator),
        "weight_ess": effective_share(weight, denominator),
    }
    values = torch.stack(list(numbers.values())).tolist()
    return {f"correction/{name}": value for name, value in zip(numbers, values, strict=True)}


def effective_share(weight: Tensor, count: int) -> Tensor:
    """Effective sample size / count (Kish): (sum w)^2 / (count * sum w^2); 1 for equal weights, nan without any."""
    return weight.sum().square() / (count * weight.square().sum())
