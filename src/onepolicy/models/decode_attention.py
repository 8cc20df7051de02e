"""Attention of packed tokens over a slab of cached keys: what the embedded engine decodes and prefills with.

A forward carries T tokens in one row, decoding (one token of many sequences) or prefilling (many tokens of several).
Which slab row and position each token has travels as an explicit attention argument (`kv_cache_step=`); no mask is built
per layer. Scores are float32. On a CPU, decoding reads keys and values as tables of rows (`bags`), which needs no
copy and skips rows that are not running; prefilling and other devices use two plain batched matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from onepolicy.models.attention_arguments import no_mask, refuse_unsupported_arguments
from onepolicy.models.embedding_bag_matmul import weighted_rows

KEY_BLOCK = (
    64  # positions of one key table row; a slab's rows are a multiple of this long on the CPU
)
MAX_HEADS_PER_KEY = (
    8  # most query heads per key that read it as a table; with more, a matmul is faster
)
NAME = "onepolicy_kv_cache"
UNSUPPORTED = (
    "softcap",
    "position_bias",
    "block_mask",
    "head_mask",
    "indices",
    "topk_indices",
    "block_indices",
)


@dataclass(slots=True)
class KVCacheStep:
    """Where the T packed tokens of one forward live in the slab."""

    rows: Tensor  # [T] int64, slab row
    positions: Tensor  # [T] int64, position in that row
    keys: int  # S: no token sees a position >= S
    view: slice | Tensor  # the V slab rows that attention reads
    place: Tensor | None = (
        None  # [T] int64, decoding: index of each token's row in the view; None: in order, V = T
    )
    queries: Tensor | None = (
        None  # [V, Q] int64, prefilling: the tokens of each row, short rows repeat their last
    )
    unpad: Tensor | None = (
        None  # [T] int64, prefilling: where in the flattened [V * Q] each token is
    )
    equal_lengths: bool = False  # decoding: all rows have S keys, so there is nothing to mask
    _bias: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)
    _tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def round_keys(self, multiple: int) -> None:
        """Let S be a multiple; what is beyond the longest row is masked like what is beyond any row."""
        keys = -(-self.keys // multiple) * multiple
        self.equal_lengths, self.keys = self.equal_lengths and keys == self.keys, keys

    def pad_queries(self, x: Tensor, rows: int) -> Tensor:
        """[T, ...] -> [V, Q, ...]"""
        if self.queries is not None:
            return x[self.queries]
        if self.place is None:
            return x[:, None]
        return x.new_zeros(rows, 1, *x.shape[1:]).index_copy_(0, self.place, x[:, None])

    def unpad_queries(self, x: Tensor) -> Tensor:
        """[V, Q, ...] -> [T, ...]"""
        if self.unpad is not None:
            return x.flatten(0, 1).index_select(0, self.unpad)
        return x[:, 0] if self.place is None else x[:, 0].index_select(0, self.place)

    def bias(self, window: int | None, rows: int | None) -> Tensor | None:
        """[V, 1, 1, Q, S] float32, 0 where the query sees the key, else -inf. None: every query sees every key.

        rows: V; None for the packed tokens of a decode, [T, 1, 1, 1, S].
        """
        if window is not None and window >= self.keys:
            window = None
        if self.equal_lengths and window is None:
            return None
        if (window, rows is None) not in self._bias:
            query = (
                self.positions[:, None] if rows is None else self.pad_queries(self.positions, rows)
            )[..., None]
            key = torch.arange(self.keys, device=query.device)
            seen = key <= query  # [V, Q, S]
            if window is not None:
                seen &= key > query - window
            bias = torch.zeros(seen.shape, device=query.device).masked_fill_(~seen, float("-inf"))
            self._bias[window, rows is None] = bias[:, None, None]
        return self._bias[window, rows is None]

    def table_rows(
        self, groups: int, shared: int, width: int, length: int
    ) -> tuple[Tensor, Tensor]:
        """Decoding: where the keys and values of every token lie, as rows of tables; the same for all layers.

        keys [T * G * blocks * R, D] of [V * G * D * length / BLOCK, BLOCK], one row of the index for every query head
        and block of positions; values [T * G * R, S] of [V * G * length, Dv]. R = shared, D = width.
        """
        if (groups, shared, width, length) not in self._tables:

            def count(n: int, step: int, *shape: int) -> Tensor:
                return torch.arange(0, n * step, step, dtype=torch.int32).view(shape)

            row, blocks = self.rows.to(torch.int32) * groups, -(-self.keys // KEY_BLOCK)
            first = (row[:, None] + count(groups, 1, groups)).view(-1, 1, 1, 1) * (
                width * length // KEY_BLOCK
            )
            keys = (
                first + count(blocks, 1, blocks, 1, 1) + count(width, length // KEY_BLOCK, width)
            )  # [T * G, blocks, 1, D]
            keys = (
                keys.expand(-1, -1, shared, -1).reshape(-1, width).contiguous()
            )  # one bag: reshape only views it
            first = (row[:, None] + count(groups, 1, groups)).view(-1, 1, 1) * length
            values = (
                (first + count(self.keys, 1, self.keys))
                .expand(-1, shared, -1)
                .reshape(-1, self.keys)
                .contiguous()
            )
            self._tables[groups, shared, width, length] = keys, values
        return self._tables[groups, shared, width, length]


def kv_cache_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # [V, kv heads, S, D]
    value: Tensor,  # [V, kv heads, S, Dv]
    attention_mask: Tensor | None,
    *,
    kv_cache_step: KVCacheStep | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:  # [1, T, heads, Dv]
    """Causal attention of each token over its own slab row. `s_aux` [heads] are attention-sink logits (gpt-oss)."""
    name = type(module).__name__
    if kv_cache_step is None:
        raise ValueError(
            f"{name} does not hand attention arguments on; the slab engine cannot work with it"
        )
    refuse_unsupported_arguments(
        module, "slab attention", extra, UNSUPPORTED, dropout=dropout, attention_mask=attention_mask
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q = query[0].transpose(0, 1)  # [T, heads, D]
    if reads_as_table(q, key, kv_cache_step):
        bias = kv_cache_step.bias(sliding_window, None)
        return _table_attention(q, key, value, kv_cache_step, bias=bias, scale=scale, sinks=s_aux)[
            None
        ].to(q.dtype), None
    rows = len(key)
    bias = kv_cache_step.bias(sliding_window, rows)
    out = _attend(
        kv_cache_step.pad_queries(q, rows), key, value, bias=bias, scale=scale, sinks=s_aux
    )
    return kv_cache_step.unpad_queries(out)[None].to(query.dtype), None


def reads_as_table(q: Tensor, key: Tensor, step: KVCacheStep) -> bool:
    """Whether `key` is the slab's own memory, its rows whole blocks, and reading it as a table is the faster way."""
    (_, groups, _, width), length = key.shape, key.stride(3)
    whole = (
        length > 1
        and length % KEY_BLOCK == 0
        and key.stride() == (groups * width * length, width * length, 1, length)
    )
    decodes = step.queries is None and isinstance(step.view, slice) and step.view.start == 0
    return (
        (key.device.type, key.dtype) == ("cpu", torch.float32)
        and whole
        and decodes
        and q.shape[1] <= MAX_HEADS_PER_KEY * groups
    )


