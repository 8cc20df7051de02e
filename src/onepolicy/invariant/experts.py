"""Experts of the on-policy mode, for decoding and training.

A row of an expert has one result, and a token's rows are added in the order of its top-k. The up
and down projections are products of `ops`. The combine weight scales the inner activation.
Everything between the inputs and the sum is float32.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import embedding_bag
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from onepolicy.invariant.ops import TERMS, InvariantFunctions, in_float32, matmul_into, silu
from onepolicy.invariant.strict import invariant_operator
from onepolicy.invariant.switch import TILE
from onepolicy.models.decode_experts import (
    MAX_BY_ROWS_COST,
    ExpertWeights,
    expert_activation,
    expert_biases,
    rows_of_experts,
    up_name,
)
from onepolicy.models.embedding_bag_matmul import weighted_rows
from onepolicy.models.experts import DownProjection, UpProjection, sort_by_expert

NAME = "onepolicy_invariant"


@invariant_operator
def invariant_experts(
    module: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Compute out[n] = sum_k top_k_weights[n, k] * expert(top_k_index[n, k])(hidden[n]).

    hidden [N, H], top_k_index [N, K] int64, top_k_weights [N, K] -> [N, H]
    """
    assert not module._is_expert_parallel
    weights, scale = _weights(module), top_k_weights.float()
    compute = _by_experts
    if _by_rows_is_faster(weights, top_k_index):
        compute = _by_rows
    out = compute(module, weights, hidden.float(), top_k_index, scale)
    down_bias = weights[3]
    if down_bias is not None:
        bias = down_bias.float()
        out = out + embedding_bag(top_k_index, bias, mode="sum", per_sample_weights=scale)
    return out.to(hidden.dtype)


def _weights(module: Any) -> ExpertWeights:
    """Return the weights of a module's experts in float32, and their biases."""
    up, down = in_float32(getattr(module, up_name(module))), in_float32(module.down_proj)
    if not module.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    return up, down, *expert_biases(module)


def _by_rows_is_faster(weights: ExpertWeights, top_k_index: Tensor) -> bool:
    """Return whether reading the weights row by row is possible and faster than matmuls."""
    up, down, _, _ = weights
    in_place = up.device.type == "cpu" and up.is_contiguous() and down.is_contiguous()
    short = max(up.shape[1], down.shape[1]) <= TERMS
    cost = top_k_index.numel() * (up[0].numel() + down[0].numel())
    return in_place and short and cost <= MAX_BY_ROWS_COST and not torch.is_grad_enabled()


def _by_rows(
    module: Any, weights: ExpertWeights, hidden: Tensor, top_k_index: Tensor, scale: Tensor
) -> Tensor:
    """Compute every (token, expert) row as a sum of rows of its expert's weights."""
    up, down, up_bias, _ = weights
    (tokens, top_k), (_, size, _), inner_size = top_k_index.shape, up.shape, down.shape[1]
    expert = top_k_index.reshape(-1).to(torch.int32)
    x = hidden[:, None].expand(-1, top_k, -1)
    index = rows_of_experts(len(up), size).index_select(0, expert)
    inner = weighted_rows(up.flatten(0, 1), index, x)
    inner = _activate(module, inner, up_bias, expert) * scale.reshape(-1, 1)
    index = rows_of_experts(len(up), inner_size).index_select(0, expert).view(tokens, -1)
    return weighted_rows(down.flatten(0, 1), index, inner, inner_size)


def _by_experts(
    module: Any, weights: ExpertWeights, hidden: Tensor, top_k_index: Tensor, scale: Tensor
) -> Tensor:
    """Sort the rows by expert, a multiple of TILE each, and multiply once per expert."""
    up, down, up_bias, _ = weights
    token, place, ends = sort_by_expert(top_k_index, len(up), least=TILE)
    inner = UpProjection.apply(hidden, up, token, place, ends, matmul_into)
    expert = None
    if up_bias is not None:
        counts = torch.tensor(ends).diff(prepend=torch.tensor([0]))
        expert = (
            torch.arange(len(up))
            .repeat_interleave(counts, output_size=len(token))
            .to(hidden.device)
        )
    inner = _activate(module, inner, up_bias, expert)
    spread = scale.new_zeros(len(token)).index_copy(0, place.view(-1), scale.reshape(-1))
    return DownProjection.apply(inner * spread[:, None], down, token, place, ends, matmul_into)


def _activate(module: Any, inner: Tensor, bias: Tensor | None, expert: Tensor | None) -> Tensor:
    if bias is not None:
        inner = inner + bias.float()[expert]
    if is_silu_gate(module, inner.shape[1]):
        if torch.is_grad_enabled():
            return _SiluGate.apply(inner)
        return _silu_gate(inner)
    with InvariantFunctions():
        return expert_activation(module)(inner)


_SILU_GATES: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def is_silu_gate(module: nn.Module, width: int) -> bool:
    """Return whether these experts' activation has the bits of `_silu_gate`. It is tried once."""
    if module not in _SILU_GATES:
        random = torch.Generator("cpu").manual_seed(0)
        inner = 4 * torch.randn(TILE, width, generator=random, device="cpu")
        with torch.no_grad(), InvariantFunctions():
            theirs = expert_activation(module)(inner)
            half = width % 2 == 0 and theirs.shape[1] * 2 == width
            _SILU_GATES[module] = half and torch.equal(theirs, _silu_gate(inner))
    return _SILU_GATES[module]


def _silu_gate(inner: Tensor) -> Tensor:
    """Return silu(gate) * up of inner [R, 2 I], its halves: [R, I]."""
    gate, up = inner.chunk(2, -1)
    return silu(gate).mul_(up)


class _SiluGate(torch.autograd.Function):
    """`_silu_gate` with its gradient, which may take any kernel and is written in its place."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor) -> Tensor:
        ctx.save_for_backward(inner)
        return _silu_gate(inner)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (inner,) = ctx.saved_tensors
        (gate, up), out = inner.chunk(2, -1), torch.empty_like(inner)
        of_gate, of_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=of_up)
        of_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
        return out


ALL_EXPERTS_FUNCTIONS.register(NAME, invariant_experts)
