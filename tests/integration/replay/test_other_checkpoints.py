"""A trainer's own activation checkpoint carries replays once it is named to `carry_also`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepolicy import bind_routers
from onepolicy.replay import recompute
from onepolicy.replay.recompute import carry_also
from support.replay_models import build, same_bits, take_grads, tokens
from support.replay_steps import loss, routes_of


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as Megatron-core has one: an autograd function that calls the layer again."""

    @staticmethod
    def forward(ctx: Any, function: Any, hidden: Tensor) -> Tensor:
        ctx.function, ctx.hidden = function, hidden.detach().requires_grad_()
        with torch.no_grad():
            out: Tensor = function(hidden)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with torch.enable_grad():
            out = ctx.function(ctx.hidden)
        torch.autograd.backward(out, gradient)
        return None, ctx.hidden.grad


@pytest.fixture
def named(monkeypatch):
    monkeypatch.setattr(recompute, "_others", {})
    own = OwnCheckpoint.forward
    carry_also(OwnCheckpoint)
    carry_also(OwnCheckpoint)  # once more changes nothing
    yield
    assert OwnCheckpoint.forward is own


def checkpointed():
    model = build("qwen3_moe")
    for layer in model.model.layers:
        inner = layer.forward

        def forward(hidden, inner=inner, **kwargs):
            return OwnCheckpoint.apply(lambda h: inner(h, **kwargs), hidden)

        layer.forward = forward
    return model


def loss_in_replay(model, routers, seed):
    """Return the loss of one micro-batch, replayed unless the seed is None."""
    if seed is None:
        return loss(model, tokens())
    with routers.replay(routes_of(routers, seed=seed), check=False):
        return loss(model, tokens())


def grads_of_both(step):
    """Return the gradients of a step of a model without checkpoints, and of one with them."""
    found = []
    for model in (build("qwen3_moe"), checkpointed()):
        step(model, bind_routers(model))
        found.append(take_grads(model))
    return found


@pytest.mark.usefixtures("named")
def test_backwards_in_any_order_outside_the_context(subtests):
    for seeds in ((3, 4), (3, None), (None, 4)):

        def step(model, routers, seeds=seeds):
            for each in [loss_in_replay(model, routers, seed) for seed in seeds]:
                each.backward()

        with subtests.test(seeds=seeds):
            assert same_bits(*grads_of_both(step))


@pytest.mark.usefixtures("named")
def test_a_backward_inside_another_replay():
    def step(model, routers):
        first = loss_in_replay(model, routers, None)
        with routers.replay(routes_of(routers, seed=5), check=False):
            first.backward()
            second = model(input_ids=tokens(), use_cache=False).logits.logsumexp(-1).mean()
        second.backward()

    assert same_bits(*grads_of_both(step))


def test_one_that_was_not_named_recomputes_other_experts():
    def step(model, routers):
        loss_in_replay(model, routers, 3).backward()

    assert not same_bits(*grads_of_both(step))
