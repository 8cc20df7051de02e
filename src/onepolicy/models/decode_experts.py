"""Experts of an inference forward on the CPU: a few large calls instead of a small one per expert.

Few tokens read the rows of their experts' weights where they lie (`bags`). With more, rows are sorted by expert; the
first `width` rows of every expert go through one batched matmul, padded where an expert has fewer, and what busy
experts have beyond that takes one matmul each. `width` follows the row counts of every call, so even and uneven routing
are both fast. Other devices and expert parallelism go to transformers' `grouped_mm`: safe for any model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from onepolicy.models.embedding_bag_matmul import weighted_rows

ExpertWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

NAME = "onepolicy_decode"
MATMUL_CALL_COST = (
    1_000_000  # multiplications that one more matmul call is worth, up and down together
)
MAX_BY_ROWS_COST = (
    14_000_000  # multiplications up to which reading weights row by row beats sorting
)
READ_COST = 4


def use_decode_experts(model: PreTrainedModel, device: torch.device) -> None:
    """Select these experts on this model only (CPU), and lay their weights out as matmuls of few rows like them.

    Shapes and values stay; in memory, up becomes [E, H, I'] and down [E, I, H].
    """
    if device.type != "cpu" or not hasattr(model, "set_experts_implementation"):
        return
    model.set_experts_implementation(NAME)
    modules: list[Any] = list(model.modules())
    for module in modules:
        if holds_experts(module) and not module.is_transposed:
            for weight in (getattr(module, up_name(module)), module.down_proj):
                weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


def holds_experts(module: Any) -> bool:
    """Whether the weights of all experts are 3-D parameters of this module."""
    return hasattr(module, "is_transposed") and isinstance(
        getattr(module, "down_proj", None), nn.Parameter
    )


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the N * K (token, expert) rows lie: E * width padded places, then those that did not fit, by expert."""

    width: int
    rows: int
    token: Tensor  # [rows] int64, which token is read at each place
    back: Tensor  # [N, K] int64, place of (token, k)
    beyond: list[
        tuple[int, int, int]
    ]  # (expert, first, last + 1) of the places outside the padding

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int, row_cost: int) -> ExpertLayout:
        """The cheapest layout, in multiplications; `row_cost` is those of one row. numpy: a call is 10x cheaper."""
        (tokens, top_k), experts = top_k_index.shape, top_k_index.reshape(-1).numpy()
        order = experts.astype(np.int16).argsort(kind="stable")
        counts = np.bincount(experts, minlength=num_experts)
        width = _width(counts, row_cost)
        rank = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)
        place = rank + np.repeat(np.arange(num_experts) * width, counts)
        rows, beyond = num_experts * width, []
        for expert in (counts > width).nonzero()[0].tolist():
            beyond.append((expert, rows, rows + int(counts[expert]) - width))
            rows = beyond[-1][2]
        if beyond:
            place[rank >= width] = np.arange(num_experts * width, rows)
        token, back = np.zeros(rows, np.int64), np.empty_like(place)
        token[place] = order // top_k
        back[order] = place
        return cls(
            width, rows, torch.from_numpy(token), torch.from_numpy(back).view(tokens, top_k), beyond
        )

    def experts(self) -> Tensor:
        """[rows] the expert each place belongs to."""
        experts = torch.arange(self.rows).div_(max(self.width, 1), rounding_mode="floor")
        for expert, first, last in self.beyond:
            experts[first:last] = expert
        return experts


def _width(counts: np.ndarray, row_cost: int) -> int:
    """The row count up to which padding every expert costs least: rows added against calls for what is beyond.

    A batched matmul of few rows is bound by reading all weights, as long as it takes to multiply `READ` rows of each.
    """
    ascending = np.sort(counts)
    nth = np.arange(1, len(counts) + 1)
    padding = (
        nth * ascending - ascending.cumsum()
    )  # rows added when all are padded to the nth count
    padding += READ_COST * len(counts) * (ascending > 0)
    return int(ascending[(padding * row_cost + (len(counts) - nth) * MATMUL_CALL_COST).argmin()])


