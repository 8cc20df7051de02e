"""The plan's arithmetic, by hand."""

import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from onepolicy.cli import main
from onepolicy.config import UsageError, resolve
from onepolicy.plan import engine_memory, hardware, learner_memory, step_work, times
from onepolicy.plan.dims import Attention, Dims, known_models
from onepolicy.plan.engine_memory import EngineWeights
from onepolicy.plan.hardware import Constant, parse_cluster
from onepolicy.plan.planner import PlanOption
from onepolicy.plan.splits import DeviceSplit, possible_splits
from onepolicy.plan.step_work import StepWork
from onepolicy.plan.suggestions import suggestions, uneven_experts
from onepolicy.plan.tables import format_used
from onepolicy.train import memory as train_memory
from onepolicy.train.dry_run import MicroBatchMemory
from onepolicy.train.memory import route_bytes
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
    cached=40,
    states=0,
    experts=4,
    top_k=1,
    moe_layers=2,
    attention=(FULL, NEAR),
)
WORK = StepWork(prompts=2, group=4, prompt=6, response=10, shared=True)
WEIGHTS = EngineWeights(total=4000, routed=1600, embedding=1000)  # bfloat16
HELD = MicroBatchMemory(saved=70.0, peak=100.0, logits=30.0, layer=6.0, end=20.0, tail=5.0)
HOW = {"slots": 30, "graphs": 1, "first": False, "cpu": True}
LOW = {"model": {"path": "x", "dtype": "bfloat16"}}
SERVER = {"engine": {"kind": "vllm-server"}}
EMBEDDED = {"engine": {"kind": "hf", "max_num_seqs": 3, "max_len": 32}}
CRITIC = {"objective": {"preset": "ppo"}}
GYM = {"kind": "gym", "name": "chain_sum"}
REACT = {"kind": "react", "problems": GYM, "tools": [{"kind": "calculator"}]}
RAY = {"kind": "ray", "replicas": 3, "gpus_per_replica": 0.5}


def config(**sections):
    tree = {"out": "unused", "steps": 1, "model": {"path": "unused"}, "task": {"kind": "chain"}}
    return resolve(tree | sections)


PLAIN = {
    **{"flops": 1000.0, "bandwidth": 100.0, "link": 50.0, "network": 5.0, "disk": 20.0},
    **{f"{name}_efficiency": 0.5 for name in ("train", "prefill", "decode", "link")},
    **{"decode_overhead": 0.25, "train_overhead": 0.5, "collective_latency": 0.125, "host": 10.0},
}


def cluster(count=8, **values):
    """Return a cluster of H100s with round constants."""
    found = parse_cluster(f"{count}xH100")
    own = {name: Constant(value, "", "given", "") for name, value in (PLAIN | values).items()}
    return dataclasses.replace(found, constants=found.constants | own)


def learner(sections=None, ranks=1, held=HELD, dims=DIMS, **how):
    return learner_memory.learner_memory(dims, config(**sections or {}), ranks, held, **HOW | how)


def learning(sections=None, at=None, ranks=1, **how):
    return times.learning_time(DIMS, config(**sections or {}), at or cluster(), WORK, ranks, **how)


def engine(rollout, at=None, devices=1, **sections):
    own = config(rollout=rollout, **sections)
    return engine_memory.engine_memory(DIMS, own, at or cluster(), WORK, WEIGHTS, devices)


def stored(memory):
    return memory.parameters + memory.gradients + memory.optimiser


def test_parameters_a_token_meets():
    assert DIMS.active == 2000 - 800 * 3 / 4
    assert DIMS.multiplied == 900  # without the embedding's 500
    assert route_bytes(DIMS) == 2
    assert route_bytes(dataclasses.replace(DIMS, experts=257)) == 4


def test_experts_touched_by_a_batch():
    assert DIMS.touched_share(1) == 0.25
    assert DIMS.touched_share(2) == 1 - 0.75**2
    assert DIMS.touched_share(1000) == pytest.approx(1)
    for tokens in range(1, 61):
        assert DIMS.touched_share(tokens) < DIMS.touched_share(tokens + 1)
        assert DIMS.touched_share(tokens) <= tokens * DIMS.expert_share * (1 + 1e-12)


def test_a_window_bounds_the_cached_elements():
    assert DIMS.kv_elements(3) == 3 * 40
    assert DIMS.kv_elements(10) == 10 * 20 + 4 * 20


