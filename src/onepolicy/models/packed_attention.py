"""Attention over packed samples: one row of T slots, in which no sample sees another.

On CUDA, 16 bits are one call of a flash kernel (`flash.py`). Elsewhere the packing lays the samples
out as tables (`buckets.py`, `train/shared_prompts.py`).
The lengths come in the attention argument `packing=`. With position ids alone some families would
be silently wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from onepolicy.models import flash
from onepolicy.models.recurrent.segments import Row, Segments
from onepolicy.models.sinks import attend_with_sinks

NAME = "onepolicy_packed"
UNSUPPORTED = ("softcap", "position_bias", "block_mask")
QUERIES = 256
"""Queries that attend at a time on a CPU. With 256 torch's kernel takes them as it takes a row."""


class Causal(Protocol):
    """Causal attention of samples of one width: q [S, heads, W, D] -> [S, heads, W, Dv].

    k and v [S, kv heads, keys, D]. start: key at which the first query stands.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Packing(ABC):
    """The samples of a packed row, and how attention is computed over them.

    `BucketedPacking` (models/buckets.py) pads them, `SharedPacking` (train/shared_prompts.py)
    shares their common prefixes.
    """

    # [T] int64, index of each slot in the buckets' slots, joined; None: they are in order
    order: Tensor | None
    bounds: Tensor  # [S + 1] int32, first slot of each sample, and T
    longest: int  # slots of the longest sample
    segments: Segments | None  # for recurrent layers; None: they cannot compute it

    def recurrent_row(self, layer: int) -> Row:
        """Return the row as recurrent layers compute it, each sample from no state."""
        assert self.segments is not None, "prompts are not shared by recurrent layers"
        return Row(self.segments)

    @abstractmethod
    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: Causal) -> Tensor:
        """Return causal attention of every sample.

        query, key, value [1, heads, T, D] -> [1, T, heads, Dv].
        """


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


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
    """Compute causal attention within each packed sample.

    `s_aux` [heads] are attention-sink logits (gpt-oss). Raises ValueError if the model passes on no
    attention arguments, or some that this function does not support.
    """
    if packing is None:
        raise ValueError(
            f"{type(module).__name__} does not pass attention arguments on; packed training cannot "
            "work with it"
        )
    refuse_unsupported_arguments(module, "packed attention", extra, UNSUPPORTED, dropout=dropout)

    if takes_flash(query, value):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, heads, D]
        spans = packing.bounds, packing.longest
        out = flash.attend_spans(q, k, v, *spans, scale=scaling, window=sliding_window, sinks=s_aux)
        return out[None], None

    causal = partial(causal_attention, scaling=scaling, window=sliding_window, sinks=s_aux)
    return packing.attend(query, key, value, causal), None


def takes_flash(query: Tensor, value: Tensor, *, of_cache: bool = False) -> bool:
    """Return whether the flash kernel can attend. It exists on CUDA alone.

    of_cache: to the rows of a KV cache, not to packed samples.
    """
    if query.device.type != "cuda":
        return False
    return (flash.takes_cache if of_cache else flash.takes)(query, value)


def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scaling: float | None,
    window: int | None,
    sinks: Tensor | None,
    start: int = 0,  # key at which the first query stands
) -> Tensor:
    """Return causal attention of q [S, heads, W, D], with a sliding window and sinks if given.

    On a CPU queries go a few at a time, each to the keys that they see: its kernel computes what a
    mask hides.
    """
    width, queries = k.shape[2], q.shape[2]
    if sinks is None and not start and (window is None or window >= width):
        return _attend(q, k, v, None, scaling=scaling)
    if q.device.type != "cpu" or queries <= QUERIES:
        mask = causal_mask(width, window, q.device)[start : start + queries]
        return _attend_masked(q, k, v, mask, sinks, scaling=scaling)
    parts = []
    for first in range(0, queries, QUERIES):
        last = min(first + QUERIES, queries)
        before = max(0, start + first - (window or width) + 1)  # keys that none of these sees
        seen = slice(before, start + last)
        mask = causal_mask(start + last - before, window, q.device)[first - last :]
        own = q[:, :, first:last], k[:, :, seen], v[:, :, seen], mask
        parts.append(_attend_masked(*own, sinks, scaling=scaling))
    return torch.cat(parts, 2)


def _attend_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, *, scaling: float | None
) -> Tensor:
    if sinks is None:
        return _attend(q, k, v, mask, scaling=scaling)
    return attend_with_sinks(q, k, v, mask, sinks, scaling=scaling)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float | None
) -> Tensor:
    """Attend by torch's kernel. mask: None if every query sees all keys up to its own."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1 and expands_heads(q):
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def expands_heads(q: Tensor) -> bool:
    """Return whether keys and values are repeated for every query head.

    On CUDA no fused kernel takes grouped heads in float32, and the other one keeps all scores.
    """
    return q.device.type == "cuda" and q.dtype == torch.float32


def causal_mask(width: int, window: int | None, device: torch.device) -> Tensor:
    """Return [width, width] bool: True where a query (row) sees a key (column).

    It sees itself and the `window` - 1 slots before it; without a window, all slots before it.
    """
    slot = torch.arange(width, device=device)
    distance = slot[:, None] - slot
    if window is None:
        return distance >= 0
    return (distance >= 0) & (distance < window)


# No mask function: transformers then makes no mask, and reads no positions on the host to do so.
AttentionInterface.register(NAME, packed_attention)


def refuse_unsupported_arguments(
    module: nn.Module,
    function: str,
    arguments: Mapping[str, Any],
    unsupported: Collection[str],
    *,
    dropout: float,
    attention_mask: Tensor | None = None,
) -> None:
    """Raise ValueError if the model passes an argument that this attention function would ignore.

    function: the attention function's name, for the message.
    """
    refused = [name for name in unsupported if arguments.get(name) is not None]
    if dropout:
        refused.append("dropout")
    if attention_mask is not None:
        refused.append("attention_mask")
    if refused:
        raise ValueError(f"{type(module).__name__}: {function} does not know {', '.join(refused)}")


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Return no mask: the attention functions take an argument that decides which keys are seen."""
