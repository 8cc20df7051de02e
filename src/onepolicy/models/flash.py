"""Attention on CUDA by torch's variable-length flash kernel: no padding, no scores in memory.

Samples are spans of one packed row, given by their bounds. Grouped heads and sliding windows are
the kernel's own. An attention sink (gpt-oss) is a key with the logit s and the value 0 that every
query sees. The kernel does not know it, but returns lse, the logarithm of its denominator. With
lse' = log(exp(lse) + exp(s)) the output is out' = out * exp(lse - lse'). The kernel's backward
makes the weights of the softmax again, exp(score - lse): given out' and lse' it makes those beside
the sink, and so the right gradients (FlashAttention-2, arXiv:2307.08691, algorithm 2). The sink's
own is -sum_t exp(s - lse'_t) * (grad_t . out'_t).
"""

from __future__ import annotations

import inspect
import math
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

try:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    ARGUMENTS = set(inspect.signature(varlen_attn).parameters)
except ImportError:  # an older torch, which trains by SDPA
    ARGUMENTS = set()

HALF = (torch.bfloat16, torch.float16)
HEAD_MULTIPLE, MOST_HEAD_ELEMENTS = 8, 256  # that the kernel takes
HEAD_ELEMENTS = ("head_dim", "global_head_dim", "qk_head_dim", "v_head_dim")
FIRST_CAPABILITY = (8, 0)  # Ampere


def takes(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel can attend from `query` [.., D] to values [.., Dv]."""
    return (
        query.device.type == "cuda"
        and _has_kernel(query.device)
        and _computed_dtype(query) in HALF
        and max(query.shape[-1], value.shape[-1]) <= MOST_HEAD_ELEMENTS
    )


def takes_cache(query: Tensor, value: Tensor) -> bool:
    """Return whether the kernel can attend to a cache whose rows have different numbers of keys.

    That of torch 2.11 attends to packed samples alone.
    """
    return "seqused_k" in ARGUMENTS and takes(query, value)


@cache
def _has_kernel(device: torch.device) -> bool:
    is_rocm = torch.version.hip is not None
    has_call = {"return_aux", "window_size"} <= ARGUMENTS
    return has_call and not is_rocm and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def _grouped(query: Tensor, key: Tensor) -> dict[str, Any]:
    """Return the argument that allows fewer heads of keys. torch 2.11 allows them without one."""
    if "enable_gqa" not in ARGUMENTS:
        return {}
    return {"enable_gqa": query.shape[1] != key.shape[1]}


def fits_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel prefills the cache of a model with this text config.

    Families name the elements of their heads differently.
    """
    named = [getattr(config, name, None) or 0 for name in HEAD_ELEMENTS]
    elements = max(config.hidden_size // config.num_attention_heads, *named)
    fits = elements <= MOST_HEAD_ELEMENTS and "seqused_k" in ARGUMENTS
    return fits and dtype in HALF and device.type == "cuda" and _has_kernel(device)


def _computed_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of attention to `x`. torch's autocast does not know the kernel."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


def attend_spans(
    query: Tensor,  # [T, heads, D]
    key: Tensor,  # [T, kv heads, D]
    value: Tensor,  # [T, kv heads, Dv]
    bounds: Tensor,  # [S + 1] int32, first slot of each sample, and T
    longest: int,
    *,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [T, heads, Dv]
    """Return causal attention within each sample. longest: slots of the longest one.

    window: a query sees itself and the `window` - 1 slots before it; None: all slots before it.
    """
    dtype, width = _computed_dtype(query), value.shape[-1]
    if scale is None:
        scale = query.shape[-1] ** -0.5
    query, key, value = _even_heads(query.to(dtype), key.to(dtype), value.to(dtype))
    spans = (bounds, longest, scale, _kernel_window(window))
    if sinks is None:
        out = _forward(query, key, value, *spans)[0]
    else:
        out = _WithSinks.apply(query, key, value, sinks, *spans)
    return out[..., :width]


def attend_cache(
    query: Tensor,  # [T, heads, D]
    key: Tensor,  # [V, kv heads, S, D]
    value: Tensor,  # [V, kv heads, S, Dv]
    bounds: Tensor,  # [V + 1] int32, first token of each row, and T
    stops: Tensor,  # [V] int32, keys of each row
    longest: int,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,  # [heads]
) -> Tensor:  # [T, heads, Dv]
    """Return causal attention of prefilled tokens to the V cache rows that they are in.

    The tokens of a row are the last of its keys. longest: most tokens of a row. Nothing has a
    gradient.
    """
    (rows, _, keys, _), width = key.shape, value.shape[-1]
    packed = (x.transpose(1, 2).reshape(rows * keys, *x.shape[1::2]) for x in (key, value))
    query, key, value = (x.contiguous() for x in _even_heads(query.to(key.dtype), *packed))
    starts = torch.arange(rows + 1, dtype=torch.int32, device=key.device) * keys
    out, lse = varlen_attn(
        query,
        key,
        value,
        bounds,
        starts,
        longest,
        keys,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=_kernel_window(window),
        **_grouped(query, key),
        seqused_k=stops,
    )
    if sinks is not None:
        out = out * torch.sigmoid(lse - sinks.float()[:, None]).t()[..., None]
    return out[..., :width]


def _even_heads(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Fill all heads with zeros up to one number of elements, as the kernel wants them."""
    most = max(tensor.shape[-1] for tensor in tensors)
    width = math.ceil(most / HEAD_MULTIPLE) * HEAD_MULTIPLE
    return tuple(_fill(tensor, width) for tensor in tensors)


def _fill(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] == width:
        return x
    return pad(x, (0, width - x.shape[-1]))


def _kernel_window(window: int | None) -> tuple[int, int]:
    """Return the slots to the left and right of a query that it sees, -1 for all."""
    if window is None:
        return -1, 0
    return window - 1, 0


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    """Return the output [T, heads, D] and lse [heads, T] float32, which has no gradient."""
    out, lse = varlen_attn(
        query,
        key,
        value,
        bounds,
        bounds,
        longest,
        longest,
        return_aux=AuxRequest(lse=True),
        scale=scale,
        window_size=window,
        **_grouped(query, key),
    )
    return out, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    longest: int,
    scale: float,
    window: tuple[int, int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value with the weights exp(score - lse).

    The operator is not public: torch's own backward of `varlen_attn` calls it.
    """
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device)
    causal = window == (-1, 0)
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        grad.contiguous(),
        query,
        key,
        value,
        out,
        lse,
        bounds,
        bounds,
        longest,
        longest,
        causal,
        no_dropout,
        scale,
        list(window),
    )
    return grads


class _WithSinks(torch.autograd.Function):
    """Attention beside a sink per head, and its gradients from the kernel's own backward."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, *spans: Any
    ) -> Tensor:
        out, lse = _forward(query, key, value, *spans)
        with_sink = torch.logaddexp(lse, sinks.float()[:, None])  # [heads, T]
        share = torch.exp(lse - with_sink).t()[..., None]
        out = (out * share).to(query.dtype)
        bounds, *ctx.rest = spans
        ctx.save_for_backward(query, key, value, sinks, out, with_sink, bounds)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse, bounds = ctx.saved_tensors
        grads = _backward(grad, query, key, value, out, lse, bounds, *ctx.rest)
        weight = torch.exp(sinks.float()[:, None] - lse)  # [heads, T], the sink's
        moved = torch.einsum("thd,thd->ht", grad.float(), out.float())
        grad_sinks = -(weight * moved).sum(1).to(sinks.dtype)
        return *grads, grad_sinks, None, None, None, None
