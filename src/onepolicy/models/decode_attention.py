"""Attention of packed tokens to a KV cache, with which the embedded engine decodes and prefills.

A forward has T tokens in one row. It decodes, with one token of many sequences, or prefills, with
many tokens of several sequences. The argument `kv_cache_step=` gives the cache row and the position
of each token; no mask is built per layer. Scores are float32. On a CPU, decoding reads keys and
values as tables of rows (`embedding_bag_matmul`): that copies nothing and skips rows that are not
running. On CUDA, prefilling is one call of a flash kernel (`flash.py`). Otherwise attention is two
batched matmuls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from onepolicy.models.embedding_bag_matmul import weighted_rows
from onepolicy.models.flash import attend_cache
from onepolicy.models.packed_attention import (
    no_mask,
    refuse_unsupported_arguments,
    round_up,
    takes_flash,
)
from onepolicy.models.sinks import fraction_beside_sink

# Fewest positions per row of the keys' table. On the CPU a cache row's length is a multiple of it.
KEY_BLOCK = 64
# Reading one more row of the keys' table takes as long as reading this many more positions.
ROW_COST = 24
# With more query heads per key than this, a matmul is faster than reading keys as a table.
MAX_HEADS_PER_KEY = 8
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
    """The places in the KV cache of one forward's T packed tokens."""

    rows: Tensor  # [T] int64, cache row
    positions: Tensor  # [T] int64, position in that row
    keys: int  # S: no token sees a position >= S
    view: slice | Tensor  # the V cache rows that attention reads
    # [T] int64, decoding: index of each token's row in the view; None: in order, V = T
    view_index: Tensor | None = None
    # [V, Q] int64, prefilling: the tokens of each row; short rows repeat their last token
    queries: Tensor | None = None
    # [T] int64, prefilling: index of each token in the flattened [V * Q]
    unpad: Tensor | None = None
    # [V + 1] int32, prefilling: the first token of each row, and T
    bounds: Tensor | None = None
    longest: int = 0  # prefilling: most tokens of a row
    stops: Tensor | None = None  # [V] int32, prefilling: keys of each row
    equal_lengths: bool = False  # decoding: all rows have S keys, so nothing needs a mask
    _bias: dict[tuple[int | None, bool], Tensor] = field(default_factory=dict)
    _tables: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def round_keys(self, multiple: int) -> None:
        """Round S up to a multiple. Positions beyond a row's length are masked anyway."""
        keys = round_up(self.keys, multiple)
        self.equal_lengths = self.equal_lengths and keys == self.keys
        self.keys = keys

    def pad_queries(self, x: Tensor, rows: int) -> Tensor:
        """Return [V, Q, ...] of [T, ...]. rows: V."""
        if self.queries is not None:
            return x[self.queries]
        if self.view_index is None:
            return x[:, None]
        padded = x.new_zeros(rows, 1, *x.shape[1:])
        return padded.index_copy_(0, self.view_index, x[:, None])

    def unpad_queries(self, x: Tensor) -> Tensor:
        """Return [T, ...] of [V, Q, ...]."""
        if self.unpad is not None:
            return x.flatten(0, 1).index_select(0, self.unpad)
        if self.view_index is None:
            return x[:, 0]
        return x[:, 0].index_select(0, self.view_index)

    def bias(self, window: int | None, rows: int | None) -> Tensor | None:
        """Return 0 where a query sees a key, else -inf; None if every query sees every key.

        The result is [V, 1, 1, Q, S] float32 with rows = V, or [T, 1, 1, 1, S] for a decode's
        packed tokens with rows = None.
        """
        if window is not None and window >= self.keys:
            window = None
        if self.equal_lengths and window is None:
            return None
        if (window, rows is None) not in self._bias:
            if rows is None:
                query = self.positions[:, None, None]
            else:
                query = self.pad_queries(self.positions, rows)[..., None]
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
        """Return the table rows of every decoding token's keys and values, the same in all layers.

        Args:
            groups: G, key heads.
            shared: R, query heads per key head.
            width: D, of a key.
            length: positions per cache row.

        Returns:
            keys: [T * G * R * blocks, D] int32, rows of the table
                [V * G * D * length / block, block] with block = `key_block`; one row of the index
                per query head and block of positions.
            values: [T * G * R, S] int32, rows of the table [V * G * length, Dv].
        """
        if (groups, shared, width, length) not in self._tables:
            row = self.rows.to(torch.int32) * groups
            head = (row[:, None] + _steps(groups)).view(-1, 1, 1)  # [T * G, 1, 1]
            block = key_block(self.keys, length)
            blocks, stride = -(-self.keys // block), length // block
            keys = head * (width * stride) + _steps(blocks).view(-1, 1) + _steps(width) * stride
            # With a single bag reshape returns a view, but embedding_bag needs contiguous memory.
            keys = keys[:, None].expand(-1, shared, -1, -1).reshape(-1, width).contiguous()
            values = (head * length + _steps(self.keys)).expand(-1, shared, -1)
            values = values.reshape(-1, self.keys).contiguous()
            self._tables[groups, shared, width, length] = keys, values
        return self._tables[groups, shared, width, length]


@lru_cache(maxsize=4096)
def key_block(keys: int, length: int) -> int:
    """Return the positions per row of the table in which `keys` of `length` positions are read.

    A row of several KEY_BLOCKs reads positions that nobody needs, but every row has a cost of its
    own, and with one row per key nothing has to be put in order afterwards.
    """
    fitting = [block for block in range(KEY_BLOCK, length + 1, KEY_BLOCK) if not length % block]
    return min(fitting, key=lambda block: -(-keys // block) * (block + ROW_COST))


def _steps(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int32)


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
    """Compute causal attention of each token to its own cache row.

    `s_aux` [heads] are attention-sink logits (gpt-oss). Raises ValueError if the model passes on no
    attention arguments, or some that this function does not support.
    """
    if kv_cache_step is None:
        raise ValueError(
            f"{type(module).__name__} does not pass attention arguments on; the embedded engine "
            "cannot work with it"
        )
    refuse_unsupported_arguments(
        module,
        "attention to the KV cache",
        extra,
        UNSUPPORTED,
        dropout=dropout,
        attention_mask=attention_mask,
    )
    scale = scaling
    if scale is None:
        scale = query.shape[-1] ** -0.5
    q = query[0].transpose(0, 1)  # [T, heads, D]
    bounds, stops = kv_cache_step.bounds, kv_cache_step.stops
    if bounds is not None and stops is not None and takes_flash(query, value, of_cache=True):
        spans = bounds, stops, kv_cache_step.longest
        out = attend_cache(q, key, value, *spans, scale=scale, window=sliding_window, sinks=s_aux)
        return out[None].to(query.dtype), None
    out = attend_to_cache(
        q, key, value, kv_cache_step, window=sliding_window, scale=scale, sinks=s_aux
    )
    return out[None], None


def attend_to_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: KVCacheStep,
    *,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from query [T, heads, D] to a KV cache: key [V, G, S, D] -> [T, heads, Dv]."""
    if reads_as_table(query, key, step):
        bias = step.bias(window, None)
        out = table_attention(query, key, value, step, bias=bias, scale=scale, sinks=sinks)
        return out.to(query.dtype)
    rows = len(key)
    bias = step.bias(window, rows)
    padded = step.pad_queries(query, rows)
    out = _attend(padded, key, value, bias=bias, scale=scale, sinks=sinks)
    return step.unpad_queries(out).to(query.dtype)


def reads_as_table(q: Tensor, key: Tensor, step: KVCacheStep) -> bool:
    """Return whether `key` can be read as a table, and that is faster than a matmul.

    `key` must be the cache's own memory, with rows of whole blocks, and the forward must decode.
    """
    (_, groups, _, width), length = key.shape, key.stride(3)
    return (
        (key.device.type, key.dtype) == ("cpu", torch.float32)
        and length > 1
        and length % KEY_BLOCK == 0
        and key.stride() == (groups * width * length, width * length, 1, length)
        and step.queries is None
        and isinstance(step.view, slice)
        and step.view.start == 0
        and q.shape[1] <= MAX_HEADS_PER_KEY * groups
    )


def table_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    step: KVCacheStep,
    *,
    bias: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from one token per row, reading keys and values as tables.

    q [T, heads, D], key [V, G, S, D], value [V, G, S, Dv], bias [T, 1, 1, 1, S] -> [T, heads, Dv]
    """
    scores = table_scores(q, key, step, bias=bias, scale=scale)
    out = table_values(scores.softmax(-1), value, step, key)
    if sinks is not None:
        out = out * fraction_beside_sink(scores, sinks)
    return out.view(*q.shape[:2], -1)


def table_scores(
    q: Tensor, key: Tensor, step: KVCacheStep, *, bias: Tensor | None, scale: float
) -> Tensor:
    """Return scores [T, G, R, 1, S] of q [T, heads, D] with key [V, G, S, D].

    bias [T, 1, 1, 1, S].
    """
    (tokens, heads, width), (rows, groups, keys, _), length = q.shape, key.shape, key.stride(3)
    block = key_block(keys, length)
    shared, blocks = heads // groups, -(-keys // block)
    key_rows, _ = step.table_rows(groups, shared, width, length)
    weight = (q.to(key.dtype) * scale).unsqueeze(2).expand(-1, -1, blocks, -1)
    table = key.as_strided((rows * groups * width * length // block, block), (block, 1))
    scores = weighted_rows(table, key_rows, weight)
    scores = scores.view(tokens, groups, shared, 1, blocks * block)[..., :keys]
    if bias is None:
        return scores
    return scores.add_(bias)


def table_values(
    weights: Tensor, value: Tensor, step: KVCacheStep, key: Tensor, *, terms: int | None = None
) -> Tensor:
    """Return [T, G, R, 1, Dv], the sums of value [V, G, S, Dv] with weights [T, G, R, 1, S].

    terms: as of `weighted_rows`.
    """
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
    """Attend with two batched matmuls. R = heads / G query heads share a key.

    q [V, Q, heads, D], key [V, G, S, D], value [V, G, S, Dv] -> [V, Q, heads, Dv]
    """
    (rows, queries, heads, _), (groups, keys) = q.shape, key.shape[1:3]
    shape = (rows, groups, heads // groups, queries, keys)
    if key.device.type == "cpu":  # bfloat16 matmuls of this shape are slower than converting
        q, key, value = q.float(), key.float(), value.float()
    grouped = q.to(key.dtype).unflatten(2, shape[1:3]).permute(0, 2, 3, 1, 4)
    q = grouped.reshape(rows * groups, -1, q.shape[-1])
    scores = torch.bmm(q * scale, key.transpose(2, 3).flatten(0, 1)).float()  # [V * G, R * Q, S]
    if bias is not None:
        scores.view(shape).add_(bias)
    out = torch.bmm(scores.softmax(-1).to(value.dtype), value.flatten(0, 1))
    out = out.view(*shape[:4], -1)
    if sinks is not None:
        out = out * fraction_beside_sink(scores.view(shape), sinks).to(out.dtype)
    return out.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)


AttentionInterface.register(NAME, kv_cache_attention)
AttentionMaskInterface.register(NAME, no_mask)
