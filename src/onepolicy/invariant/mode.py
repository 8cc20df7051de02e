"""The switch: which models compute with invariant operators, and nothing else about this process.

The state lives on the model. There is no flag, thread-local or library override that could say one thing while the
kernels do another: a model inside has other attention, experts, linear layers, and around the modules that call torch's
functions themselves (routers, activations) the functions of `ops`. So an engine and a learner may be inside for their
whole lives, side by side with models that are not, in any thread or task.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from threading import RLock
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.invariant import attention, experts, ops
from onepolicy.invariant.strict import StrictMode, track_running_module
from onepolicy.invariant.switch import STATE, TILE
from onepolicy.models.linear import is_plain_linear
from onepolicy.models.packed_attention import Packing
from onepolicy.models.prepare import recurrent_layers

FEW_TOKENS = 5  # tokens that a model is looked at with
_LOCK = RLock()


@dataclass
class _State:
    """What to put back when the last context is left."""

    attention: str
    experts: str | None
    classes: list[tuple[nn.Module, type[nn.Module]]] = field(default_factory=list)
    entered: int = 0


class Invariant:
    """`with Invariant(model):` its forwards are invariant to batch, position, packing, chunks of prefill and threads.

    Contexts nest; the model is what it was when the last one is left, however it is left. strict: an operator
    without an invariant version raises NotInvariant, naming it and the module (slow: start-up checks and tests).
    """

    def __init__(self, model: PreTrainedModel, *, strict: bool = False) -> None:
        refuse_recurrent(model)
        self.model, self.strict = model, strict
        self._entered: list[ExitStack] = []  # one for every time this object was entered

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
    """For the rest of the model's life."""
    refuse_recurrent(model)
    _enter(model)


def refuse_recurrent(model: PreTrainedModel) -> None:
    if other := recurrent_layers(model):
        raise UsageError(
            f"numerics: {type(model).__name__} has {other} layers, whose decoding and "
            "prefilling are different algorithms, so on-policy numerics cannot hold for it; use numerics = fast"
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
    for module in model.modules():
        if is_plain_linear(module):
            _become(module, InvariantLinear, state)
    for module in _callers(model):
        _become(module, _with_functions(type(module)), state)  # type: ignore[arg-type]


def _restore(model: PreTrainedModel, state: _State) -> None:
    delattr(model, STATE)
    for module, own in state.classes:
        module.__class__ = own
    model.set_attn_implementation(state.attention)
    if state.experts is not None:
        model.set_experts_implementation(state.experts)


def _become(module: nn.Module, other: type[nn.Module], state: _State) -> None:
    state.classes.append((module, type(module)))
    module.__class__ = other


class InvariantLinear(nn.Linear):
    product = staticmethod(ops.linear)

    def forward(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)


@cache
def _with_functions(own: Any) -> type[nn.Module]:
    """The same class, but while its forward runs torch's functions are those of `ops`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ops.InvariantFunctions():
            return own.forward(self, *args, **kwargs)

    return type(
        own.__name__,
        (own,),
        {"forward": forward, "__module__": own.__module__, "__doc__": own.__doc__},
    )


def _callers(model: PreTrainedModel) -> set[nn.Module]:
    """Modules that call a function `ops` replaces in their own forward, found by running the model once."""
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
        ids = (positions + 2) % int(model.get_input_embeddings().num_embeddings)  # type: ignore[arg-type]
        packing = few_token_packing(model.device)
        with torch.no_grad(), Watch():
            model.base_model(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, packing=packing
            )
    return found


def few_token_packing(device: torch.device) -> Packing:
    """One sample of FEW tokens."""
    return Packing.of(torch.tensor([0, FEW_TOKENS], dtype=torch.int32), device, multiple=TILE)
