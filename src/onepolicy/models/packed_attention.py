"""Attention over packed samples: one row of T slots, no sample sees another, no padding outside this file.

Samples of similar length share a bucket; inside it keys and queries are laid out right-padded, where a causal mask
already hides the padding, so no mask is built. Lengths travel as an explicit attention argument (`packing=`): position
ids alone are silently wrong for some families.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from onepolicy.models.attention_arguments import no_mask, refuse_unsupported_arguments

NAME = "onepolicy_packed"
UNSUPPORTED = ("softcap", "position_bias", "block_mask")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples laid out as [samples, width]; `pad` points unused places at slot 0, `unpad` is its inverse."""

    samples: int
    width: int
    pad: Tensor  # [samples * width] int64, slot of each place
    used: Tensor  # [samples * width] bool
    slots: Tensor  # [n] int64, slots this bucket holds, in place order
    places: Tensor  # [n] int64, place of each of them


@dataclass(frozen=True, slots=True)
class Packing:
    buckets: tuple[Bucket, ...]
    order: (
        Tensor | None
    )  # [T] int64, where the buckets' slots hold each slot; None: they hold them in order

    @classmethod
    def of(cls, cu_seqlens: Tensor, device: torch.device, *, multiple: int = 1) -> Packing:
        """Group samples so that no bucket is padded to more than twice its shortest member, and to a `multiple`."""
        bounds = cu_seqlens.tolist()
        spans = sorted(
            ((end - start, start) for start, end in itertools.pairwise(bounds)), reverse=True
        )
        buckets, first = [], 0
        for i in range(1, len(spans) + 1):
            if i == len(spans) or spans[i][0] * 2 < spans[first][0]:
                buckets.append(_bucket(spans[first:i], multiple, device))
                first = i
        slots = torch.cat([bucket.slots for bucket in buckets])
        in_order = bool((slots[1:] > slots[:-1]).all())
        return cls(tuple(buckets), None if in_order else torch.argsort(slots))


def _bucket(spans: list[tuple[int, int]], multiple: int, device: torch.device) -> Bucket:
    width = -(-spans[0][0] // multiple) * multiple
    lengths = torch.tensor([length for length, _ in spans])
    starts = torch.tensor([start for _, start in spans])
    column = torch.arange(width)
    used = (column < lengths[:, None]).flatten()
    pad = torch.where(used, (starts[:, None] + column).flatten(), 0)
    places = used.nonzero()[:, 0]
    return Bucket(len(spans), width, *(t.to(device) for t in (pad, used, pad[places], places)))


class _Pad(torch.autograd.Function):
    """[n, ...] slots -> [places, ...]; both directions are gathers, because every slot has exactly one place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bucket: Bucket) -> Tensor:
        ctx.bucket, ctx.slots = bucket, len(x)
        return x.index_select(0, bucket.pad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_zeros(ctx.slots, *grad.shape[1:])
        return out.index_copy_(0, ctx.bucket.slots, grad.index_select(0, ctx.bucket.places)), None


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [1, kv heads, T, D]
    value: Tensor,  # [1, kv heads, T, D]
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each packed sample. `s_aux` [heads] are attention-sink logits (gpt-oss)."""
    if packing is None:
        raise ValueError(
            f"{type(module).__name__} does not hand attention arguments on; packed training cannot work with it"
        )
    refuse_unsupported_arguments(module, "packed attention", extra, UNSUPPORTED, dropout=dropout)

    def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _causal(q, k, v, scaling=scaling, window=sliding_window, sinks=s_aux)

    return attend_packed(query, key, value, packing, causal), None


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """`attend` of every bucket, [S, heads, W, D] each; [1, heads, T, D] -> [1, T, heads, Dv]."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
    pieces = []
    for bucket in packing.buckets:
        shape = (bucket.samples, bucket.width)
        parts = [_Pad.apply(x, bucket).unflatten(0, shape).transpose(1, 2) for x in (q, k, v)]
        attended = attend(*parts)  # [S, heads, W, D]
        pieces.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.places))
    out = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return (out if packing.order is None else out[packing.order])[None]


def _causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    width = q.shape[2]
    whole = window is None or window >= width
    if sinks is None:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=None if whole else causal_mask(width, window, q.device),
            is_causal=whole,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)).float() * (
        q.shape[-1] ** -0.5 if scaling is None else scaling
    )
    scores = scores.masked_fill(~causal_mask(width, window, q.device), float("-inf"))
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype) @ v


def causal_mask(width: int, window: int | None, device: torch.device) -> Tensor:
    """[width, width] bool: a query sees itself and the `window` - 1 slots before it, or all of them."""
    distance = torch.arange(width, device=device)
    distance = distance[:, None] - distance
    return (distance >= 0) & (distance < (width if window is None else window))


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, no_mask)
