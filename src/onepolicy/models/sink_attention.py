"""Attention with sinks: logits of a key that no slot has (gpt-oss)."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_with_sinks(
    q: Tensor,  # [S, heads, W, D]
    k: Tensor,  # [S, kv heads, keys, D]
    v: Tensor,  # [S, kv heads, keys, Dv]
    mask: Tensor,  # [W, keys] bool, True where a query sees a key
    sinks: Tensor,  # [heads]
    *,
    scaling: float | None,
) -> Tensor:
    """Return [S, heads, W, Dv]: softmax over the keys that are seen and the head's sink."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if scaling is None:
        scaling = q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-1, -2)).float() * scaling
    scores = scores.masked_fill(~mask, float("-inf"))
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype) @ v
