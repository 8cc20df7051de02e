"""float32 linear layers on a CPU with AVX-512 that is not Intel's, by oneDNN's kernels.

torch multiplies float32 with MKL, which uses AVX-512 on Intel's CPUs only. On others oneDNN is
about twice as fast; on Intel's it is not, so that they keep MKL. Both are exact float32 sums, in
different orders. oneDNN compiles a kernel for every shape, in about 1 ms, and keeps it.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# A smaller product takes less time than oneDNN's search for its kernel.
MIN_MULTIPLICATIONS = 2_000_000


def use_onednn_linear(model: nn.Module, device: torch.device) -> None:
    """Make this model's linear layers use `linear`. Parameters, names and hooks stay the same."""
    if device.type == "cpu" and prefers_onednn():
        for module in model.modules():
            if is_plain_linear(module):
                module.__class__ = CPULinear


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether this is torch's linear layer or CPULinear, and no other subclass."""
    return type(module) in (nn.Linear, CPULinear)


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN's kernels use AVX-512 on this CPU, and MKL's do not."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and not (torch.backends.mkl.is_available() and _is_intel())
    )


def _is_intel() -> bool:
    """Return whether Linux says that the CPU is Intel's."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "GenuineIntel" in info.read_text(encoding="utf-8")


class CPULinear(nn.Linear):
    """A linear layer that multiplies with `linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`. x [..., I], weight [O, I], bias [O] -> [..., O]."""
    if torch.is_autocast_enabled("cpu") or not onednn_is_faster(x, len(weight)):
        return F.linear(x, weight, bias)
    if torch.is_grad_enabled():
        out = LinearFunction.apply(x.flatten(0, -2), weight, bias)
        # FSDP2 warns of a module that returns a view: a change in place would lose its hook.
        return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], len(weight)])
    return onednn_linear(x, weight, bias)


def matmul_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out [M, O] = x [M, I] @ weight [I, O], without a graph."""
    if onednn_is_faster(x, weight.shape[1]):
        out.copy_(onednn_linear(x, weight.T))
    else:
        torch.mm(x, weight, out=out)


def transposed_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return x.T @ y without a graph: the gradient of a weight. x [M, I], y [M, O] -> [I, O]."""
    if not onednn_is_faster(x, y.shape[1]):
        return x.T @ y
    if x.shape[1] <= y.shape[1]:
        return onednn_linear(x.T.contiguous(), y.T)
    return onednn_linear(y.T.contiguous(), x.T).T


def onednn_is_faster(x: Tensor, width: int) -> bool:
    return (
        (x.dtype, x.device.type) == (torch.float32, "cpu")
        and x.numel() * width >= MIN_MULTIPLICATIONS
        and prefers_onednn()
    )


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias in float32, without a graph, by the kernel of torch's compiler."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class LinearFunction(torch.autograd.Function):
    """The function `onednn_linear` with gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return onednn_linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if wants_x and onednn_is_faster(grad, weight.shape[1]):
            grad_x = onednn_linear(grad, weight.T)
        elif wants_x:
            grad_x = grad @ weight
        if wants_weight:
            grad_weight = transposed_matmul(grad, x)
        if wants_bias:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias
