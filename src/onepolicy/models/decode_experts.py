"""Experts of an inference forward on the CPU: a few large calls instead of a small one per expert.

Few tokens read the rows of their experts' weights without copying them (`embedding_bag_matmul`).
More tokens are sorted by expert. The first `width` rows of every expert go through one batched
matmul, padded where an expert has fewer rows. The remaining rows of busy experts take one matmul
per expert. `width` follows the row counts of each call, so even and uneven routing are both fast.
Other devices and expert parallelism use transformers' `grouped_mm`, so this function is safe for
any model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from onepolicy.models.embedding_bag_matmul import weighted_rows

ExpertWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""up [E, H, I'], down [E, I, H] and their biases [E, I'] and [E, H]; I' = 2 I with a gate."""

NAME = "onepolicy_decode"
MATMUL_CALL_COST = 1_000_000  # multiplications that cost as much as one more call for up and down
MAX_BY_ROWS_COST = 14_000_000  # up to so many multiplications, reading rows is faster than sorting
READ_COST = 4  # reading an expert's weights takes as long as multiplying this many of its rows


def use_decode_experts(model: PreTrainedModel, device: torch.device) -> None:
    """Select these experts on this model if it is on a CPU, and lay its weights out for them.

    Shapes and values do not change. In memory, up becomes [E, H, I'] and down [E, I, H], which
    suits matmuls of few rows.
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
    """Return whether the weights of all experts are 3-D parameters of this module."""
    return hasattr(module, "is_transposed") and isinstance(
        getattr(module, "down_proj", None), nn.Parameter
    )


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """The order in which N * K (token, expert) rows are multiplied.

    E * width padded places come first, then the rows that did not fit there, by expert.
    """

    width: int
    rows: int
    token: Tensor  # [rows] int64, the token at each place
    back: Tensor  # [N, K] int64, place of (token, k)
    beyond: list[tuple[int, int, int]]  # (expert, first, last + 1): places behind the padded ones

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int, row_cost: int) -> ExpertLayout:
        """Return the cheapest layout for top_k_index [N, K].

        row_cost: multiplications of one row. Computed with numpy, whose calls are 10x cheaper.
        """
        (tokens, top_k), experts = top_k_index.shape, top_k_index.reshape(-1).numpy()
        order = experts.astype(np.int16).argsort(kind="stable")
        counts = np.bincount(experts, minlength=num_experts)
        width = _width(counts, row_cost)
        rank = np.arange(len(order)) - np.repeat(counts.cumsum() - counts, counts)
        place = rank + np.repeat(np.arange(num_experts) * width, counts)
        rows, beyond = num_experts * width, []
        for expert in (counts > width).nonzero()[0].tolist():
            end = rows + int(counts[expert]) - width
            beyond.append((expert, rows, end))
            rows = end
        if beyond:
            place[rank >= width] = np.arange(num_experts * width, rows)
        token, back = np.zeros(rows, np.int64), np.empty_like(place)
        token[place] = order // top_k
        back[order] = place
        back_of = torch.from_numpy(back).view(tokens, top_k)
        return cls(width, rows, torch.from_numpy(token), back_of, beyond)

    def experts(self) -> Tensor:
        """Return the expert [rows] of each place."""
        experts = torch.arange(self.rows).div_(max(self.width, 1), rounding_mode="floor")
        for expert, first, last in self.beyond:
            experts[first:last] = expert
        return experts


def _width(counts: np.ndarray, row_cost: int) -> int:
    """Return the number of padded rows per expert that costs least.

    It weighs the rows that padding adds against the calls for experts with more rows. A batched
    matmul of few rows is limited by reading all weights, which takes READ_COST rows of each expert.
    """
    ascending = np.sort(counts)
    nth = np.arange(1, len(counts) + 1)
    # Rows added when all experts up to the nth are padded to the nth count
    padding = nth * ascending - ascending.cumsum()
    padding += READ_COST * len(counts) * (ascending > 0)
    return int(ascending[(padding * row_cost + (len(counts) - nth) * MATMUL_CALL_COST).argmin()])


def decode_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute out[n] = sum_k top_k_weights[n, k] * expert(top_k_index[n, k])(hidden[n]).

    hidden [N, H], top_k_index [N, K] int64, top_k_weights [N, K] -> [N, H]
    """
    quantised = getattr(module, "quantised", None)
    if quantised is not None:
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
    """Compute `decode_experts` of these weights, contiguous but for a transposition.

    activate: [R, I'] -> [R, I]
    """
    row_cost = weights[0][0].numel() + weights[1][0].numel()
    if top_k_index.numel() * row_cost <= MAX_BY_ROWS_COST:
        return _by_rows(weights, activate, hidden, top_k_index, top_k_weights)
    up, down, up_bias, down_bias = weights
    if up.dtype == torch.bfloat16 and has_slow_bfloat16():
        up, down, up_bias, down_bias = up.float(), down.float(), _float(up_bias), _float(down_bias)
    layout = ExpertLayout.of(top_k_index, len(up), row_cost)
    inner = _multiply(hidden.to(up.dtype).index_select(0, layout.token), up, layout)
    if up_bias is not None:
        inner = inner + up_bias[layout.experts()]
    out = _multiply(activate(inner), down, layout)
    if down_bias is not None:
        out = out + down_bias[layout.experts()]
    scale = top_k_weights.to(up.dtype)
    return embedding_bag(layout.back, out, mode="sum", per_sample_weights=scale).to(hidden.dtype)


