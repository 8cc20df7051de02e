"""Replay under activation checkpointing, interleaved micro-batches and autocast."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from onepolicy import bind_routers
from support.replay_models import (
    build,
    experts_inputs,
    loss_and_grads,
    same_bits,
    take_grads,
    tokens,
)
from support.replay_steps import (
    checkpointed,
    loss,
    loss_of,
    routes_of,
    torchs_checkpoints,
    untouched,
)

IDS = tokens()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_recompute_takes_the_same_routes(family: str, subtests) -> None:
    model = build(family)
    routers = bind_routers(model)
    for every in (0, 3):
        trace = routes_of(routers, every=every)
        with routers.replay(trace, native=True, check=False) as plain:
            _, expected = loss_and_grads(model, IDS)
        for reentrant in (False, True):
            with subtests.test(every=every, reentrant=reentrant):
                replay = routers.replay(trace, native=True, check=False)
                with (
                    checkpointed(model, reentrant=reentrant),
                    experts_inputs(model) as computed,
                    replay as replayed,
                ):
                    _, grads = loss_and_grads(model, IDS)
                assert len(computed) > len(routers.layers)  # something was recomputed
                assert same_bits(grads, expected)
                # Kept once, not again by the recompute.
                assert torch.equal(replayed.native().ids, plain.native().ids)


def test_a_recording_keeps_recomputes_out(model, routers, subtests) -> None:
    with routers.record() as plain:
        _, expected = loss_and_grads(model, IDS)
    for reentrant in (False, True):
        with subtests.test(reentrant=reentrant), checkpointed(model, reentrant=reentrant):
            with routers.record() as tape:
                _, grads = loss_and_grads(model, IDS)
            assert torch.equal(tape.trace().ids, plain.trace().ids)
            assert same_bits(grads, expected)


def test_micro_batches_may_interleave(model, routers, subtests) -> None:
    """Forward 1, forward 2, backward 2 inside replay 2, backward 1 outside any: each recompute
    takes its own routes."""
    batches = tokens(seed=5), tokens(seed=6)
    traces = routes_of(routers, seed=7, every=4), routes_of(routers, seed=8)

    def interleaved(*, inside: int) -> dict[str, Tensor]:
        losses = []
        with routers.replay(traces[0], check=False):
            losses.append(loss(model, batches[0]))
        with routers.replay(traces[1], check=False):
            losses.append(loss(model, batches[1]))
            losses[inside].backward()
        losses[1 - inside].backward()
        return take_grads(model)

    expected = [interleaved(inside=inside) for inside in (0, 1)]
    for reentrant, inside in itertools.product((False, True), (0, 1)):
        with subtests.test(reentrant=reentrant, inside=inside):
            with checkpointed(model, reentrant=reentrant):
                found = interleaved(inside=inside)
            assert same_bits(found, expected[inside])


def _selective() -> tuple:
    """Keep matrix products, recompute the rest (router selections included)."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return create_selective_checkpoint_contexts(kept)


KINDS: dict[str, dict[str, Any]] = {
    "non_reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "context_fn": _selective},
}


def _checkpoint_by_hand(model: PreTrainedModel, kind: str) -> None:
    """Checkpoint decoder layers as a trainer does that wraps them itself, without transformers."""
    for layer in model.model.layers:
        plain = type(layer).forward.__get__(layer)

        def forward(hidden: Tensor, *args: Any, _plain: Any = plain, **kwargs: Any) -> Any:
            return checkpoint(functools.partial(_plain, **kwargs), hidden, *args, **KINDS[kind])

        layer.forward = forward


BACKWARDS = ("inside", "outside", "in_another_replay", "after_another_forward")


def test_a_hand_made_checkpoint_takes_its_own_routes(model, routers, subtests) -> None:
    trace, other = routes_of(routers, every=4), routes_of(routers, seed=9)
    with routers.replay(trace, check=False):
        loss(model, IDS).backward()
    expected = take_grads(model)
    for kind, backward in itertools.product(KINDS, BACKWARDS):
        with subtests.test(kind=kind, backward=backward):
            _checkpoint_by_hand(model, kind)
            with experts_inputs(model) as computed:
                with routers.replay(trace, check=False):
                    found = loss(model, IDS)
                    if backward == "inside":
                        found.backward()
                if backward == "outside":
                    found.backward()
                elif backward != "inside":
                    with routers.replay(other, check=False):
                        unused = loss(model, IDS)
                        if backward == "in_another_replay":
                            found.backward()
                    if backward == "after_another_forward":
                        found.backward()
                    del unused
            assert len(computed) > len(routers.layers)  # something was recomputed
            assert same_bits(take_grads(model), expected)


