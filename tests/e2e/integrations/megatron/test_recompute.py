"""Recomputes of Megatron's own activation checkpoint keep the routes of their forward."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onepolicy.integrations.megatron as op_megatron
from support.megatron.models import (
    FULL_RECOMPUTE,
    gradients,
    logits_of,
    loss_of,
    make_model,
    tokens_of,
)
from support.replay_models import random_trace

pytestmark = pytest.mark.megatron

SELECTIVE = {"recompute_granularity": "selective"}
RECOMPUTES = {
    "full, every layer": FULL_RECOMPUTE,
    "full, two layers at once": FULL_RECOMPUTE | {"recompute_num_layers": 2},
    "full, blocks": FULL_RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 3},
    "selective, the MoE layer": SELECTIVE | {"recompute_modules": ["moe"]},
    "selective, attention and shared expert": SELECTIVE
    | {"recompute_modules": ["core_attn", "shared_experts"]},
}
FIRST, SECOND = tokens_of(seed=11), tokens_of(seed=12)
LATE = "second backward first"
ORDERS = ["in turn", "first backward first", LATE]


def make(**changed):
    freq = [0, 1, 1, 1]
    return make_model(moe_layer_freq=freq, moe_shared_expert_intermediate_size=16, **changed)


def routes(model, seed):
    """Return routes that no router chose, with a few invalid rows. None: no routes."""
    if seed is None:
        return None
    routers = op_megatron.routers_of(model)
    trace = random_trace(FIRST.numel(), routers.layers, 8, 2, seed=seed)
    valid = torch.arange(len(trace)) % 5 != 2
    return type(trace)(trace.ids, valid, trace.layers, trace.num_experts)


def forward(model, tokens, trace):
    if trace is None:
        return loss_of(logits_of(model, tokens), tokens)
    with op_megatron.replay(model, trace, batch=len(tokens), check=False):
        return loss_of(logits_of(model, tokens), tokens)


def two_micro_batches(model, traces, order):
    """Return the sum of the gradients of two micro-batches."""
    if order == "in turn":
        forward(model, FIRST, traces[0]).backward()
        forward(model, SECOND, traces[1]).backward()
        return gradients(model)
    losses = [forward(model, FIRST, traces[0]), forward(model, SECOND, traces[1])]
    if order == LATE:
        losses.reverse()
    for loss in losses:
        loss.backward()
    return gradients(model)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module")
def plain():
    return make()


@pytest.fixture(scope="module", params=RECOMPUTES.values(), ids=RECOMPUTES.keys())
def saving(request):
    return make(**request.param)


@pytest.fixture(scope="module")
def without_recompute(plain):
    """Return a function that gives the gradients of two micro-batches, computed once each."""

    @functools.cache
    def found(order, *seeds):
        return two_micro_batches(plain, [routes(plain, seed) for seed in seeds], order)

    return found


CASES = [
    *((order, 21, 22) for order in ORDERS),
    *((LATE, *seeds) for seeds in ((0, None), (None, 1))),  # one micro-batch is not replayed
]


def test_gradients_are_those_without_recompute(saving, without_recompute, subtests):
    for order, *seeds in CASES:
        with subtests.test(order=order, seeds=seeds):
            traces = [routes(saving, seed) for seed in seeds]
            found = two_micro_batches(saving, traces, order)
            assert_same_bits(without_recompute(order, *seeds), found)


def inside_the_replay_of_another(model):
    """An interleaved schedule may run a backward between two forwards of one context."""
    loss = forward(model, FIRST, None)
    with op_megatron.replay(model, routes(model, 21), batch=3, check=False):
        loss.backward()
        second = loss_of(logits_of(model, SECOND), SECOND)
    second.backward()


def inside_its_own_replay(model):
    with op_megatron.replay(model, routes(model, 21), batch=3, check=False):
        loss_of(logits_of(model, FIRST), FIRST).backward()


def beside_the_own_choice_for_a_check(model):
    with torch.no_grad(), op_megatron.record(model) as tape:
        logits_of(model, FIRST)
    with op_megatron.replay(model, tape.trace(), batch=3, native=True):
        loss = loss_of(logits_of(model, FIRST), FIRST)
    loss.backward()


BACKWARDS = [
    inside_the_replay_of_another,
    inside_its_own_replay,
    beside_the_own_choice_for_a_check,
]


@pytest.mark.parametrize("backward", BACKWARDS)
def test_a_backward(plain, saving, backward):
    found = []
    for model in (plain, saving):
        backward(model)
        found.append(gradients(model))
    assert_same_bits(*found)


def test_recomputes_are_not_recorded(saving):
    with torch.no_grad(), op_megatron.record(saving) as tape:
        logits_of(saving, FIRST)
    with op_megatron.record(saving) as whole:
        loss_of(logits_of(saving, FIRST), FIRST).backward()
    gradients(saving)
    assert whole.trace() == tape.trace()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_torch_around_a_layer(without_recompute, reentrant):
    saving = make()
    layer = saving.decoder.layers[2]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(inner, *args, use_reentrant=False, **kwargs)
    if reentrant:  # takes no keyword arguments of the function
        layer.forward = lambda **kwargs: checkpoint(
            lambda hidden, mask: inner(**(kwargs | {"hidden_states": hidden})),
            kwargs["hidden_states"],
            kwargs["attention_mask"],
            use_reentrant=True,
        )
    found = two_micro_batches(saving, [routes(saving, seed) for seed in (21, 22)], LATE)
    assert_same_bits(without_recompute(LATE, 21, 22), found)


def test_megatrons_queue_is_wrong_in_this_order():
    """Its own replay hands a recompute the oldest targets: the order of ours is worth testing."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    plain, saving = (make(**r, moe_enable_routing_replay=True) for r in ({}, FULL_RECOMPUTE))
    traces = [random_trace(FIRST.numel(), (1, 2, 3), 8, 2, seed=seed) for seed in (21, 22)]
    expected = two_micro_batches(plain, traces, LATE)
    replays = [layer.mlp.router.router_replay for layer in list(saving.decoder.layers)[1:]]
    losses = []
    for tokens, trace in zip((FIRST, SECOND), traces, strict=True):
        ids = trace.ids.long().view(3, 12, 3, 2).transpose(0, 1).flatten(0, 1)
        for column, replay in enumerate(replays):
            replay.set_target_indices(ids[:, column].contiguous())
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        losses.append(forward(saving, tokens, None))
    for replay in replays:
        replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    for loss in reversed(losses):
        loss.backward()
    theirs, name = gradients(saving), "decoder.layers.2.mlp.router.weight"
    wrong = (theirs[name] - expected[name]).norm() / expected[name].norm()
    assert wrong > 0.1
