"""verl's policy loss `onepolicy`: corrections that need the policy that is being trained.

verl hands its losses the old log-probabilities and not the rollout's. With
`algorithm.rollout_correction.bypass_mode=true` the old ones *are* the rollout's, which is what
these corrections compare with. They are evaluated per micro-batch of whole samples. verl's own
functions then compute the surrogate, with its clip settings, and its denominators, which count
every response token: a rejected one weighs 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.correct.current_policy import live_weights
from onepolicy.integrations.core.advantages import turns_of
from onepolicy.integrations.verl.metrics import LIVE

NAME = "onepolicy"
_correction: CorrectionConfig | None = None


def configure(correction: CorrectionConfig | None) -> None:
    """Set the correction of this process's loss. onepolicy's trainer calls it in every worker."""
    global _correction
    _correction = correction


@core_algos.register_policy_loss(NAME)
def policy_loss(
    old_log_prob: Tensor,  # [B, R] float32: the rollout's, with bypass_mode=true
    log_prob: Tensor,  # [B, R] float32, carries the graph
    advantages: Tensor,  # [B, R] float32
    response_mask: Tensor,  # [B, R] bool
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,  # [B, R] float32
) -> tuple[Tensor, dict[str, Any]]:
    """Return verl's loss with the current-policy correction applied, and its metrics.

    A correction for the score-function loss (pg-tis, ipo, ..) gives -weight A log p; the
    others go with verl's clipped PPO loss (ppo-is, opsm).

    Raises UsageError without a correction, and if rollout_is_weights correct the batch already.
    """
    if _correction is None:
        raise UsageError(
            "policy_loss.loss_mode=onepolicy: this worker was given no correction; run with "
            "trainer.v1.trainer_mode=onepolicy_sync and +trainer.onepolicy.correction=pg-tis"
        )
    if rollout_is_weights is not None:
        raise UsageError(
            f"policy_loss.loss_mode=onepolicy: the batch has rollout_is_weights beside "
            f"{_correction.name}, which would correct it twice; set "
            "algorithm.rollout_correction.rollout_is=null"
        )
    part = _correction.live_part
    assert part is not None
    mask = response_mask.bool()
    live = live_weights(
        log_prob.detach().float(),
        old_log_prob.float(),
        mask,
        part,
        turn=turns_of(mask),
        advantage=advantages.float(),
    )
    # A token that has no ratio is rejected, but 0 times NaN is NaN in verl's loss.
    known = torch.where(old_log_prob.isfinite() & mask, old_log_prob, log_prob.detach())
    if _correction.surrogate == "pg":
        loss, metrics = core_algos.compute_policy_loss_reinforce(
            rollout_log_prob=known,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
            rollout_is_weights=live.weight,
        )
    else:
        loss, metrics = core_algos.compute_policy_loss_vanilla(
            old_log_prob=known,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            loss_agg_mode=loss_agg_mode,
            config=config,
            rollout_is_weights=live.weight,
        )
    return loss, metrics | _sums(log_prob.detach(), old_log_prob, mask, live.keep)


def _sums(logp_new: Tensor, logp_rollout: Tensor, mask: Tensor, keep: Tensor) -> dict[str, float]:
    """Return this micro-batch's numerators and denominator of the metrics.

    verl averages a loss's metrics over micro-batches without weights. The trainer divides the
    averages, which gives the mean over tokens.
    """
    log_rho = (logp_new.double() - logp_rollout.double())[mask]
    log_rho = log_rho[log_rho.isfinite()]
    sums = {
        "tokens": mask.sum(),
        "kept": keep.sum(),
        "compared": torch.tensor(len(log_rho), device=mask.device),
        "k1": -log_rho.sum(),
        "k3": (log_rho.expm1() - log_rho).sum(),
    }
    values = torch.stack([value.double() for value in sums.values()]).tolist()
    return {LIVE + name: value for name, value in zip(sums, values, strict=True)}
