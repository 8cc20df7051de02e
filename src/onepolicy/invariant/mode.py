"""The on-policy mode of a model: invariant operators in place of its own.

The mode is a property of the model and of nothing else in the process. There is no flag,
thread-local or library override that could contradict the kernels. An invariant model has other
attention, experts and linear layers. Modules that call torch's functions themselves (routers,
activations) get the functions of `ops`. So an engine and a learner may be invariant all the time,
beside other models, in any thread or task.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from types import FunctionType, ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from onepolicy.config import UsageError
from onepolicy.invariant import attention, experts, ops
from onepolicy.invariant.delta_rule import delta_rule
from onepolicy.invariant.strict import StrictMode, track_running_module
from onepolicy.invariant.switch import STATE, TILE
from onepolicy.models.buckets import BucketedPacking
from onepolicy.models.few_passes import Fused
from onepolicy.models.linear import is_plain_linear
from onepolicy.models.packed_attention import Packing
from onepolicy.models.prepare import unknown_layers
from onepolicy.models.recurrent.conv import causal_conv
from onepolicy.models.recurrent.layers import Recurrent, install_recurrent, operators
from onepolicy.models.recurrent.segments import Row
from onepolicy.models.rms_norm import own_class
from onepolicy.replay.private_names import past_function_modes

activation_of = cache(ACT2FN.__getitem__)


def _causal_conv(
    row: Row,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Compute `causal_conv` past the mode of its layer, which the activation alone needs."""
    with past_function_modes():
        out = causal_conv(row, hidden_states, weight, bias)
    if activation is None:
        return out
    activated: Tensor = activation_of(activation)(out)
    return activated


RECURRENT = {"causal_conv1d_fn": _causal_conv, "torch_chunk_gated_delta_rule": delta_rule}
"""Operator of recurrent layers -> the invariant one."""
FEW_TOKENS = 5  # tokens of the forward that finds which modules to change
_LOCK = RLock()


@dataclass
class _State:
    """The settings and classes to restore when the last context is left."""

    attention: str
    experts: str | None
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    entered: int = 0


class Invariant:
    """A context in which the model's forwards are invariant.

    They do not depend on batch, position, packing, chunks of prefill or threads. Contexts nest.
    Leaving the last one, in any way, restores the model.

    strict: raise NotInvariantError, naming operator and module, for an operator without an
    invariant version. It is slow, and meant for start-up checks and tests.
    """

    def __init__(self, model: PreTrainedModel, *, strict: bool = False) -> None:
        refuse_uneven_layers(model)
        self.model, self.strict = model, strict
        self._entered: list[ExitStack] = []  # one per time that this object was entered

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            _enter(self.model)
            stack.callback(_leave, self.model)
            if self.strict:
                stack.enter_context(StrictMode(self.model))
            self._entered.append(stack.pop_all())
        return self

    def __exit__(self, *error: object) -> None:
        self._entered.pop().close()


def install_invariant(model: PreTrainedModel) -> None:
    """Make the model's forwards invariant for the rest of its life.

    Raises:
        UsageError: the model has recurrent layers whose decoding is another algorithm.
    """
    refuse_uneven_layers(model)
    _enter(model)


def refuse_uneven_layers(model: PreTrainedModel) -> None:
    """Raise UsageError if recurrent layers decode and prefill by different algorithms."""
    uneven = ", ".join(sorted(operators(model) - RECURRENT.keys()))
    if not uneven:
        uneven = unknown_layers(model)
    if uneven:
        raise UsageError(
            f"numerics: {type(model).__name__} has recurrent layers ({uneven}) whose decoding and "
            "prefilling are different algorithms, so on-policy numerics cannot hold for it; use "
            "numerics = fast"
        )


def _enter(model: PreTrainedModel) -> None:
    with _LOCK:
        state: _State | None = getattr(model, STATE, None)
        if state is None:
            state = _State(
                model.config._attn_implementation,
                getattr(model.config, "_experts_implementation", None),
            )
            setattr(model, STATE, state)
            try:
                _swap(model, state)
            except BaseException:
                _restore(model, state)
                raise
        state.entered += 1


def _leave(model: PreTrainedModel) -> None:
    with _LOCK:
        state: _State = getattr(model, STATE)
        state.entered -= 1
        if not state.entered:
            _restore(model, state)


