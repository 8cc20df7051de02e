"""float32 linear layers on a CPU with AVX-512: oneDNN's kernels, which use it on every vendor's CPU.

torch multiplies float32 with MKL, which keeps AVX-512 to Intel: on others oneDNN is about twice as fast. Both are exact
float32 sums, in another order. A kernel is compiled for every shape, about 1 ms each, and kept.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MIN_MULTIPLICATIONS = (
    2_000_000  # multiplications; a smaller product is over before oneDNN has found its kernel
)


def use_onednn_linear(model: nn.Module, device: torch.device) -> None:
    """Make the linear layers of this model use `linear`. Parameters, names and hooks stay."""
    if device.type == "cpu" and onednn_available():
        for module in model.modules():
            if is_plain_linear(module):
                module.__class__ = CPULinear


def is_plain_linear(module: nn.Module) -> bool:
    """Whether this is a linear layer and nothing more: torch's own or ours, no subclass of another library."""
    return type(module) in (nn.Linear, CPULinear)


@cache
def onednn_available() -> bool:
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    )


class CPULinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`. x [..., I], weight [O, I], bias [O] -> [..., O]"""
    if torch.is_autocast_enabled("cpu") or not _onednn_is_faster(x, len(weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        out = LinearFunction.apply(x.flatten(0, -2), weight, bias)
        # a module that returns a view would lose FSDP2's hook if it were changed in place, which FSDP2 warns of
        return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], len(weight)])
    return onednn_linear(x, weight, bias)


def matmul_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out [M, O] = x [M, I] @ weight [I, O], without a graph."""
    if _onednn_is_faster(x, weight.shape[1]):
        out.copy_(onednn_linear(x, weight.T))
    else:
        torch.mm(x, weight, out=out)


def transposed_matmul(x: Tensor, y: Tensor) -> Tensor:
    """x.T @ y without a graph: x [M, I], y [M, O] -> [I, O], the gradient of a weight."""
    if not _onednn_is_faster(x, y.shape[1]):
        return x.T @ y
    return (
        onednn_linear(x.T.contiguous(), y.T)
        if x.shape[1] <= y.shape[1]
        else onednn_linear(y.T.contiguous(), x.T).T
    )


def _onednn_is_faster(x: Tensor, width: int) -> bool:
    return (
        (x.dtype, x.device.type) == (torch.float32, "cpu")
        and x.numel() * width >= MIN_MULTIPLICATIONS
        and onednn_available()
    )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in float32, without a graph; the kernel torch's own compiler uses."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = None
        if wants_x:
            grad_x = (
                onednn_linear(grad, weight.T)
                if _onednn_is_faster(grad, weight.shape[1])
                else grad @ weight
            )
        return (
            grad_x,
            transposed_matmul(grad, x) if wants_weight else None,
            grad.sum(0) if wants_bias else None,
        )