def test_a_checkpoint_around_the_whole_model(model, routers, subtests) -> None:
    trace = routes_of(routers)
    with routers.replay(trace, check=False):
        loss(model, IDS).backward()
    expected = take_grads(model)
    expected.pop("model.embed_tokens.weight")
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()

    def forward(x: Tensor) -> Tensor:
        return loss_of(model(inputs_embeds=x, use_cache=False).logits, IDS)

    for kind, how in KINDS.items():
        with subtests.test(kind):
            with routers.replay(trace, check=False):
                found = checkpoint(forward, embedded, **how)
            found.backward()
            assert same_bits(take_grads(model), expected)


def test_native_checkpoints_stay_native(model, routers, subtests) -> None:
    """The forward is of a reference model or an auxiliary loss without replay. Its backward runs
    inside a replay, before or after the replay's forward, or after it."""
    loss(model, IDS).backward()
    expected = take_grads(model)
    for kind, backward in itertools.product(KINDS, ("before", "after", "outside")):
        with subtests.test(kind=kind, backward=backward):
            _checkpoint_by_hand(model, kind)
            native = loss(model, IDS)
            with routers.replay(routes_of(routers), check=False):
                if backward == "before":
                    native.backward()
                loss(model, IDS)
                if backward == "after":
                    native.backward()
            if backward == "outside":
                native.backward()
            assert same_bits(take_grads(model), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_in_forward_or_recompute_leaves_nothing_behind(model, routers, kind) -> None:
    trace = routes_of(routers)
    _checkpoint_by_hand(model, kind)
    with routers.replay(trace, check=False):
        loss(model, IDS).backward()
    expected, before = take_grads(model), torchs_checkpoints()

    def fail_at(call: int) -> Any:
        calls = itertools.count()

        def hook(*_: Any) -> None:
            if next(calls) == call:
                raise KeyError("midway")

        return model.model.layers[1].mlp.experts.register_forward_pre_hook(hook)

    handle = fail_at(0)
    with pytest.raises(KeyError, match="midway"), routers.replay(trace, check=False):
        loss(model, IDS)
    handle.remove()
    handle = fail_at(1)  # the recompute
    with routers.replay(trace, check=False):
        found = loss(model, IDS)
    with pytest.raises(KeyError, match="midway"):
        found.backward()
    handle.remove()
    model.zero_grad(set_to_none=True)
    assert torchs_checkpoints() == before
    assert all(untouched(layer.mlp) for layer in model.model.layers)
    with routers.replay(trace, check=False):
        loss(model, IDS).backward()
    assert same_bits(take_grads(model), expected)


def test_native_rows_are_not_chosen_again_in_the_recompute(model, routers) -> None:
    replay = routers.replay(routes_of(routers, every=2), check=False)
    with checkpointed(model, reentrant=False), experts_inputs(model) as computed, replay:
        found = loss(model, IDS)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.neg_()  # now every choice would come out differently
        found.backward()
    forward, recompute = computed[: len(routers.layers)], computed[len(routers.layers) :]
    for (chosen, _), (again, _) in zip(forward, reversed(recompute), strict=True):
        assert torch.equal(chosen, again)


def test_autocast_keeps_the_router_gradient() -> None:
    """The extra gradient-free router forward must not cut the graph through autocast's weight
    cache."""
    model = build("qwen3_moe", experts="eager")
    routers = bind_routers(model)
    with torch.autocast("cpu", torch.bfloat16), routers.record() as tape:
        plain, expected = loss_and_grads(model, IDS)
    trace = dataclasses.replace(tape.trace(), valid=torch.arange(21) % 2 == 0)
    with torch.autocast("cpu", torch.bfloat16), routers.replay(trace, native=True, check=False):
        logits, grads = loss_and_grads(model, IDS)
    assert torch.equal(logits, plain)
    assert same_bits(grads, expected)
