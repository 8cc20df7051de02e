"""Strict mode: refuse every operator of a forward that is not known to be batch-invariant."""

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
from onepolicy.replay.private_names import current_graph_task_id, past_function_modes

# Elementwise operators whose vector kernel and scalar kernel differ in the last bit (measured).
# `ops` has versions without this difference.
_UNEVEN = """
    sigmoid silu softplus gelu mish exp2 log1p hardswish log_sigmoid_forward elu selu celu logit
    sinh cosh atanh atan2 logaddexp logaddexp2
"""
UNEVEN = set(_UNEVEN.split())
EVEN_POWERS = {1, 2, 3, 0.5, -1, -2}  # -0.5 too, except in bfloat16, where it is rsqrt
# Copies, indices and exact reductions. Views and other elementwise operators have tags.
EXACT = """
    _to_copy clone copy_ contiguous cat stack constant_pad_nd index index_select index_copy
    index_copy_ index_put index_put_ gather scatter scatter_ masked_fill masked_fill_ embedding
    repeat repeat_interleave roll flip as_strided arange zeros ones full empty empty_like zeros_like
    ones_like full_like new_zeros new_ones new_full new_empty scalar_tensor fill_ zero_ lift_fresh
    detach detach_ alias resolve_conj resolve_neg empty_strided new_empty_strided topk sort argsort
    argmax argmin bincount one_hot nonzero max min amax amin any all tril triu _local_scalar_dense
    is_nonzero equal item split split_with_sizes unbind _unsafe_view diff searchsorted
"""
ROWWISE = set(EXACT.split())
# Invariant if they reduce single rows
REDUCTIONS = {"mean", "sum", "cumsum", "_softmax", "_log_softmax"}
_invariant_calls = threading.local()  # depth: invariant operators that are running in this thread


class NotInvariantError(UsageError):
    """An operator that would make log-probabilities depend on the batch."""


def invariant_operator(function: Callable) -> Callable:
    """Declare a function invariant, so that strict mode does not check the operators it calls."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _invariant_calls.depth = getattr(_invariant_calls, "depth", 0) + 1
        try:
            return function(*args, **kwargs)
        finally:
            _invariant_calls.depth -= 1

    return call


def past_modes(function: Callable) -> Callable:
    """Run an invariant operator past modes of torch's functions: it calls none that they replace.

    Each call that a mode sees costs about 3 us.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with past_function_modes():
            return function(*args, **kwargs)

    return call


class StrictMode(TorchDispatchMode):
    """A mode that raises NotInvariantError for a forward's operator that is not known.

    Backwards may run any operator.
    """

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
        in_backward = current_graph_task_id() != -1
        if getattr(_invariant_calls, "depth", 0) or in_backward or _is_known(func, args, kwargs):
            return func(*args, **kwargs)
        # Inference mode does not decompose operators before it dispatches them.
        decomposed = func.decompose(*args, **kwargs)
        if decomposed is not NotImplemented:
            return decomposed
        where = ""
        if self._inside:
            where = f" (in {self._inside[-1]})"
        raise NotInvariantError(
            f"numerics: {func}{where} has no batch-invariant version, so on-policy numerics cannot "
            "hold for this model; use numerics = fast"
        )


def _is_known(func: Any, args: Any, kwargs: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    if name.rstrip("_") in UNEVEN or not _is_even(name.rstrip("_"), args, kwargs):
        return False
    if name in ("bmm", "mm"):
        return args[0].shape[-1] == 1  # rotary angles: one product, nothing to add
    if name in REDUCTIONS:
        return _reduces_rows(name, args)
    return name in ROWWISE or func.is_view or torch.Tag.pointwise in func.tags


def _reduces_rows(name: str, args: Any) -> bool:
    """Return whether a reduction is over adjacent elements of single rows, or exact.

    torch sums several rows at a time if a row's elements are not adjacent.
    """
    x, dims = args[0], [None]
    if not x.is_floating_point():
        return True
    if len(args) > 1:
        dims = args[1]
        if not isinstance(dims, list):
            dims = [dims]
    adjacent = x.shape[-1:] == (1,) or x.stride()[-1:] == (1,) or name.startswith("_")
    return adjacent and {*dims} <= {-1, x.dim() - 1}


def _is_even(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an elementwise operator gives equal elements equal results.

    Its arguments choose its kernel. True for operators that are not listed here.
    """
    halves = any(
        isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16) for x in args
    )
    if name in ("add", "sub", "rsub"):
        return not halves or kwargs.get("alpha", 1) == 1
    if name == "pow":
        if not isinstance(args[1], int | float):
            return False
        return args[1] in EVEN_POWERS or (args[1] == -0.5 and not halves)
    return name != "rsqrt" or not halves


@contextmanager
def track_running_module(names: dict[nn.Module, Any], inside: list) -> Iterator[None]:
    """Keep in `inside` the names of the modules whose forwards are running, innermost last."""

    def enter(module: nn.Module, *_: Any) -> None:
        inside.append(names[module])

    def leave(*_: Any) -> None:
        inside.pop()

    with ExitStack() as stack:
        for module in names:
            stack.callback(module.register_forward_pre_hook(enter).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
