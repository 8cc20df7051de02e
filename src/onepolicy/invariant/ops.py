"""Products and elementwise functions whose result for a row is always the same.

It does not depend on the batch, the row's position in it, or the number of threads.

Each element of a product has a definition: float32 fused multiply-adds in the order of the terms,
in chains of at most TERMS, the chains' results added in order, and one rounding to the dtype at the
end. MKL, oneDNN and `embedding_bag` all compute such a chain exactly if they get enough rows,
enough columns and few enough terms. `enable.check_build` tests that of this build. So every shape
may take the kernel that is fastest for it. On other devices the order is the kernel's own. There
every call has the same shape, which makes it one order.

torch's elementwise kernels compute most elements of a thread's part with vectors and the rest one
by one. Some of them differ in the last bit between the two. Those are written here in terms of
kernels that do not differ (exp, tanh, erf, division).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onepolicy.invariant.strict import invariant_operator, past_modes
from onepolicy.invariant.switch import TILE
from onepolicy.models import linear as kernels
from onepolicy.models.packed_attention import round_up

TERMS = 128  # per chain; MKL begins a second chain after 192
BLOCK = 64  # rows and columns of a call on other devices
PAIRS = 256  # blocks multiplied in one call there
KEPT = "_in_float32"  # attribute of weights that keep a float32 copy, which it holds


def fixed_shapes(device: torch.device) -> bool:
    """Return whether every call must have the same shape.

    Except on a CPU, the shape decides which kernel runs.
    """
    return device.type != "cpu"


def matmul_into(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out [M, O] = x [M, I] @ weight [I, O] in float32, without a graph."""
    rows, columns = out.shape
    if columns % TILE:
        wide = out.new_empty(rows, round_up(columns, TILE))
        matmul_into(x, F.pad(weight, (0, -columns % TILE)), wide)
        out.copy_(wide[:, :columns])
        return
    tile = _tile(x.device)
    whole = rows - rows % tile
    step = whole or 1
    if fixed_shapes(x.device):
        step = BLOCK
    for start in range(0, whole, step):
        _add_chains(x[start : start + step], weight, out[start : start + step])
    if whole < rows:
        rest = out.new_empty(tile, columns)
        _add_chains(F.pad(x[whole:], (0, 0, 0, tile - rows + whole)), weight, rest)
        out[whole:] = rest[: rows - whole]


def _tile(device: torch.device) -> int:
    """Return the number that a product's rows and columns must be a multiple of."""
    if fixed_shapes(device):
        return BLOCK
    return TILE


