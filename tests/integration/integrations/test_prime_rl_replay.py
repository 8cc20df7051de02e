"""Replay of the routes that prime-rl hands to a model of transformers, which ignores them.

Contract: the call of prime-rl 0.8.0 at 559b447, model(**kwargs) with `routed_experts`.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations.prime_rl import replay_in_transformers
from onepolicy.replay.checks import RoutingError
from support.contracts import value_of
from support.planted_routes import one_row_changed, one_row_late
from support.replay_models import build, tokens

capability = pytest.mark.capability


@pytest.fixture(autouse=True)
def hooked(monkeypatch):
    monkeypatch.setattr(PreTrainedModel, "__call__", PreTrainedModel.__call__)
    replay_in_transformers()
    replay_in_transformers()


@pytest.fixture
def batch():
    """Return a packed row of two samples, as prime-rl feeds them."""
    ids = tokens(rows=1, length=18)
    positions = torch.cat([torch.arange(11), torch.arange(7)])[None]
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


def score(model, batch, **more):
    with torch.no_grad():
        return model(**batch, **more).logits


def routes_of(model, batch):
    with op.bind_routers(model).record() as tape:
        score(model, batch)
    return tape.trace()


def payload(trace, depth, missing=()):
    """Return [1, S, decoder layers, K], zeros where nothing was captured."""
    ids = torch.zeros(1, len(trace), depth, trace.top_k, dtype=torch.uint8)
    ids[0, :, list(trace.layers)] = trace.ids
    ids[0, list(missing)] = 0
    return ids


def test_prime_rl_calls_its_models_so():
    assert value_of("prime-rl", "model is called") == [["**"]]
    assert "routed_experts=None" in value_of("prime-rl", "forward")


@capability("prime-rl", "R3", how="contract")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_routes_are_replayed(family, batch):
    model = build(family)
    trace = one_row_changed(routes_of(model, batch))
    with op.bind_routers(model).replay(trace, check=False):
        expected = score(model, batch)
    native = score(model, batch)
    depth = model.config.num_hidden_layers
    found = score(model, batch, routed_experts=payload(trace, depth))
    assert found.equal(expected)
    assert not found.equal(native)


def test_gradients_come_through_checkpoints(batch):
    model = build("mixtral")
    routes = payload(one_row_changed(routes_of(model, batch)), model.config.num_hidden_layers)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(**batch, routed_experts=routes).logits.square().mean().backward()
        found.append(model.get_input_embeddings().weight.grad.clone())
    assert found[0].equal(found[1])


def test_rows_of_zeros_are_native(batch):
    """prime-rl's own models replay them as expert 0, K times."""
    model = build("mixtral")
    trace = routes_of(model, batch)
    native = score(model, batch)
    routes = payload(trace, model.config.num_hidden_layers, missing=(3, 10, 17))
    assert score(model, batch, routed_experts=routes).equal(native)
    assert score(model, batch, routed_experts=torch.zeros_like(routes)).equal(native)


@capability("prime-rl", "detector", how="contract")
def test_routes_one_row_late_stop_the_forward(batch):
    model = build("mixtral")
    trace = routes_of(model, batch)
    late = one_row_late(trace)
    with pytest.raises(RoutingError, match="one row late"):
        score(model, batch, routed_experts=payload(late, model.config.num_hidden_layers))


def test_a_model_that_takes_routes_gets_them(batch):
    class Own(type(build("mixtral"))):
        def forward(self, *args, routed_experts=None, **kwargs):
            self.got = routed_experts
            return super().forward(*args, **kwargs)

    config = build("mixtral").config
    config._experts_implementation = "eager"  # transformers 5.0 to 5.9 ask a subclass's own module
    model = Own(config)
    routes = torch.zeros(1, 18, 2, 2)
    score(model, batch, routed_experts=routes)
    assert model.got is routes


class OwnRouter(nn.Module):
    """A router in the form of prime-rl's own: weights, ids, and the tokens of each expert."""

    def __init__(self, gate):
        super().__init__()
        self.top_k, self.num_experts = gate.top_k, gate.num_experts
        self.weight = gate.weight

    def forward(self, x):
        logits, ids = torch.topk(x @ self.weight.T, self.top_k, dim=-1)
        return logits.softmax(-1), ids, torch.bincount(ids.flatten(), minlength=self.num_experts)


class OwnBlock(nn.Module):
    """A block in the form of prime-rl's GPT-OSS, which knows its numbers too."""

    def __init__(self, block):
        super().__init__()
        self.router, self.experts = OwnRouter(block.gate), block.experts
        self.top_k, self.num_experts = self.router.top_k, self.router.num_experts

    def forward(self, hidden):
        flat = hidden.flatten(0, 1)
        weights, ids, counts = self.router(flat)
        assert counts.sum() == ids.numel()
        return self.experts(flat, ids, weights).view_as(hidden)


def test_a_model_of_prime_rls_own_that_takes_no_routes(batch):
    """Its GPT-OSS: the argument would be swallowed."""
    named = value_of("prime-rl", "GPT-OSS takes no routes")
    assert "**kwargs" in named
    assert not any("routed_experts" in name for name in named)
    model = build("qwen3_moe")
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp = OwnBlock(layer.mlp)
    trace = one_row_changed(routes_of(model, batch))
    with op.bind_routers(model).replay(trace, check=False):
        expected = score(model, batch)
    routes = payload(trace, model.config.num_hidden_layers)
    assert score(model, batch, routed_experts=routes).equal(expected)
    assert not score(model, batch).equal(expected)


def test_routes_of_another_shape(batch):
    with pytest.raises(UsageError, match=r"expected \[B, S, layers, K\]"):
        score(build("mixtral"), batch, routed_experts=torch.zeros(18, 2))


def test_a_router_loss_is_refused(batch):
    model = build("mixtral", output_router_logits=True)
    routes = torch.ones(1, 18, model.config.num_hidden_layers, 2, dtype=torch.uint8)
    with pytest.raises(UsageError, match="output_router_logits"):
        score(model, batch, routed_experts=routes)
