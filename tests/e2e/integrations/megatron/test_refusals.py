"""Models, settings and traces with which replay would be wrong are named before the forward."""

from __future__ import annotations

import copy
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
TRACE = random_trace(TOKENS.numel(), (0, 1, 2, 3), 8, 2)


@pytest.fixture
def model():
    return make_model()


def replayed(model, trace=TRACE, batch=3, **options):
    with op_megatron.replay(model, trace, batch=batch, check=False, **options):
        return logits_of(model, TOKENS)


REFUSED_ALWAYS = {
    "moe_router_fusion": True,
    "moe_router_force_load_balancing": True,
    "cuda_graph_impl": "local",
    "overlap_moe_expert_parallel_comm": True,
    "moe_router_load_balancing_type": "sinkhorn",
}


@pytest.mark.parametrize("name", REFUSED_ALWAYS)
def test_settings_under_which_the_router_does_not_ask(model, name):
    setattr(model.config, name, REFUSED_ALWAYS[name])
    with pytest.raises(UsageError, match=rf"cannot be replayed:\n.*{name}"):
        replayed(model)
    with pytest.raises(UsageError, match=rf"cannot be recorded:\n.*{name}"):
        op_megatron.record(model).__enter__()


def test_a_fused_router_in_the_list_of_balancing_types(model):
    model.config.moe_router_load_balancing_type = ["aux_loss", "quantile_balancing"]
    with pytest.raises(UsageError, match="'quantile_balancing' chooses the experts without"):
        replayed(model)


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


def test_dropped_tokens(model):
    model.config.moe_expert_capacity_factor = 1.0
    with pytest.raises(UsageError, match=r"moe_expert_capacity_factor=1.0 drops tokens"):
        replayed(model)


def test_a_recompute_by_transformer_engine(model):
    model.config.fp8, model.config.recompute_granularity = "hybrid", "full"
    with pytest.raises(UsageError, match="fp8 or fp4 with activation recompute"):
        replayed(model)


@capability("Megatron", "preflight", how="live")
def test_all_problems_are_named_at_once(model):
    model.config.moe_router_fusion, model.config.moe_expert_capacity_factor = True, 1.0
    with pytest.raises(UsageError) as error:
        replayed(model)
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


def test_a_dense_model():
    dense = make_model(num_moe_experts=None, moe_ffn_hidden_size=None)
    with pytest.raises(UsageError, match="no Mixture-of-Experts layer"):
        op_megatron.routers_of(dense)


def test_two_models_in_one_module():
    both = torch.nn.ModuleList([make_model(), make_model()])
    with pytest.raises(UsageError, match="both the router of layer 0"):
        op_megatron.routers_of(both)


@pytest.mark.parametrize("thing", [[], None, "model"])
def test_no_model(thing):
    with pytest.raises(UsageError, match="expected a Megatron model"):
        op_megatron.routers_of(thing)


def test_a_router_of_another_kind(model):
    class HashRouter(Router):
        def __init__(self):
            torch.nn.Module.__init__(self)

        def routing(self, logits): ...

        def forward(self, tokens): ...

    model.decoder.layers[1].mlp.router = HashRouter()
    with pytest.raises(UsageError, match=r"layers\.1\.mlp: the router is HashRouter"):
        op_megatron.routers_of(model)


def cut(layers):
    return random_trace(TOKENS.numel(), layers, 8, 2)


WRONG = {
    "layers": (cut((0, 1, 2)), 3, r"layers is \(0, 1, 2\), but the model's MoE layers"),
    "top-k": (random_trace(36, (0, 1, 2, 3), 8, 3), 3, "3 experts per token.*routes each token to"),
    "experts": (random_trace(36, (0, 1, 2, 3), 16, 2), 3, "num_experts is 16"),
    "rows for the batch": (TRACE, 5, "36 rows, which are not those of batch=5"),
    "no batch": (TRACE, 0, "batch=0"),
    "no trace": (TRACE.ids, 3, "expected a RoutingTrace, got Tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_traces_of_something_else(model, case):
    trace, batch, message = WRONG[case]
    with pytest.raises(UsageError, match=message):
        replayed(model, trace, batch)


def test_rows_of_other_tokens(model):
    with pytest.raises(RoutingError, match="layer 0 routes 36 tokens, but the trace has 33 rows"):
        replayed(model, TRACE.rows(0, 33))


def test_another_number_of_samples(model):
    with pytest.raises(RoutingError, match=r"fed 3 samples.*give replay\(batch=3\)"):
        replayed(model, batch=1)


def test_two_forwards_in_one_context(model):
    with op_megatron.replay(model, TRACE, batch=3, check=False):
        logits_of(model, TOKENS)
        with pytest.raises(RoutingError, match="called twice in one replay"):
            logits_of(model, TOKENS)


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
    router.routing = lambda logits, padding_mask=None: type(router).routing(
        router_without_replay(router), logits, padding_mask
    )
    with pytest.raises(RoutingError, match=r"layer 2.* ran 0 top-2 selections"):
        replayed(model)


def router_without_replay(router):
    plain = copy.copy(vars(router))
    made = object.__new__(type(router))
    vars(made).update(plain, router_replay=None)
    return made