def _swap(model: PreTrainedModel, state: _State) -> None:
    model.set_attn_implementation(attention.NAME)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(experts.NAME)
    _swap_recurrent(model, state)
    for module in model.modules():
        if is_plain_linear(module):
            _change_class(module, InvariantLinear, state)
        elif isinstance(module, Fused):  # a kernel that nobody vouches for
            _change_class(module, own_class(module), state)
    for replaced in (_with_invariant_names, _with_invariant_functions):  # what is left by a mode
        for module in _modules_that_call_functions(model):
            module_class: Any = type(module)
            _change_class(module, replaced(module_class), state)


def _swap_recurrent(model: PreTrainedModel, state: _State) -> None:
    install_recurrent(model)
    for module in model.modules():
        if isinstance(module, Recurrent):
            layer_class: Any = type(module)
            _change_class(module, _with_invariant_operators(layer_class), state)


def use_recurrent_states(empty: PreTrainedModel) -> None:
    """Let a model's recurrent layers keep the states of the mode, to count them.

    empty: the model of meta tensors, which may not compute in the mode.
    """
    _swap_recurrent(empty, _State("", None))


def _restore(model: PreTrainedModel, state: _State) -> None:
    delattr(model, STATE)
    for module, original in reversed(state.classes):
        module.__class__ = original
    model.set_attn_implementation(state.attention)
    if state.experts is not None:
        model.set_experts_implementation(state.experts)


def _change_class(module: nn.Module, other: type[nn.Module], state: _State) -> None:
    state.classes.append((module, type(module)))
    module.__class__ = other


class InvariantLinear(nn.Linear):
    """A linear layer that multiplies with `ops.linear`."""

    product = staticmethod(ops.linear)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


@cache
def _with_invariant_operators(original: Any) -> type[nn.Module]:
    """Return a subclass of a recurrent layer with the operators of RECURRENT."""
    parts = {"replaced": RECURRENT, "__module__": original.__module__}
    return type(original.__name__, (original,), parts)


class _Names:
    """A module of Python in which some names are others."""

    def __init__(self, module: ModuleType, names: dict[str, Any]) -> None:
        self._module = module
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _invariant_names() -> dict[ModuleType, _Names]:
    """Return torch's modules with the functions of `ops` under their names."""
    own = {id(func): invariant for func, invariant in ops.FUNCTIONS.items()}
    found: dict[ModuleType, _Names] = {}
    for module, inside in ((F, {}), (nn, {"functional": F}), (torch, {"nn": nn})):
        names = {name: own[id(value)] for name, value in vars(module).items() if id(value) in own}
        found[module] = _Names(module, names | {n: found[part] for n, part in inside.items()})
    return found


@cache
def _with_invariant_names(original: Any) -> type[nn.Module]:
    """Return a subclass whose forward finds the functions of `ops` under the names of torch's.

    That costs nothing, and a mode about 1 us a call. Calls that are not by name stay as they are.
    """
    own = original.forward
    if not isinstance(own, FunctionType):
        return original
    names = _invariant_names()
    others = {
        name: names[value]
        for name, value in own.__globals__.items()
        if isinstance(value, ModuleType) and value in names
    }
    forward = FunctionType(
        own.__code__, own.__globals__ | others, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    return type(original.__name__, (original,), _body(original, forward))


def _body(original: Any, forward: Callable[..., Any]) -> dict[str, Any]:
    """Return the attributes of a subclass that differs in its forward."""
    return {"forward": forward, "__module__": original.__module__, "__doc__": original.__doc__}


@cache
def _with_invariant_functions(original: Any) -> type[nn.Module]:
    """Return a subclass in whose forward torch's functions are those of `ops`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ops.InvariantFunctions():
            return original.forward(self, *args, **kwargs)

    return type(original.__name__, (original,), _body(original, forward))


def _modules_that_call_functions(model: PreTrainedModel) -> set[nn.Module]:
    """Return the modules whose own forward calls a function that `ops` replaces.

    The model runs once to find them.
    """
    found: set[nn.Module] = set()
    inside: list[Any] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if inside and ops.is_replaced(func, args):
                found.add(inside[-1])
            return func(*args, **(kwargs or {}))

    with track_running_module({module: module for module in model.modules()}, inside):
        positions = torch.arange(FEW_TOKENS, device=model.device)
        vocabulary = int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        ids = (positions + 2) % vocabulary
        packing = few_token_packing(model.device)
        with torch.no_grad(), Watch():
            model.base_model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, packing=packing
            )
    return found


def few_token_packing(device: torch.device) -> Packing:
    """Return the packing of one sample of FEW_TOKENS tokens."""
    return BucketedPacking.of(
        torch.tensor([0, FEW_TOKENS], dtype=torch.int32), device, multiple=TILE
    )
