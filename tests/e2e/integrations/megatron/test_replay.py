"""Record and replay in real GPTModels of Megatron-core: what stays, and what reaches experts."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

import onepolicy.integrations.megatron as op_megatron
from onepolicy.integrations.core.payload import to_trace
from onepolicy.replay import RoutingError
from onepolicy.types import RoutingTrace
from support.megatron.experts import one_hot, watched_experts
from support.megatron.models import (
    EXPERTS,
    gradients,
    logits_of,
    loss_of,
    make_model,
    tokens_of,
)
from support.replay_models import random_trace

pytestmark = pytest.mark.megatron
capability = pytest.mark.capability

SIGMOID = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GROUPS = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
VARIANTS = {
    "softmax": {},
    "softmax first": {"moe_router_pre_softmax": True},
    "dense between": {"moe_layer_freq": [0, 1, 0, 1]},
    "dense first, shared expert": {
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_shared_expert_intermediate_size": 16,
    },
    "sigmoid with bias": SIGMOID | {"moe_router_topk_scaling_factor": 2.5},
    "groups": GROUPS | {"moe_router_pre_softmax": True},
    "sigmoid with bias and groups": SIGMOID | GROUPS,
    "four experts per token": {"moe_router_topk": 4},
    "sigmoid, four experts": SIGMOID | {"moe_router_topk": 4},
    "one expert per token": {"moe_router_topk": 1, "moe_router_pre_softmax": True},
    "with Megatron's flag": {"moe_enable_routing_replay": True},
    "router in float32": {"moe_router_dtype": "fp32"},
}
TOKENS = tokens_of()


def make(**changed):
    """Return a model; its selection biases, if any, decide about experts."""
    model = make_model(**changed)
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.linspace(-0.3, 0.3, EXPERTS))
    return model


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def model(request):
    return make(**request.param)


def recorded(model, tokens=TOKENS) -> RoutingTrace:
    with torch.no_grad(), op_megatron.record(model) as tape:
        logits_of(model, tokens)
    return tape.trace()


def foreign(model, tokens=TOKENS, seed=5) -> RoutingTrace:
    """Return routes that no router of the model chose."""
    torch.manual_seed(seed)
    routers = op_megatron.routers_of(model)
    return random_trace(tokens.numel(), routers.layers, routers.num_experts, routers.top_k)


def step(model, trace=None, tokens=TOKENS, **options):
    """Return logits and gradients, with replay if a trace is given."""
    if trace is None:
        logits = logits_of(model, tokens)
    else:
        with op_megatron.replay(model, trace, batch=len(tokens), **options):
            logits = logits_of(model, tokens)
    loss_of(logits, tokens).backward()
    return logits.detach(), gradients(model)


def assert_same_bits(one, other):
    (logits, grads), (other_logits, other_grads) = one, other
    assert torch.equal(logits, other_logits)
    assert grads.keys() == other_grads.keys()
    assert not [name for name in grads if not torch.equal(grads[name], other_grads[name])]


def test_replaying_its_own_routes_keeps_every_bit(model):
    trace = recorded(model)
    assert trace.valid.all()
    assert_same_bits(step(model), step(model, trace))


def test_rows_are_sample_by_sample(model):
    trace, length = recorded(model), TOKENS.shape[1]
    for sample in range(len(TOKENS)):
        alone = recorded(model, TOKENS[sample : sample + 1])
        assert torch.equal(trace.ids[sample * length :][:length], alone.ids)


def test_routes_are_recorded_in_the_order_of_a_training_forward(model):
    """Megatron 0.19 leaves the experts of a row unsorted where gradients are off."""
    with op_megatron.record(model) as tape:
        logits_of(model, TOKENS)
    assert torch.equal(tape.trace().ids, recorded(model).ids)


def test_recorded_routes_are_those_that_the_experts_got(model):
    with watched_experts(model) as log:
        trace = recorded(model)
    assert torch.equal(log.used(), one_hot(trace.ids, EXPERTS))


@capability("Megatron", "R3", how="live")
def test_other_routes_reach_the_experts(model):
    trace = foreign(model)
    with watched_experts(model) as log:
        logits, grads = step(model, trace, check=False)
    assert torch.equal(log.used(), one_hot(trace.ids, EXPERTS))
    assert not torch.equal(logits, step(model)[0])
    routers = [name for name in grads if name.endswith("router.weight")]
    assert len(routers) == len(trace.layers)
    if trace.top_k > 1:  # a softmax over one expert has no gradient
        assert all(grads[name].abs().max() > 0 for name in routers)


def test_invalid_rows_are_routed_natively(model):
    trace = recorded(model)
    valid = torch.arange(len(trace)) % 3 != 1
    ids = torch.where(valid[:, None, None], trace.ids, 255)
    holes = RoutingTrace(ids, valid, trace.layers, trace.num_experts)
    assert_same_bits(step(model), step(model, holes))


def test_invalid_rows_among_other_routes(model):
    trace, own = foreign(model), recorded(model)
    valid = torch.arange(len(trace)) % 3 != 1
    mixed = RoutingTrace(trace.ids, valid, trace.layers, trace.num_experts)
    with watched_experts(model) as log:
        step(model, mixed, check=False)
    used, forced = log.used(), one_hot(trace.ids, EXPERTS)
    assert torch.equal(used[valid], forced[valid])
    # The first MoE layer sees the hidden states of an unreplayed forward.
    native = one_hot(own.ids, EXPERTS)[~valid, 0]
    assert torch.equal(used[~valid, 0], native)
    assert (used[~valid].sum(-1) == trace.top_k).all()


def test_routes_are_those_of_megatrons_own_replay():
    model = make(moe_enable_routing_replay=True, moe_layer_freq=[0, 1, 1, 1])
    trace = foreign(model)
    rows = trace.ids.long().view(*TOKENS.shape, *trace.ids.shape[1:]).transpose(0, 1).flatten(0, 1)
    replays = [layer.mlp.router.router_replay for layer in list(model.decoder.layers)[1:]]
    for column, router in enumerate(replays):
        router.set_target_indices(rows[:, column].contiguous())
        router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    theirs = step(model)
    for router in replays:
        router.clear_indices()
        router.clear_router_replay_action()
    assert_same_bits(theirs, step(model, trace, check=False))


def test_megatron_is_left_as_it_was():
    model = make(moe_enable_routing_replay=True)
    instances = list(RouterReplay.global_router_replay_instances)
    before = RouterReplay.get_replay_topk
    routers = [layer.mlp.router for layer in model.decoder.layers]
    own = [router.router_replay for router in routers]
    replay = op_megatron.replay(model, foreign(model), batch=3)
    with pytest.raises(IndexError), replay:
        logits_of(model, TOKENS + 64)  # no such token
    assert RouterReplay.get_replay_topk is before
    assert RouterReplay.global_router_replay_instances == instances
    assert [router.router_replay for router in routers] == own
    assert not any("forward" in vars(router) for router in routers)
    assert all(router.recorded_topk_idx is None for router in own)


def test_a_reference_model_in_the_same_process_routes_itself():
    model, reference = make(), make(seed=7)
    with op_megatron.replay(model, foreign(model), batch=3, check=False):
        mine = logits_of(reference, TOKENS)
        logits_of(model, TOKENS)
    assert torch.equal(mine, logits_of(reference, TOKENS))


def test_a_packed_row_is_one_sample():
    model = make()
    row = TOKENS.reshape(1, -1)[:, :12]
    trace = recorded(model, row)
    with op_megatron.replay(model, trace):
        assert torch.equal(logits_of(model, row), logits_of_unreplayed(model, row))


def logits_of_unreplayed(model, tokens):
    other = make()
    other.load_state_dict(model.state_dict())
    return logits_of(other, tokens)


def test_several_forwards_are_recorded_one_after_the_other():
    model = make()
    with torch.no_grad(), op_megatron.record(model) as tape:
        logits_of(model, TOKENS[:2])
        logits_of(model, TOKENS[2:])
    assert tape.trace() == recorded(model)


def test_the_routers_own_choice_is_reported_sample_by_sample():
    model = make()
    trace = recorded(model)
    with op_megatron.replay(model, trace, batch=3, native=True) as handle:
        logits_of(model, TOKENS)
    assert torch.equal(handle.native().ids, trace.ids)
    assert torch.equal(handle.trace.ids, trace.ids)
    assert torch.equal(handle.gate_mass(), torch.ones(len(trace), 4))
    handle.check_alignment(torch.arange(4) * TOKENS.shape[1])


def test_rows_in_megatrons_order_are_found_out():
    """Batch-first and sequence-first rows have one shape; a trainer once mixed them up."""
    model = make()
    trace = recorded(model)
    wrong = trace.at(torch.arange(36).view(3, 12).T.reshape(-1))
    replay = op_megatron.replay(model, wrong, batch=3)
    with pytest.raises(RoutingError, match="not those of this forward"), replay:
        logits_of(model, TOKENS)


@capability("Megatron", "detector", how="live")
@pytest.mark.parametrize(("shift", "cause"), [(1, "one row late"), (-1, "one row early")])
def test_shifted_rows_are_found_out(shift, cause):
    model = make()
    trace = recorded(model, TOKENS[:1])
    wrong = trace.at(torch.arange(12).roll(shift))
    with pytest.raises(RoutingError, match=cause), op_megatron.replay(model, wrong):
        logits_of(model, TOKENS[:1])


def test_engine_ids_of_all_layers_or_of_the_moe_layers():
    model = make(moe_layer_freq=[0, 1, 0, 1])
    routers, trace = op_megatron.routers_of(model), recorded(model)
    ids = torch.zeros(len(trace), 4, 2, dtype=torch.int32)
    ids[:, [1, 3]] = trace.ids.int()
    for payload in (ids, trace.ids):
        found = to_trace(routers, payload.numpy(), tokens=len(trace) + 1, form="vllm-0.31")
        assert torch.equal(found.ids, trace.ids)
        assert found.layers == (1, 3)
        assert_same_bits(step(model), step(model, found))
