"""Bugs of routing replay that other projects had or have, as fixtures: each is named by a check.

Every test has the project and the number of the issue or pull request in its name.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import onepolicy as op
from onepolicy.config import UsageError
from onepolicy.integrations import miles, slime
from onepolicy.integrations.core.layout import fit, sequence_first
from onepolicy.integrations.core.payload import to_trace
from onepolicy.replay.checks import RoutingError, check_trace
from support.replay_models import build, random_trace, tokens


@pytest.fixture(scope="module")
def policy():
    """Return a model with a dense layer, a batch of two equally long samples, and its routes."""
    model = build("deepseek_v3")
    batch = tokens(rows=2, length=20)
    routers = op.bind_routers(model)
    with routers.record() as tape, torch.no_grad():
        model(batch)
    return SimpleNamespace(model=model, batch=batch, routers=routers, trace=tape.trace())


def replayed(policy, trace):
    with op.bind_routers(policy.model).replay(trace), torch.no_grad():
        policy.model(policy.batch)


def payload(policy, trace):
    """Return ids [T, decoder layers, K] as SGLang and vLLM send them."""
    ids = torch.zeros(len(trace), policy.routers.depth, trace.top_k, dtype=torch.int32)
    ids[:, list(trace.layers)] = trace.ids.int()
    return ids


def check(policy, trace):
    bound = policy.routers
    check_trace(trace, layers=bound.layers, num_experts=bound.num_experts, top_k=bound.top_k)


def arguments(policy):
    freq = [int(layer in policy.routers.layers) for layer in range(policy.routers.depth)]
    return SimpleNamespace(
        use_rollout_routing_replay=True,
        num_layers=policy.routers.depth,
        moe_layer_freq=freq,
        num_experts=policy.routers.num_experts,
        moe_router_topk=policy.routers.top_k,
    )


def sample(policy, **more):
    """Return a finished sample of slime and miles, with one row less than it has tokens."""
    trace = random_trace(7, policy.routers.layers, policy.routers.num_experts, policy.routers.top_k)
    routes = payload(policy, trace).numpy()
    known = {"tokens": list(range(5, 13)), "rollout_routed_experts": routes}
    return SimpleNamespace(**(known | {"weight_versions": ["1"]} | more))


def test_own_routes_pass(policy):
    replayed(policy, policy.trace)
    slime.check_samples(arguments(policy), [[sample(policy)]])


def test_miles_3146_token_order_with_micro_batches_above_1(policy):
    """Rows sample after sample for a model that takes the sequence first: all shapes fit."""
    with pytest.raises(RoutingError, match="agree"):
        replayed(policy, sequence_first(policy.trace, samples=2))


def test_miles_3277_retraction_pairs_old_log_probabilities_with_new_routes(policy, caplog):
    mixed = sample(policy, weight_versions=["1", "2"])
    with caplog.at_level(logging.WARNING):
        miles.check_samples(arguments(policy), [[mixed, sample(policy)]])
    assert "1 of 2 samples" in caplog.text
    assert "retracted" in caplog.text


@pytest.mark.parametrize("module", [slime, miles])
def test_slime_1145_slime_1909_miles_407_the_server_sends_no_routes(policy, module):
    silent = sample(policy, rollout_routed_experts=None)
    with pytest.raises(UsageError, match="enable-return-routed-experts"):
        module.check_samples(arguments(policy), [[silent]])


def test_prime_rl_1807_zero_rows_at_turn_boundaries_are_no_routes(policy):
    """prime-rl replays them as expert 0, K times."""
    ids = payload(policy, policy.trace)
    ids[6] = 0
    data = SimpleNamespace(data=ids.numpy().tobytes(), shape=list(ids.shape), dtype="int32")
    trace = to_trace(policy.routers, data, tokens=len(ids) + 1, form="prime-rl")
    assert (~trace.valid).nonzero().flatten().tolist() == [6]
    old = policy.trace
    zeros = op.RoutingTrace(old.ids.clone(), old.valid, old.layers, old.num_experts)
    zeros.ids[6] = 0
    with pytest.raises(UsageError, match="valid=False"):
        check(policy, zeros)


def test_verl_7075_the_filler_row_of_the_last_token_is_no_route(policy):
    ids = payload(policy, policy.trace)
    ids[-1] = 0
    trace = to_trace(policy.routers, ids.to(torch.int16), tokens=len(ids) + 1, form="verl")
    assert not trace.valid[-1]
    assert trace.valid[:-1].all()


def test_verl_6027_routes_longer_than_a_truncated_response_are_cut(policy):
    ids = payload(policy, policy.trace)
    with pytest.raises(UsageError, match=r"has 40 rows, but 21 tokens have 20.*truncated"):
        to_trace(policy.routers, ids, tokens=21, form="verl")
    trace = to_trace(policy.routers, ids, tokens=21, form="verl", surplus="cut")
    assert len(trace) == 20
    assert trace.ids.equal(policy.trace.ids[:20])


def test_sglang_pipeline_stages_capture_other_layers(policy):
    """Layers of other stages arrive as zeros."""
    partial = sample(policy)
    partial.rollout_routed_experts[:, policy.routers.layers[-1]] = 0
    with pytest.raises(UsageError, match=f"layer {policy.routers.layers[-1]}"):
        slime.check_samples(arguments(policy), [[partial]])


def test_vllm_ascend_16314_all_rows_are_zero(policy):
    """One such sample is one without routes; a forward with nothing else is an error."""
    trace = to_trace(policy.routers, payload(policy, policy.trace) * 0, tokens=41, form="vllm")
    assert not trace.valid.any()
    with pytest.raises(RoutingError, match="captured"):
        replayed(policy, trace)


def test_miles_codec_takes_another_number_of_experts_for_a_short_sample(policy):
    """Its K is a quotient of the buffer's length, which has a row too many at a stop token."""
    short = sample(policy, tokens=[5, 6])
    rows = payload(policy, random_trace(2, policy.routers.layers, policy.routers.num_experts, 2))
    size = rows.numel()
    guessed = size // (1 * policy.routers.depth)
    taken = rows.flatten()[: policy.routers.depth * guessed]
    short.rollout_routed_experts = taken.reshape(1, policy.routers.depth, guessed)
    assert guessed != policy.routers.top_k
    with pytest.raises(UsageError, match="experts"):
        miles.check_samples(arguments(policy), [[short]])