def test_attention_flops_sum_over_visible_tokens():
    by_token = sum(2 * 40 * (t + 0.5) for t in range(10))  # a triangle: half of its own column
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
    assert WORK.prefilled == 12  # a group prefills its prompt once with prefix caching
    assert dataclasses.replace(WORK, shared=False).prefilled == 48


def test_parameters_of_a_learner():
    memory = learner()
    assert stored(memory) == 2000 * 16
    assert (memory.masters, memory.gathered, memory.others) == (0, 0, 0)
    assert (memory.activations, memory.logits, memory.routes) == (70, 30, 60)
    assert memory.total == 2000 * 16 + 160
    memory = learner(LOW)
    assert (memory.parameters, memory.masters) == (4000, 8000)
    assert (memory.gradients, memory.optimiser) == (8000, 16000)
    assert (memory.activations, memory.logits) == (70, 30)


def test_ranks_share_tensors_of_a_parameters_shape():
    memory = learner(ranks=4)
    assert stored(memory) == 500 * 16
    # the layer sends its gradients without activations
    assert memory.gathered == 4 * (1000 + 2 * 500) + 4 * 500 - 6
    gpu = learner(ranks=4, cpu=False)
    assert gpu.gathered == 4 * (1000 + 3 * 500) + 2 * 4 * 500 - 6
    memory = learner({"train": {"ranks": 4, "fsdp_param_dtype": "bfloat16"}}, 4)
    assert stored(memory) == 500 * 16
    assert memory.gathered == 2 * (1000 + 2 * 500) + 4 * 500 - 6


def test_a_rank_stores_whole_experts():
    """5 experts of 100 over 4 ranks: each stores 2, gathers 8, and one is divided by 5."""
    shapes = {"shapes": ((5, 100), (1000, 1)), "layer_shapes": ((5, 100),)}
    dims = dataclasses.replace(DIMS, experts=5, total=1500, outside=1000, **shapes)
    four, five = (learner(ranks=ranks, dims=dims) for ranks in (4, 5))
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


def test_extrapolated_logits_are_no_negative_bytes():
    """Under checkpointing logits are no part of the peak, and fewer of them may raise it."""
    found = learner(held=dataclasses.replace(HELD, logits=-3.0))
    assert (found.logits, found.activations) == (0.0, learner().activations + learner().logits)


def test_memory_that_no_number_of_ranks_makes_fit_is_that_of_the_best_number():
    """2 ranks need 1 + 8 GB beside what is divided, 4 ranks 2 + 5, more ranks 9 + 9."""
    working = {2: (1e9, 8e9), 4: (2e9, 5e9)}

    def memory(ranks, _):
        gathered, activations = working.get(ranks, (9e9, 9e9))
        return SimpleNamespace(gathered=gathered, activations=activations, logits=0.0, total=2e10)

    large = SimpleNamespace(
        learner_used=2e10,
        learner=SimpleNamespace(total=2e10),
        learner_fits=False,
        learner_room=1e9,
    )
    made = SimpleNamespace(
        config=config(train={"tokens_per_micro_batch": 5}),
        dims=DIMS,
        work=WORK,
        cluster=parse_cluster("1xcpu"),
        room=1e9,
        room_share=0.5,
        evaluate_split=lambda *_: large,
        learner_rank_memory=memory,
        weights=SimpleNamespace(total=0.0),
    )
    made.settings_of = lambda learners, config=None: config or made.config
    made.replanned = lambda config: made
    own = {"split": DeviceSplit(1, 1, 1), "engine_fits": True, "host_state": 0, "host_room": 1}
    own |= {"save": SimpleNamespace(staged=0), "start": SimpleNamespace(host=0)}
    *_, line = suggestions(made, SimpleNamespace(**vars(large) | own))
    assert "2 GB with its gradients, beside 5 GB of activations" in line
    assert "devices of 14 GB would do" in line


def test_one_micro_batch_frees_activations_while_it_makes_gradients():
    few = dataclasses.replace(HELD, peak=3000.0)
    recomputed = dataclasses.replace(HELD, end=900.0)  # only layer 0's gradients are to come
    for held, left in ((few, 3000 - 500 * 4), (HELD, 5), (recomputed, 900 - 4 * 125)):
        memory = learner(ranks=4, held=held, first=True)
        assert memory.activations + memory.logits == left


