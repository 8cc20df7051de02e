"""Experts of a training forward on the CPU: transformers' `grouped_mm` with less memory traffic.

At the sizes that a CPU trains, moving rows costs more than multiplying them. Three changes remove
most of the moves. The combine weight scales the narrow inner activation, not the wide output. A
token's rows are added up in one `embedding_bag`, for the output and for the gradient. And rows are
gathered only where they are multiplied. Other devices, and families with expert biases or expert
parallelism, use `grouped_mm`, so this function is safe for any model. On other devices autocast
casts the experts' weights here, which keeps `grouped_mm` on its kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from onepolicy.models import linear
from onepolicy.models.experts_autocast import run_in_dtype
from onepolicy.models.linear import matmul_into, transposed_matmul

NAME = "onepolicy_grouped"
BLOCK, SMALLEST_BLOCK = 64, 16  # rows, powers of two

# The product of a forward, as `linear.matmul_into`
Multiply = Callable[[Tensor, Tensor, Tensor], None]


def grouped_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute out[n] = sum_k top_k_weights[n, k] * expert(top_k_index[n, k])(hidden[n]).

    hidden [N, H], top_k_index [N, K] int64, top_k_weights [N, K] -> [N, H]
    """
    quantised = getattr(module, "quantised", None)
    if quantised is not None:
        return quantised(module, hidden, top_k_index, top_k_weights)
    device = hidden.device.type
    has_autocast = device != "cpu" and torch.amp.is_autocast_available(device)
    if has_autocast and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return run_in_dtype(module, hidden, top_k_index, top_k_weights, dtype)
    if device != "cpu" or module.has_bias or module._is_expert_parallel or not module.has_gate:
        return grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    # [E, 2I, H] and [E, H, I], or both transposed
    gate_up, down = module.gate_up_proj, module.down_proj
    if torch.is_autocast_enabled("cpu"):
        gate_up, down = (weight.to(torch.get_autocast_dtype("cpu")) for weight in (gate_up, down))
    if not module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    token, place, ends = sort_by_expert(top_k_index, module.num_experts)
    scale = top_k_weights.new_zeros(len(token))
    scale = scale.index_copy(0, place.view(-1), top_k_weights.reshape(-1))
    x = hidden.to(gate_up.dtype)
    inner = UpProjection.apply(x, gate_up, token, place, ends, matmul_into)
    inner = module._apply_gate(inner)  # [rows, I]
    inner = inner * scale[:, None].to(inner.dtype)
    return DownProjection.apply(inner, down, token, place, ends, matmul_into).to(hidden.dtype)


def sort_by_expert(
    top_k_index: Tensor, num_experts: int, *, least: int = 1
) -> tuple[Tensor, Tensor, list[int]]:
    """Sort the (token, expert) rows of top_k_index [N, K] by expert.

    The rows of each expert are filled up to a multiple of `least`, and of a larger power of two, at
    most BLOCK, if there are many rows, so that oneDNN meets the same shapes again. Rows that fill
    up read token 0, and must get weight 0.

    Returns:
        The token of each row [rows], the row of each (token, k) [N, K], and every expert's end.
    """
    tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1)
    block, quarter = least, len(experts) // (4 * num_experts)  # of an expert's rows
    if linear.prefers_onednn() and quarter >= SMALLEST_BLOCK:
        block = max(least, min(BLOCK, 1 << (quarter.bit_length() - 1)))
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    filled = (counts + block - 1) // block * block
    ends = filled.cumsum(0)
    shifts = (ends - filled - counts.cumsum(0) + counts).repeat_interleave(counts)
    row = torch.arange(len(order), device=order.device) + shifts
    end_list = ends.tolist()
    token = torch.zeros(end_list[-1], dtype=torch.int64, device=order.device)
    token.index_copy_(0, row, order // top_k)
    place = torch.empty_like(order).scatter_(0, order, row).view(tokens, top_k)
    return token, place, end_list


class UpProjection(torch.autograd.Function):
    """The product out[r] = x[token[r]] @ weight[e] of every row r, of expert e.

    x [N, H], weight [E, H, I'] -> [rows, I']. Rows are gathered one expert at a time, and again in
    the backward, so they stay in the processor's cache and take no memory. `multiply` computes the
    forward only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        token: Tensor,
        place: Tensor,
        ends: list[int],
        multiply: Multiply,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.token, ctx.place, ctx.ends = token, place, ends
        out = x.new_empty(len(token), weight.shape[2])
        for e, rows in _experts(ends):
            multiply(x.index_select(0, token[rows]), weight[e], out[rows])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_rows = x.new_empty(len(grad), x.shape[1])
        # zeros_like keeps the transposed layout, so the parameter's gradient is contiguous.
        grad_weight = torch.zeros_like(weight)
        for e, rows in _experts(ctx.ends):
            matmul_into(grad[rows], weight[e].T, grad_rows[rows])
            grad_weight[e] = transposed_matmul(x.index_select(0, ctx.token[rows]), grad[rows])
        return embedding_bag(ctx.place, grad_rows, mode="sum"), grad_weight, None, None, None, None


class DownProjection(torch.autograd.Function):
    """The sum out[n] of x[r] @ weight[e] over the rows r of token n, each of an expert e.

    x [rows, I], weight [E, I, H] -> [N, H]. `multiply` computes the forward only.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        token: Tensor,
        place: Tensor,
        ends: list[int],
        multiply: Multiply,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.token, ctx.ends = token, ends
        out = x.new_empty(len(x), weight.shape[2])
        for e, rows in _experts(ends):
            multiply(x[rows], weight[e], out[rows])
        return embedding_bag(place, out, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
        for e, rows in _experts(ctx.ends):
            grad_rows = grad.index_select(0, ctx.token[rows])
            matmul_into(grad_rows, weight[e].T, grad_x[rows])
            grad_weight[e] = transposed_matmul(x[rows], grad_rows)
        return grad_x, grad_weight, None, None, None, None


def _experts(ends: list[int]) -> Iterator[tuple[int, slice]]:
    """Yield every expert that has rows, with these rows."""
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if start < end:
            yield e, slice(start, end)


ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
