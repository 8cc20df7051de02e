"""The seconds of a step. Decoding is bound by reading, the rest by arithmetic or communication."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepolicy.config import RolloutReplay, RunConfig, ServerEngineConfig
from onepolicy.config.cluster import RayCluster
from onepolicy.config.numerics import ON_POLICY
from onepolicy.plan.dims import Dims
from onepolicy.plan.engine_memory import EngineWeights, sent_dtype, sequence_cache_bytes
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.step_work import StepWork, in_process, sequences_per_engine
from onepolicy.train.dry_run import gather_dtype
from onepolicy.train.memory import FLOAT32, ITEMSIZE, kept_per_token, trace_itemsize


@dataclass(frozen=True, slots=True)
class CommunicationVolume:
    """Bytes that a step sends."""

    # as the learner keeps them: MoE layers only, one byte up to 256 experts
    route_bytes_per_token: int
    routes: float  # of a step, as the learner keeps them
    routes_sent: float  # of a step, as the engine sends them
    weights: float  # to each engine, in its dtype; unrounded where it quantises them
    gathered: float  # per rank: layers gathered for forward and backward, gradients summed


def communication_volume(
    dims: Dims, config: RunConfig, work: StepWork, ranks: int
) -> CommunicationVolume:
    """Compute the bytes that one step sends."""
    kept_bytes = kept = 0
    sent = 0.0
    if isinstance(config.replay, RolloutReplay):
        kept_bytes = kept_per_token(dims, config)
        kept = kept_bytes * work.all_slots
        sent = sent_per_token(dims, config) * work.all_slots
    micro_batches = work.micro_batches(config.train.tokens_per_micro_batch, ranks)
    itemsize = ITEMSIZE[gather_dtype(config)]
    objective = config.objective
    gathers = 2 + config.scores_first + (objective.kl.coef > 0)  # by the reference
    summed = summed_bytes(dims, config, micro_batches)
    if objective.has_critic:  # which scores too, and has an update of its own
        gathers, summed = gathers + 3, 2 * summed
    gathered = micro_batches * dims.total * itemsize * gathers
    return CommunicationVolume(
        route_bytes_per_token=kept_bytes,
        routes=kept,
        routes_sent=sent,
        weights=_synced_bytes(dims, config),
        gathered=(ranks - 1) / ranks * (gathered + summed),
    )


def summed_bytes(dims: Dims, config: RunConfig, micro_batches: int) -> float:
    """Return the bytes of gradients that the ranks sum in a step.

    FSDP2 sums those of all weights after every micro-batch. Those of adapters are summed once per
    optimiser step, on every rank, which sends them twice.
    """
    if dims.adapter:
        return 2.0 * FLOAT32 * dims.adapter * config.objective.num_minibatches
    return float(FLOAT32) * dims.total * micro_batches


def sends_factors(config: RunConfig) -> bool:
    """Return whether a sync sends A and B of adapters, and not the weights."""
    return config.train.lora is not None and config.train.lora.sync == "native"


def _synced_bytes(dims: Dims, config: RunConfig) -> float:
    """Return the bytes that one engine is given. A and B travel in float32."""
    if sends_factors(config):
        return FLOAT32 * dims.adapter
    return dims.total * ITEMSIZE[sent_dtype(config)]


def sent_per_token(dims: Dims, config: RunConfig) -> float:
    """Return the bytes in which an engine sends one token's routes.

    A server sends every decoder layer, as base64 over HTTP. A choice takes one or two bytes from
    vLLM, four from SGLang.
    """
    if in_process(config):
        return kept_per_token(dims, config)
    choice_bytes = trace_itemsize(dims)
    if config.rollout.engine.kind == "sglang":
        choice_bytes = 4
    return dims.layers * dims.top_k * choice_bytes * 4 / 3


@dataclass(frozen=True, slots=True)
class DecodeStepTime:
    """Seconds of one decode step of one engine, by cause."""

    weights: float  # read
    cache: float  # read
    flops: float
    tensor_parallel: float  # all-reduces
    overhead: float

    @property
    def seconds(self) -> float:
        """Seconds of the step, in which reading and arithmetic overlap."""
        return max(self.weights + self.cache, self.flops) + self.tensor_parallel + self.overhead

    @property
    def bound(self) -> str:
        """The cause that takes most."""
        names = {
            "weights": "reading weights",
            "cache": "reading keys and values",
            "flops": "arithmetic",
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
    """Compute the time for one token each of `batch` sequences with `context` tokens before it.

    An engine reads all weights but the routed experts that no token of the batch is expected to
    use.
    """
    read = weights.bytes_read(dims.touched_share(batch), converts=cluster.is_cpu)
    speed = cluster["bandwidth"] * cluster["decode_efficiency"]
    cache = sequence_cache_bytes(dims, config, cluster, context, tensor_parallel)
    flops = batch * (2 * dims.multiplied + dims.decode_flops(context)) / tensor_parallel
    return DecodeStepTime(
        weights=read / tensor_parallel / speed,
        cache=batch * cache / speed,
        flops=flops / (cluster["flops"] * cluster["prefill_efficiency"]),
        tensor_parallel=_all_reduce_seconds(dims, config, cluster, batch, tensor_parallel),
        overhead=dims.layers * cluster["decode_overhead"],
    )


def _all_reduce_seconds(
    dims: Dims, config: RunConfig, cluster: Cluster, batch: float, tensor_parallel: int
) -> float:
    """Return the seconds of a decode step's all-reduces: two per layer."""
    if tensor_parallel == 1:
        return 0.0
    itemsize = ITEMSIZE[config.rollout.engine.dtype]
    sent = 2 * (tensor_parallel - 1) / tensor_parallel * batch * dims.hidden * itemsize
    one = cluster["collective_latency"] + sent / cluster.collective_bandwidth(tensor_parallel)
    return 2 * dims.layers * one


