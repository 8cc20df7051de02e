"""Experts of a training forward on the CPU: the same sums as transformers' `grouped_mm`, with less memory traffic.

At the sizes a CPU trains, moving rows costs more than multiplying them. Three changes remove most of it: the routing
weight scales the narrow intermediate instead of the wide output, a token's rows are summed in one `embedding_bag`, both
for the output and for the gradient, and rows are gathered where they are multiplied. Families this cannot express
(expert biases, expert parallelism) and other devices go to `grouped_mm`: the function is safe for any model.
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
from onepolicy.models.linear import matmul_into, transposed_matmul

NAME = "onepolicy_grouped"
BLOCK = 64  # rows

Multiply = Callable[
    [Tensor, Tensor, Tensor], None
]  # like linear.matmul_into; used for what a forward computes


def grouped_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """out[n] = sum_k top_k_weights[n, k] * expert(top_k_index[n, k])(hidden[n]).

    hidden [N, H], top_k_index [N, K] int64, top_k_weights [N, K] -> [N, H]
    """
    if (quantised := getattr(module, "quantised", None)) is not None:
        return quantised(module, hidden, top_k_index, top_k_weights)
    if (
        hidden.device.type != "cpu"
        or module.has_bias
        or module._is_expert_parallel
        or not module.has_gate
    ):
        return grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    gate_up, down = (
        module.gate_up_proj,
        module.down_proj,
    )  # [E, 2I, H], [E, H, I] (or both transposed)
    if torch.is_autocast_enabled("cpu"):
        gate_up, down = (weight.to(torch.get_autocast_dtype("cpu")) for weight in (gate_up, down))
    if not module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    token, place, ends = sort_by_expert(top_k_index, module.num_experts)
    scale = top_k_weights.new_zeros(len(token)).index_copy(
        0, place.view(-1), top_k_weights.reshape(-1)
    )
    inner = module._apply_gate(
        UpProjection.apply(hidden.to(gate_up.dtype), gate_up, token, place, ends, matmul_into)
    )  # [rows, I]
    return DownProjection.apply(
        inner * scale[:, None].to(inner.dtype), down, token, place, ends, matmul_into
    ).to(hidden.dtype)


def sort_by_expert(
    top_k_index: Tensor, num_experts: int, *, least: int = 1
) -> tuple[Tensor, Tensor, list[int]]:
    """Rows sorted by expert: the token [rows] of each, the row [N, K] of each (token, k), the end of every expert.

    With many rows an expert has a multiple of BLOCK, so that oneDNN meets the same shapes again, else of `least`. What
    fills up reads token 0 and must be given weight 0.
    """
    tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1)
    block = (
        BLOCK if linear.onednn_available() and len(experts) >= 4 * BLOCK * num_experts else least
    )
    order = torch.argsort(experts, stable=True)
    counts = torch.bincount(experts, minlength=num_experts)
    room = (counts + block - 1) // block * block
    ends = room.cumsum(0)
    begins = (ends - room - counts.cumsum(0) + counts).repeat_interleave(counts)
    row = torch.arange(len(order), device=order.device) + begins
    last = ends.tolist()
    token = torch.zeros(last[-1], dtype=torch.int64, device=order.device).index_copy_(
        0, row, order // top_k
    )
    place = torch.empty_like(order).scatter_(0, order, row).view(tokens, top_k)
    return token, place, last


class UpProjection(torch.autograd.Function):
    """out[r] = x[token[r]] @ weight[e] for row r of expert e; x [N, H], weight [E, H, I'] -> [rows, I'].

    Rows are gathered one expert at a time, again in the backward: they stay in the cache and cost no memory. The
    backward multiplies as it likes.
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
        grad_weight = torch.zeros_like(
            weight
        )  # keeps the transposed layout, so the parameter's gradient is contiguous
        for e, rows in _experts(ctx.ends):
            matmul_into(grad[rows], weight[e].T, grad_rows[rows])
            grad_weight[e] = transposed_matmul(x.index_select(0, ctx.token[rows]), grad[rows])
        return embedding_bag(ctx.place, grad_rows, mode="sum"), grad_weight, None, None, None, None


class DownProjection(torch.autograd.Function):
    """out[n] = sum of x[r] @ weight[e] over the rows r of token n, each of an expert e.

    x [rows, I], weight [E, I, H] -> [N, H]
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
    """(expert, its rows) of every expert that has any."""
    for e, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        if start < end:
            yield e, slice(start, end)


ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
