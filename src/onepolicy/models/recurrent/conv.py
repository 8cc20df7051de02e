"""The causal convolution of every channel by itself, over packed samples.

It adds its taps one by one in float32, so that an output depends on its own window alone: packed,
alone and decoded outputs have the same bits. A convolution of torch's takes other kernels for other
lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from onepolicy.models.recurrent.segments import Row

STATE = "convolution"


def causal_conv(
    row: Row,
    hidden_states: Tensor,  # [1, D, T]
    weight: Tensor,  # [D, K]
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Return [1, D, T]: the sum of the last K tokens of a sample, weighted; zeros before it."""
    x = hidden_states[0].transpose(0, 1)  # [T, D]
    taps = weight.to(x.dtype).t()  # [K, D]
    if row.decodes:
        out = _next(row, x, taps.float())
    else:
        table, first = _windows(row, x, len(taps) - 1)
        out = _Taps.apply(table, taps, first)
    if bias is not None:
        out = out + bias.float()
    out = out.to(x.dtype)
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.transpose(0, 1)[None]


def _next(row: Row, x: Tensor, taps: Tensor) -> Tensor:
    """Return the outputs [T, D] of one token a sample."""
    before = row.before(STATE, x, len(taps) - 1, x.shape[1])
    window = torch.cat([before, x[:, None]], 1)
    row.after(STATE, window[:, 1:])
    rows = window.float()
    out = rows[:, 0] * taps[0]
    for j in range(1, len(taps)):
        out.addcmul_(rows[:, j], taps[j])
    return out


def _windows(row: Row, x: Tensor, reach: int) -> tuple[Tensor, Tensor]:
    """Return the samples [n, D] with `reach` rows before each, and where windows begin [T] int64.

    The rows before a sample are zeros, or those that an engine kept.
    """
    first = torch.arange(len(x), device=x.device) + row.segments.index * reach
    table = x.new_zeros(len(x) + len(row.segments.lengths) * reach, x.shape[1])
    table = table.index_copy(0, first + reach, x)
    if row.states is not None:
        bounds, column = row.segments.bounds, torch.arange(reach, device=x.device)
        samples = torch.arange(len(bounds) - 1, device=x.device)
        begin = (bounds[:-1] + samples * reach)[:, None] + column
        table[begin] = row.before(STATE, x, reach, x.shape[1])
        row.after(STATE, table[begin + bounds.diff()[:, None]])
    return table, first


class _Taps(torch.autograd.Function):
    """out[t] = sum over j of taps[j] * table[first[t] + j], in float32."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, taps: Tensor, first: Tensor) -> Tensor:
        ctx.save_for_backward(table, taps, first)
        rows, weights = table.float(), taps.float()
        length = len(rows) - len(taps) + 1
        out = rows[:length] * weights[0]
        for j in range(1, len(taps)):
            out.addcmul_(rows[j : j + length], weights[j])
        return out.index_select(0, first)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        table, taps, first = ctx.saved_tensors
        length = len(table) - len(taps) + 1
        grads = grad.new_zeros(length, grad.shape[1]).index_copy_(0, first, grad)
        of_table = of_taps = None
        if ctx.needs_input_grad[0]:
            weights, of_table = taps.float(), torch.zeros_like(table, dtype=torch.float32)
            for j in range(len(taps)):
                of_table[j : j + length].addcmul_(grads, weights[j])
            of_table = of_table.to(table.dtype)
        if ctx.needs_input_grad[1]:
            rows = table.float()
            sums = [(grads * rows[j : j + length]).sum(0) for j in range(len(taps))]
            of_taps = torch.stack(sums).to(taps.dtype)
        return of_table, of_taps, None
