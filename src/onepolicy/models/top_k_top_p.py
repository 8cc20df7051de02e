"""Top-k, top-p and min-p: restrict a distribution to its likeliest tokens."""

from __future__ import annotations

import torch
from torch import Tensor

WHOLE_VOCABULARY = 1 << 62  # top_k of a row that keeps the whole vocabulary


def apply_min_p(logits: Tensor, min_p: Tensor) -> Tensor:
    """Set logits [B, V] to -inf where p is below `min_p` [B, 1] times the likeliest token's p."""
    least = logits.amax(-1, keepdim=True) + min_p.log()  # log 0 = -inf: a row without min-p
    return logits.masked_fill(logits < least, float("-inf"))


def apply_top_k_top_p(
    logits: Tensor, *, top_k: Tensor | None = None, top_p: Tensor | None = None
) -> Tensor:
    """Set logits [B, V] to -inf outside the top-k tokens, then outside the smallest top-p set.

    Args:
        logits: [B, V] floating.
        top_k: [B, 1] int64, WHOLE_VOCABULARY for a row without top-k.
        top_p: [B, 1] float32, 1 for a row without top-p. The set is the smallest one of the
            likeliest tokens whose probabilities add up to it.

    Returns:
        [B, V], in the dtype of the logits.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        rank = torch.arange(logits.shape[1], device=logits.device)
        ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    if top_p is not None:
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1, dtype=torch.float64) - probability
        ordered = ordered.masked_fill((before >= top_p) & (top_p < 1) & (before > 0), float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ordered)