def test_adapters_alone_have_gradients():
    held = learner(dims=dataclasses.replace(DIMS, adapter=20), first=True)
    assert held.gradients == 80
    assert held.activations + held.logits == 100 - 80


def test_autocast_keeps_a_copy_of_every_matrix():
    own = config(train={"autocast": "bfloat16"})
    assert learner_memory.gathered_bytes(DIMS, own, 1, 0.0, cpu=True) == 4000


def test_graphs_kept_for_the_update_add_up():
    one, three = learner(graphs=1), learner(graphs=3)
    assert three.activations == one.activations + 2 * 70
    assert three.routes == 3 * one.routes


def test_other_models_take_their_own():
    both = {"objective": {"preset": "ppo", "kl": {"coef": 0.1}}}  # critic and reference
    assert learner(both).others == 2000 * 16 + 2000 * 4
    whole = learner({"replay": {"source": "reprefill"}}, 4)  # a model that records routes
    assert whole.others == 2000 * 2


def moments(state, **sections):
    own = config(optim={"state": state}, **sections)
    return train_memory.optimiser_memory(DIMS.shapes, own, 1, cpu=False, one_memory=False)


def test_moments_on_the_host_leave_three_buckets_on_a_gpu(monkeypatch):
    monkeypatch.setattr(train_memory, "BUCKET_BYTES", 12 * 300)
    host = {"optim": {"state": "host"}}
    memory = learner(host, cpu=False)
    assert (memory.optimiser, memory.masters) == (0, 0)
    assert memory.activations + memory.logits == 3 * 400 * 8  # the largest tensor is a bucket
    assert learner(host, 4, cpu=False).total < learner(ranks=4, cpu=False).total
    found = moments("host", **LOW)
    assert (found.moved, found.masters) == (2000 * 12, 0)
    assert found.host == 5 * 2048 * 3  # page-locked: 1600 bytes take 2048
    assert found.working == 400 * 3 * 12
    assert learner(host, one_memory=True) == learner()  # on a CPU they are where they were


def test_moments_in_8_bits_take_a_byte_and_a_scale_for_256():
    found = moments("8bit", **LOW)
    assert (found.moments, found.masters, found.host) == (2000 * (2 + 8 / 256), 8000, 0)
    assert found.working == 2000 * 8 + 40 * 400


def test_moving_moments_takes_the_link_to_the_host_once_an_update():
    own, at = {"objective": {"num_minibatches": 2}}, cluster(pcie=40.0)
    still, moved = (learning(own, at, moved=size) for size in (0.0, 1000.0))
    assert moved.update - still.update == pytest.approx(2 * 1000 / (40 * 0.5))


def test_a_servers_cache_is_the_memory_that_weights_leave():
    at = cluster(memory=10_000.0, engine_share=0.9, engine_reserve=1000.0)
    memory = engine(SERVER, at)
    assert (memory.weights, memory.cache) == (4000, 4000)
    assert memory.sequences == 4000 // (2 * (16 * 20 + 4 * 20))
    two = engine(SERVER, at, 2)
    assert (two.weights, two.cache) == (2000, 6000)
    own = config(rollout=SERVER)
    for devices in (2, 4):  # two key-value heads, one on each device: no fewer bytes on 4
        assert engine_memory.sequence_cache_bytes(DIMS, own, at, 16, devices) == 400


# rows of a multiple of 64, in layers with a window too, and the routes of 32 tokens
ROWS, ROUTES = 2 * 64 * 20, 32 * 2


def test_the_embedded_engine_takes_its_whole_cache():
    memory = engine(EMBEDDED)
    assert memory.cache == 3 * (2 * ROWS + ROUTES)
    assert (memory.tokens, memory.sequences) == (96, 3)
    # float32 keys on a CPU only
    plain, weighted = config(rollout=EMBEDDED), config(rollout=EMBEDDED, replay={"mode": "weights"})
    layer = dataclasses.replace(FULL, latent=True)
    latent = dataclasses.replace(DIMS, attention=(layer,), cached=20)
    for dims, own, wanted in (
        (DIMS, plain, 4 * ROWS + ROUTES),
        (latent, plain, ROWS + ROUTES),
        (DIMS, weighted, 4 * ROWS + ROUTES + 32 * 8),
    ):
        assert engine_memory.embedded_cache_bytes(dims, own, parse_cluster("1xcpu")) == 3 * wanted