def _table_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    step: KVCacheStep,
    *,
    bias: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """q [T, heads, D], key [V, G, S, D], value [V, G, S, Dv], bias [T, 1, 1, 1, S] -> [T, heads, Dv]."""
    scores = table_scores(q, key, step, bias=bias, scale=scale)
    out = table_values(scores.softmax(-1), value, step, key)
    if sinks is not None:
        out = out * _kept(scores, sinks)
    return out.view(*q.shape[:2], -1)


def table_scores(
    q: Tensor, key: Tensor, step: KVCacheStep, *, bias: Tensor | None, scale: float
) -> Tensor:
    """q [T, heads, D], key [V, G, S, D], bias [T, 1, 1, 1, S] -> [T, G, R, 1, S]."""
    (tokens, heads, width), (rows, groups, keys, _), length = q.shape, key.shape, key.stride(3)
    shared, blocks = heads // groups, -(-keys // KEY_BLOCK)
    key_rows, _ = step.table_rows(groups, shared, width, length)
    lanes = (
        (q.to(key.dtype) * scale)
        .reshape(tokens, groups, 1, shared, width)
        .expand(-1, -1, blocks, -1, -1)
    )
    table = key.as_strided((rows * groups * width * length // KEY_BLOCK, KEY_BLOCK), (KEY_BLOCK, 1))
    scores = (
        weighted_rows(table, key_rows, lanes)
        .view(tokens, groups, blocks, shared, KEY_BLOCK)
        .transpose(2, 3)
    )
    scores = scores.reshape(tokens, groups, shared, 1, blocks * KEY_BLOCK)[..., :keys]
    return scores if bias is None else scores + bias


def table_values(
    weights: Tensor, value: Tensor, step: KVCacheStep, key: Tensor, *, terms: int | None = None
) -> Tensor:
    """weights [T, G, R, 1, S], value [V, G, S, Dv] -> [T, G, R, 1, Dv]; `terms` as in `bags`."""
    (rows, groups, _, width), length = key.shape, key.stride(3)
    _, value_rows = step.table_rows(groups, weights.shape[2], width, length)
    table = value.as_strided((rows * groups * length, value.shape[3]), (value.shape[3], 1))
    return weighted_rows(table, value_rows, weights, terms).view(*weights.shape[:4], -1)


def _attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """q [V, Q, heads, D], key [V, G, S, D], value [V, G, S, Dv] -> [V, Q, heads, Dv]; R = heads / G share a key."""
    (rows, queries, heads, _), (groups, keys) = q.shape, key.shape[1:3]
    per_group = heads // groups
    if key.device.type == "cpu":  # bfloat16 matmuls of this shape are slower than converting
        q, key, value = q.float(), key.float(), value.float()
    q = (
        q.to(key.dtype)
        .unflatten(2, (groups, per_group))
        .permute(0, 2, 3, 1, 4)
        .reshape(rows * groups, -1, q.shape[-1])
    )
    scores = torch.bmm(q * scale, key.transpose(2, 3).flatten(0, 1)).float()  # [V * G, R * Q, S]
    if bias is not None:
        scores.view(rows, groups, per_group, queries, keys).add_(bias)
    out = torch.bmm(scores.softmax(-1).to(value.dtype), value.flatten(0, 1))
    out = out.view(rows, groups, per_group, queries, -1)
    if sinks is not None:
        out = out * _kept(scores.view(rows, groups, per_group, queries, keys), sinks).to(out.dtype)
    return out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)


def _kept(scores: Tensor, sinks: Tensor) -> Tensor:
    """What a sink, which adds exp(sink) to the softmax's denominator, leaves: scores [V, G, R, Q, S] -> [..., 1]."""
    return torch.sigmoid(
        scores.logsumexp(-1, keepdim=True) - sinks.float().view(*scores.shape[1:3], 1, 1)
    )


AttentionInterface.register(NAME, kv_cache_attention)
AttentionMaskInterface.register(NAME, no_mask)