@dataclass(frozen=True, slots=True)
class RolloutTime:
    """Seconds of a step's rollout."""

    prefill: float
    decode: float
    batch: float  # sequences that an engine decodes at once
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
    """Compute the time of a step's rollout.

    capacity: sequences that one engine's cache holds. A sequence that finishes makes room for the
    next one.
    """
    slowdown = cluster["on_policy_rollout"] if config.numerics == ON_POLICY else 1.0
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
    waves = max(1.0, work.sequences / (engines * batch))
    devices = engines * tensor_parallel
    token_flops = 2 * dims.multiplied + dims.attention_flops(work.prompt) / work.prompt
    flops = work.prefilled * token_flops
    prefill = flops / (devices * cluster["flops"] * cluster["prefill_efficiency"])
    decode = slowdown * waves * work.response * step.seconds
    return RolloutTime(slowdown * prefill, decode, batch, step)


@dataclass(frozen=True, slots=True)
class LearningTime:
    """Seconds of scoring and of the update, and seconds of both by cause."""

    score: float
    update: float
    compute: float
    # layers gathered and gradients summed, also the part that overlaps with computing
    gather: float
    overhead: float
    moved: float = 0.0  # moments and masters from the host's memory and back

    @property
    def bound(self) -> str:
        """The cause that takes most."""
        names = {
            "moved": "moving the optimiser's state",
            "compute": "arithmetic",
            "gather": "gathering layers between ranks",
            "overhead": "launching kernels",
        }
        return names[max(names, key=lambda name: getattr(self, name))]


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of forwards and backwards, by cause. Gathering overlaps with the rest."""

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


def learning_time(
    dims: Dims,
    config: RunConfig,
    cluster: Cluster,
    work: StepWork,
    ranks: int,
    *,
    chunked: bool = False,
    moved: float = 0.0,
) -> LearningTime:
    """Compute the time of scoring and of the update.

    A forward takes 2 FLOPs for each token and each parameter it is multiplied with, and those of
    attention. A backward takes twice as many. chunked: it also computes the logits again. moved:
    bytes of a rank's optimiser that an update moves to the device, and as many back at once.
    """
    train, scores_first = config.train, config.scores_first
    slowdown = cluster["on_policy_train"] if config.numerics == ON_POLICY else 1.0
    speed = ranks * cluster["flops"] * cluster["train_efficiency"]
    compute = slowdown * _forward_flops(dims, work) / speed
    micro_batches = work.micro_batches(train.tokens_per_micro_batch, ranks)
    launch = slowdown * micro_batches * dims.layers * cluster["train_overhead"]
    bandwidth = cluster.collective_bandwidth(ranks) if ranks > 1 else 1.0
    # seconds to gather one byte of every parameter, in all micro-batches
    byte_gather = dims.total * (ranks - 1) / ranks * micro_batches / bandwidth
    itemsize = ITEMSIZE[gather_dtype(config)]

    forward = PassTime(compute, byte_gather * itemsize, launch)
    score = forward.times(float(scores_first))
    if config.rollout_is_old and not scores_first:  # what the first minibatch leaves out
        score = forward.times(1 - 1 / config.objective.num_minibatches)
    if config.objective.kl.coef:
        score = score.plus(forward)
    # The update is a forward and a backward of twice its cost. Checkpointing adds a forward.
    # Reusing the scoring forward saves one.
    reused = micro_batches <= config.most_reused_forwards
    passes = 3 + train.activation_checkpointing - reused
    gathers = 1 + (not reused)
    summed = summed_bytes(dims, config, micro_batches) * (ranks - 1) / ranks / bandwidth
    update_gather = byte_gather * gathers * itemsize + summed
    update = PassTime(passes * compute, update_gather, passes * launch)
    if config.objective.has_critic:
        score, update = score.plus(forward), update.times(2)
    if chunked:
        head = 2 * dims.head_size * work.sequences * work.response
        update = update.plus(PassTime(slowdown * head / speed, 0.0, 0.0))
    both = score.plus(update)
    moving = 0.0
    if moved:
        moving = config.objective.num_minibatches * moved / cluster.host_bandwidth()
    return LearningTime(
        score.seconds,
        update.seconds + moving,
        both.compute,
        both.gather,
        both.overhead,
        moving,
    )


def _forward_flops(dims: Dims, work: StepWork) -> float:
    """Return the FLOPs of a forward over a step's slots. Only trainable slots are projected."""
    not_projected = 2 * dims.head_size * work.sequences * (work.slots - work.response)
    attention = work.sequences * dims.attention_flops(work.slots)
    return 2 * dims.multiplied * work.all_slots - not_projected + attention


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
    """Compute the seconds until the engines have the new weights.

    Weights are sent in the engine's dtype, or unrounded if the engine quantises them. Sharded
    learners gather every tensor first. The methods:

    - memory: copy into an engine in the same process
    - files: write once; every node of the engines reads
    - gloo: one broadcast through the hosts in a binomial tree, whose root sends once per level
    - ray: copy into Ray's object store, which passes it on from node to node; each replica reads
      its node's copy, and one of several devices sends to these
    - nccl: broadcast from rank 0

    The check of an adapter after every sync is not counted.
    """
    model_bytes = dims.total * ITEMSIZE[config.model.dtype]
    gather = 0.0
    if ranks > 1:
        gather = model_bytes / cluster.collective_bandwidth(ranks)
    sent = _synced_bytes(dims, config)
    if sends_factors(config):  # every rank has them
        gather = 0.0
        if sync_method == "memory":
            return 2 * sent / cluster["bandwidth"]
    if sync_method == "memory":
        return gather + (model_bytes + weights.total) / cluster["bandwidth"]
    receivers, copied = engines * tensor_parallel, 0.0
    if sync_method == "ray":  # to each replica, which sends to its devices
        receivers, copied = engines, math.ceil(math.log2(tensor_parallel)) * sent / cluster["host"]
    levels, nodes = math.ceil(math.log2(1 + receivers)), math.ceil(receivers / cluster.per_node)
    written, broadcast = sent / cluster["disk"], levels * sent / cluster["host"]
    seconds = {
        "files": written * (1 + nodes),
        "gloo": broadcast,
        "ray": (1 + math.ceil(math.log2(1 + nodes))) * sent / cluster["host"] + copied,
        "nccl": sent / cluster.point_to_point_bandwidth(),
    }
    return gather + seconds[sync_method]


def default_sync_method(config: RunConfig) -> str:
    """Return how the recipe's engine gets its weights."""
    engine = config.rollout.engine
    if isinstance(engine, ServerEngineConfig):
        method: str = engine.sync
    elif isinstance(config.cluster, RayCluster):
        method = "ray"
    else:
        method = "memory"
    if method == "disk":
        return "files"
    return method
