"""Recurrent layers of a model that compute packed rows, by operators that know its samples.

A family's own forward runs; only the operators that it calls by name are others, as attention is
another function (`packed_attention.py`). transformers' own leave out where samples begin without
saying so. Where the package of a GPU kernel can be imported, the kernel is called with the bounds.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from onepolicy.models.recurrent.conv import causal_conv
from onepolicy.models.recurrent.delta_rule import delta_rule
from onepolicy.models.recurrent.mamba import mamba2_scan, mamba_scan
from onepolicy.models.recurrent.segments import Row

Operator = Callable[..., Any]
LOG = logging.getLogger(__name__)


def _not_fused(row: Row, *args: Any, **arguments: Any) -> None:
    """Return None, for which a layer calls its convolution and its scan instead."""


OPERATORS: dict[str, Operator] = {
    "causal_conv1d_fn": causal_conv,
    "torch_chunk_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
    "mamba_selective_scan": mamba_scan,
    "mamba2_split_conv1d_scan_combined": _not_fused,
    "mamba_inner_fn": _not_fused,
}
"""Name by which transformers' layers call an operator -> the operator that knows the samples."""

KERNELS = {
    "causal_conv1d_fn": ("causal_conv1d.causal_conv1d_fn", "seq_idx"),
    "torch_chunk_gated_delta_rule": (
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule",
        "cu_seqlens",
    ),
    "chunk_kimi_delta_attention": ("fla.ops.kda.chunk_kda", "cu_seqlens"),
    "mamba2_chunk_scan": (
        "mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined",
        "seq_idx",
    ),
}
"""Operator -> its GPU kernel in another package, and the kernel's argument for the samples."""


class Recurrent(nn.Module):
    """The part of a recurrent layer's class that runs its forward over a packed row."""

    row: Row | None = None  # of the forward that runs, None for one that is not packed
    packed_forward: FunctionType  # the class's own, with other operators
    replaced: ClassVar[dict[str, Operator]] = {}  # by a subclass, whatever is installed

    def forward(self, *args: Any, **arguments: Any) -> Any:
        if self.row is None:
            return super().forward(*args, **arguments)
        token = RUNNING.set(self)
        try:
            return type(self).packed_forward(self, *args, **arguments)
        finally:
            RUNNING.reset(token)


RUNNING: ContextVar[Recurrent] = ContextVar("recurrent layer that runs")


def install_recurrent(model: nn.Module) -> int:
    """Let every recurrent layer whose operators are known compute packed rows; return how many."""
    found = 0
    for layer in list(model.modules()):
        mixers = [m for m in layer.children() if _operators(type(m))]
        for mixer in mixers:
            if not isinstance(mixer, Recurrent):
                mixer.__class__ = _made(type(mixer))
        if mixers and _give_row not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_give_row, with_kwargs=True)
        found += len(mixers)
    return found


def recurrent_places(model: nn.Module) -> Counter[int]:
    """Return how many mixers whose operators are known each layer has, by the layer's index.

    A cache and a packed row keep one state of each name for a layer, so a layer may have one.
    """
    mixers = [m for m in model.modules() if isinstance(m, Recurrent) or _operators(type(m))]
    return Counter(int(getattr(mixer, "layer_idx", -1)) for mixer in mixers)


def operators(model: nn.Module) -> set[str]:
    """Return the names of the known operators that the model's recurrent layers call."""
    return {name for m in model.modules() for name in _operators(type(m))}


def own_forward(layer: type[nn.Module]) -> FunctionType | None:
    """Return the function in which this class calls its operators, None if it is none of Python."""
    if issubclass(layer, Recurrent):
        return layer.packed_forward
    forward = inspect.unwrap(layer.forward)
    if isinstance(forward, FunctionType):
        return forward
    return None


def _operators(layer: type[nn.Module]) -> set[str]:
    """Return the operators of OPERATORS that the forward of this class calls."""
    forward = own_forward(layer)
    if forward is None:
        return set()
    return OPERATORS.keys() & set(forward.__code__.co_names) & forward.__globals__.keys()


def _give_row(layer: nn.Module, args: Any, arguments: dict[str, Any]) -> None:
    """Tell the recurrent parts of a decoder layer which row its forward computes.

    The layer gets the argument again when its activations are recomputed.
    """
    packed: Any = arguments.get("packing")
    if "kv_cache_step" in arguments:
        packed = arguments["past_key_values"]
    for mixer in layer.children():
        if isinstance(mixer, Recurrent):
            mixer.row = None
            if packed is not None:
                mixer.row = packed.recurrent_row(mixer.layer_idx)


MADE: dict[type, type[nn.Module]] = {}  # our subclasses of the layers' classes


def _made(layer: type[nn.Module]) -> type[nn.Module]:
    if layer not in MADE:
        forward = own_forward(layer)
        assert forward is not None
        others = {name: _operator(name, forward.__globals__[name]) for name in _operators(layer)}
        packed = FunctionType(
            forward.__code__,
            {**forward.__globals__, **others},
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        packed.__kwdefaults__ = forward.__kwdefaults__
        parts = {"__module__": layer.__module__, "packed_forward": packed}
        MADE[layer] = type(layer.__name__, (Recurrent, layer), parts)
    return MADE[layer]


def _operator(name: str, theirs: Operator) -> Operator:
    """Return the operator of this name for the row that runs. theirs: transformers'."""
    kernel, argument = KERNELS.get(name, ("", ""))
    has_kernel = torch.cuda.is_available() and _takes(kernel, argument)

    def operator(hidden: torch.Tensor, *args: Any, **arguments: Any) -> Any:
        layer = RUNNING.get()
        row = layer.row
        assert row is not None
        if name in layer.replaced:
            return layer.replaced[name](row, hidden, *args, **arguments)
        if not has_kernel or row.states is not None or hidden.device.type != "cuda":
            return OPERATORS[name](row, hidden, *args, **arguments)
        samples = row.segments.bounds
        if argument == "seq_idx":
            samples = row.segments.index.int()[None]
        arguments[argument] = samples
        return theirs(hidden, *args, **arguments)

    return operator


@cache
def _takes(kernel: str, argument: str) -> bool:
    """Return whether a kernel's package is installed and its function takes this argument.

    transformers falls back to its own operator for one that cannot be imported, as after an upgrade
    of torch, and leaves the argument out without saying so.
    """
    module, _, function = kernel.rpartition(".")
    package = module.partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        return False
    try:
        found = getattr(importlib.import_module(module), function)
        if argument in inspect.signature(found).parameters:
            return True
        problem = f"takes no {argument}"
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        problem = f"cannot be imported ({type(error).__name__}: {error})"
    LOG.warning("%s is not used, because it %s: recurrent layers are slower", kernel, problem)
    return False
