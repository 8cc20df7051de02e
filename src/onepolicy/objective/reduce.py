"""How slots become one scalar: the share of every slot, fixed over the whole optimiser step."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import ObjectiveConfig, UsageError
from onepolicy.types import TokenBatch


def slot_shares(batch: TokenBatch, config: ObjectiveConfig, *, max_tokens: int) -> Tensor:
    """[T] float32, `share`: the loss is sum(share * keep * weight * surrogate). 0 outside the trainable slots.

    `batch` is the whole optimiser step, so that any split into micro-batches adds up to the same loss and gradient.
    With N slots, S samples of T_i slots, P prompts of T_p slots: token-mean 1 / N; prompt-mean 1 / (P T_p);
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
            prompts, prompt = batch.group.unique(return_inverse=True)
            prompt = prompt[batch.segment]
            share = mask / (len(prompts) * _counts(mask, prompt, len(prompts))[prompt])
        case "sequence-mean-token-mean":
            share = mask / (samples * _counts(mask, batch.segment, samples)[batch.segment])
        case "sequence-mean-token-sum":
            share = mask / samples
        case "sequence-mean-token-constant":
            share = mask / (samples * (config.reduction_length or max_tokens))
    return share.float()


def _counts(mask: Tensor, unit: Tensor, units: int) -> Tensor:
    """[units] float64, trainable slots of each, at least 1."""
    return torch.zeros(units, dtype=mask.dtype, device=mask.device).index_add(0, unit, mask).clamp(min=1)
