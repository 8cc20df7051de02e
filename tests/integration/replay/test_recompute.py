"""Replay under activation checkpointing, interleaved micro-batches and autocast."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import checkpoint as checkpoint_module
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from onepolicy import bind_routers
from onepolicy.replay import Routers
from onepolicy.types import RoutingTrace
from support.replay_models import (
    build,
    experts_inputs,
    loss_and_grads,
    random_trace,
    same_bits,
    take_grads,
    tokens,
)

MODES = pytest.mark.parametrize("reentrant", [False, True], ids=["non_reentrant", "reentrant"])


def _checkpointed(model: PreTrainedModel, reentrant: bool) -> PreTrainedModel:
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


def _trace(routers: Routers, seed: int, every: int = 0) -> RoutingTrace:
    """Return random routes. With `every`, each every-th row is left to the routers."""
    trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k, seed=seed)
    if every:
        trace.valid[::every] = False
    return trace


def _loss(model: PreTrainedModel, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return logits.log_softmax(-1).gather(-1, ids.roll(1, -1)[..., None]).mean()


@MODES
@pytest.mark.parametrize("every", [0, 3], ids=["all_valid", "some_native"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_recompute_takes_the_same_routes(family: str, every: int, reentrant: bool) -> None:
    model, ids = build(family), tokens()
    routers = bind_routers(model)
    trace = _trace(routers, 2, every)
    with routers.replay(trace, native=True, check=False) as plain:
        _, expected = loss_and_grads(model, ids)
    _checkpointed(model, reentrant)
    with (
        experts_inputs(model) as computed,
        routers.replay(trace, native=True, check=False) as replayed,
    ):
        _, grads = loss_and_grads(model, ids)
    assert len(computed) > len(routers.layers)  # something was recomputed
    assert same_bits(grads, expected)
    assert torch.equal(
        replayed.native().ids, plain.native().ids
    )  # kept once, not again by the recompute


@MODES
def test_a_recording_keeps_recomputes_out(reentrant: bool) -> None:
    model, ids = build("qwen3_moe"), tokens()
    routers = bind_routers(model)
    with routers.record() as plain:
        _, expected = loss_and_grads(model, ids)
    _checkpointed(model, reentrant)
    with routers.record() as tape:
        _, grads = loss_and_grads(model, ids)
    assert torch.equal(tape.trace().ids, plain.trace().ids)
    assert same_bits(grads, expected)


@MODES
def test_micro_batches_may_interleave(reentrant: bool) -> None:
    """Forward 1, forward 2, backward 2 inside replay 2, backward 1 outside any: each recompute
    takes its own routes."""
    model = build("qwen3_moe")
    routers = bind_routers(model)
    batches, traces = (tokens(seed=5), tokens(seed=6)), (_trace(routers, 7, 4), _trace(routers, 8))

    def interleaved() -> dict[str, Tensor]:
        with routers.replay(traces[0], check=False):
            first = _loss(model, batches[0])
        with routers.replay(traces[1], check=False):
            second = _loss(model, batches[1])
            second.backward()
        first.backward()
        return take_grads(model)

    expected = interleaved()
    _checkpointed(model, reentrant)
    assert same_bits(interleaved(), expected)

    with routers.replay(traces[0], check=False):
        first = _loss(model, batches[0])
    with routers.replay(traces[1], check=False):
        second = _loss(model, batches[1])
        first.backward()  # inside the other micro-batch's replay
    second.backward()
    wanted = take_grads(model)
    model.gradient_checkpointing_disable()
    for trace, batch in zip(traces, batches, strict=True):
        with routers.replay(trace, check=False):
            _loss(model, batch).backward()
    assert same_bits(wanted, take_grads(model))


def _selective() -> tuple:
    """Keep matrix products, recompute the rest (router selections included)."""
    return create_selective_checkpoint_contexts(
        [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    )


KINDS: dict[str, dict[str, Any]] = {
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": _selective},
}


def _checkpoint_by_hand(model: PreTrainedModel, kind: str) -> None:
    """Checkpoint decoder layers as a trainer does that wraps them itself, without transformers."""
    for layer in model.model.layers:
        plain = layer.forward

        def forward(hidden: Tensor, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(_plain, **kwargs), hidden, *args, **KINDS[kind])

        layer.forward = forward


@pytest.mark.parametrize(
    "backward", ["inside", "outside", "in_another_replay", "after_another_forward"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_hand_made_checkpoint_takes_its_own_routes(kind: str, backward: str) -> None:
    model, ids = build("qwen3_moe"), tokens()
    routers = bind_routers(model)
    trace, other = _trace(routers, 2, 4), _trace(routers, 9)
    with routers.replay(trace, check=False):
        _loss(model, ids).backward()
    expected = take_grads(model)
    _checkpoint_by_hand(model, kind)
    with experts_inputs(model) as computed:
        with routers.replay(trace, check=False):
            loss = _loss(model, ids)
            if backward == "inside":
                loss.backward()
        if backward == "outside":
            loss.backward()
        elif backward != "inside":
            with routers.replay(other, check=False):
                unused = _loss(model, ids)
                if backward == "in_another_replay":
                    loss.backward()
            if backward == "after_another_forward":
                loss.backward()
            del unused
    assert len(computed) > len(routers.layers)  # something was recomputed
    assert same_bits(take_grads(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_around_the_whole_model(kind: str) -> None:
    model, ids = build("qwen3_moe"), tokens()
    routers = bind_routers(model)
    trace = _trace(routers, 2)
    with routers.replay(trace, check=False):
        _loss(model, ids).backward()
    expected = take_grads(model)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()

    def forward(x: Tensor) -> Tensor:
        logits = model(inputs_embeds=x, use_cache=False).logits
        return logits.log_softmax(-1).gather(-1, ids.roll(1, -1)[..., None]).mean()

    with routers.replay(trace, check=False):
        loss = checkpoint(forward, embedded, **KINDS[kind])
    loss.backward()
    expected.pop("model.embed_tokens.weight")
    assert same_bits(take_grads(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_native_checkpoints_stay_native(kind: str) -> None:
    """The model is a reference model, or the same one before its replay. Its recompute does not use
    the replay."""
    model, ids = build("qwen3_moe"), tokens()
    routers = bind_routers(model)
    _loss(model, ids).backward()
    expected = take_grads(model)
    _checkpoint_by_hand(model, kind)
    native = _loss(model, ids)
    with routers.replay(_trace(routers, 2), check=False):
        _loss(model, ids)
    native.backward()
    assert same_bits(take_grads(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_forward_or_recompute_leaves_nothing_behind(kind: str) -> None:
    model, ids = build("qwen3_moe"), tokens()
    routers = bind_routers(model)
    trace = _trace(routers, 2)
    _checkpoint_by_hand(model, kind)
    with routers.replay(trace, check=False):
        _loss(model, ids).backward()
    expected = take_grads(model)
    before = (
        checkpoint_module.CheckpointFunction,
        checkpoint_module._checkpoint_without_reentrant_generator,
    )
    calls = itertools.count()

    def fail_at(call: int) -> Any:
        def hook(*_: Any) -> None:
            if next(calls) == call:
                raise KeyError("midway")

        return model.model.layers[1].mlp.experts.register_forward_pre_hook(hook)

    handle = fail_at(0)
    with pytest.raises(KeyError, match="midway"), routers.replay(trace, check=False):
        _loss(model, ids)
    handle.remove()
    calls = itertools.count()
    handle = fail_at(1)  # the recompute
    with routers.replay(trace, check=False):
        loss = _loss(model, ids)
    with pytest.raises(KeyError, match="midway"):
        loss.backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    assert before == (
        checkpoint_module.CheckpointFunction,
        checkpoint_module._checkpoint_without_reentrant_generator,
    )
    assert not any("forward" in router.module.__dict__ for router in routers._routers)
    with routers.replay(trace, check=False):
        _loss(model, ids).backward()
    assert same_bits(take_grads(model), expected)


def test_native_rows_are_not_chosen_again_in_the_recompute() -> None:
    model, ids = _checkpointed(build("qwen3_moe"), False), tokens()
    routers = bind_routers(model)
    with experts_inputs(model) as computed, routers.replay(_trace(routers, 2, 2), check=False):
        loss = _loss(model, ids)
        with torch.no_grad():
            for router in routers._routers:
                router.module.weight.neg_()  # now every choice would come out differently
        loss.backward()
    forward, recompute = computed[: len(routers.layers)], computed[len(routers.layers) :]
    for (chosen, _), (again, _) in zip(forward, reversed(recompute), strict=True):
        assert torch.equal(chosen, again)


def test_autocast_keeps_the_router_gradient() -> None:
    """The extra gradient-free router forward must not cut the graph through autocast's weight
    cache."""
    model, ids = build("qwen3_moe", experts="eager"), tokens()
    routers = bind_routers(model)
    with torch.autocast("cpu", torch.bfloat16), routers.record() as tape:
        plain, expected = loss_and_grads(model, ids)
    trace = dataclasses.replace(tape.trace(), valid=torch.arange(21) % 2 == 0)
    with torch.autocast("cpu", torch.bfloat16), routers.replay(trace, native=True, check=False):
        logits, grads = loss_and_grads(model, ids)
    assert torch.equal(logits, plain)
    assert same_bits(grads, expected)
