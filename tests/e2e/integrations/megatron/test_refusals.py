"""Models, settings and traces with which replay would be wrong are named before the forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

import onepolicy.integrations.megatron as op_megatron
from onepolicy.config import UsageError
from onepolicy.replay import RoutingError
from support.megatron.models import gradients, logits_of, loss_of, make_model, tokens_of
from support.replay_models import random_trace

pytestmark = pytest.mark.megatron
capability = pytest.mark.capability

TOKENS = tokens_of()
TRACE = random_trace(36, (0, 1, 2, 3), 8, 2)


@pytest.fixture
def model():
    return make_model()


def replayed(model, trace=TRACE, batch=3, **options):
    with op_megatron.replay(model, trace, batch=batch, check=False, **options):
        return logits_of(model, TOKENS)


NEVER_ASKS = [  # neither replayed nor recorded
    {"moe_router_fusion": True},
    {"moe_router_force_load_balancing": True},
    {"cuda_graph_impl": "local"},
    {"overlap_moe_expert_parallel_comm": True},
    {"moe_router_load_balancing_type": "sinkhorn"},
]
NOT_REPLAYED = [
    (
        {"moe_router_load_balancing_type": ["aux_loss", "quantile_balancing"]},
        "'quantile_balancing' chooses the experts without",
    ),
    ({"moe_expert_capacity_factor": 1.0}, r"moe_expert_capacity_factor=1.0 drops tokens"),
    ({"fp8": "hybrid", "recompute_granularity": "full"}, "fp8 or fp4 with activation recompute"),
]


def changed(changes):
    model = make_model()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def test_settings_under_which_the_router_does_not_ask(subtests):
    for changes in NEVER_ASKS:
        (name,) = changes
        with subtests.test(name):
            model = changed(changes)
            with pytest.raises(UsageError, match=rf"cannot be replayed:\n.*{name}"):
                replayed(model)
            with pytest.raises(UsageError, match=rf"cannot be recorded:\n.*{name}"):
                op_megatron.record(model).__enter__()


def test_settings_under_which_a_replay_would_be_wrong(subtests):
    for changes, said in NOT_REPLAYED:
        with subtests.test(said), pytest.raises(UsageError, match=said):
            replayed(changed(changes))


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_a_load_balancing_loss(kind):
    model = make_model(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.01)
    with pytest.raises(UsageError, match=r"moe_aux_loss_coeff=0.01.*set it to 0.0"):
        replayed(model)
    with op_megatron.record(model), torch.no_grad():  # harmless
        logits_of(model, TOKENS)


def test_a_balancing_type_without_a_coefficient_is_fine():
    model = make_model(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.0)
    loss_of(replayed(model), TOKENS).backward()
    assert gradients(model)


@capability("Megatron", "preflight", how="live")
def test_all_problems_are_named_at_once():
    with pytest.raises(UsageError) as error:
        replayed(changed({"moe_router_fusion": True, "moe_expert_capacity_factor": 1.0}))
    assert "moe_router_fusion" in str(error.value)
    assert "moe_expert_capacity_factor" in str(error.value)
    assert str(error.value).count("moe_router_fusion") == 1  # not once per layer


def test_megatrons_own_replay_is_armed():
    model = make_model(moe_enable_routing_replay=True)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    try:
        with pytest.raises(UsageError, match="own RouterReplay is armed"):
            replayed(model)
    finally:
        RouterReplay.clear_global_router_replay_action()
    replayed(model)


class HashRouter(Router):
    def __init__(self):
        torch.nn.Module.__init__(self)

    def routing(self, logits): ...

    def forward(self, tokens): ...


def of_another_kind():
    model = make_model()
    model.decoder.layers[1].mlp.router = HashRouter()
    return model


UNBOUND = [
    (lambda: make_model(num_moe_experts=None, moe_ffn_hidden_size=None), "no Mixture-of-Experts"),
    (lambda: torch.nn.ModuleList([make_model(), make_model()]), "both the router of layer 0"),
    (of_another_kind, r"layers\.1\.mlp: the router is HashRouter"),
    (list, "expected a Megatron model"),
    (lambda: None, "expected a Megatron model"),
    (lambda: "model", "expected a Megatron model"),
]


def test_models_without_routers_to_replay(subtests):
    for make, said in UNBOUND:
        with subtests.test(said), pytest.raises(UsageError, match=said):
            op_megatron.routers_of(make())


ALL = (0, 1, 2, 3)
WRONG = [
    (random_trace(36, (0, 1, 2), 8, 2), 3, r"layers is \(0, 1, 2\), but the model's MoE layers"),
    (random_trace(36, ALL, 8, 3), 3, "3 experts per token.*routes each token to"),
    (random_trace(36, ALL, 16, 2), 3, "num_experts is 16"),
    (TRACE, 5, "36 rows, which are not those of batch=5"),
    (TRACE, 0, "batch=0"),
    (TRACE.ids, 3, "expected a RoutingTrace, got Tensor"),
]
OTHER_TOKENS = [
    (TRACE.rows(0, 33), 3, "layer 0 routes 36 tokens, but the trace has 33 rows"),
    (TRACE, 1, r"fed 3 samples.*give replay\(batch=3\)"),
]


def test_traces_of_something_else(model, subtests):
    for cases, error in ((WRONG, UsageError), (OTHER_TOKENS, RoutingError)):
        for trace, batch, said in cases:
            with subtests.test(said), pytest.raises(error, match=said):
                replayed(model, trace, batch)


def test_two_forwards_in_one_context(model):
    with op_megatron.replay(model, TRACE, batch=3, check=False):
        logits_of(model, TOKENS)
        with pytest.raises(RoutingError, match="called twice in one replay"):
            logits_of(model, TOKENS)


@pytest.mark.smoke
def test_no_forward_in_the_context(model):
    replay = op_megatron.replay(model, TRACE, batch=3, check=False)
    with pytest.raises(RoutingError, match="was not called while its routes were replayed"), replay:
        pass


def test_a_replay_inside_a_replay(model):
    with op_megatron.replay(model, TRACE, batch=3, check=False):
        with pytest.raises(RoutingError, match="recorded or replayed already"):
            op_megatron.record(model).__enter__()
        logits_of(model, TOKENS)


def test_routes_without_a_valid_row(model):
    nothing = dataclasses.replace(TRACE, valid=torch.zeros(36, dtype=torch.bool))
    replay = op_megatron.replay(model, nothing, batch=3)
    with pytest.raises(RoutingError, match="none of the trace's 36 rows is valid"), replay:
        logits_of(model, TOKENS)


def test_a_router_that_does_not_ask_after_all(model):
    """As one would that a future Megatron fuses without its flag."""
    router = model.decoder.layers[2].mlp.router
    plain = object.__new__(type(router))
    vars(plain).update(vars(router), router_replay=None)
    router.routing = lambda logits, padding_mask=None: type(router).routing(
        plain, logits, padding_mask
    )
    with pytest.raises(RoutingError, match=r"layer 2.* ran 0 top-2 selections"):
        replayed(model)
