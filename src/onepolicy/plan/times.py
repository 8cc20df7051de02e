"""Seconds of a step. Decoding is bound by what it reads, everything else by what it multiplies or sends."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepolicy.config import FromRollout, RunConfig, ServerEngineConfig
from onepolicy.config.cluster import RayCluster
from onepolicy.config.numerics import ON_POLICY
from onepolicy.plan.dims import Dims
from onepolicy.plan.engine_memory import EngineWeights, sent_dtype, sequence_cache_bytes
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.learner_memory import BYTES, FLOAT32, gather_dtype, kept_per_token
from onepolicy.plan.step_work import StepWork, in_process, sequences_per_engine


@dataclass(frozen=True, slots=True)
class CommunicationVolume:
    route_bytes_per_token: (
        int  # as the learner keeps them: MoE layers only, one byte up to 256 experts
    )
    routes: float  # of a step, as the learner keeps them
    routes_sent: float  # of a step, as the engine sends them
    weights: float  # to each engine, in its dtype; unrounded where it quantises them
    gathered: float  # per rank: layers gathered for forward and backward, gradients summed


def communication_volume(
    dims: Dims, config: RunConfig, work: StepWork, ranks: int
) -> CommunicationVolume:
    replayed = isinstance(config.replay, FromRollout)
    own = kept_per_token(dims, config) if replayed else 0
    rounds = work.micro_batches(config.train.tokens_per_micro_batch, ranks)
    size = BYTES[gather_dtype(config)]
    per_round = dims.total * (ranks - 1) / ranks * (size * (2 + config.scores_old) + FLOAT32)
    return CommunicationVolume(
        route_bytes_per_token=own,
        routes=own * work.all_slots,
        routes_sent=sent_per_token(dims, config) * work.all_slots if replayed else 0.0,
        weights=dims.total * BYTES[sent_dtype(config)],
        gathered=rounds * per_round,
    )


def sent_per_token(dims: Dims, config: RunConfig) -> float:
    """Bytes: vLLM sends a column of one or two bytes per decoder layer, SGLang of four; both as base64 over HTTP."""
    if in_process(config):
        return kept_per_token(dims, config)
    width = 4 if config.rollout.engine.kind == "sglang" else 1 if dims.experts <= 256 else 2
    return dims.layers * dims.top_k * width * 4 / 3


@dataclass(frozen=True, slots=True)
class DecodeStepTime:
    """Seconds of one decode step of one engine, by what takes them."""

    weights: float  # read
    cache: float  # read
    flops: float
    tensor_parallel: float  # all-reduces
    overhead: float

    @property
    def seconds(self) -> float:
        """Reading and multiplying overlap."""
        return max(self.weights + self.cache, self.flops) + self.tensor_parallel + self.overhead

    @property
    def bound(self) -> str:
        names = {
            "weights": "reading weights",
            "cache": "reading keys and values",
            "flops": "arithmetic",
        }
        names |= {
            "tensor_parallel": "all-reduces of tensor parallelism",
            "overhead": "the engine's own overhead",
        }
        return names[max(names, key=lambda name: getattr(self, name))]


def decode_step_time(
    dims: Dims,
    config: RunConfig,
    cluster: Cluster,
    weights: EngineWeights,
    *,
    batch: float,
    context: float,
    tensor_parallel: int,
) -> DecodeStepTime:
    """One token each for `batch` sequences with `context` tokens behind them.

    Weights: all that every token meets, and of the routed experts those that a batch is expected to touch.
    """
    size = BYTES[config.rollout.engine.dtype]
    read = weights.read(dims.touched(batch), converts=cluster.is_cpu)
    speed = cluster["bandwidth"] * cluster["decode_efficiency"]
    flops = batch * (2 * dims.multiplied + dims.decode_flops(context)) / tensor_parallel
    sent = 0.0
    if tensor_parallel > 1:
        one = 2 * (tensor_parallel - 1) / tensor_parallel * batch * dims.hidden * size
        sent = (
            2
            * dims.layers
            * (cluster["collective_latency"] + one / cluster.collective(tensor_parallel))
        )
    return DecodeStepTime(
        weights=read / tensor_parallel / speed,
        cache=batch * sequence_cache_bytes(dims, config, cluster, context, tensor_parallel) / speed,
        flops=flops / (cluster["flops"] * cluster["prefill_efficiency"]),
        tensor_parallel=sent,
        overhead=dims.layers * cluster["decode_overhead"],
    )


@dataclass(frozen=True, slots=True)
class RolloutTime:
    prefill: float
    decode: float
    batch: float  # sequences an engine decodes at once
    step: DecodeStepTime  # of one token, at half of the response

    @property
    def seconds(self) -> float:
        return self.prefill + self.decode


def rollout_time(
    dims: Dims,
    config: RunConfig,
    cluster: Cluster,
    work: StepWork,
    weights: EngineWeights,
    *,
    engines: int,
    tensor_parallel: int,
    capacity: int,
) -> RolloutTime:
    """capacity: sequences one engine's cache holds. A finished sequence makes room for the next."""
    slower = cluster["on_policy_rollout"] if config.numerics == ON_POLICY else 1.0
    batch = max(1, min(sequences_per_engine(config, work, engines), capacity))
    step = decode_step_time(
        dims,
        config,
        cluster,
        weights,
        batch=batch,
        context=work.prompt + work.response / 2,
        tensor_parallel=tensor_parallel,
    )
    turns = max(1.0, work.sequences / (engines * batch))
    devices = engines * tensor_parallel
    flops = work.prefilled * (2 * dims.multiplied + dims.attention_flops(work.prompt) / work.prompt)
    prefill = flops / (devices * cluster["flops"] * cluster["prefill_efficiency"])
    return RolloutTime(slower * prefill, slower * turns * work.response * step.seconds, batch, step)


