"""Strict mode: every operator a forward runs must be known to give one result per row, or it is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from onepolicy.config import UsageError

# Elementwise operators whose vector body and remainder differ in the last bit (measured; `ops` has its own versions).
_UNEVEN = """
    sigmoid silu softplus gelu mish exp2 log1p hardswish log_sigmoid_forward elu selu celu logit sinh cosh atanh atan2
    logaddexp logaddexp2
"""
UNEVEN = set(_UNEVEN.split())
EVEN_POWERS = {1, 2, 3, 0.5, -1, -2}  # and -0.5 but in bfloat16, where it is rsqrt
# Copies, indices and exact reductions. Views and other elementwise operators are found by their tags.
EXACT = """
    _to_copy clone copy_ contiguous cat stack constant_pad_nd index index_select index_copy index_copy_ index_put
    index_put_ gather scatter scatter_ masked_fill masked_fill_ embedding repeat repeat_interleave roll flip as_strided
    arange zeros ones full empty empty_like zeros_like ones_like full_like new_zeros new_ones new_full new_empty
    scalar_tensor fill_ zero_ lift_fresh detach detach_ alias resolve_conj resolve_neg empty_strided new_empty_strided
    topk sort argsort argmax argmin bincount one_hot nonzero max min amax amin any all tril triu
    _local_scalar_dense is_nonzero equal item split split_with_sizes unbind _unsafe_view diff searchsorted
"""
ROWWISE = set(EXACT.split())
REDUCTIONS = {
    "mean",
    "sum",
    "cumsum",
    "_softmax",
    "_log_softmax",
}  # one result per row if it is the row they reduce
_here = threading.local()


class NotInvariantError(UsageError):
    """An operator that would make log-probabilities depend on the batch."""


def invariant_operator(function: Callable) -> Callable:
    """What this function calls is known to be invariant as a whole; strict mode does not look inside."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _here.depth = getattr(_here, "depth", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _here.depth -= 1

    return call


class StrictMode(TorchDispatchMode):
    """Raises NotInvariant for an operator of a forward that no one vouches for. Backwards may run what they like."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {
            module: name or type(module).__name__ for name, module in model.named_modules()
        }
        self._inside: list[str] = []
        self._stack = ExitStack()

    def __enter__(self) -> Any:
        self._stack.enter_context(track_running_module(self._names, self._inside))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (
            getattr(_here, "depth", 0)
            or torch._C._current_graph_task_id() != -1
            or _known(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        if (
            parts := func.decompose(*args, **kwargs)
        ) is not NotImplemented:  # inference mode does not take them apart
            return parts
        where = f" (in {self._inside[-1]})" if self._inside else ""
        raise NotInvariantError(
            f"numerics: {func}{where} has no batch-invariant version, so on-policy numerics cannot hold for this "
            "model; use numerics = fast"
        )


def _known(func: Any, args: Any, kwargs: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if name.rstrip("_") in UNEVEN or not _even(name.rstrip("_"), args, kwargs):
        return False
    if name in ("bmm", "mm"):
        return args[0].shape[-1] == 1  # rotary angles: one product, nothing to add
    if name in REDUCTIONS:
        dims = args[1] if len(args) > 1 else None
        reduced = {*dims} if isinstance(dims, list) else {dims}
        if not args[0].is_floating_point():
            return True
        adjacent = (
            args[0].shape[-1:] == (1,) or args[0].stride()[-1:] == (1,) or name.startswith("_")
        )
        return adjacent and reduced <= {
            -1,
            args[0].dim() - 1,
        }  # apart, several rows are summed at a time
    return name in ROWWISE or func.is_view or torch.Tag.pointwise in func.tags


def _even(name: str, args: Any, kwargs: Any) -> bool:
    """Whether an elementwise operator whose arguments choose its kernel has one result per element."""
    halves = any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in args
    )
    if name in ("add", "sub", "rsub"):
        return not halves or kwargs.get("alpha", 1) == 1
    if name == "pow":
        exponent = args[1] if isinstance(args[1], int | float) else None
        return exponent in EVEN_POWERS or (exponent == -0.5 and not halves)
    return name != "rsqrt" or not halves


@contextmanager
def track_running_module(names: dict[nn.Module, Any], inside: list) -> Iterator[None]:
    """While it is held, `inside` ends with the name of the innermost module whose forward is running."""

    def enter(module: nn.Module, *_: Any) -> None:
        inside.append(names[module])

    def leave(*_: Any) -> None:
        inside.pop()

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