def test_another_engine_evaluates_unquantised_weights():
    rollout = EMBEDDED | {"quant": "int8"}
    memory = engine(rollout)
    assert memory.evaluator == 2 * 2000 + memory.cache
    for settings in ({"every": 0}, {"quantised": True}):
        assert engine(rollout, eval=settings).evaluator == 0
    pressed = EMBEDDED | {"pressure": {"scale": 0.1}}
    assert engine(pressed, replay={"min_agreement": 0}).evaluator == memory.evaluator


def test_a_learners_device_holds_the_engine_in_its_process():
    unset = dict.fromkeys(each.name for each in dataclasses.fields(PlanOption))
    start = learner_memory.start_memory(DIMS, config(), cluster(), 1)
    parts = {"learner": learner(), "engine": engine(EMBEDDED), "start": start}
    held = 4000 + 3 * (2 * ROWS + ROUTES)  # weights and cache
    for shared, more in ((True, held), (False, 0)):
        option = PlanOption(**unset | parts | {"engine_on_learner": shared})
        assert option.learner_used == learner().total + more
    # an engine that sleeps frees its memory while the learner works
    held_by_learner = learner(LOW)
    kept = held_by_learner.kept
    states = ("parameters", "masters", "optimiser", "others")
    assert kept == sum(getattr(held_by_learner, name) for name in states) < held_by_learner.total
    for cache in (0.0, 1e6):
        awake = dataclasses.replace(engine(EMBEDDED), cache=cache)
        parts = {"learner": held_by_learner, "engine": awake, "start": start}
        option = PlanOption(**unset | parts | {"engine_on_learner": True, "sleeps": True})
        assert option.learner_used == max(held_by_learner.total, kept + 4000 + cache)


def test_weights_read_by_a_forward():
    assert WEIGHTS.bytes_read(0.25, converts=True) == 4000 - 1000 - 1600 * 0.75
    codes = EngineWeights(total=2500, routed=800, embedding=1000, converted=900)
    assert codes.bytes_read(0.25, converts=False) == 2500 - 1000 - 800 * 0.75
    # all experts of a layer, whatever is met
    assert codes.bytes_read(0.25, converts=True) == 2500 - 1000 + 8 * 900


def test_memory_of_reading_weights_at_the_start():
    tied, critic = dataclasses.replace(DIMS, embedding=0), config(**CRITIC)
    for dims, own, ranks, host, device in (
        (DIMS, config(), 16, 8000, 0),  # rank 0 alone
        (tied, config(), 16, 8 * 8000, 0),
        (DIMS, critic, 16, 8 * 8000, 8000 + 500),
    ):
        found = learner_memory.start_memory(dims, own, cluster(ranks), ranks)
        assert (found.host, found.device) == (host, device)
    assert learner_memory.start_memory(DIMS, critic, cluster(), 1).device == 0


def test_on_policy_numerics_take_as_long_as_measured():
    cpu = parse_cluster("1xcpu", ["on_policy_rollout=2", "on_policy_train=3"])
    both = [
        {"numerics": mode, "rollout": {"engine": {"dtype": "float32"}}}
        for mode in ("fast", "on-policy")
    ]
    fast, slow = (learning(own, cpu) for own in both)
    # without a scoring forward, whose graph the fast update of one micro-batch takes
    assert (slow.score, slow.update) == pytest.approx((0.0, 3 * (fast.score + fast.update)))
    several = {"objective": {"num_minibatches": 4}} | both[1]  # all but the first are scored too
    assert learning(several, cpu).score == pytest.approx(3 * fast.score * 3 / 4)
    fast, slow = (rollout(config(**own), cpu) for own in both)
    assert (slow.prefill, slow.decode) == pytest.approx((2 * fast.prefill, 2 * fast.decode))


def rollout(own, at=None, capacity=8):
    how = {"engines": 1, "tensor_parallel": 1, "capacity": capacity}
    return times.rollout_time(DIMS, own, at or cluster(), WORK, WEIGHTS, **how)


def decoding(devices):
    own, how = config(rollout=SERVER), {"batch": 2, "context": 10, "tensor_parallel": devices}
    return times.decode_step_time(DIMS, own, cluster(), WEIGHTS, **how)


