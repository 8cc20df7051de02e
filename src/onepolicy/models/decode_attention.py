"""Attention of packed tokens over a slab of cached keys: what the embedded engine decodes and prefills with.

A forward carries T tokens in one row, decoding (one token of many sequences) or prefilling (many tokens of several).
Which slab row and position each token has travels as an explicit attention argument (`slab_step=`); no mask is built
per layer. With one query per sequence two plain batched matmuls beat every fused CPU kernel; scores are float32.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "onepolicy_slab"
UNSUPPORTED = ("softcap", "position_bias", "block_mask", "head_mask", "indices", "topk_indices", "block_indices")


@dataclass(slots=True)
class SlabStep:
    """Where the T packed tokens of one forward live in the slab."""

    rows: Tensor  # [T] int64, slab row
    positions: Tensor  # [T] int64, position in that row
    keys: int  # S: no token sees a position >= S
    view: slice | Tensor  # the V slab rows that attention reads
    place: Tensor | None = None  # [T] int64, decoding: index of each token's row in the view; None: in order, V = T
    queries: Tensor | None = None  # [V, Q] int64, prefilling: the tokens of each row, short rows repeat their last
    unpad: Tensor | None = None  # [T] int64, prefilling: where in the flattened [V * Q] each token is
    even: bool = False  # decoding: all rows have S keys, so there is nothing to mask
    _bias: dict[int | None, Tensor] = field(default_factory=dict)

    def spread(self, x: Tensor, rows: int) -> Tensor:
        """[T, ...] -> [V, Q, ...]"""
        if self.queries is not None:
            return x[self.queries]
        if self.place is None:
            return x[:, None]
        return x.new_zeros(rows, 1, *x.shape[1:]).index_copy_(0, self.place, x[:, None])

    def collect(self, x: Tensor) -> Tensor:
        """[V, Q, ...] -> [T, ...]"""
        if self.unpad is not None:
            return x.flatten(0, 1).index_select(0, self.unpad)
        return x[:, 0] if self.place is None else x[:, 0].index_select(0, self.place)

    def bias(self, window: int | None, rows: int) -> Tensor | None:
        """[V, 1, 1, Q, S] float32, 0 where the query sees the key, else -inf. None: every query sees every key."""
        if window is not None and window >= self.keys:
            window = None
        if self.even and window is None:
            return None
        if window not in self._bias:
            query = self.spread(self.positions, rows)[..., None]  # [V, Q, 1]
            key = torch.arange(self.keys, device=query.device)
            seen = key <= query
            if window is not None:
                seen &= key > query - window
            self._bias[window] = torch.zeros(seen.shape, device=query.device).masked_fill_(~seen, float("-inf"))[
                :, None, None
            ]
        return self._bias[window]


def slab_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [V, kv heads, S, D]
    value: Tensor,  # [V, kv heads, S, Dv]
    attention_mask: Tensor | None,
    *,
    slab_step: SlabStep | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:  # [1, T, heads, Dv]
    """Causal attention of each token over its own slab row. `s_aux` [heads] are attention-sink logits (gpt-oss)."""
    name = type(module).__name__
    if slab_step is None:
        raise ValueError(f"{name} does not hand attention arguments on; the slab engine cannot work with it")
    refused = [option for option in UNSUPPORTED if extra.get(option) is not None]
    if refused or dropout or attention_mask is not None:
        raise ValueError(
            f"{name}: slab attention does not know {refused or ('dropout' if dropout else 'attention_mask')}"
        )
    rows = len(key)
    q = slab_step.spread(query[0].transpose(0, 1), rows)  # [V, Q, heads, D]
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = _attend(q, key, value, bias=slab_step.bias(sliding_window, rows), scale=scale, sinks=s_aux)
    return slab_step.collect(out)[None].to(query.dtype), None


def _attend(
    q: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None, scale: float, sinks: Tensor | None
) -> Tensor:
    """q [V, Q, heads, D], key [V, G, S, D], value [V, G, S, Dv] -> [V, Q, heads, Dv]; R = heads / G share a key."""
    (rows, queries, heads, _), (groups, keys) = q.shape, key.shape[1:3]
    per_group = heads // groups
    if key.device.type == "cpu":  # bfloat16 matmuls of this shape are slower than converting
        q, key, value = q.float(), key.float(), value.float()
    q = q.to(key.dtype).unflatten(2, (groups, per_group)).permute(0, 2, 3, 1, 4).reshape(rows * groups, -1, q.shape[-1])
    scores = torch.bmm(q * scale, key.transpose(2, 3).flatten(0, 1)).float()  # [V * G, R * Q, S]
    if bias is not None:
        scores.view(rows, groups, per_group, queries, keys).add_(bias)
    out = torch.bmm(scores.softmax(-1).to(value.dtype), value.flatten(0, 1))
    out = out.view(rows, groups, per_group, queries, -1)
    if sinks is not None:  # a sink adds exp(sink) to the softmax's denominator
        total = scores.logsumexp(-1).view(rows, groups, per_group, queries, 1)
        out = out * torch.sigmoid(total - sinks.float().view(groups, per_group, 1, 1)).to(out.dtype)
    return out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """What this attention must not see is in `slab_step`."""


AttentionInterface.register(NAME, slab_attention)
AttentionMaskInterface.register(NAME, _no_mask)
