"""Slots -> the scalar that is differentiated."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import GRPOConfig, UsageError
from onepolicy.objective.surrogate import grpo_surrogate
from onepolicy.types import TokenBatch


def policy_loss(
    logp_new: Tensor,  # [T] float32, carries the graph; anything where not trainable
    batch: TokenBatch,  # a micro-batch with logp_old, advantage, weight, keep
    *,
    config: GRPOConfig,
    denominator: int,
) -> tuple[Tensor, dict[str, Tensor]]:
    """sum(weight * surrogate over kept slots) / denominator, and SUMS over slots for logging.

    `denominator` belongs to the whole optimiser step (`totals(step).slots`), so losses, gradients and metrics of
    micro-batches add up to those of the whole. If nothing is kept the loss is 0 and backward still runs.
    """
    assert batch.logp_old is not None, "score() fills logp_old"
    assert batch.advantage is not None, "credit() fills advantage"
    assert batch.weight is not None, "reweight() gives weight"
    assert batch.keep is not None, "reweight() gives keep"
    if denominator < 1:
        raise UsageError(f"policy_loss: denominator is {denominator}; the step has no trainable slot to divide by")
    keep = batch.keep

    def kept(values: Tensor) -> Tensor:
        """Select before exp: what stands in the other slots reaches neither the loss nor its gradient."""
        return torch.where(keep, values, 0.0)

    surrogate = grpo_surrogate(
        kept(logp_new),
        kept(batch.logp_old),
        kept(batch.advantage),
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    loss = (kept(batch.weight) * surrogate.loss).sum() / denominator
    return loss, {
        "clip_low": surrogate.clipped_low.sum(),
        "clip_high": surrogate.clipped_high.sum(),
        "ratio_dev": (surrogate.ratio - 1).abs().sum(),
    }
