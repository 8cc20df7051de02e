"""Attention of the on-policy mode: one function for decoding, prefilling and packed samples.

A query's result depends on its own keys only. Scores and weighted sums are products of `ops`. On
every path keys are counted from the beginning of their sequence. Keys that a query must not see
have weight 0, which changes no bit of a sum. Rows of scores are whole tiles long, because torch
sums shorter rows in another order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from onepolicy.invariant.ops import TERMS, batched_matmul, fixed_shapes
from onepolicy.invariant.strict import invariant_operator
from onepolicy.invariant.switch import TILE
from onepolicy.models import decode_attention, packed_attention
from onepolicy.models.decode_attention import (
    KVCacheStep,
    reads_as_table,
    table_scores,
    table_values,
)
from onepolicy.models.packed_attention import (
    Packing,
    causal_mask,
    no_mask,
    refuse_unsupported_arguments,
)

NAME = "onepolicy_invariant"
UNSUPPORTED = {*decode_attention.UNSUPPORTED, *packed_attention.UNSUPPORTED}


@invariant_operator
def invariant_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, D]
    key: Tensor,  # packed [1, kv heads, T, D]; KV cache [V, kv heads, S, D]
    value: Tensor,  # packed [1, kv heads, T, Dv]; KV cache [V, kv heads, S, Dv]
    attention_mask: Tensor | None,
    *,
    packing: Packing | None = None,
    kv_cache_step: KVCacheStep | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, None]:  # [1, T, heads, Dv]
    """Compute causal attention of each token within its own sequence.

    `s_aux` [heads] are attention-sink logits (gpt-oss). Raises ValueError if the model passes on no
    attention arguments, or some that this function does not support.
    """
    if packing is None and kv_cache_step is None:
        raise ValueError(
            f"{type(module).__name__} does not pass attention arguments on; invariant attention "
            "cannot work with it"
        )
    refuse_unsupported_arguments(
        module,
        "invariant attention",
        extra,
        UNSUPPORTED,
        dropout=dropout,
        attention_mask=attention_mask,
    )
    scale = scaling
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if kv_cache_step is not None:
        q = query[0].transpose(0, 1)
        out = attend_to_cache(
            q, key, value, kv_cache_step, window=sliding_window, scale=scale, sinks=s_aux
        )
        return out[None], None
    assert packing is not None

    def causal(q: Tensor, k: Tensor, v: Tensor, *, start: int = 0) -> Tensor:
        seen = causal_mask(k.shape[2], sliding_window, q.device)[start : start + q.shape[2]]
        bias = torch.zeros_like(seen, dtype=torch.float32).masked_fill_(~seen, float("-inf"))
        out = attend(q.transpose(1, 2), k, v, bias=bias, scale=scale, sinks=s_aux)
        return out.transpose(1, 2)

    return packing.attend(query, key, value, causal).to(query.dtype), None


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
    if reads_as_table(query, key, step) and query.shape[-1] <= TERMS:
        out = _table_attention(query, key, value, step, window=window, scale=scale, sinks=sinks)
        return out.to(query.dtype)
    rows = len(key)
    bias = step.bias(window, rows)
    padded = step.pad_queries(query, rows)
    out = attend(padded, key, value, bias=bias, scale=scale, sinks=sinks)
    return step.unpad_queries(out).to(query.dtype)


def attend(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    bias: Tensor | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from every query to all keys of its row.

    q [V, Q, heads, D], key [V, G, S, D], value [V, G, S, Dv] -> [V, Q, heads, Dv] float32. bias is
    float32 and broadcasts to [V, G, R, Q, S]. R = heads / G heads share a key.
    """
    (rows, queries, heads, _), (groups, keys) = q.shape, key.shape[1:3]
    shape = (rows, groups, heads // groups, queries, keys)
    q = (
        (q.float() * scale)
        .unflatten(2, shape[1:3])
        .permute(0, 2, 3, 1, 4)
        .reshape(rows * groups, -1, q.shape[-1])
    )
    if sinks is not None:
        sinks = sinks.float()
    key, value = key.float().flatten(0, 1), value.float().flatten(0, 1)
    out = _Attend.apply(q, key, value, bias, sinks, shape)
    return out.view(*shape[:4], -1).permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)


class _Attend(torch.autograd.Function):
    """Attention with its gradient, in one autograd function.

    q [B, R * Q, D], key [B, S, D], value [B, S, Dv] -> [B, R * Q, Dv], with B = V * G and `shape`
    [V, G, R, Q, S]. Separate operators would make autograd copy the scores at every in-place
    change.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        shape: tuple,
    ) -> Tensor:
        scores = batched_matmul(q, key.transpose(1, 2)).view(shape)
        if bias is not None:
            scores.add_(bias)
        weights = softmax(scores, sinks)
        ctx.save_for_backward(q, key, value, weights)
        ctx.heads = shape[1:3]
        ctx.has_sinks = sinks is not None
        return batched_matmul(weights[..., -shape[4] :].flatten(0, 1).flatten(1, 2), value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, key, value, weights = ctx.saved_tensors
        weights = weights.flatten(0, 1).flatten(1, 2)  # [B, R * Q, S], with a sink TILE + S
        front = weights.shape[2] - key.shape[1]
        grad_weights = torch.bmm(grad, value.transpose(1, 2))
        if front:  # of a sink; a pad of nothing is a copy
            grad_weights = F.pad(grad_weights, (front, 0))
        grad_scores = torch.ops.aten._softmax_backward_data(
            grad_weights, weights, -1, torch.float32
        )
        grad_sinks = None
        if ctx.has_sinks:
            queries = grad.shape[1] // ctx.heads[1]
            grad_sinks = grad_scores[..., 0].reshape(-1, *ctx.heads, queries).sum((0, 3)).flatten()
        seen, grad_scores = weights[..., front:], grad_scores[..., front:]
        return (
            torch.bmm(grad_scores, key),
            torch.bmm(grad_scores.transpose(1, 2), q),
            torch.bmm(seen.transpose(1, 2), grad),
            None,
            grad_sinks,
            None,
        )


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [V, G, R, Q, S] over the keys, S a multiple of TILE.

    A sink [G * R] adds exp(sink) to its head's denominator. With sinks, the result has TILE more
    columns, at the front.
    """
    assert scores.shape[-1] % TILE == 0
    if sinks is not None:
        front = scores.new_full((*scores.shape[:-1], TILE), float("-inf"))
        front[..., 0] = sinks.view(*scores.shape[1:3], 1)
        scores = torch.cat([front, scores], -1)
    if not fixed_shapes(scores.device):
        return scores.softmax(-1)
    # torch's softmax kernel depends on the number of keys.
    weights = (scores - scores.amax(-1, keepdim=True)).exp_()
    ones = scores.new_ones(1, scores.shape[-1], 1)
    total = batched_matmul(weights.view(1, -1, scores.shape[-1]), ones)
    return weights / total.view(*scores.shape[:-1], 1)


def _table_attention(
    q: Tensor,
    key: Tensor,
    value: Tensor,
    step: KVCacheStep,
    *,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from one token per row without copying keys: q [T, heads, D] -> [T, heads, Dv]."""
    scores = table_scores(q, key, step, bias=step.bias(window, None), scale=scale)
    if sinks is not None:
        sinks = sinks.float()
    weights = softmax(scores, sinks)[..., -scores.shape[-1] :]
    return table_values(weights, value, step, key, terms=TERMS).view(*q.shape[:2], -1)


AttentionInterface.register(NAME, invariant_attention)
AttentionMaskInterface.register(NAME, no_mask)
