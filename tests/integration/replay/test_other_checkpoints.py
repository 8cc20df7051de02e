"""A trainer's own activation checkpoint carries replays once it is named to `carry_also`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from onepolicy import bind_routers
from onepolicy.replay import recompute
from onepolicy.replay.recompute import carry_also
from support.replay_models import build, random_trace, same_bits, take_grads, tokens


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


def loss_of(model, routers, seed):
    """Return the loss of one micro-batch, replayed unless the seed is None."""
    ids = tokens()

    def loss():
        logits = model(input_ids=ids, use_cache=False).logits
        return logits.log_softmax(-1).gather(-1, ids.roll(1, -1)[..., None]).mean()

    if seed is None:
        return loss()
    trace = random_trace(ids.numel(), routers.layers, routers.num_experts, routers.top_k, seed=seed)
    with routers.replay(trace, check=False):
        return loss()


@pytest.mark.parametrize("seeds", [(3, 4), (3, None), (None, 4)])
@pytest.mark.usefixtures("named")
def test_backwards_in_any_order_outside_the_context(seeds):
    found = []
    for model in (build("qwen3_moe"), checkpointed()):
        routers = bind_routers(model)
        losses = [loss_of(model, routers, seed) for seed in seeds]
        for loss in losses:
            loss.backward()
        found.append(take_grads(model))
    assert same_bits(*found)


@pytest.mark.usefixtures("named")
def test_a_backward_inside_another_replay():
    found = []
    for model in (build("qwen3_moe"), checkpointed()):
        routers = bind_routers(model)
        first = loss_of(model, routers, None)
        trace = random_trace(21, routers.layers, routers.num_experts, routers.top_k, seed=5)
        with routers.replay(trace, check=False):
            first.backward()
            second = model(input_ids=tokens(), use_cache=False).logits.logsumexp(-1).mean()
        second.backward()
        found.append(take_grads(model))
    assert same_bits(*found)


def test_one_that_was_not_named_recomputes_other_experts():
    found = []
    for model in (build("qwen3_moe"), checkpointed()):
        loss_of(model, bind_routers(model), 3).backward()
        found.append(take_grads(model))
    assert not same_bits(*found)
