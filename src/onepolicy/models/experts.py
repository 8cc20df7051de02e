"""Experts of a training forward on the CPU: the same sums as transformers' `grouped_mm`, with less memory traffic.

At the sizes a CPU trains, moving rows costs more than multiplying them. Three changes remove most of it: the routing
weight scales the narrow intermediate instead of the wide output, rows are gathered back and summed in one
`embedding_bag`, and the backward of a gather is that same sum instead of a scatter. Families this cannot express
(expert biases, expert parallelism) and other devices go to `grouped_mm`: the function is safe for any model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "onepolicy_grouped"


def grouped_experts(module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """out[n] = sum_k top_k_weights[n, k] * expert(top_k_index[n, k])(hidden[n]).

    hidden [N, H], top_k_index [N, K] int64, top_k_weights [N, K] -> [N, H]
    """
    if hidden.device.type != "cpu" or module.has_bias or module._is_expert_parallel or not module.has_gate:
        return grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    gate_up, down = module.gate_up_proj, module.down_proj  # [E, 2I, H], [E, H, I] (or both transposed)
    if torch.is_autocast_enabled("cpu"):
        gate_up, down = (weight.to(torch.get_autocast_dtype("cpu")) for weight in (gate_up, down))
    if not module.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    tokens, top_k = top_k_index.shape
    experts = top_k_index.reshape(-1)
    order = torch.argsort(experts, stable=True)  # [N*K] rows sorted by expert
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(tokens, top_k)
    ends = torch.bincount(experts, minlength=module.num_experts).cumsum(0).tolist()

    token = order // top_k
    rows = _Gather.apply(hidden.to(gate_up.dtype), token, back)  # [N*K, H]
    inner = module._apply_gate(_GroupedLinear.apply(rows, gate_up, ends))  # [N*K, I]
    inner = inner * top_k_weights.reshape(-1)[order, None].to(inner.dtype)
    out = _GroupedLinear.apply(inner, down, ends)
    return _Combine.apply(out, token, back).to(hidden.dtype)


class _Gather(torch.autograd.Function):
    """rows[j] = x[token[j]]; backward sums each token's K rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return x.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return embedding_bag(ctx.back, grad.contiguous(), mode="sum"), None, None


class _Combine(torch.autograd.Function):
    """out[n] = sum of token n's K rows; backward hands every row its token's gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, token: Tensor, back: Tensor) -> Tensor:
        ctx.token = token
        return embedding_bag(back, rows, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.token), None, None


class _GroupedLinear(torch.autograd.Function):
    """out[ends[e-1]:ends[e]] = x[ends[e-1]:ends[e]] @ weight[e] for weight [E, in, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ends = ends
        out = x.new_empty(len(x), weight.shape[2])
        for e, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            if start < end:
                torch.mm(x[start:end], weight[e], out=out[start:end])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = torch.empty_like(x)
        grad_weight = torch.zeros_like(weight)  # keeps the transposed layout, so the parameter's gradient is contiguous
        for e, (start, end) in enumerate(zip([0, *ctx.ends[:-1]], ctx.ends, strict=True)):
            if start < end:
                torch.mm(grad[start:end], weight[e].T, out=grad_x[start:end])
                grad_weight[e] = x[start:end].T @ grad[start:end]
        return grad_x, grad_weight, None


ALL_EXPERTS_FUNCTIONS.register(NAME, grouped_experts)