def test_decoding_reads_weights_and_cache_while_it_multiplies():
    step = decoding(1)
    read = 2000 - 800 - 500 + 800 * (1 - 0.75**2)
    assert step.weights == pytest.approx(2 * read / 50)
    assert step.cache == pytest.approx(2 * 2 * (200 + 80) / 50)
    assert step.flops == pytest.approx(2 * (2 * 900 + 2 * 40 * 14) / 500)
    assert (step.tensor_parallel, step.overhead) == (0, 0.5)
    assert step.seconds == pytest.approx(step.weights + step.cache + 0.5)
    assert step.bound == "reading weights"
    step, alone = decoding(2), step
    assert (step.weights, step.cache) == (alone.weights / 2, alone.cache / 2)
    # two a layer, half of it to and fro
    assert step.tensor_parallel == 2 * 2 * (0.125 + 2 * 10 * 2 / 25)


def test_rollout_takes_turns_where_the_cache_is_small():
    whole, half = (rollout(config(rollout=SERVER), capacity=capacity) for capacity in (8, 4))
    assert (whole.batch, half.batch) == (8, 4)
    assert whole.decode == pytest.approx(10 * whole.step.seconds)
    assert half.decode == pytest.approx(2 * 10 * half.step.seconds)
    assert whole.prefill == pytest.approx((12 * 1800 + 2 * DIMS.attention_flops(6)) / 500)


def test_learning_counts_forwards():
    at, reuse = cluster(train_overhead=1e-9), {"train": {"reuse_scoring_forward": True}}
    head = 2 * 500 * 8 * (15 - 10)
    forward = (2 * 900 * 120 - head + 8 * DIMS.attention_flops(15)) / 500
    for sections, score, update in (
        ({"train": {"reuse_scoring_forward": False}}, 1, 3),
        ({"train": {"activation_checkpointing": True}}, 1, 4),
        (reuse, 1, 2),
        ({"correction": {"preset": "ppo-is"}}, 0, 3),
    ):
        found = learning(sections, at)
        assert (found.score, found.update) == pytest.approx((score * forward, update * forward))
    chunked = learning(at=at, chunked=True)  # of one micro-batch: the scoring forward is reused
    assert chunked.update - learning(reuse, at).update == pytest.approx(2 * 500 * 8 * 10 / 500)


def test_ranks_wait_for_layers_where_they_compute_little():
    slow = learning(at=cluster(link=1e-3), ranks=4)
    moved = 2000 * 3 / 4 / (1e-3 * 0.5)
    assert slow.score == pytest.approx(moved * 4)
    assert slow.update == pytest.approx(moved * 8)  # the backward's gathering, and gradients
    assert slow.bound == "gathering layers between ranks"
    assert learning(at=cluster(link=1e9), ranks=4).score < slow.score / 100


def test_collectives_between_nodes_use_all_adapters():
    assert cluster(8).collective_bandwidth(8) == 25
    assert cluster(16).collective_bandwidth(16) == 40 * 0.5
    assert cluster(16).collective_bandwidth(8) == 25


def test_ray_replicas_have_devices_of_their_own():
    few = {"engine": {"kind": "hf", "max_num_seqs": 4, "max_len": 32}}
    own = config(cluster=RAY, rollout=few)
    assert step_work.replicated(own)
    assert not step_work.in_process(own)
    assert step_work.sequences_per_engine(own, WORK, 3) == 3  # of 8 sequences
    assert step_work.sequences_per_engine(own, WORK, 1) == 4  # a replica's own max_num_seqs
    urls = ["http://a:1", "http://b:1", "http://c:1"]
    servers = config(rollout={"engine": {"kind": "vllm-server", "max_num_seqs": 2, "url": urls}})
    assert step_work.num_servers(servers) == 3
    assert step_work.sequences_per_engine(servers, WORK, 3) == 2  # of each
    memory = engine(few, cluster(memory=10_000.0, engine_reserve=1000.0), cluster=RAY)
    assert memory.room == 4000  # half a device
    parallel = {"engine": {"kind": "vllm", "tensor_parallel_size": 2}}
    split = config(cluster={"kind": "ray", "replicas": 3}, rollout=parallel)
    assert possible_splits(split, cluster(8)) == [DeviceSplit(1, 3, 2)]
    with pytest.raises(UsageError, match="1 learners and 3 replicas of 2 devices need 7"):
        possible_splits(split, cluster(6))
    # A device holds whole replicas: of 0.6 one, of 0.4 and 0.5 two, of 1/3 three.
    for share, count, needed in (
        (0.6, 5, 5),
        (0.4, 5, 3),
        (0.5, 4, 2),
        (1 / 3, 6, 2),
        (0.1, 9, 1),
        (0, 2, 0),
    ):
        parts = {"kind": "ray", "replicas": count, "gpus_per_replica": share}
        own = config(cluster=parts, rollout=few)
        assert possible_splits(own, cluster(1 + needed)) == [DeviceSplit(1, count, 1)]
        if needed > 1:
            with pytest.raises(UsageError, match=f"need {1 + needed}; give more"):
                possible_splits(own, cluster(needed))


