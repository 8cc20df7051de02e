"""Other work while a replay is open: other forwards' checkpoints, other models' replays, copies,
reused buffers."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from onepolicy import bind_routers
from onepolicy.replay import RoutingError
from support.replay_models import build, same_bits, take_grads, tokens
from support.replay_steps import (
    checkpointed,
    loss,
    loss_of,
    routes_of,
    torchs_checkpoints,
    untouched,
)

IDS = tokens()


def replayed_grads(model, routers, trace) -> dict[str, Tensor]:
    with routers.replay(trace, check=False):
        loss(model, IDS).backward()
    return take_grads(model)


def test_a_replay_inside_the_checkpointed_function(model, routers, subtests) -> None:
    """The recompute opens a replay of its own, in which rows without a route are again the
    router's."""
    trace = routes_of(routers, every=3)

    def run(embedded: Tensor) -> Tensor:
        with routers.replay(trace, check=False):
            logits = model(inputs_embeds=embedded, use_cache=False).logits
        return loss_of(logits, IDS)

    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    run(embedded).backward()
    expected = take_grads(model)
    for reentrant in (False, True):
        with subtests.test(reentrant=reentrant):
            checkpoint(run, embedded, use_reentrant=reentrant).backward()
            assert same_bits(take_grads(model), expected)


def test_replays_of_two_models_end_in_any_order(model, routers, subtests) -> None:
    """Two threads end their replays in any order. torch gets its checkpoints back, and each model
    keeps its routes until its end."""
    before, third = torchs_checkpoints(), build("qwen3_moe", seed=9)
    other, trace = bind_routers(third), routes_of(routers)
    expected = replayed_grads(model, routers, trace)
    for reentrant in (False, True):
        with subtests.test(reentrant=reentrant), checkpointed(model, reentrant=reentrant):
            first, second = other.replay(trace, check=False), routers.replay(trace, check=False)
            first.__enter__()
            second.__enter__()
            third(input_ids=IDS)
            first.__exit__(None, None, None)
            found = loss(model, IDS)
            second.__exit__(None, None, None)
            assert torchs_checkpoints() == before
            found.backward()
            assert same_bits(take_grads(model), expected)


WRITES = {
    "zero_": lambda t: t.zero_(),
    "data": lambda t: t.data.zero_(),
    "numpy": lambda t: t.numpy().fill(0),
}


def test_a_trace_may_be_overwritten_before_the_recompute(model, routers, subtests) -> None:
    """Engines use one buffer for the routes of all micro-batches."""
    expected = replayed_grads(model, routers, routes_of(routers))
    for reentrant, write, field in itertools.product((False, True), WRITES, ("ids", "valid")):
        with subtests.test(reentrant=reentrant, write=write, field=field):
            trace = routes_of(routers)
            with checkpointed(model, reentrant=reentrant):
                with routers.replay(trace, check=False):
                    found = loss(model, IDS)
                WRITES[write](getattr(trace, field))
                found.backward()
            assert same_bits(take_grads(model), expected)


def test_a_model_is_not_copied_with_its_recorders(model, routers, subtests) -> None:
    for how, duplicate in itertools.product(("record", "replay"), (copy.deepcopy, pickle.dumps)):
        with subtests.test(how=how, duplicate=duplicate.__name__):
            context = routers.record()
            if how == "replay":
                context = routers.replay(routes_of(routers), check=False)
            with context:
                model(input_ids=IDS)
                with pytest.raises(RoutingError, match="outside the context"):
                    duplicate(model)
            assert untouched(copy.deepcopy(model))


def test_recorded_weights_do_not_hold_the_graph(model, routers) -> None:
    with routers.record(weights=True) as tape:
        model(input_ids=IDS)
    weights = tape.trace().weights
    assert weights is not None
    assert not weights.requires_grad
