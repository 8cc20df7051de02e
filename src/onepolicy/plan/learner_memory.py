"""Bytes on a learner's rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepolicy.config import FromRollout, RunConfig, WeightsReplay
from onepolicy.plan.dims import Dims, route_bytes
from onepolicy.plan.dry_run import MicroBatchMemory
from onepolicy.plan.hardware import Cluster


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    size: float  # bytes: parameters, AdamW, masters; a critic counts as a second policy
    staged: float  # bytes of a node's own memory that its ranks' shards are copied to, until they are written
    written: float  # seconds; ranks write at the same time, into one folder
    counts: float  # seconds until it is complete: sharded weights are also read and written again, all files hashed
    limit: float | None  # seconds that the ranks have for writing (train.rank_timeout)

    @property
    def in_time(self) -> bool:
        return self.limit is None or self.written <= self.limit


def checkpoint_cost(dims: Dims, config: RunConfig, cluster: Cluster, ranks: int) -> CheckpointCost:
    """All ranks share the bandwidth of one folder (`disk`). One rank writes from where its tensors are."""
    own = BYTES[config.model.dtype]
    each = own + 2 * FLOAT32 + FLOAT32 * (config.model.dtype == "bfloat16")
    size = dims.total * each * (1 + (config.objective.critic is not None))
    written, disk = size / cluster["disk"], cluster["disk"]
    if ranks == 1:
        return CheckpointCost(size, 0.0, written, 2 * written, None)
    again = 2 * dims.total * own / disk
    staged = size * min(ranks, cluster.per_node) / ranks
    return CheckpointCost(size, staged, written, 2 * written + again, config.train.rank_timeout)


FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2}


def gather_dtype(config: RunConfig) -> str:
    """Of the parameters that ranks gather to compute a layer."""
    low = "bfloat16" in (config.model.dtype, config.train.fsdp_param_dtype)
    return "bfloat16" if low else "float32"


def compute_dtype(config: RunConfig) -> str:
    """Of the layers in forward and backward."""
    return "bfloat16" if config.train.autocast == "bfloat16" else gather_dtype(config)


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Of one rank, in bytes."""

    parameters: float  # its shard, in model.dtype
    masters: float  # float32 weights behind parameters in less
    gradients: float
    optimiser: float  # AdamW's two moments, float32
    gathered: float  # of layers, while they compute: parameters in the compute dtype, gradients before they are summed
    activations: float
    logits: float
    routes: float
    others: float  # reference and critic

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, name) for name in self.__dataclass_fields__)


def learner_memory(
    dims: Dims,
    config: RunConfig,
    ranks: int,
    held: MicroBatchMemory,
    *,
    slots: int,
    graphs: int,
    first: bool,
    cpu: bool,
) -> LearnerMemory:
    """ranks: over which FSDP2 shards everything that has a parameter's shape. slots: of a micro-batch.

    graphs: micro-batches whose graph is kept at once (train.reuse_scoring_forward keeps all of a step's). first: an
    optimiser step has one micro-batch, whose activations are gone by the time all gradients are there.
    """
    own, size = dims.total / ranks, BYTES[config.model.dtype]
    masters = 0.0 if size == FLOAT32 else own * FLOAT32
    critic = (
        own * (2 * size + 2 * FLOAT32) + masters if config.objective.critic is not None else 0.0
    )
    reference = own * size if config.objective.kl.coef else 0.0
    again = dims.total * BYTES[config.rollout.engine.dtype] if uses_reprefill(config) else 0.0
    layers = gathered_bytes(dims, config, ranks, held.layer, cpu=cpu)
    working = held.peak + (graphs - 1) * held.saved
    if first:
        working = max(working - own * size, held.tail)
    if masters:  # AdamW makes all gradients float32 at once, when there are no activations
        working = max(working, own * (FLOAT32 - size) - layers)
    logits = min(held.logits, working)
    return LearnerMemory(
        parameters=own * size,
        masters=masters,
        gradients=own * size,
        optimiser=own * 2 * FLOAT32,
        gathered=layers,
        activations=working - logits,
        logits=logits,
        routes=slots * kept_per_token(dims, config) * graphs
        if config.replay.mode != "off"
        else 0.0,
        others=critic + reference + again,
    )


def gathered_bytes(
    dims: Dims, config: RunConfig, ranks: int, activations: float, *, cpu: bool
) -> float:
    """What exists of layers beside their shards.

    Autocast keeps a bfloat16 copy of every matrix until the backward is over. FSDP2: what is outside the layers stays
    gathered; of the layers there are the one that computes and the next one, on a GPU also the buffer it arrives in. A
    layer's gradients in float32, on their way to the other ranks, come when its `activations` have gone: those of one
    layer, on a GPU of two, because one is sent while the next is made.
    """
    copies = dims.total * BYTES["bfloat16"] if config.train.autocast == "bfloat16" else 0.0
    if ranks == 1:
        return copies
    size, layer = BYTES[gather_dtype(config)], dims.largest_layer
    sent = FLOAT32 * layer * (1 if cpu else 2)
    return copies + size * (dims.outside + layer * (2 if cpu else 3)) + max(0.0, sent - activations)


def uses_reprefill(config: RunConfig) -> bool:
    """Whether the first rank has a second copy of the model, unsharded, that records routes."""
    return isinstance(config.replay, FromRollout) and config.replay.source == "reprefill"


def kept_per_token(dims: Dims, config: RunConfig) -> int:
    """Bytes of a token's routes, with replay.mode = weights of their combine weights too."""
    combine = isinstance(config.replay, WeightsReplay) * FLOAT32 * dims.moe_layers * dims.top_k
    return route_bytes(dims) + combine


@dataclass(frozen=True, slots=True)
class StartMemory:
    """What exists for a moment before the first step, in bytes."""

    host: float  # of the first rank's node: whole models as they are read
    device: float  # of a rank: its shard, and the critic before it is spread


def start_memory(dims: Dims, config: RunConfig, cluster: Cluster, ranks: int) -> StartMemory:
    """Rank 0 alone reads the policy, unless the head is tied to the embedding; every rank reads a critic."""
    size, critic = BYTES[config.model.dtype], config.objective.critic is not None
    readers = min(ranks, cluster.per_node) if critic or not dims.embedding else 1
    whole = dims.total * size
    return StartMemory(readers * whole, whole + whole / ranks if critic and ranks > 1 else 0.0)