def test_more_learners_than_devices_are_named_by_their_setting():
    alone = config(train={"ranks": 4})
    with pytest.raises(UsageError, match=r"train\.ranks: 4 of 2 devices"):
        possible_splits(alone, cluster(2))
    with pytest.raises(UsageError, match="--learners: 3 of 2 devices"):
        possible_splits(alone, cluster(2), learners=3)


def test_ways_to_engines_are_those_of_the_recipe():
    assert times.default_sync_method(config(cluster=RAY)) == "ray"
    for kind in ("vllm-server", "sglang"):
        for sync, way in (("gloo", "gloo"), ("nccl", "nccl"), ("disk", "files")):
            own = config(rollout={"engine": {"kind": kind, "sync": sync}})
            assert times.default_sync_method(own) == way


def sync(way, ranks=1, at=None, rollout=SERVER, weights=WEIGHTS, **how):
    own, at = config(rollout=rollout), at or cluster()
    return times.sync_seconds(DIMS, own, at, weights, ranks, way, **how)


def test_vllm_keeps_routes_of_its_whole_cache_in_host_memory():
    """A token of 2 layers, one of them dense here, and one expert of each: 2 bytes."""
    for kind in ("vllm", "vllm-server"):
        memory = engine({"engine": {"kind": kind}})
        assert memory.routes == memory.tokens * 2 > 0
        many = dataclasses.replace(DIMS, experts=257, moe_layers=1)
        own = config(rollout={"engine": {"kind": kind}})
        memory = engine_memory.engine_memory(many, own, cluster(), WORK, WEIGHTS, 1)
        assert memory.routes == memory.tokens * 2 * 2
        assert not engine({"engine": {"kind": kind}}, replay={"mode": "off"}).routes
    assert not engine({"engine": {"kind": "sglang"}}).routes


def test_sync_by_way():
    assert sync("files") == sync("gloo") == 4000 / 10
    assert sync("nccl") == 4000 / 25
    assert sync("nccl", at=cluster(16)) == 4000 / 2.5  # to another node: one adapter
    assert sync("nccl", ranks=2) == 4000 / 25 + 8000 / 25  # gathered in float32 before
    assert sync("memory", rollout={}) == (8000 + 4000) / 100
    codes = dataclasses.replace(WEIGHTS, total=2500)
    assert sync("memory", rollout={"quant": "int8"}, weights=codes) == (8000 + 2500) / 100
    own = config(rollout=SERVER, train={"lora": {"rank": 2, "sync": "native"}})
    adapted = dataclasses.replace(DIMS, adapter=100)

    def factors(way, ranks=1):  # of A and B, in float32, which every rank has
        return times.sync_seconds(adapted, own, cluster(), WEIGHTS, ranks, way)

    assert factors("gloo") == 400 / 10
    assert factors("files") == 400 / 20 * 2
    assert factors("nccl") == 400 / 25
    assert factors("memory") == factors("memory", ranks=2) == 2 * 400 / 100


def test_sync_to_several_engines():
    """Files are written once. The sender of a gloo broadcast sends all of it to 1, 2, 4, ...
    receivers in turn."""

    def seconds(way, engines, tensor_parallel=1):
        how = {"engines": engines, "tensor_parallel": tensor_parallel}
        return sync(way, at=cluster(16), **how)

    assert [seconds("gloo", n) for n in (1, 2, 3, 4, 8)] == [400, 800, 800, 1200, 1600]
    assert seconds("gloo", 1, 8) == seconds("gloo", 8)  # every process of a server has all of it
    assert [seconds("ray", n) for n in (1, 8, 9)] == [400 + 400, 400 + 400, 400 + 800]
    assert seconds("ray", 1, 8) == 400 + 400 + 1200  # to its node, and from there to each device
    assert [seconds("files", n) for n in (1, 8, 9)] == [200 + 200, 200 + 200, 200 + 400]
    assert seconds("nccl", 8) == seconds("nccl", 1)


