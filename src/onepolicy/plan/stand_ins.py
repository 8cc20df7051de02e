"""What a dry run takes in place of functions that read a tensor's values, and of kernels that only a GPU has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from onepolicy.invariant import experts as invariant_experts
from onepolicy.invariant import mode
from onepolicy.models import experts, packed_attention
from onepolicy.models.packed_attention import Packing
from onepolicy.models.quant import install

LAYOUT, FEW_TOKENS = experts.layout, mode.few_tokens


@contextmanager
def stand_ins(*, cpu: bool) -> Iterator[None]:
    """cpu: of our CPU functions; else of a GPU's kernels."""
    with ExitStack() as stack:
        if cpu:
            for module in (experts, invariant_experts):
                stack.enter_context(replaced(module, "layout", _even_layout))
            stack.enter_context(replaced(mode, "few_tokens", _real_packing))
        else:
            stack.enter_context(replaced(packed_attention, "scaled_dot_product_attention", _flash))
        stack.enter_context(replaced(torch.nn.functional, "grouped_mm", _grouped_mm))
        stack.enter_context(replaced(install, "_check_forward", lambda model: None))
        yield


@contextmanager
def replaced(module: Any, name: str, stand_in: Any) -> Iterator[None]:
    own = getattr(module, name)
    setattr(module, name, stand_in)
    try:
        yield
    finally:
        setattr(module, name, own)


def _real_packing(device: torch.device) -> Packing:
    with unset_fake_temporarily():
        return FEW_TOKENS(torch.device("cpu"))


def _even_layout(top_k_index: Tensor, num_experts: int, *, least: int = 1) -> tuple[Tensor, Tensor, list[int]]:
    """Our CPU experts lay out rows by the values of routes, which fake tensors lack: every expert gets equally many.

    Only the first computes, which holds as much as each of the others would after it.
    """
    with unset_fake_temporarily():
        chosen = torch.arange(top_k_index.numel()).remainder(num_experts).view(top_k_index.shape)
        token, place, ends = LAYOUT(chosen, num_experts, least=least)
    return torch.empty_like(token), torch.empty_like(place), ends[:1] * num_experts


class _Flash(torch.autograd.Function):
    """What flash attention holds on a GPU, whatever kernel torch would choose for tensors of the CPU.

    Its backward sums queries' gradients in float32, and makes those of keys and values for every query head.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        total = torch.empty_like(query, dtype=torch.float32)
        whole = [query.new_empty(*query.shape[:-1], x.shape[-1]) for x in (key, value)]
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del total, whole
        return grads


class _Grouped(torch.autograd.Function):
    """What a grouped matmul holds, in any dtype: the one for fake tensors knows bfloat16 only."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight)
        return rows.new_empty(len(rows), weight.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(tensor) for tensor in ctx.saved_tensors)


def _grouped_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    return _Grouped.apply(rows, weight)


def _flash(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    return _Flash.apply(query, key, value)
