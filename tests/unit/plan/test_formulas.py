"""The plan's arithmetic, by hand."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.cli import main
from onepolicy.config import UsageError, resolve
from onepolicy.plan import hardware
from onepolicy.plan.dims import Attention, Dims, known_models, route_bytes
from onepolicy.plan.dry_run import MicroBatchMemory
from onepolicy.plan.engine_memory import (
    EngineWeights,
    embedded_cache_bytes,
    engine_memory,
    sequence_cache_bytes,
)
from onepolicy.plan.hardware import Constant, parse_cluster
from onepolicy.plan.learner_memory import (
    checkpoint_cost,
    gathered_bytes,
    learner_memory,
    start_memory,
)
from onepolicy.plan.splits import DeviceSplit, possible_splits
from onepolicy.plan.step_work import (
    StepWork,
    in_process,
    num_servers,
    replicated,
    sequences_per_engine,
    step_work,
)
from onepolicy.plan.suggestions import uneven_experts
from onepolicy.plan.times import (
    communication_volume,
    decode_step_time,
    default_sync_method,
    learning_time,
    rollout_time,
    sync_seconds,
)
from onepolicy.train import optimiser_memory
from support.paths import ROOT

# 2 layers, one of them with a window of 4 tokens; 4 experts, 1 active
FULL = Attention(cached=20, heads=2, width=40, window=None)
NEAR = dataclasses.replace(FULL, window=4)
DIMS = Dims(
    name="toy",
    hidden=10,
    vocab=50,
    context=64,
    total=2000,
    routed=800,
    embedding=500,
    outside=1000,
    largest_layer=500,
    shapes=((100, 4),) * 4 + ((400, 1),),
    layer_shapes=((100, 4), (100, 1)),
    experts=4,
    top_k=1,
    moe_layers=2,
    attention=(FULL, NEAR),
)
WORK = StepWork(prompts=2, group=4, prompt=6, response=10, shared=True)
WEIGHTS = EngineWeights(total=4000, routed=1600, embedding=1000)  # bfloat16
HELD = MicroBatchMemory(saved=70.0, peak=100.0, logits=30.0, layer=6.0, end=20.0, tail=5.0)
HOW = {"slots": 30, "graphs": 1, "first": False, "cpu": True}
ON_POLICY = ["numerics=on-policy", "rollout.engine.dtype=float32", "model.path=Qwen3-30B-A3B"]


def config(**sections):
    tree = {"out": "unused", "steps": 1, "model": {"path": "unused"}, "task": {"kind": "chain"}}
    return resolve(tree | sections)


def cluster(count=8, **values):
    """Return a cluster of H100s with round constants."""
    plain = {
        "flops": 1000.0,
        "bandwidth": 100.0,
        "link": 50.0,
        "network": 5.0,
        "disk": 20.0,
        "host": 10.0,
    }
    plain |= {f"{name}_efficiency": 0.5 for name in ("train", "prefill", "decode", "link")}
    plain |= {"decode_overhead": 0.25, "train_overhead": 0.5, "collective_latency": 0.125}
    found = parse_cluster(f"{count}xH100")
    constants = dict(found.constants)
    for name, value in (plain | values).items():
        constants[name] = Constant(value, "", "given", "")
    return dataclasses.replace(found, constants=constants)


def test_parameters_a_token_meets():
    assert DIMS.active == 2000 - 800 * 3 / 4
    assert DIMS.multiplied == 900  # without the embedding's 500
    assert route_bytes(DIMS) == 2
    assert route_bytes(dataclasses.replace(DIMS, experts=257)) == 4


def test_experts_touched_by_a_batch():
    assert DIMS.touched_share(1) == 0.25
    assert DIMS.touched_share(2) == 1 - 0.75**2
    assert DIMS.touched_share(1000) == pytest.approx(1)


@given(st.integers(1, 60))
def test_a_larger_batch_reads_more_experts_but_fewer_per_token(tokens):
    assert DIMS.touched_share(tokens) < DIMS.touched_share(tokens + 1)
    assert DIMS.touched_share(tokens) <= tokens * DIMS.expert_share * (1 + 1e-12)


def test_a_window_bounds_the_cached_elements():
    assert DIMS.kv_elements(3) == 3 * 40
    assert DIMS.kv_elements(10) == 10 * 20 + 4 * 20


def test_attention_flops_sum_over_visible_tokens():
    by_token = sum(
        2 * 40 * (min(t + 0.5, 1e9)) for t in range(10)
    )  # a triangle: half of its own column
    near = sum(2 * 40 * min(t + 0.5, 4) for t in range(10))
    assert DIMS.attention_flops(10) == pytest.approx(by_token + near, rel=0.01)


def test_micro_batches_hold_whole_samples():
    assert (WORK.slots, WORK.sequences, WORK.all_slots) == (15, 8, 120)
    assert WORK.micro_batches(50, 1) == 3  # 3 samples fit, 8 there are
    assert WORK.fullest_micro_batch(50, 1).slots == (15, 15, 15)
    assert WORK.micro_batches(50, 2) == 2
    assert WORK.fullest_micro_batch(50, 2).slots == (15, 15)  # spread over 4
    assert WORK.fullest_micro_batch(5, 1).slots == (15,)  # a longer sample gets one of its own
    assert WORK.micro_batches(1000, 8) == 1


def test_a_group_prefills_its_prompt_once_with_prefix_caching():
    assert WORK.prefilled == 12
    assert dataclasses.replace(WORK, shared=False).prefilled == 48


def test_float32_learner_holds_16_bytes_per_parameter():
    memory = learner_memory(DIMS, config(), 1, HELD, **HOW)
    assert memory.parameters + memory.gradients + memory.optimiser == 2000 * 16
    assert (memory.masters, memory.gathered, memory.others) == (0, 0, 0)
    assert (memory.activations, memory.logits, memory.routes) == (70, 30, 60)
    assert memory.total == 2000 * 16 + 160


def test_a_bfloat16_learner_has_master_weights():
    memory = learner_memory(DIMS, config(model={"path": "x", "dtype": "bfloat16"}), 1, HELD, **HOW)
    assert (memory.parameters, memory.masters, memory.gradients, memory.optimiser) == (
        4000,
        8000,
        4000,
        16000,
    )
    assert (
        memory.activations + memory.logits == 2000 * 2
    )  # AdamW's float32 gradients are more than a micro-batch's activations


def test_ranks_share_tensors_of_a_parameters_shape():
    memory = learner_memory(DIMS, config(), 4, HELD, **HOW)
    assert memory.parameters + memory.gradients + memory.optimiser == 500 * 16
    assert (
        memory.gathered == 4 * (1000 + 2 * 500) + 4 * 500 - 6
    )  # the layer sends its gradients without activations
    gpu = learner_memory(DIMS, config(), 4, HELD, **HOW | {"cpu": False})
    assert gpu.gathered == 4 * (1000 + 3 * 500) + 2 * 4 * 500 - 6


def test_a_rank_stores_whole_experts():
    """5 experts of 100 over 4 ranks: each stores 2, gathers 8, and one is divided by 5."""
    dims = dataclasses.replace(
        DIMS,
        experts=5,
        total=1500,
        outside=1000,
        shapes=((5, 100), (1000, 1)),
        layer_shapes=((5, 100),),
    )
    four, five = (learner_memory(dims, config(), ranks, HELD, **HOW) for ranks in (4, 5))
    assert (four.parameters, four.optimiser) == (450 * 4, 450 * 8)
    assert (five.parameters, five.optimiser) == (300 * 4, 300 * 8)
    assert four.gathered == 4 * (1000 + 2 * 800) + 4 * 800 - 6
    assert five.gathered == 4 * (1000 + 2 * 500) + 4 * 500 - 6
    planner = SimpleNamespace(dims=dims)
    option = SimpleNamespace(split=DeviceSplit(4, 1, 1))
    (line,) = uneven_experts(planner, option)
    assert line.startswith("train.ranks=1 or 5 divides the 5 experts: each of 4 ranks stores 2 ")
    option.split = DeviceSplit(5, 1, 1)
    assert uneven_experts(planner, option) == []


def test_ranks_gather_in_the_dtype_they_compute_in():
    low = config(train={"ranks": 4, "fsdp_param_dtype": "bfloat16"})
    memory = learner_memory(DIMS, low, 4, HELD, **HOW)
    assert memory.parameters + memory.gradients + memory.optimiser == 500 * 16
    assert memory.gathered == 2 * (1000 + 2 * 500) + 4 * 500 - 6


def test_one_micro_batch_frees_activations_while_it_makes_gradients():
    few = dataclasses.replace(HELD, peak=3000.0)
    held = learner_memory(DIMS, config(), 4, few, **HOW | {"first": True})
    assert held.activations + held.logits == 3000 - 500 * 4
    none_left = learner_memory(DIMS, config(), 4, HELD, **HOW | {"first": True})
    assert none_left.activations + none_left.logits == 5
    recomputed = dataclasses.replace(HELD, end=900.0)  # only layer 0's gradients are to come
    at_the_end = learner_memory(DIMS, config(), 4, recomputed, **HOW | {"first": True})
    assert at_the_end.activations + at_the_end.logits == 900 - 4 * 125


def test_adapters_alone_have_gradients():
    dims = dataclasses.replace(DIMS, adapter=20)
    held = learner_memory(dims, config(), 1, HELD, **HOW | {"first": True})
    assert held.gradients == 80
    assert held.activations + held.logits == 100 - 80


def test_autocast_keeps_a_copy_of_every_matrix():
    assert gathered_bytes(DIMS, config(train={"autocast": "bfloat16"}), 1, 0.0, cpu=True) == 4000


def test_graphs_kept_for_the_update_add_up():
    one, three = (learner_memory(DIMS, config(), 1, HELD, **HOW | {"graphs": n}) for n in (1, 3))
    assert three.activations == one.activations + 2 * 70
    assert three.routes == 3 * one.routes


def test_critic_and_reference_take_their_own():
    both = config(objective={"preset": "ppo", "kl": {"coef": 0.1}})
    assert learner_memory(DIMS, both, 1, HELD, **HOW).others == 2000 * 16 + 2000 * 4


def test_a_second_model_that_records_routes_is_whole():
    own = config(replay={"source": "reprefill"})
    assert learner_memory(DIMS, own, 4, HELD, **HOW).others == 2000 * 2


def test_moments_on_the_host_leave_three_buckets_on_a_gpu(monkeypatch):
    monkeypatch.setattr(optimiser_memory, "BUCKET_BYTES", 12 * 300)
    host = config(optim={"state": "host"})
    memory = learner_memory(DIMS, host, 1, HELD, **HOW | {"cpu": False})
    assert (memory.optimiser, memory.masters) == (0, 0)
    assert memory.activations + memory.logits == 3 * 400 * 8  # the largest tensor is a bucket
    ranked = learner_memory(DIMS, host, 4, HELD, **HOW | {"cpu": False})
    assert ranked.total < learner_memory(DIMS, config(), 4, HELD, **HOW | {"cpu": False}).total
    low = config(optim={"state": "host"}, model={"path": "x", "dtype": "bfloat16"})
    found = optimiser_memory.optimiser_memory(DIMS.shapes, low, 1, cpu=False, one_memory=False)
    assert (found.moved, found.masters) == (2000 * 12, 0)
    assert found.host == 5 * 2048 * 3  # page-locked: 1600 bytes take 2048
    assert found.working == 400 * (3 * 12 + 2)  # gradients of one bucket in float32


def test_moments_on_the_host_of_a_cpu_are_where_they_were():
    host = config(optim={"state": "host"})
    memory = learner_memory(DIMS, host, 1, HELD, **HOW, one_memory=True)
    assert memory == learner_memory(DIMS, config(), 1, HELD, **HOW)


def test_moments_in_8_bits_take_a_byte_and_a_scale_for_256():
    low = config(optim={"state": "8bit"}, model={"path": "x", "dtype": "bfloat16"})
    found = optimiser_memory.optimiser_memory(DIMS.shapes, low, 1, cpu=False, one_memory=False)
    assert (found.moments, found.masters, found.host) == (2000 * (2 + 8 / 256), 8000, 0)
    assert found.working == 2000 * (8 + 2) + 40 * 400


def test_moving_moments_takes_the_link_to_the_host_once_an_update():
    own, at = config(objective={"num_minibatches": 2}), cluster(pcie=40.0)
    still, moved = (learning_time(DIMS, own, at, WORK, 1, moved=size) for size in (0.0, 1000.0))
    assert moved.update - still.update == pytest.approx(2 * 1000 / (40 * 0.5))


SERVER = {"engine": {"kind": "vllm-server"}}


def test_a_servers_cache_is_the_memory_that_weights_leave():
    own = cluster(memory=10_000.0, engine_share=0.9, engine_reserve=1000.0)
    memory = engine_memory(DIMS, config(rollout=SERVER), own, WORK, WEIGHTS, 1)
    assert (memory.weights, memory.cache) == (4000, 4000)
    assert memory.sequences == 4000 // (2 * (16 * 20 + 4 * 20))
    two = engine_memory(DIMS, config(rollout=SERVER), own, WORK, WEIGHTS, 2)
    assert (two.weights, two.cache) == (2000, 6000)
    assert (
        sequence_cache_bytes(DIMS, config(rollout=SERVER), own, 16, 2) == 400
    )  # two key-value heads, one on each device
    assert (
        sequence_cache_bytes(DIMS, config(rollout=SERVER), own, 16, 4) == 400
    )  # no more than that


def test_the_embedded_engine_takes_its_whole_cache():
    own = config(rollout={"engine": {"kind": "hf", "max_num_seqs": 3, "max_len": 32}})
    memory = engine_memory(DIMS, own, cluster(), WORK, WEIGHTS, 1)
    assert memory.cache == 3 * (
        2 * 2 * 64 * 20 + 32 * 2
    )  # rows of a multiple of 64, in layers with a window too
    assert (memory.tokens, memory.sequences) == (96, 3)


def test_the_embedded_engine_keeps_float32_keys_on_a_cpu_only():
    own, cpu = (
        config(rollout={"engine": {"kind": "hf", "max_num_seqs": 3, "max_len": 32}}),
        parse_cluster("1xcpu"),
    )
    assert embedded_cache_bytes(DIMS, own, cpu) == 3 * (4 * 2 * 64 * 20 + 32 * 2)
    latent = dataclasses.replace(FULL, latent=True)
    assert embedded_cache_bytes(dataclasses.replace(DIMS, attention=(latent,)), own, cpu) == 3 * (
        2 * 64 * 20 + 32 * 2
    )
    weighted = config(
        rollout={"engine": {"kind": "hf", "max_num_seqs": 3, "max_len": 32}},
        replay={"mode": "weights"},
    )
    assert embedded_cache_bytes(DIMS, weighted, cpu) == 3 * (4 * 2 * 64 * 20 + 32 * (2 + 8))


def test_another_engine_evaluates_unquantised_weights():
    engine = {"engine": {"kind": "hf", "max_num_seqs": 3, "max_len": 32}, "quant": "int8"}
    own = config(rollout=engine)
    memory = engine_memory(DIMS, own, cluster(), WORK, WEIGHTS, 1)
    assert memory.evaluator == 2 * 2000 + memory.cache
    for settings in ({"every": 0}, {"quantised": True}):
        assert (
            engine_memory(
                DIMS, config(rollout=engine, eval=settings), cluster(), WORK, WEIGHTS, 1
            ).evaluator
            == 0
        )


def test_weights_read_by_a_forward():
    assert WEIGHTS.bytes_read(0.25, converts=True) == 4000 - 1000 - 1600 * 0.75
    codes = EngineWeights(total=2500, routed=800, embedding=1000, converted=900)
    assert codes.bytes_read(0.25, converts=False) == 2500 - 1000 - 800 * 0.75
    assert (
        codes.bytes_read(0.25, converts=True) == 2500 - 1000 + 8 * 900
    )  # all experts of a layer, whatever is met


def test_memory_of_reading_weights_at_the_start():
    plain = start_memory(DIMS, config(), cluster(16), 16)
    assert (plain.host, plain.device) == (8000, 0)  # rank 0 alone
    tied = start_memory(dataclasses.replace(DIMS, embedding=0), config(), cluster(16), 16)
    assert (tied.host, tied.device) == (8 * 8000, 0)
    critic = start_memory(DIMS, config(objective={"preset": "ppo"}), cluster(16), 16)
    assert (critic.host, critic.device) == (8 * 8000, 8000 + 500)
    assert start_memory(DIMS, config(objective={"preset": "ppo"}), cluster(), 1).device == 0


def test_on_policy_numerics_take_as_long_as_measured():
    both = [
        config(numerics=mode, rollout={"engine": {"dtype": "float32"}})
        for mode in ("fast", "on-policy")
    ]
    cpu = parse_cluster("1xcpu", ["on_policy_rollout=2", "on_policy_train=3"])
    fast, slow = (learning_time(DIMS, own, cpu, WORK, 1) for own in both)
    assert (slow.score, slow.update) == (
        pytest.approx(3 * fast.score),
        pytest.approx(3 * fast.update),
    )
    how = {"engines": 1, "tensor_parallel": 1, "capacity": 8}
    fast, slow = (rollout_time(DIMS, own, cpu, WORK, WEIGHTS, **how) for own in both)
    assert (slow.prefill, slow.decode) == (
        pytest.approx(2 * fast.prefill),
        pytest.approx(2 * fast.decode),
    )


def test_decoding_reads_weights_and_cache_while_it_multiplies():
    step = decode_step_time(
        DIMS, config(rollout=SERVER), cluster(), WEIGHTS, batch=2, context=10, tensor_parallel=1
    )
    read = 2000 - 800 - 500 + 800 * (1 - 0.75**2)
    assert step.weights == pytest.approx(2 * read / 50)
    assert step.cache == pytest.approx(2 * 2 * (200 + 80) / 50)
    assert step.flops == pytest.approx(2 * (2 * 900 + 2 * 40 * 14) / 500)
    assert (step.tensor_parallel, step.overhead) == (0, 0.5)
    assert step.seconds == pytest.approx(step.weights + step.cache + 0.5)
    assert step.bound == "reading weights"


def test_tensor_parallel_divides_reading_and_adds_all_reduces():
    step = decode_step_time(
        DIMS, config(rollout=SERVER), cluster(), WEIGHTS, batch=2, context=10, tensor_parallel=2
    )
    alone = decode_step_time(
        DIMS, config(rollout=SERVER), cluster(), WEIGHTS, batch=2, context=10, tensor_parallel=1
    )
    assert step.weights == alone.weights / 2
    assert step.cache == alone.cache / 2
    assert step.tensor_parallel == 2 * 2 * (
        0.125 + 2 * 10 * 2 / 25
    )  # two a layer, half of it to and fro


def test_rollout_takes_turns_where_the_cache_is_small():
    own = config(rollout=SERVER)
    whole = rollout_time(
        DIMS, own, cluster(), WORK, WEIGHTS, engines=1, tensor_parallel=1, capacity=8
    )
    half = rollout_time(
        DIMS, own, cluster(), WORK, WEIGHTS, engines=1, tensor_parallel=1, capacity=4
    )
    assert (whole.batch, half.batch) == (8, 4)
    assert whole.decode == pytest.approx(10 * whole.step.seconds)
    assert half.decode == pytest.approx(2 * 10 * half.step.seconds)
    assert whole.prefill == pytest.approx((12 * 1800 + 2 * DIMS.attention_flops(6)) / 500)


def test_learning_counts_forwards():
    plain, ck, reused, bypass = (
        learning_time(DIMS, config(**sections), cluster(train_overhead=1e-9), WORK, 1)
        for sections in (
            {"train": {"reuse_scoring_forward": False}},
            {"train": {"activation_checkpointing": True}},
            {"train": {"reuse_scoring_forward": True}},
            {"correction": {"preset": "ppo-is"}},
        )
    )
    chunked = learning_time(
        DIMS, config(), cluster(train_overhead=1e-9), WORK, 1, chunked=True
    ).update  # of one micro-batch: the scoring forward is reused
    assert chunked - reused.update == pytest.approx(2 * 500 * 8 * 10 / 500)
    head = 2 * 500 * 8 * (15 - 10)
    forward = (2 * 900 * 120 - head + 8 * DIMS.attention_flops(15)) / 500
    assert plain.score == pytest.approx(forward)
    assert plain.update == pytest.approx(3 * forward)
    assert ck.update == pytest.approx(4 * forward)
    assert (reused.score, reused.update) == (pytest.approx(forward), pytest.approx(2 * forward))
    assert (bypass.score, bypass.update) == (0, pytest.approx(3 * forward))


def test_ranks_wait_for_layers_where_they_compute_little():
    slow = learning_time(DIMS, config(), cluster(link=1e-3), WORK, 4)
    moved = 2000 * 3 / 4 / (1e-3 * 0.5)
    assert slow.score == pytest.approx(moved * 4)
    assert slow.update == pytest.approx(moved * 8)  # the backward's gathering, and gradients
    assert slow.bound == "gathering layers between ranks"
    fast = learning_time(DIMS, config(), cluster(link=1e9), WORK, 4)
    assert fast.score < slow.score / 100


def test_collectives_between_nodes_use_all_adapters():
    assert cluster(8).collective_bandwidth(8) == 25
    assert cluster(16).collective_bandwidth(16) == 40 * 0.5
    assert cluster(16).collective_bandwidth(8) == 25


RAY = {"kind": "ray", "replicas": 3, "gpus_per_replica": 0.5}


def test_ray_replicas_have_devices_of_their_own():
    own = config(cluster=RAY, rollout={"engine": {"kind": "hf", "max_num_seqs": 4, "max_len": 32}})
    assert replicated(own)
    assert not in_process(own)
    assert sequences_per_engine(own, WORK, 3) == 3  # of 8 sequences
    assert sequences_per_engine(own, WORK, 1) == 4  # a replica's own max_num_seqs
    urls = ["http://a:1", "http://b:1", "http://c:1"]
    several = {"kind": "vllm-server", "max_num_seqs": 2, "url": urls}
    assert num_servers(config(rollout={"engine": several})) == 3
    assert sequences_per_engine(config(rollout={"engine": several}), WORK, 3) == 2  # of each
    memory = engine_memory(
        DIMS, own, cluster(memory=10_000.0, engine_reserve=1000.0), WORK, WEIGHTS, 1
    )
    assert memory.room == 4000  # half a device
    parallel = {"kind": "vllm", "tensor_parallel_size": 2}
    own2 = config(cluster={"kind": "ray", "replicas": 3}, rollout={"engine": parallel})
    (split,) = possible_splits(own2, cluster(8))
    assert split == DeviceSplit(1, 3, 2)
    with pytest.raises(UsageError, match="3 replicas of 2 need 7 devices"):
        possible_splits(own2, cluster(6))
    assert default_sync_method(own) == "stream"
    assert default_sync_method(config(cluster=RAY | {"sync": "disk"})) == "files"


@pytest.mark.parametrize(("sync", "way"), [("gloo", "gloo"), ("nccl", "nccl"), ("disk", "files")])
def test_ways_to_servers_are_those_of_the_recipe(sync, way):
    for kind in ("vllm-server", "sglang"):
        assert default_sync_method(config(rollout={"engine": {"kind": kind, "sync": sync}})) == way


def test_sync_by_way():
    own = config(rollout=SERVER)
    assert sync_seconds(DIMS, own, cluster(), WEIGHTS, 1, "files") == 4000 / 10
    assert sync_seconds(DIMS, own, cluster(), WEIGHTS, 1, "gloo") == 4000 / 10
    assert sync_seconds(DIMS, own, cluster(), WEIGHTS, 1, "nccl") == 4000 / 25
    assert (
        sync_seconds(DIMS, own, cluster(16), WEIGHTS, 1, "nccl") == 4000 / 2.5
    )  # to another node: one adapter
    assert (
        sync_seconds(DIMS, own, cluster(), WEIGHTS, 2, "nccl") == 4000 / 25 + 8000 / 25
    )  # gathered in float32 before
    assert sync_seconds(DIMS, config(), cluster(), WEIGHTS, 1, "memory") == (8000 + 4000) / 100
    codes = dataclasses.replace(WEIGHTS, total=2500)
    assert (
        sync_seconds(DIMS, config(rollout={"quant": "int8"}), cluster(), codes, 1, "memory")
        == (8000 + 2500) / 100
    )


def test_sync_to_several_engines():
    """Files are written once. The sender of a gloo broadcast sends all of it to 1, 2, 4, ...
    receivers in turn."""
    own = config(rollout=SERVER)

    def seconds(way, engines, tensor_parallel=1):
        return sync_seconds(
            DIMS,
            own,
            cluster(16),
            WEIGHTS,
            1,
            way,
            engines=engines,
            tensor_parallel=tensor_parallel,
        )

    assert [seconds("gloo", n) for n in (1, 2, 3, 4, 8)] == [400, 800, 800, 1200, 1600]
    assert seconds("gloo", 1, 8) == seconds("gloo", 8)  # every process of a server has all of it
    assert [seconds("stream", n) for n in (1, 8)] == [200 + 400, 200 + 1600]
    assert [seconds("files", n) for n in (1, 8, 9)] == [200 + 200, 200 + 200, 200 + 400]
    assert seconds("nccl", 8) == seconds("nccl", 1)


def test_saving_a_checkpoint():
    """2000 parameters: 12 bytes each in float32, 2 + 8 + 4 in bfloat16 with masters; 20 bytes a
    second."""
    save = checkpoint_cost(
        DIMS, config(train={"ranks": 16, "rank_timeout": 1200.0}), cluster(16), 16
    )
    assert (save.size, save.staged) == (24_000, 12_000)  # 8 ranks on a node
    assert (save.written, save.counts) == (1200, 1200 + 1200 + 800)
    assert save.in_time
    assert not checkpoint_cost(
        DIMS, config(train={"ranks": 16, "rank_timeout": 1199.0}), cluster(16), 16
    ).in_time
    alone = checkpoint_cost(DIMS, config(model={"path": "m", "dtype": "bfloat16"}), cluster(), 1)
    assert (alone.size, alone.staged, alone.written, alone.counts) == (28_000, 0, 1400, 2800)
    assert alone.in_time
    rounded = {"model": {"path": "m", "dtype": "bfloat16"}, "optim": {"state": "8bit"}}
    assert checkpoint_cost(DIMS, config(**rounded), cluster(), 1).staged == 2000 * 12
    several = config(optim={"state": "8bit"}, train={"ranks": 16})
    assert checkpoint_cost(DIMS, several, cluster(16), 16).staged == (24_000 + 16_000) / 2
    critic = config(objective={"baseline": "critic", "normalise": "none"})
    assert checkpoint_cost(DIMS, critic, cluster(), 1).size == 48_000


def test_routes_as_engines_send_them():
    qwen = dataclasses.replace(DIMS, experts=128, top_k=8, moe_layers=48, attention=(FULL,) * 48)
    vllm = communication_volume(qwen, config(rollout=SERVER), WORK, 1)
    sglang = communication_volume(qwen, config(rollout={"engine": {"kind": "sglang"}}), WORK, 1)
    assert vllm.route_bytes_per_token == 384
    assert vllm.routes == 384 * 120
    assert vllm.routes_sent == pytest.approx(512 * 120)
    assert sglang.routes_sent == pytest.approx(2048 * 120)
    assert vllm.weights == 2 * 2000
    assert (
        communication_volume(qwen, config(rollout={"quant": "int8"}), WORK, 1).weights == 4 * 2000
    )  # it quantises unrounded ones
    off = communication_volume(qwen, config(rollout=SERVER, replay={"mode": "off"}), WORK, 1)
    assert (off.routes, off.routes_sent) == (0, 0)


def test_layers_gathered_by_every_rank():
    found = communication_volume(DIMS, config(rollout=SERVER), WORK, 4)
    assert found.gathered == 2000 * 3 / 4 * (4 * 3 + 4)
    assert communication_volume(DIMS, config(rollout=SERVER), WORK, 1).gathered == 0


def test_lengths_are_checked_against_the_context():
    own = config(rollout={"sampling": {"max_tokens": 40}})
    assert step_work(own, 64, prompt=None, response=None).prompt == 24
    assert step_work(own, 4096, prompt=None, response=None).prompt == 512
    assert step_work(own, 64, prompt=3, response=5).length == 8
    with pytest.raises(UsageError, match="max_tokens: 40 leaves no room"):
        step_work(own, 40, prompt=None, response=None)
    with pytest.raises(UsageError, match="--response-tokens: 64 leaves no room"):
        step_work(own, 64, prompt=None, response=64)
    with pytest.raises(UsageError, match="--prompt-tokens: 60 and 40"):
        step_work(own, 64, prompt=60, response=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8", "not COUNTxDEVICE"),
        ("8xh1000", r"did you mean 8xH100\?"),
        ("8xtoaster", "known: A100, B200, B300, H100, H200, cpu"),
        ("0xH100", "no devices"),
        ("12xH100", "no whole number of nodes"),
        ("-1xH100", "not COUNTxDEVICE"),
    ],
)
def test_bad_clusters_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        parse_cluster(text)


def test_clusters_are_read_in_any_case():
    assert str(parse_cluster("64xh200")) == "64xH200"
    assert parse_cluster("2xCPU").is_cpu


@pytest.mark.parametrize(
    "text", ["flops", "flops=", "flops=fast", "flops=-1", "flops=nan", "flops=inf", "speed=1"]
)
def test_bad_constants_are_refused(text):
    with pytest.raises(UsageError, match="--constant"):
        parse_cluster("8xH100", [text])


def test_constants_that_are_given_are_marked():
    found = parse_cluster("8xH100", ["network=25e9"])
    assert found["network"] == 25e9
    assert found.constants["network"].origin == "given"
    assert found.constants["flops"].origin == "cited"


def test_every_constant_names_its_source():
    names = set(parse_cluster("1xH100").constants)
    for device in hardware.known_devices():
        constants = parse_cluster(f"1x{device}").constants
        of_gpus, of_cpus = {"host_memory", "pcie"}, {"on_policy_rollout", "on_policy_train"}
        own = of_cpus if device == "cpu" else of_gpus
        assert set(constants) == names - of_gpus | own, device
        for constant in constants.values():
            assert constant.value > 0
            assert constant.origin in ("measured", "cited", "assumed")
            assert constant.source
            assert constant.origin != "measured" or "`python benchmarks/" in constant.source


def test_shipped_models_name_the_source_of_their_dimensions():
    assert set(known_models()) == {"Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3"}
    assert all(entry["source"].startswith("https://") for entry in known_models().values())


def test_a_bad_cluster_is_refused_before_torch_loads():
    code = (
        "import sys; from onepolicy.cli import main; "
        "code = main(['plan', 'recipes/quickstart.toml', '--cluster', '8xB52']); "
        "assert code == 2, code; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is no device known here" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.path=./nowhere"], "no folder ./nowhere.*known without a download: DeepSeek-V3"),
        (["--json", "nowhere/plan.json"], "--json: no folder nowhere"),
        (
            [
                "--cluster",
                "1xH100",
                "numerics=on-policy",
                "rollout.engine.dtype=float32",
                "model.path=Qwen3-30B-A3B",
            ],
            "numerics: on-policy was run on CPUs only",
        ),
        (
            ["--sync", "nccl", "model.path=Qwen3-30B-A3B"],
            "--sync: the engine is in the learner's process",
        ),
    ],
)
def test_settings_that_cannot_be_planned_are_refused(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["plan", "recipes/quickstart.toml", "--cluster", "1xcpu", *arguments]) == 2
    assert __import__("re").search(message, capsys.readouterr().err)


def test_the_page_lists_the_constants_as_they_are():
    page = (ROOT / "docs" / "plan_model.md").read_text()
    for name, own in json.loads(
        (Path(hardware.__file__).parent / "hardware.json").read_text()
    ).items():
        for constant, entry in own.items():
            row = (
                f"| {name} | {constant} | {entry['value']:.4g} {entry['unit']} | "
                f"{entry['origin']} |"
            )
            assert row in page, row
