"""Other work while a replay is open: other forwards' checkpoints, other models' replays, copies,
reused buffers."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoint_module
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.replay import Routers, RoutingError
from onepolicy.types import RoutingTrace
from support.replay_models import build, random_trace, same_bits, take_grads, tokens

MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])
IDS = tokens()


@pytest.fixture
def model() -> PreTrainedModel:
    return build("qwen3_moe")


@pytest.fixture
def routers(model: PreTrainedModel) -> Routers:
    return bind_routers(model)


def _trace(routers: Routers, *, valid: Tensor | None = None) -> RoutingTrace:
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k)
    return trace if valid is None else dataclasses.replace(trace, valid=valid)


def _loss(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, IDS.roll(1, -1)[..., None]).mean()


@MODES
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_native_checkpoint_recomputes_natively_inside_a_replay(
    model: PreTrainedModel, routers: Routers, reentrant: bool, order: str
) -> None:
    """The forward is an auxiliary loss without replay. Its backward runs before or after the
    replay's forward."""
    _loss(model(input_ids=IDS).logits).backward()
    expected = take_grads(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    native = _loss(model(input_ids=IDS).logits)
    with routers.replay(_trace(routers), check=False):
        if order == "before":
            native.backward()
        model(input_ids=IDS)
        if order == "after":
            native.backward()
    assert same_bits(take_grads(model), expected)


@MODES
def test_a_replay_inside_the_checkpointed_function(
    model: PreTrainedModel, routers: Routers, reentrant: bool
) -> None:
    """The recompute opens a replay of its own, in which rows without a route are again the
    router's."""
    trace = _trace(routers, valid=torch.arange(21) % 3 != 0)

    def run(embedded: Tensor) -> Tensor:
        with routers.replay(trace, check=False):
            logits = model(inputs_embeds=embedded, use_cache=False).logits
        return _loss(logits)

    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    run(embedded).backward()
    expected = take_grads(model)
    checkpoint(run, embedded, use_reentrant=reentrant).backward()
    assert same_bits(take_grads(model), expected)


@MODES
def test_replays_of_two_models_end_in_any_order(
    model: PreTrainedModel, routers: Routers, reentrant: bool
) -> None:
    """Two threads end their replays in any order. torch gets its checkpoints back, and each model
    keeps its routes until its end."""
    before = (
        checkpoint_module.CheckpointFunction,
        checkpoint_module._checkpoint_without_reentrant_generator,
    )
    other = bind_routers(build("qwen3_moe", seed=9))
    trace = _trace(routers)
    with routers.replay(trace, check=False):
        _loss(model(input_ids=IDS).logits).backward()
    expected = take_grads(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    first, second = other.replay(trace, check=False), routers.replay(trace, check=False)
    first.__enter__()
    second.__enter__()
    other._model(input_ids=IDS)
    first.__exit__(None, None, None)
    loss = _loss(model(input_ids=IDS).logits)
    second.__exit__(None, None, None)
    after = (
        checkpoint_module.CheckpointFunction,
        checkpoint_module._checkpoint_without_reentrant_generator,
    )
    assert after == before
    loss.backward()
    assert same_bits(take_grads(model), expected)


@MODES
@pytest.mark.parametrize(
    "write", [lambda t: t.zero_(), lambda t: t.data.zero_(), lambda t: t.numpy().fill(0)]
)
@pytest.mark.parametrize("field", ["ids", "valid"])
def test_a_trace_may_be_overwritten_before_the_recompute(
    model: PreTrainedModel, routers: Routers, reentrant: bool, field: str, write: Callable
) -> None:
    """Engines use one buffer for the routes of all micro-batches."""
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with routers.replay(_trace(routers), check=False):
        _loss(model(input_ids=IDS).logits).backward()
    expected, trace = take_grads(model), _trace(routers)
    with routers.replay(trace, check=False):
        loss = _loss(model(input_ids=IDS).logits)
    write(getattr(trace, field))
    loss.backward()
    assert same_bits(take_grads(model), expected)


@pytest.mark.parametrize("how", ["record", "replay"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied_with_its_recorders(
    model: PreTrainedModel, routers: Routers, how: str, duplicate: Callable
) -> None:
    with routers.record() if how == "record" else routers.replay(_trace(routers), check=False):
        model(input_ids=IDS)
        with pytest.raises(RoutingError, match="outside the context"):
            duplicate(model)
    assert not any("forward" in module.__dict__ for module in copy.deepcopy(model).modules())


def test_recorded_weights_do_not_hold_the_graph(model: PreTrainedModel, routers: Routers) -> None:
    with routers.record(weights=True) as tape:
        model(input_ids=IDS)
    weights = tape.trace().weights
    assert weights is not None
    assert not weights.requires_grad
