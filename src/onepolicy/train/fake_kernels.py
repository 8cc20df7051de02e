"""Stand-ins for kernels that fake tensors cannot run, or that a GPU would choose instead."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onepolicy.invariant import experts as invariant_experts
from onepolicy.invariant import mode
from onepolicy.models import experts, few_passes, flash, packed_attention
from onepolicy.models.packed_attention import Packing
from onepolicy.models.quant import quantise

REAL_SORT_BY_EXPERT, REAL_FEW_TOKEN_PACKING = experts.sort_by_expert, mode.few_token_packing
REAL_IS_SILU_GATE = invariant_experts.is_silu_gate


@contextmanager
def kernel_stand_ins(*, cpu: bool) -> Iterator[None]:
    """Replace kernels inside the block. cpu: replace our CPU functions, else a GPU's kernels."""
    with ExitStack() as stack:
        if cpu:
            for module in (experts, invariant_experts):
                stack.enter_context(patched(module, "sort_by_expert", _sort_evenly))
            stack.enter_context(patched(mode, "few_token_packing", _real_packing))
            stack.enter_context(patched(invariant_experts, "is_silu_gate", _is_silu_gate))
        else:
            for module, name, stand_in in GPU_KERNELS:
                stack.enter_context(patched(module, name, stand_in))
        stack.enter_context(patched(torch.nn.functional, "grouped_mm", _grouped_mm))
        stack.enter_context(patched(quantise, "_check_forward", lambda model: None))
        yield


@contextmanager
def patched(module: Any, name: str, stand_in: Any) -> Iterator[None]:
    """Replace an attribute of a module inside the block."""
    original = getattr(module, name)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        setattr(module, name, original)


def _real_packing(device: torch.device) -> Packing:
    with unset_fake_temporarily():
        return REAL_FEW_TOKEN_PACKING(torch.device("cpu"))


def _is_silu_gate(module: nn.Module, width: int) -> bool:
    with unset_fake_temporarily():
        return REAL_IS_SILU_GATE(module, width)


def _sort_evenly(
    top_k_index: Tensor, num_experts: int, *, least: int = 1
) -> tuple[Tensor, Tensor, list[int]]:
    """Give every expert equally many rows, because fake tensors have no routes to sort by.

    Only the first expert computes. It holds as much memory as each of the others would after it.
    """
    with unset_fake_temporarily():
        chosen = torch.arange(top_k_index.numel()).remainder(num_experts).view(top_k_index.shape)
        token, place, ends = REAL_SORT_BY_EXPERT(chosen, num_experts, least=least)
    return torch.empty_like(token), torch.empty_like(place), ends[:1] * num_experts


def _flash_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    summed = torch.empty_like(query, dtype=torch.float32)
    by_query_head = [query.new_empty(*query.shape[:-1], x.shape[-1]) for x in (key, value)]
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    del summed, by_query_head
    return grads


class _FlashAttention(torch.autograd.Function):
    """The memory of flash attention on a GPU, for any device.

    Its backward sums the gradients of queries in float32. It makes the gradients of keys and values
    for every query head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        log_sum_exp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum_exp)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return _flash_gradients(grad, query, key, value)


class _GroupedMatmul(torch.autograd.Function):
    """The memory of a grouped matmul in any dtype. Torch's own fake one knows bfloat16 only."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wanted = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in wanted)


def _grouped_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    return _GroupedMatmul.apply(rows, weight)


class _FusedNorm(torch.autograd.Function):
    """The memory of a GPU's kernel for a norm, which keeps its input and a number of every row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        wanted = zip((x, weight), ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in wanted)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, epsilon: float) -> Tensor:
    return _FusedNorm.apply(x, weight)


def _flash_attention(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return _FlashAttention.apply(query, key, value)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor]:
    log_sum_exp = query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    return _FlashAttention.apply(query, key, value), log_sum_exp


GPU_KERNELS = [
    (few_passes, "rms_norm", _rms_norm),
    (packed_attention, "takes_flash", lambda query, value: query.dtype in flash.HALF),
    (packed_attention, "expands_heads", lambda query: query.dtype == torch.float32),
    (packed_attention, "scaled_dot_product_attention", _flash_attention),
    (flash, "varlen_attn", _varlen_attention),
    (flash, "_backward", _flash_gradients),
]
"""A GPU's norms, and its attention: flash in 16 bits, as little memory in float32."""
