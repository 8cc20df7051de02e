"""Bytes on a learner's rank, and the cost of its checkpoints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onepolicy.config import RunConfig
from onepolicy.plan.dims import Dims
from onepolicy.plan.hardware import Cluster
from onepolicy.train.dry_run import MicroBatchMemory, gather_dtype
from onepolicy.train.memory import FLOAT32, ITEMSIZE, kept_per_token, rank_state, shard_sizes


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """The size of a checkpoint and the time it takes."""

    size: float  # bytes: parameters, AdamW, masters; a critic counts as a second policy
    staged: float  # bytes of a node's own memory with copies of its ranks' state, until written
    written: float  # seconds to write; ranks write at the same time, into one folder
    # seconds until it is complete: sharded weights are also read and written again, and all files
    # are hashed
    counts: float
    limit: float | None  # seconds that the ranks have for writing (train.rank_timeout)
    exported: float  # bytes of the model alone in bfloat16 (`onepolicy export`)

    @property
    def in_time(self) -> bool:
        return self.limit is None or self.written <= self.limit


def checkpoint_cost(dims: Dims, config: RunConfig, cluster: Cluster, ranks: int) -> CheckpointCost:
    """Compute the cost of a checkpoint.

    All ranks share the bandwidth of one folder (`disk`). A single rank writes its tensors without
    copying them. Moments in 8 bits, and their masters, are first copied to the host in float32.
    """
    weight_bytes = ITEMSIZE[config.model.dtype]
    parameter_bytes = weight_bytes + 2 * FLOAT32
    if config.model.dtype == "bfloat16":
        parameter_bytes += FLOAT32
    policies = 1 + config.objective.has_critic
    size = dims.total * parameter_bytes * policies
    if dims.adapter:  # the base is not written
        size = dims.adapter * 3 * FLOAT32
    disk, exported = cluster["disk"], ITEMSIZE["bfloat16"] * dims.total
    written, widened = size / disk, 0.0
    if config.optim.state == "8bit":
        widened = dims.total * (parameter_bytes - weight_bytes) * policies
    if ranks == 1 or dims.adapter:  # rank 0 writes an adapter alone
        return CheckpointCost(size, widened, written, 2 * written, None, exported)
    rewritten = 2 * dims.total * weight_bytes / disk
    staged = (size + widened) * min(ranks, cluster.per_node) / ranks
    counts, limit = 2 * written + rewritten, config.train.rank_timeout
    return CheckpointCost(size, staged, written, counts, limit, exported)


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on one rank."""

    parameters: float  # its shard, in model.dtype
    masters: float  # float32 weights behind bfloat16 parameters
    gradients: float
    optimiser: float  # AdamW's two moments, unless they rest on the host
    # of layers that compute: parameters in the compute dtype, gradients before they are summed
    gathered: float
    activations: float
    logits: float
    routes: float
    others: float  # reference and critic

    @property
    def total(self) -> float:
        return math.fsum(getattr(self, name) for name in self.__dataclass_fields__)

    @property
    def kept(self) -> float:
        """Bytes that stay between updates."""
        return self.parameters + self.masters + self.optimiser + self.others


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
    one_memory: bool = False,
) -> LearnerMemory:
    """Compute the memory of one rank.

    held, slots: of a micro-batch. graphs: micro-batches whose graph is kept at once
    (train.reuse_scoring_forward keeps all of a step's). first: an optimiser step has one
    micro-batch, whose activations are freed by the time all gradients exist. one_memory: see
    `optimiser_memory`.
    """
    state = rank_state(dims, config, ranks, cpu=cpu, one_memory=one_memory)
    gathered, gradients = gathered_bytes(dims, config, ranks, held.layer, cpu=cpu), state.gradients
    working = held.peak + (graphs - 1) * held.saved
    if first:  # the backward of layer 0 has all gradients but those of this layer and before it
        missing = gradients / dims.layers
        if not dims.adapter:
            missing = FLOAT32 * sum(shard_sizes(dims.layer_shapes, ranks))
        working = max(working - gradients, held.end - missing, held.tail)
    # An update has neither activations nor gathered layers.
    working = max(working, state.optimiser.working - gathered)
    logits = max(0.0, min(held.logits, working))  # extrapolated: below 0 where they never peak
    routes = 0.0
    if config.replay.mode != "off":
        routes = slots * kept_per_token(dims, config) * graphs
    return LearnerMemory(
        parameters=state.parameters,
        masters=state.optimiser.masters,
        gradients=gradients,
        optimiser=state.optimiser.moments,
        gathered=gathered,
        activations=working - logits,
        logits=logits,
        routes=routes,
        others=state.others + state.critic_gradients,
    )


def gathered_bytes(
    dims: Dims, config: RunConfig, ranks: int, activations: float, *, cpu: bool
) -> float:
    """Return the bytes of layers beside their shards, at the peak.

    Autocast keeps a bfloat16 copy of every matrix until the backward ends. FSDP2 keeps parameters
    outside decoder layers gathered. It also gathers the layer that computes and the next one. A GPU
    has one more buffer, into which the next layer is received. What is sent is padded.

    A layer's gradients are sent to the other ranks in float32 after its `activations` [bytes] have
    been freed. On a GPU two layers' gradients exist at once, because one layer sends while the next
    computes. Beside adapters a layer has none.
    """
    copies = 0.0
    if config.train.autocast == "bfloat16":
        copies = dims.total * ITEMSIZE["bfloat16"]
    if ranks == 1:
        return copies
    gathered_layers, sent_layers = (2, 1) if cpu else (3, 2)
    itemsize = ITEMSIZE[gather_dtype(config)]
    layer = ranks * sum(shard_sizes(dims.layer_shapes, ranks))
    sent = 0.0 if dims.adapter else FLOAT32 * layer * sent_layers
    gathered = itemsize * (dims.outside + layer * gathered_layers)
    return copies + gathered + max(0.0, sent - activations)


@dataclass(frozen=True, slots=True)
class StartMemory:
    """Bytes that are needed for a moment before the first step."""

    host: float  # of the first rank's node: whole models as they are read
    device: float  # of a rank: its shard, and the critic before it is sharded


def start_memory(dims: Dims, config: RunConfig, cluster: Cluster, ranks: int) -> StartMemory:
    """Compute the memory for loading models.

    Rank 0 alone reads the policy, unless the head is tied to the embedding. Every rank reads a
    critic.
    """
    has_critic = config.objective.has_critic
    readers = 1
    if has_critic or not dims.embedding:
        readers = min(ranks, cluster.per_node)
    whole = dims.total * ITEMSIZE[config.model.dtype]
    device = 0.0
    if has_critic and ranks > 1:
        device = whole + whole / ranks
    return StartMemory(readers * whole, device)
