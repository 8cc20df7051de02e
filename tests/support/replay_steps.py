"""What tests of replay do with the tiny models of replay_models.py: routes for their tokens, losses
and whole steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils import checkpoint as checkpoint_module
from transformers import PreTrainedModel

from onepolicy.replay import Routers
from onepolicy.types import RoutingTrace
from support.replay_models import random_trace

ROWS = 21
"""The tokens of `tokens()`."""


def routes_of(routers: Routers, rows: int = ROWS, *, seed: int = 2, every: int = 0) -> RoutingTrace:
    """Return random routes. With `every`, each every-th row is left to the routers."""
    trace = random_trace(rows, routers.layers, routers.num_experts, routers.top_k, seed=seed)
    if every:
        trace.valid[::every] = False
    return trace


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, ids.roll(1, -1)[..., None]).mean()


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return loss_of(model(input_ids=ids, use_cache=False).logits, ids)


@contextmanager
def checkpointed(model: PreTrainedModel, *, reentrant: bool) -> Iterator[None]:
    """Recompute the model's layers in the backwards of this context."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    try:
        yield
    finally:
        model.gradient_checkpointing_disable()


def untouched(model: nn.Module) -> bool:
    """Return whether no module has a forward of its own."""
    return not any("forward" in module.__dict__ for module in model.modules())


def torchs_checkpoints() -> tuple[object, ...]:
    """Return what a replay replaces in torch, so that it can be compared afterwards."""
    function = checkpoint_module.CheckpointFunction
    generator = checkpoint_module._checkpoint_without_reentrant_generator
    return function, function.forward, generator
