"""Attention sinks (gpt-oss): a logit of each head that takes a part of every query's softmax.

On CUDA `flash.py` adds them to its kernel's result.
"""

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


def fraction_beside_sink(scores: Tensor, sinks: Tensor) -> Tensor:
    """Return the fraction of a softmax that a sink leaves to the keys.

    The sink adds exp(sink) to the denominator. scores [V, G, R, Q, S] -> [V, G, R, Q, 1]
    """
    logit = sinks.float().view(*scores.shape[1:3], 1, 1)
    return torch.sigmoid(scores.logsumexp(-1, keepdim=True) - logit)