def _float(bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    return bias.float()


def _by_rows(
    weights: ExpertWeights,
    activate: Callable[[Tensor], Tensor],
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Compute every (token, expert) row as a sum of rows of its expert's weights.

    The sum over rows of down also adds up the token's experts.
    """
    up, down, up_bias, down_bias = weights
    (tokens, top_k), (_, size, _), inner_size = top_k_index.shape, up.shape, down.shape[1]
    expert, scale = top_k_index.reshape(-1, 1).to(torch.int32), top_k_weights.to(up.dtype)
    x = hidden.to(up.dtype)[:, None].expand(-1, top_k, -1)
    index = rows_of_experts(len(up), size).index_select(0, expert[:, 0])
    inner = weighted_rows(up.flatten(0, 1), index, x)
    if up_bias is not None:
        inner = inner + up_bias[expert[:, 0]]
    inner = activate(inner) * scale.reshape(-1, 1)
    index = rows_of_experts(len(up), inner_size).index_select(0, expert[:, 0]).view(tokens, -1)
    out = weighted_rows(down.flatten(0, 1), index, inner)
    if down_bias is not None:
        out = out + weighted_rows(down_bias, top_k_index, scale)
    return out.to(hidden.dtype)


@lru_cache(maxsize=16)
def rows_of_experts(experts: int, size: int) -> Tensor:
    """Return the rows [E, size] int32 of every expert in a table of E * size rows."""
    with torch.inference_mode(False):
        return torch.arange(experts * size, dtype=torch.int32).view(experts, size)


def expert_weights(module: Any) -> ExpertWeights:
    """Return the weights of a module's experts, as views."""
    up, down = getattr(module, up_name(module)), module.down_proj
    if not module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return up, down, *expert_biases(module)


def up_name(module: Any) -> str:
    """Return the name of the up projection's parameter."""
    if module.has_gate:
        return "gate_up_proj"
    return "up_proj"


def expert_biases(module: Any) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases [E, I'] and [E, H], None where the experts have none."""
    if not module.has_bias:
        return None, None
    return getattr(module, f"{up_name(module)}_bias"), module.down_proj_bias


def expert_activation(module: Any) -> Callable[[Tensor], Tensor]:
    """Return the activation [R, I'] -> [R, I] between up and down."""
    if module.has_gate:
        return module._apply_gate
    return module.act_fn


@cache
def has_slow_bfloat16() -> bool:
    """Return whether this CPU has no bfloat16 instructions.

    It then multiplies faster in float32, conversions included.
    """
    able = torch.cpu.get_capabilities()
    return not any(able.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def _multiply(x: Tensor, weight: Tensor, layout: ExpertLayout) -> Tensor:
    """Return every row of x times the weight [E, in, out] of its expert."""
    out = x.new_empty(len(x), weight.shape[2])
    if layout.width:
        rows = len(weight) * layout.width
        grid = (len(weight), layout.width)
        torch.bmm(x[:rows].unflatten(0, grid), weight, out=out[:rows].unflatten(0, grid))
    for expert, first, last in layout.beyond:
        torch.mm(x[first:last], weight[expert], out=out[first:last])
    return out


ALL_EXPERTS_FUNCTIONS.register(NAME, decode_experts)
