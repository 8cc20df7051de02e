"""Products and elementwise functions with one result per row, whatever the batch, the position and the threads.

A product's element is defined, not merely reproduced: fused multiply-adds in the order of the terms, in float32, at
most TERMS of them in one chain; the chains' results are added in order; one rounding to the dtype at the end. MKL,
oneDNN and `embedding_bag` all compute such a chain exactly, as long as they get enough rows, enough columns and few
enough terms (`probe` checks that of this build). So every shape may take the kernel that is fastest for it.

Elementwise kernels of torch differ in the last bit between their vector body and the rest of a thread's share. Those
that do are written here in terms of those that do not (exp, tanh, erf, division).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onepolicy.invariant.strict import invariant_operator
from onepolicy.models import linear as kernels
from onepolicy.models.linear import products

TERMS = 128  # of one chain: MKL begins a second one after 192
TILE = 16  # rows and columns: fewer, or a remainder of one to three in a thread's share, go to a matrix-vector kernel
CUDA_ROWS = 64  # on other devices every call has the same shape, because a kernel is chosen by shape


def up_to(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [M, O] = x [M, I] @ weight [I, O], float32, without a graph."""
    rows, columns = out.shape
    if x.device.type == "cpu" and not rows % TILE and not columns % TILE:
        return _chains(x, weight, out)
    if columns % TILE:
        wide = out.new_empty(rows, up_to(columns, TILE))
        multiply(x, F.pad(weight, (0, -columns % TILE)), wide)
        out.copy_(wide[:, :columns])
        return
    whole, step = (rows - rows % TILE, rows or 1) if x.device.type == "cpu" else (rows - rows % CUDA_ROWS, CUDA_ROWS)
    for start in range(0, whole, step):
        _chains(x[start : min(start + step, whole)], weight, out[start : min(start + step, whole)])
    if whole < rows:
        tile = TILE if x.device.type == "cpu" else CUDA_ROWS
        rest = out.new_empty(tile, columns)
        _chains(F.pad(x[whole:], (0, 0, 0, tile - rows + whole)), weight, rest)
        out[whole:] = rest[: rows - whole]


def _chains(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if x.shape[1] <= TERMS:
        return kernels.multiply(x, weight, out)
    part = torch.empty_like(out)
    for start in range(0, x.shape[1], TERMS):
        chain = weight[start : start + TERMS].contiguous()  # oneDNN adds in another order if rows are not adjacent
        kernels.multiply(x[:, start : start + TERMS], chain, part if start else out)
        if start:
            out += part


def batched(x: Tensor, y: Tensor) -> Tensor:
    """[B, M, I] @ [B, I, N] float32, with a graph."""
    rows, columns = x.shape[1], y.shape[2]
    if rows % TILE:
        x = F.pad(x, (0, 0, 0, -rows % TILE))
    if columns % TILE:
        y = F.pad(y, (0, -columns % TILE))
    out = torch.bmm(x[..., :TERMS], y[:, :TERMS])
    for start in range(TERMS, x.shape[2], TERMS):
        out = torch.baddbmm(out, x[..., start : start + TERMS], y[:, start : start + TERMS])
    return out[:, :rows, :columns] if rows % TILE or columns % TILE else out


@invariant_operator
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`. x [..., I], weight [O, I], bias [O], of one dtype -> [..., O]; computed in float32, rounded once."""
    flat = x.flatten(0, -2)
    out = _Linear.apply(flat, weight, bias) if torch.is_grad_enabled() else _linear(flat, weight, bias)
    return out.view(*x.shape[:-1], len(weight))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = x.new_empty(len(x), len(weight), dtype=torch.float32)
    multiply(x.float(), weight.float().T, out)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = None
        if wants_x:
            kernels.multiply(grad, weight, grad_x := torch.empty_like(x))
        return grad_x, products(grad, x) if wants_weight else None, grad.sum(0) if wants_bias else None


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable) -> Tensor:
        out = value(x.float()).to(x.dtype)
        ctx.save_for_backward(x, out)
        ctx.gradient = gradient
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad, *ctx.saved_tensors), None, None


def _elementwise(x: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable) -> Tensor:
    """value(x), computed in float32; `gradient` (torch's own) takes the output's, x and the output."""
    if torch.is_grad_enabled():
        return _Elementwise.apply(x, value, gradient)
    return value(x.float()).to(x.dtype)


aten = torch.ops.aten


@invariant_operator
def sigmoid(x: Tensor) -> Tensor:
    return _elementwise(
        x, lambda x: x.neg().exp_().add_(1).reciprocal_(), lambda grad, x, out: aten.sigmoid_backward(grad, out)
    )


@invariant_operator
def silu(x: Tensor, inplace: bool = False) -> Tensor:
    return _elementwise(x, lambda x: x / x.neg().exp_().add_(1), lambda grad, x, out: aten.silu_backward(grad, x))


@invariant_operator
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return _elementwise(
        x,
        lambda x: torch.where(x * beta > threshold, x, (x * beta).exp_().log1p_() / beta),
        lambda grad, x, out: aten.softplus_backward(grad, x, beta, threshold),
    )


@invariant_operator
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    def value(x: Tensor) -> Tensor:
        if approximate == "none":
            return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    return _elementwise(x, value, lambda grad, x, out: aten.gelu_backward(grad, x, approximate=approximate))


FUNCTIONS: dict[Callable, Callable] = {
    F.linear: linear,
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    F.silu: silu,
    F.softplus: softplus,
    F.gelu: gelu,
}


class Functional(TorchFunctionMode):
    """Inside, these functions of torch are the ones above. Held by one module's forward: a call costs about 1 us."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FUNCTIONS.get(func, func)(*args, **(kwargs or {}))
