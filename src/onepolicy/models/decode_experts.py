"""Experts of an inference forward on the CPU: one padded batched matmul over all experts instead of a small one each.

Rows are sorted by expert and padded to the busiest expert's count; the routing weight scales the narrow intermediate
instead of the wide output. When routing is too uneven for padding, experts run one after the other. Other devices and
expert parallelism go to transformers' `grouped_mm`, so the function is safe to select for any model.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

NAME = "onepolicy_decode"
MAX_PADDING = 3  # rows computed per row needed, above which experts run one by one


def prepare(model: PreTrainedModel, device: torch.device) -> None:
    """Select these experts on this model only (CPU), and give their weights the layout small matmuls are fastest in."""
    if device.type != "cpu" or not hasattr(model, "set_experts_implementation"):
        return
    model.set_experts_implementation(NAME)
    for module in model.modules():
        if getattr(module, "is_transposed", None) is False:
            for name in ("gate_up_proj", "up_proj", "down_proj"):
                weight = getattr(module, name, None)
                if isinstance(weight, nn.Parameter) and weight.dim() == 3:  # same shape and values, [in, out] in memory
                    weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


@cache
def slow_bfloat16() -> bool:
    """A CPU without bfloat16 instructions multiplies faster in float32, conversions included."""
    able = torch.cpu.get_capabilities()
    return not (able.get("avx512_bf16") or able.get("amx_bf16") or able.get("bf16"))


def decode_experts(module: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """out[n] = sum_k top_k_weights[n, k] * expert(top_k_index[n, k])(hidden[n]).

    hidden [N, H], top_k_index [N, K] int64, top_k_weights [N, K] -> [N, H]
    """
    if hidden.device.type != "cpu" or module._is_expert_parallel:
        return grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    weights = _weights(module)
    experts, order = top_k_index.reshape(-1).sort()  # [N * K]
    counts = torch.bincount(experts, minlength=module.num_experts)
    width = int(counts.max())
    scale = top_k_weights.reshape(-1).to(weights[0].dtype)
    x = hidden.to(weights[0].dtype)
    if len(counts) * width <= MAX_PADDING * len(experts):
        place = torch.arange(len(experts)) + ((torch.arange(len(counts)) * width) - counts.cumsum(0) + counts)[experts]
        out = _padded(module, x, weights, order, place, width, scale, top_k_index.shape[1])
    else:
        place = torch.arange(len(experts))
        out = _one_by_one(module, x, weights, order, counts.tolist(), scale, top_k_index.shape[1])
    back = torch.empty_like(order).index_copy_(0, order, place).view(top_k_index.shape)
    return embedding_bag(back, out, mode="sum").to(hidden.dtype)


def _weights(module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """up [E, H, I'], down [E, I, H] and their biases [E, 1, I'], [E, 1, H]; I' = 2 I with a gate."""
    name = "gate_up_proj" if module.has_gate else "up_proj"
    up, down = getattr(module, name), module.down_proj
    if not module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    biases = (
        (getattr(module, f"{name}_bias")[:, None], module.down_proj_bias[:, None]) if module.has_bias else (None, None)
    )
    if up.dtype == torch.bfloat16 and slow_bfloat16():
        return up.float(), down.float(), *(b if b is None else b.float() for b in biases)  # type: ignore[return-value]
    return up, down, *biases


def _activate(module: nn.Module, x: Tensor) -> Tensor:
    return module._apply_gate(x) if module.has_gate else module.act_fn(x)


def _padded(
    module: nn.Module,
    x: Tensor,  # [N, H]
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    order: Tensor,  # [N * K] flat (token, k) of each sorted row
    place: Tensor,  # [N * K] padded row of each sorted row
    width: int,
    scale: Tensor,  # [N * K]
    top_k: int,
) -> Tensor:  # [E * width, H]
    up, down, up_bias, down_bias = weights
    rows = len(up) * width
    token = order.new_zeros(rows).index_copy_(0, place, order // top_k)
    weight = scale.new_zeros(rows).index_copy_(0, place, scale[order]).view(len(up), width, 1)
    gathered = x.index_select(0, token).view(len(up), width, -1)
    inner = torch.bmm(gathered, up) if up_bias is None else torch.baddbmm(up_bias, gathered, up)
    inner = _activate(module, inner) * weight
    out = torch.bmm(inner, down) if down_bias is None else torch.baddbmm(down_bias * weight, inner, down)
    return out.flatten(0, 1)


def _one_by_one(
    module: nn.Module,
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    order: Tensor,
    counts: list[int],
    scale: Tensor,
    top_k: int,
) -> Tensor:  # [N * K, H]
    up, down, up_bias, down_bias = weights
    weight = scale[order, None]
    inner = _each(x.index_select(0, order // top_k), up, up_bias, counts)
    inner = _activate(module, inner) * weight
    return _each(inner, down, down_bias, counts, weight)


def _each(x: Tensor, weight: Tensor, bias: Tensor | None, counts: list[int], scale: Tensor | None = None) -> Tensor:
    """Rows of expert e times weight[e], plus its bias (times the row's scale). x sorted by expert."""
    out = x.new_empty(len(x), weight.shape[2])
    for rows, matrix, result in zip(x.split(counts), weight.unbind(0), out.split(counts), strict=True):
        if len(rows):
            torch.mm(rows, matrix, out=result)
    if bias is not None:
        offset = bias[:, 0].repeat_interleave(torch.tensor(counts), dim=0)
        out += offset if scale is None else offset * scale
    return out


ALL_EXPERTS_FUNCTIONS.register(NAME, decode_experts)