def _add_chains(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Compute out [M, O] = x [M, I] @ weight [I, O] as a sum of chains of at most TERMS."""
    if x.shape[1] <= TERMS:
        kernels.matmul_into(x, _adjacent(weight), out)
        return
    kernels.matmul_into(x[:, :TERMS], weight[:TERMS].contiguous(), out)
    part = torch.empty_like(out)
    for start in range(TERMS, x.shape[1], TERMS):
        chain = weight[start : start + TERMS].contiguous()
        kernels.matmul_into(x[:, start : start + TERMS], chain, part)
        out += part


def batched_matmul(x: Tensor, y: Tensor) -> Tensor:
    """Return x [B, M, I] @ y [B, I, N] in float32, without a graph."""
    rows, columns, tile = x.shape[1], y.shape[2], _tile(x.device)
    if rows % tile:
        x = F.pad(x, (0, 0, 0, -rows % tile))
    if columns % tile:
        y = F.pad(y, (0, -columns % tile))
    product: Callable[[Tensor, Tensor], Tensor] = torch.bmm
    if fixed_shapes(x.device):
        product = _bmm_in_blocks
    out = product(x[..., :TERMS], y[:, :TERMS])
    for start in range(TERMS, x.shape[2], TERMS):
        out += product(x[..., start : start + TERMS], y[:, start : start + TERMS])
    if out.shape[1:] == (rows, columns):
        return out
    return out[:, :rows, :columns]


def _bmm_in_blocks(x: Tensor, y: Tensor) -> Tensor:
    """Return x [B, M, I] @ y [B, I, N], with I <= TERMS, M and N multiples of BLOCK.

    Every call multiplies PAIRS blocks, so that all calls have one shape.
    """
    (batch, rows, terms), columns = x.shape, y.shape[2]
    m, n = rows // BLOCK, columns // BLOCK
    x, y = F.pad(x, (0, TERMS - terms)), F.pad(y, (0, 0, 0, TERMS - terms))
    left = x.view(batch, m, 1, BLOCK, TERMS).expand(-1, -1, n, -1, -1).flatten(0, 2)
    right = (
        y.view(batch, TERMS, n, BLOCK)
        .permute(0, 2, 1, 3)[:, None]
        .expand(-1, m, -1, -1, -1)
        .flatten(0, 2)
    )
    missing = -len(left) % PAIRS
    left, right = (F.pad(blocks, (0, 0, 0, 0, 0, missing)) for blocks in (left, right))
    parts = torch.cat(
        [torch.bmm(a, b) for a, b in zip(left.split(PAIRS), right.split(PAIRS), strict=True)]
    )
    return (
        parts[: batch * m * n]
        .view(batch, m, n, BLOCK, BLOCK)
        .transpose(2, 3)
        .reshape(batch, rows, columns)
    )


@invariant_operator
@past_modes
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `F.linear`, computed in float32 and rounded once.

    x [..., I], weight [O, I], bias [O], all of one dtype -> [..., O]
    """
    flat = x.flatten(0, -2)
    if torch.is_grad_enabled():
        out = _Linear.apply(flat, weight, bias)
    else:
        out = _linear(flat, weight, bias)
    return out.view(*x.shape[:-1], len(weight))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = matmul(x.float(), in_float32(weight).T)
    if bias is not None:
        out += bias
    return out.to(x.dtype)


def in_float32(weight: Tensor) -> Tensor:
    """Return a weight in float32, without a graph if there is none.

    A weight of `keep_in_float32` has its copy made once.
    """
    if weight.dtype == torch.float32:
        return weight
    if not torch.is_inference_mode_enabled() or not hasattr(weight, KEPT):
        return weight.float()
    kept: _Copy | _Part | None = getattr(weight, KEPT)
    if isinstance(kept, _Part):
        return in_float32(kept.whole)[kept.rows]
    key = weight._version, weight.data_ptr()
    if kept is None or kept.key != key:
        kept = _Copy(key, weight.float())
        setattr(weight, KEPT, kept)
    return kept.values


class _Copy(NamedTuple):
    """A weight in float32. key: of the weight when it was made, which most writes change."""

    key: tuple[int, int]
    values: Tensor


class _Part(NamedTuple):
    """A weight whose copy is rows of another's."""

    whole: Tensor
    rows: slice


@contextmanager
def rewriting(model: nn.Module) -> Iterator[None]:
    """Return a context in which the weights of a model are written in any way.

    Copies of `keep_in_float32` are forgotten. torch counts most writes, but not one to a tensor
    that shares the weight's memory, such as `weight.data`.
    """
    _forget_copies(model)
    try:
        yield
    finally:
        _forget_copies(model)


def keep_in_float32(model: nn.Module) -> None:
    """Let an engine's model on a CPU keep a float32 copy beside each weight of 16 bits it reads.

    It reads all of them for every token, and on many processors products in 16 bits take longer
    than in float32. Whoever writes its weights does so in `rewriting`. No other model, such as a
    learner's, keeps any.
    """
    for weight in model.parameters():
        _allow_copy(weight)


def keep_parts_in_float32(whole: Tensor, parts: Iterable[Tensor]) -> None:
    """Let weights that are a whole's rows, one after the other, share its copy."""
    _allow_copy(whole)
    start = 0
    for part in parts:
        if hasattr(whole, KEPT):
            setattr(part, KEPT, _Part(whole, slice(start, start + len(part))))
        start += len(part)


def _allow_copy(weight: Tensor) -> None:
    if not fixed_shapes(weight.device) and not weight.is_inference():
        setattr(weight, KEPT, None)


def _forget_copies(model: nn.Module) -> None:
    for weight in model.parameters():
        kept = getattr(weight, KEPT, None)
        if isinstance(kept, _Part):
            setattr(kept.whole, KEPT, None)
        elif kept is not None:
            setattr(weight, KEPT, None)


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Return x [M, I] @ weight [I, O] in float32, without a graph, as `matmul_into` does."""
    (rows, terms), columns = x.shape, weight.shape[1]
    if not fixed_shapes(x.device) and not (rows % TILE or columns % TILE) and terms <= TERMS:
        weight = _adjacent(weight)
        if kernels.onednn_is_faster(x, columns):
            return kernels.onednn_linear(x, weight.T)
        return x.mm(weight)
    out = x.new_empty(rows, columns)
    matmul_into(x, weight, out)
    return out


def _adjacent(weight: Tensor) -> Tensor:
    """Return a weight with adjacent rows or columns. oneDNN adds in another order if neither is."""
    if weight.is_contiguous() or weight.T.is_contiguous():
        return weight
    return weight.contiguous()


class _Linear(kernels.LinearFunction):
    """The function `linear` with gradients, which may take any kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)


