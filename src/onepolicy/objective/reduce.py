"""How slots become one scalar: the share of every slot, fixed over the whole optimiser step."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.types import TokenBatch


def slot_shares(batch: TokenBatch, config: ObjectiveConfig, *, max_tokens: int) -> Tensor:
    """[T] float32, `share`: the loss is sum(share * keep * weight * surrogate). 0 outside the trainable slots.

    `batch` is the whole optimiser step, so that any split into micro-batches adds up to the same loss and gradient.
    With N slots, S samples of T_i slots, P prompts of T_p slots, R episodes of T_r slots (an episode whose history was
    rewritten has several samples): token-mean 1 / N; prompt-mean 1 / (P T_p); episode-mean 1 / (R T_r);
    sequence-mean-token-mean 1 / (S T_i); sequence-mean-token-sum 1 / S; sequence-mean-token-constant 1 / (S L) with
    L = reduction_length or `max_tokens` (Dr. GRPO). Counts are of the mask before any rejection.
    Raises UsageError if there is no trainable slot.
    """
    mask = batch.trainable.double()
    if not batch.trainable.any():
        raise UsageError("the step has no trainable slot to divide by")
    samples = batch.num_samples
    match config.reduction:
        case "token-mean":
            share = mask / mask.sum()
        case "prompt-mean":
            share = _mean_of_means(mask, batch.group[:, None], batch.segment)
        case "episode-mean":
            own = torch.arange(samples, device=mask.device) if batch.episode is None else batch.episode
            share = _mean_of_means(mask, torch.stack([batch.group, own], 1), batch.segment)
        case "sequence-mean-token-mean":
            share = _mean_of_means(mask, torch.arange(samples, device=mask.device)[:, None], batch.segment)
        case "sequence-mean-token-sum":
            share = mask / samples
        case "sequence-mean-token-constant":
            share = mask / (samples * (config.reduction_length or max_tokens))
    return share.float()


def _mean_of_means(mask: Tensor, unit: Tensor, segment: Tensor) -> Tensor:
    """[T] float64: 1 / (units * trainable slots of the unit). mask [T] float64; unit [S, any] int64: samples with equal
    rows are one unit."""
    units, index = unit.unique(dim=0, return_inverse=True)
    index = index[segment]
    counts = torch.zeros(len(units), dtype=mask.dtype, device=mask.device).index_add(0, index, mask)
    return mask / (len(units) * counts.clamp(min=1)[index])