@pytest.mark.parametrize("by", [1, -1])
def test_miles_start_len_off_by_one_shifts_the_rows(policy, by):
    """`routed_experts_start_len` counts rows; a token too many or too few moves all later ones."""
    shifted = policy.trace.at((torch.arange(len(policy.trace)) + by) % len(policy.trace))
    with pytest.raises(RoutingError, match="one row"):
        replayed(policy, shifted)


def test_areal_resumed_requests_concatenate_whole_captures(policy):
    """Each part has the rows of the whole prefix again."""
    again = sample(policy)
    routes = again.rollout_routed_experts
    again.rollout_routed_experts = np.concatenate([routes[:3], routes])
    with pytest.raises(UsageError, match="10 routing rows"):
        slime.check_samples(arguments(policy), [[again]])


def test_twinkle_240_layers_by_their_order_instead_of_their_index(policy):
    """Column i is taken for the i-th MoE layer, but the axis has dense layers too."""
    ids = payload(policy, policy.trace)
    first = policy.routers.layers[0]
    assert first > 0
    by_order = ids[:, : len(policy.routers.layers)]
    trace, bound = policy.trace, policy.routers
    taken = by_order.to(trace.ids.dtype)
    with pytest.raises(UsageError, match=r"layer|expert"):
        check(policy, op.RoutingTrace(taken, trace.valid, bound.layers, bound.num_experts))


def test_skyrl_1908_stale_routes_of_the_batch_before(policy):
    """Two samples' routes in the other's place, as a queue that was not cleared leaves them."""
    half = len(policy.trace) // 2
    stale = policy.trace.at(torch.cat([torch.arange(half, 2 * half), torch.arange(half)]))
    with pytest.raises(RoutingError, match="agree"):
        replayed(policy, stale)


def test_skyrl_filler_rows_look_like_routes_and_are_cut_by_length(policy):
    ids = payload(policy, policy.trace.rows(0, 19))
    filler = torch.arange(policy.routers.top_k).expand(1, policy.routers.depth, -1).int()
    trace = to_trace(policy.routers, torch.cat([ids, filler]), tokens=20, form="skyrl")
    assert trace.ids.equal(policy.trace.ids[:19])
    assert not fit(trace, 20).valid[-1]