class _Elementwise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable
    ) -> Tensor:
        out = value(x.float()).to(x.dtype)
        ctx.save_for_backward(x, out)
        ctx.gradient = gradient
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.gradient(grad, *ctx.saved_tensors), None, None


def _elementwise(x: Tensor, value: Callable[[Tensor], Tensor], gradient: Callable) -> Tensor:
    """Return value(x), computed in float32.

    gradient: torch's own, of the output's gradient, x and the output.
    """
    if torch.is_grad_enabled():
        return _Elementwise.apply(x, value, gradient)
    return value(x.float()).to(x.dtype)


aten = torch.ops.aten


@invariant_operator
@past_modes
def sigmoid(x: Tensor) -> Tensor:
    return _elementwise(
        x,
        lambda x: x.neg().exp_().add_(1).reciprocal_(),
        lambda grad, x, out: aten.sigmoid_backward(grad, out),
    )


@invariant_operator
@past_modes
def silu(x: Tensor, inplace: bool = False) -> Tensor:
    return _elementwise(
        x, lambda x: x / x.neg().exp_().add_(1), lambda grad, x, out: aten.silu_backward(grad, x)
    )


@invariant_operator
@past_modes
def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    return _elementwise(
        x,
        lambda x: torch.where(x * beta > threshold, x, (x * beta).exp_().log1p_() / beta),
        lambda grad, x, out: aten.softplus_backward(grad, x, beta, threshold),
    )


@invariant_operator
@past_modes
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    def value(x: Tensor) -> Tensor:
        if approximate == "none":
            return x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    return _elementwise(
        x, value, lambda grad, x, out: aten.gelu_backward(grad, x, approximate=approximate)
    )


FUNCTIONS: dict[Callable, Callable] = {
    F.linear: linear,
    F.sigmoid: sigmoid,
    torch.sigmoid: sigmoid,
    torch.Tensor.sigmoid: sigmoid,
    F.silu: silu,
    F.softplus: softplus,
    F.gelu: gelu,
}


SUMS = {torch.mean, torch.Tensor.mean, torch.sum, torch.Tensor.sum}


def is_replaced(func: Any, args: Any) -> bool:
    """Return whether `InvariantFunctions` replaces this call of a function of torch."""
    if func in FUNCTIONS:
        return True
    return func in SUMS and fixed_shapes(args[0].device) and args[0].is_floating_point()


def sum_in_blocks(func: Callable, x: Tensor, dim: Any = None, *args: Any, **kwargs: Any) -> Tensor:
    """Return a mean or sum; over the last dimension it takes BLOCK rows in every call."""
    if dim not in (-1, x.dim() - 1, [-1], (-1,)):
        return func(x, dim, *args, **kwargs)
    rows = x.reshape(-1, x.shape[-1])
    blocks = F.pad(rows, (0, 0, 0, -len(rows) % BLOCK)).split(BLOCK)
    out = torch.cat([func(block, -1, *args, **kwargs) for block in blocks])[: len(rows)]
    return out.view(*x.shape[:-1], *out.shape[1:])


class InvariantFunctions(TorchFunctionMode):
    """A mode in which torch's functions are the invariant ones above.

    One module's forward holds it at a time, because it adds about 1 us to every call.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SUMS and is_replaced(func, args):
            return sum_in_blocks(func, *args, **kwargs)
        return FUNCTIONS.get(func, func)(*args, **kwargs)
