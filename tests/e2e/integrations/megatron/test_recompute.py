"""Recomputes of Megatron's own activation checkpoint keep the routes of their forward."""

from __future__ import annotations

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

NONE: dict[str, object] = {}
RECOMPUTES = {
    "full, every layer": FULL_RECOMPUTE,
    "full, two layers at once": FULL_RECOMPUTE | {"recompute_num_layers": 2},
    "full, blocks": FULL_RECOMPUTE | {"recompute_method": "block", "recompute_num_layers": 3},
    "selective, the MoE layer": {
        "recompute_granularity": "selective",
        "recompute_modules": ["moe"],
    },
    "selective, attention and shared expert": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "shared_experts"],
    },
}
FIRST, SECOND = tokens_of(seed=11), tokens_of(seed=12)
ORDERS = ["in turn", "first backward first", "second backward first"]


def make(recompute):
    return make_model(
        moe_layer_freq=[0, 1, 1, 1], moe_shared_expert_intermediate_size=16, **recompute
    )


def routes(model, seed):
    """Return routes that no router chose, with a few invalid rows."""
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
    if order == "second backward first":
        losses.reverse()
    for loss in losses:
        loss.backward()
    return gradients(model)


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    assert not [name for name in one if not torch.equal(one[name], other[name])]


@pytest.fixture(scope="module", params=RECOMPUTES.values(), ids=RECOMPUTES.keys())
def recompute(request):
    return request.param


@pytest.mark.parametrize("order", ORDERS)
def test_gradients_are_those_without_recompute(recompute, order):
    plain, saving = make(NONE), make(recompute)
    traces = routes(plain, 21), routes(plain, 22)
    expected = two_micro_batches(plain, traces, order)
    assert_same_bits(expected, two_micro_batches(saving, traces, order))


@pytest.mark.parametrize("traces", [(0, None), (None, 1)], ids=["first", "second"])
def test_a_micro_batch_without_replay_recomputes_natively(recompute, traces):
    plain, saving = make(NONE), make(recompute)
    chosen = [None if trace is None else routes(plain, trace) for trace in traces]
    expected = two_micro_batches(plain, chosen, "second backward first")
    assert_same_bits(expected, two_micro_batches(saving, chosen, "second backward first"))


def test_a_recompute_inside_the_replay_of_another_micro_batch(recompute):
    """An interleaved schedule may run a backward between two forwards of one context."""
    plain, saving = make(NONE), make(recompute)
    trace, found = routes(plain, 21), []
    for model in (plain, saving):
        loss = forward(model, FIRST, None)
        with op_megatron.replay(model, trace, batch=3, check=False):
            loss.backward()
            second = loss_of(logits_of(model, SECOND), SECOND)
        second.backward()
        found.append(gradients(model))
    assert_same_bits(*found)


def test_a_backward_inside_the_context(recompute):
    plain, saving = make(NONE), make(recompute)
    found = []
    for model in (plain, saving):
        with op_megatron.replay(model, routes(plain, 21), batch=3, check=False):
            loss_of(logits_of(model, FIRST), FIRST).backward()
        found.append(gradients(model))
    assert_same_bits(*found)


def test_the_own_choice_kept_for_a_check_changes_no_bit(recompute):
    plain, saving = make(NONE), make(recompute)
    with torch.no_grad(), op_megatron.record(plain) as tape:
        logits_of(plain, FIRST)
    found = []
    for model in (plain, saving):
        with op_megatron.replay(model, tape.trace(), batch=3, native=True):
            loss = loss_of(logits_of(model, FIRST), FIRST)
        loss.backward()
        found.append(gradients(model))
    assert_same_bits(*found)


def test_recomputes_are_not_recorded(recompute):
    model = make(recompute)
    with torch.no_grad(), op_megatron.record(model) as tape:
        logits_of(model, FIRST)
    with op_megatron.record(model) as whole:
        loss_of(logits_of(model, FIRST), FIRST).backward()
    assert whole.trace() == tape.trace()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_of_torch_around_a_layer(reentrant):
    plain, saving = make(NONE), make(NONE)
    layer = saving.decoder.layers[2]
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(
        inner, *args, use_reentrant=reentrant, **kwargs
    )
    if reentrant:  # takes no keyword arguments of the function
        layer.forward = lambda **kwargs: checkpoint(
            lambda hidden, mask: inner(**(kwargs | {"hidden_states": hidden})),
            kwargs["hidden_states"],
            kwargs["attention_mask"],
            use_reentrant=True,
        )
    traces = routes(plain, 21), routes(plain, 22)
    expected = two_micro_batches(plain, traces, "second backward first")
    assert_same_bits(expected, two_micro_batches(saving, traces, "second backward first"))


def test_megatrons_queue_is_wrong_in_this_order():
    """Its own replay hands a recompute the oldest targets: the order of ours is worth testing."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    plain, saving = (make(r | {"moe_enable_routing_replay": True}) for r in (NONE, FULL_RECOMPUTE))
    traces = [random_trace(FIRST.numel(), (1, 2, 3), 8, 2, seed=seed) for seed in (21, 22)]
    expected = two_micro_batches(plain, traces, "second backward first")
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