def checkpoint(ranks=1, **sections):
    return learner_memory.checkpoint_cost(DIMS, config(**sections), cluster(max(8, ranks)), ranks)


def test_saving_a_checkpoint():
    """2000 parameters: 12 bytes each in float32, 2 + 8 + 4 in bfloat16 with masters; 20 bytes a
    second."""
    save = checkpoint(16, train={"ranks": 16, "rank_timeout": 1200.0})
    assert (save.size, save.staged) == (24_000, 12_000)  # 8 ranks on a node
    assert (save.written, save.counts) == (1200, 1200 + 1200 + 800)
    assert save.in_time
    assert not checkpoint(16, train={"ranks": 16, "rank_timeout": 1199.0}).in_time
    alone = checkpoint(**LOW)
    assert (alone.size, alone.staged, alone.written, alone.counts) == (28_000, 0, 1400, 2800)
    assert alone.in_time
    rounded = {"optim": {"state": "8bit"}}
    assert checkpoint(**LOW, **rounded).staged == 2000 * 12
    assert checkpoint(16, **rounded, train={"ranks": 16}).staged == (24_000 + 16_000) / 2
    assert checkpoint(objective={"baseline": "critic", "normalise": "none"}).size == 48_000


def test_routes_and_layers_that_are_sent():
    qwen = dataclasses.replace(DIMS, experts=128, top_k=8, moe_layers=48, attention=(FULL,) * 48)

    def volume(rollout=SERVER, **sections):
        return times.communication_volume(qwen, config(rollout=rollout, **sections), WORK, 1)

    assert volume().route_bytes_per_token == 384
    assert volume().routes == 384 * 120
    assert volume().routes_sent == pytest.approx(512 * 120)
    assert volume({"engine": {"kind": "sglang"}}).routes_sent == pytest.approx(2048 * 120)
    assert volume().weights == 2 * 2000
    assert volume({"quant": "int8"}).weights == 4 * 2000  # it quantises unrounded ones
    off = volume(replay={"mode": "off"})
    assert (off.routes, off.routes_sent) == (0, 0)
    layers = 4 * 3 + 4  # bytes of a parameter in a micro-batch: read three times, summed once
    for ranks, budget, gathered in (
        (4, 16_384, 2000 * 3 / 4 * layers),
        (2, 50, 2000 / 2 * layers * 2),  # two micro-batches a rank
        (1, 50, 0),
    ):
        own = config(rollout=SERVER, train={"tokens_per_micro_batch": budget})
        found = times.communication_volume(DIMS, own, WORK, ranks)
        assert found.gathered == gathered
    for objective, layers in (  # bytes of a parameter as above
        ({"kl": {"coef": 0.1}}, 4 * 4 + 4),  # the reference reads it once more
        ({"baseline": "critic", "normalise": "none"}, 4 * 6 + 2 * 4),  # the critic three times
    ):
        own = config(rollout=SERVER, objective=objective)
        assert times.communication_volume(DIMS, own, WORK, 4).gathered == 2000 * 3 / 4 * layers


def test_lengths_are_checked_against_the_context():
    own = config(rollout={"sampling": {"max_tokens": 40}})

    def work(context, prompt=None, response=None):
        return step_work.step_work(own, context, prompt=prompt, response=response)

    assert (work(64).prompt, work(4096).prompt) == (24, 512)
    assert work(64, prompt=3, response=5).length == 8
    turns = config(
        task=REACT | {"max_turns": 3},
        rollout={"engine": {"max_len": 256}, "sampling": {"max_tokens": 48}},
    )
    for typed, prompt, response in (
        ({}, 112, 3 * 48),
        ({"response": 20}, 236, 20),
        ({"prompt": 200}, 200, 56),
    ):
        found = step_work.step_work(turns, 4096, **{"prompt": None, "response": None} | typed)
        assert (found.prompt, found.response) == (prompt, response)
    with pytest.raises(UsageError, match="--prompt-tokens: 256 and 1"):
        step_work.step_work(turns, 4096, prompt=256, response=None)
    for given, words in (
        ({"context": 40}, "max_tokens: 40 leaves no room"),
        ({"context": 64, "response": 64}, "--response-tokens: 64 leaves no room"),
        ({"context": 64, "prompt": 60}, "--prompt-tokens: 60 and 40"),
    ):
        with pytest.raises(UsageError, match=words):
            work(**given)