@dataclass(frozen=True, slots=True)
class LearningTime:
    """score and update are seconds; the rest says what takes them, over both."""

    score: float
    update: float
    compute: float
    gather: float  # layers gathered and gradients summed, all of it; hidden behind the computing as far as it goes
    overhead: float

    @property
    def bound(self) -> str:
        names = {
            "compute": "arithmetic",
            "gather": "gathering layers between ranks",
            "overhead": "launching kernels",
        }
        return names[max(names, key=lambda name: getattr(self, name))]


def learning_time(
    dims: Dims, config: RunConfig, cluster: Cluster, work: StepWork, ranks: int
) -> LearningTime:
    """A forward is 2 FLOPs per parameter a token is multiplied with, and its attention; a backward twice that."""
    head = (
        2 * dims.head * work.sequences * (work.slots - work.response)
    )  # only trainable slots are projected
    flops = (
        2 * dims.multiplied * work.all_slots
        - head
        + work.sequences * dims.attention_flops(work.slots)
    )
    slower = cluster["on_policy_train"] if config.numerics == ON_POLICY else 1.0
    forward = slower * flops / (ranks * cluster["flops"] * cluster["train_efficiency"])
    rounds = work.micro_batches(config.train.tokens_per_micro_batch, ranks)
    speed, low = cluster.collective(ranks) if ranks > 1 else 1.0, BYTES[gather_dtype(config)]
    moved = dims.total * (ranks - 1) / ranks * rounds / speed  # seconds per byte of a parameter
    launch = slower * rounds * dims.layers * cluster["train_overhead"]

    scored = config.scores_old
    passes = (
        3 + config.train.activation_checkpointing - (scored and config.train.reuse_scoring_forward)
    )
    score = PassTime(forward, moved * low, launch).times(float(scored))
    if config.objective.kl.coef:
        score = score.plus(PassTime(forward, moved * low, launch))
    gathers = 1 + (not config.train.reuse_scoring_forward)
    update = PassTime(passes * forward, moved * (gathers * low + FLOAT32), passes * launch)
    if config.objective.critic is not None:
        score, update = score.plus(PassTime(forward, moved * low, launch)), update.times(2)
    both = score.plus(update)
    return LearningTime(score.seconds, update.seconds, both.compute, both.gather, both.overhead)


@dataclass(frozen=True, slots=True)
class PassTime:
    compute: float
    gather: float
    overhead: float

    @property
    def seconds(self) -> float:
        return max(self.compute + self.overhead, self.gather)

    def times(self, factor: float) -> PassTime:
        return PassTime(self.compute * factor, self.gather * factor, self.overhead * factor)

    def plus(self, other: PassTime) -> PassTime:
        return PassTime(
            self.compute + other.compute, self.gather + other.gather, self.overhead + other.overhead
        )


def sync_seconds(
    dims: Dims,
    config: RunConfig,
    cluster: Cluster,
    weights: EngineWeights,
    ranks: int,
    sync_method: str,
    *,
    engines: int = 1,
    tensor_parallel: int = 1,
) -> float:
    """Seconds until the engines have the new weights, sent in the engine's dtype, unrounded where it quantises them.

    memory: into an engine in the same process; files: written once, read by every node of the engines; gloo: one
    broadcast through the hosts, a binomial tree, so the sender sends all of it once per level; stream: written once,
    then broadcast so; nccl: broadcast from rank 0. Sharded learners gather every tensor first.
    """
    sent = dims.total * BYTES[sent_dtype(config)]
    gather = (
        0.0 if ranks == 1 else dims.total * BYTES[config.model.dtype] / cluster.collective(ranks)
    )
    if sync_method == "memory":
        return (
            gather + (dims.total * BYTES[config.model.dtype] + weights.total) / cluster["bandwidth"]
        )
    receivers = engines * tensor_parallel
    levels, nodes = math.ceil(math.log2(1 + receivers)), math.ceil(receivers / cluster.per_node)
    written, broadcast = sent / cluster["disk"], levels * sent / cluster["host"]
    seconds = {
        "files": written * (1 + nodes),
        "gloo": broadcast,
        "stream": written + broadcast,
        "nccl": sent / cluster.point_to_point(),
    }
    return gather + seconds[sync_method]


def default_sync_method(config: RunConfig) -> str:
    """How this engine gets its weights."""
    engine = config.rollout.engine
    if isinstance(engine, ServerEngineConfig):
        return "files" if engine.sync == "disk" else engine.sync
    if isinstance(config.cluster, RayCluster):
        return "stream" if config.cluster.sync == "stream" else "files"
    return "memory"