def decode_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """out[n] = sum_k top_k_weights[n, k] * expert(top_k_index[n, k])(hidden[n]).

    hidden [N, H], top_k_index [N, K] int64, top_k_weights [N, K] -> [N, H]
    """
    if (quantised := getattr(module, "quantised", None)) is not None:
        return quantised(module, hidden, top_k_index, top_k_weights)
    if hidden.device.type != "cpu" or module._is_expert_parallel:
        return grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    return weighted_experts(
        expert_weights(module), expert_activation(module), hidden, top_k_index, top_k_weights
    )


def weighted_experts(
    weights: ExpertWeights,
    activate: Callable[[Tensor], Tensor],
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """`decode_experts` of these weights: up [E, H, I'], down [E, I, H], both contiguous but for a transposition."""
    row_cost = weights[0][0].numel() + weights[1][0].numel()
    if top_k_index.numel() * row_cost <= MAX_BY_ROWS_COST:
        return _by_rows(weights, activate, hidden, top_k_index, top_k_weights)
    if weights[0].dtype == torch.bfloat16 and has_slow_bfloat16():
        weights = tuple(weight if weight is None else weight.float() for weight in weights)  # type: ignore[assignment]
    up, down, up_bias, down_bias = weights
    layout = ExpertLayout.of(top_k_index, len(up), row_cost)
    inner = _multiply(hidden.to(up.dtype).index_select(0, layout.token), up, layout)
    inner = activate(inner if up_bias is None else inner + up_bias[layout.experts()])
    out = _multiply(inner, down, layout)
    out = out if down_bias is None else out + down_bias[layout.experts()]
    scale = top_k_weights.to(up.dtype)
    return embedding_bag(layout.back, out, mode="sum", per_sample_weights=scale).to(hidden.dtype)


def _by_rows(
    weights: ExpertWeights,
    activate: Callable[[Tensor], Tensor],
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Every (token, expert) row sums the rows of its expert's weights; down sums the token's experts in the same go."""
    up, down, up_bias, down_bias = weights
    (tokens, top_k), (_, size, _), inner_size = top_k_index.shape, up.shape, down.shape[1]
    expert, scale = top_k_index.reshape(-1, 1).to(torch.int32), top_k_weights.to(up.dtype)
    x = hidden.to(up.dtype)[:, None].expand(-1, top_k, -1)
    inner = weighted_rows(
        up.flatten(0, 1), expert * size + torch.arange(size, dtype=torch.int32), x
    )
    inner = activate(inner if up_bias is None else inner + up_bias[expert[:, 0]]) * scale.reshape(
        -1, 1
    )
    index = (expert * inner_size + torch.arange(inner_size, dtype=torch.int32)).view(tokens, -1)
    out = weighted_rows(down.flatten(0, 1), index, inner)
    return (out if down_bias is None else out + weighted_rows(down_bias, top_k_index, scale)).to(
        hidden.dtype
    )


def expert_weights(module: Any) -> ExpertWeights:
    """up [E, H, I'], down [E, I, H] and their biases [E, I'], [E, H]; I' = 2 I with a gate."""
    up, down = getattr(module, up_name(module)), module.down_proj
    if not module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return up, down, *expert_biases(module)


def up_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def expert_biases(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """[E, I'], [E, H]"""
    return (
        (getattr(module, f"{up_name(module)}_bias"), module.down_proj_bias)
        if module.has_bias
        else (None, None)
    )


def expert_activation(module: Any) -> Callable[[Tensor], Tensor]:
    """[R, I'] -> [R, I]"""
    return module._apply_gate if module.has_gate else module.act_fn


@cache
def has_slow_bfloat16() -> bool:
    """A CPU without bfloat16 instructions multiplies faster in float32, conversions included."""
    able = torch.cpu.get_capabilities()
    return not any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _multiply(x: Tensor, weight: Tensor, layout: ExpertLayout) -> Tensor:
    """Every row times the weight [E, in, out] of its expert."""
    out = x.new_empty(len(x), weight.shape[2])
    if layout.width:
        rows = len(weight) * layout.width
        grid = (len(weight), layout.width)
        torch.bmm(x[:rows].unflatten(0, grid), weight, out=out[:rows].unflatten(0, grid))
    for expert, first, last in layout.beyond:
        torch.mm(x[first:last], weight[expert], out=out[first:last])
    return out


ALL_EXPERTS_FUNCTIONS.register(NAME, decode_experts)