def test_clusters_are_read_in_any_case_or_refused(subtests):
    for text, message in (
        ("8", "not COUNTxDEVICE"),
        ("8xh1000", r"did you mean 8xH100\?"),
        ("8xtoaster", "known: A100, A10G, B200, B300, GH200, .*, RTX4090, RTX5090, cpu"),
        ("0xH100", "no devices"),
        ("12xH100", "no whole number of nodes"),
        ("-1xH100", "not COUNTxDEVICE"),
    ):
        with subtests.test(text=text), pytest.raises(UsageError, match=message):
            parse_cluster(text)
    assert str(parse_cluster("64xh200")) == "64xH200"
    assert {str(parse_cluster(f"1x{name}")) for name in ("4090", "RTX-4090", "rtx 4090")} == {
        "1xRTX4090"
    }
    assert parse_cluster("2xCPU").is_cpu


def test_constants_that_are_given_are_marked_or_refused(subtests):
    values = ("", "=", "=fast", "=-1", "=nan", "=inf")
    for text in (*(f"flops{value}" for value in values), "speed=1"):
        with subtests.test(text=text), pytest.raises(UsageError, match="--constant"):
            parse_cluster("8xH100", [text])
    found = parse_cluster("8xH100", ["network=25e9"])
    assert found["network"] == 25e9
    assert found.constants["network"].origin == "given"
    assert found.constants["flops"].origin == "cited"


def test_constants_and_shipped_models_name_their_source():
    names = set(parse_cluster("1xH100").constants)
    for device in hardware.known_devices():
        constants = parse_cluster(f"1x{device}").constants
        of_gpus, of_cpus = {"host_memory", "pcie"}, {"on_policy_rollout", "on_policy_train"}
        own = of_cpus if device == "cpu" else of_gpus
        assert set(constants) == names - of_gpus | own, device
        for constant in constants.values():
            assert constant.value > 0
            assert constant.source
            assert constant.origin in ("measured", "cited", "assumed")
            assert constant.origin != "measured" or "`python benchmarks/" in constant.source
    assert set(known_models()) == {"Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3"}
    assert all(entry["source"].startswith("https://") for entry in known_models().values())


@pytest.mark.process
def test_a_bad_cluster_is_refused_before_torch_loads():
    code = (
        "import sys; from onepolicy.cli import main; "
        "code = main(['plan', 'recipes/quickstart.toml', '--cluster', '8xB52']); "
        "assert code == 2, code; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is no device known here" in done.stderr


def test_settings_that_cannot_be_planned_are_refused(capsys, monkeypatch, subtests):
    monkeypatch.chdir(ROOT)
    qwen = "model.path=Qwen3-30B-A3B"
    exact = f"--cluster 1xH100 numerics=on-policy rollout.engine.dtype=float32 {qwen}"
    for arguments, message in (
        ("model.path=./nowhere", "no folder ./nowhere.*known without a download: DeepSeek-V3"),
        ("--json nowhere/plan.json", "--json: no folder nowhere"),
        ("--json README.md/x/plan.json", "--json: .*README.md is a file, not a folder"),
        (exact, r"numerics: the time and memory of on-policy on a GPU .* are not"),
        (f"--sync nccl {qwen}", "--sync: the engine is in the learner's process"),
    ):
        with subtests.test(arguments=arguments):
            plan = ["plan", "recipes/quickstart.toml", "--cluster", "1xcpu"]
            assert main([*plan, *arguments.split()]) == 2
            assert re.search(message, capsys.readouterr().err)


def test_bytes_and_their_room_have_one_unit():
    assert format_used(0.16e9, 8e9) == "0.16 of 8.00 GB"
    assert format_used(782.5e9, 72e9) == "782.5 of 72.0 GB"
    assert format_used(470.19e9, 2e12) == "0.47 of 2.00 TB"
