"""Bytes on an engine's device: its copy of the weights, and its cache."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from onepolicy.config import HFEngineConfig, QuantFormat, RunConfig, VLLMEngineConfig
from onepolicy.config.quant import Fp8, Fp8Weight
from onepolicy.models.decode_attention import KEY_BLOCK
from onepolicy.plan.dims import Dims
from onepolicy.plan.dry_run import kernel_stand_ins
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.learner_memory import BYTES, FLOAT32, kept_per_token
from onepolicy.plan.step_work import StepWork, devices_per_replica, replicated
from onepolicy.rollout.copies import quantise_policy
from onepolicy.rollout.vllm.quant import hf_equivalent


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """An engine's copy of them, in bytes, over all its devices."""

    total: float
    routed: float  # of these in routed experts
    embedding: float  # of these in the input embedding, of which a token reads one row
    converted: float = 0.0  # parameters that become floats again at every use

    def read(self, touched: float, *, converts: bool) -> float:
        """Bytes of one forward in which `touched` of the routed experts are met. converts: all experts of a layer."""
        if converts and self.converted:
            return self.total - self.embedding + 2 * FLOAT32 * self.converted
        return self.total - self.embedding - self.routed * (1 - touched)


def engine_weights(dims: Dims, config: RunConfig, hf_config: PreTrainedConfig) -> EngineWeights:
    engine, quant = config.rollout.engine, config.rollout.quant
    size = BYTES[engine.dtype]
    head = (
        FLOAT32 * dims.head
        if isinstance(engine, HFEngineConfig) and engine.lm_head == "float32"
        else 0
    )  # a copy
    embedding: float = dims.embedding * size
    if quant is None:
        return EngineWeights(dims.total * size + head, dims.routed * size, embedding)
    experts_only = not isinstance(engine, HFEngineConfig) and hf_equivalent(quant)[1]
    parts = quantised_parts(hf_config, quant, engine.dtype, experts_only=experts_only)
    experts, parameters = parts.pop("experts", (0.0, 0))
    total = math.fsum(size for size, _ in parts.values()) + experts + head
    converted = isinstance(quant, Fp8 | Fp8Weight) * (
        dims.total - sum(count for _, count in parts.values())
    )
    embedding = parts["embeddings"][0] if embedding else 0.0
    return EngineWeights(total, experts * dims.routed / max(1, parameters), embedding, converted)


def quantised_parts(
    config: PreTrainedConfig, quant: QuantFormat, dtype: str, *, experts_only: bool = False
) -> dict[str, tuple[float, int]]:
    """part -> bytes, parameters; by quantising the model as the embedded engine does, without its numbers.

    experts_only: as vLLM's int8 does.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), kernel_stand_ins(cpu=True):
        model = AutoModelForCausalLM.from_config(
            deepcopy(config), dtype=getattr(torch, dtype)
        ).eval()
        made = quantise_policy(model, quant, experts_only=experts_only).sizes()
        return {part.part: (part.bytes_after, part.parameters) for part in made.parts}


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Of one device of an engine, in bytes; what the cache holds, in tokens and sequences of an engine."""

    weights: float
    cache: float
    tokens: float  # of all sequences together
    sequences: int  # of the planned length
    room: float  # that its device has for it, if it is not the learner's
    evaluator: (
        float  # of a second engine, on the learner's device, that evaluates unquantised weights
    )


def engine_memory(
    dims: Dims,
    config: RunConfig,
    cluster: Cluster,
    work: StepWork,
    weights: EngineWeights,
    tensor_parallel: int,
) -> EngineMemory:
    """A cache: of a server what the weights leave, of the embedded engine its slab, of vLLM in this process as said."""
    engine, own = config.rollout.engine, weights.total / tensor_parallel
    room, evaluator = math.inf, 0.0
    if replicated(config):
        room = (
            cluster["memory"] * min(1.0, devices_per_replica(config, cpu=cluster.is_cpu))
            - cluster["engine_reserve"]
        )
    if config.rollout.quant is not None and config.eval.every and not config.eval.quantised:
        evaluator = dims.total * BYTES[engine.dtype] + embedded_cache_bytes(dims, config, cluster)
    if isinstance(engine, HFEngineConfig):
        tokens = engine.max_num_seqs * (engine.max_len or dims.context)
        return EngineMemory(
            own,
            embedded_cache_bytes(dims, config, cluster),
            tokens,
            engine.max_num_seqs,
            room,
            evaluator,
        )
    if isinstance(engine, VLLMEngineConfig):
        cache = engine.kv_cache_gib * 2**30
    else:
        cache = cluster["memory"] * cluster["engine_share"] - own - cluster["engine_reserve"]
    per_sequence = sequence_cache_bytes(dims, config, cluster, work.length, tensor_parallel)
    sequences = max(0, math.floor(cache / per_sequence))
    return EngineMemory(
        own, cache, max(0.0, cache / per_sequence * work.length), sequences, room, evaluator
    )


def embedded_cache_bytes(dims: Dims, config: RunConfig, cluster: Cluster) -> float:
    """The embedded engine's keys, values and routes: whole rows for every slot and layer, whatever a layer's window."""
    engine = config.rollout.engine
    length = engine.max_len or dims.context
    rows = -(-length // KEY_BLOCK) * KEY_BLOCK
    elements = sum(a.cached for a in dims.attention) * rows
    routes = length * kept_per_token(dims, config) if config.replay.mode != "off" else 0
    return engine.max_num_seqs * (elements * cache_itemsize(dims, config, cluster) + routes)


def cache_itemsize(dims: Dims, config: RunConfig, cluster: Cluster) -> int:
    """Of a cached key: the engine's dtype; of the embedded engine on a CPU float32, but for latent attention."""
    plain = not any(a.latent for a in dims.attention)
    wide = isinstance(config.rollout.engine, HFEngineConfig) and cluster.is_cpu and plain
    return FLOAT32 if wide else BYTES[config.rollout.engine.dtype]


def sequence_cache_bytes(
    dims: Dims, config: RunConfig, cluster: Cluster, length: float, tensor_parallel: int
) -> float:
    """Keys and values of one sequence on one device. MLA's latent is on all of them."""
    heads = min(tensor_parallel, max(a.heads for a in dims.attention))
    return dims.kv_elements(length) * cache_itemsize(dims, config, cluster) / heads


def sent_dtype(config: RunConfig) -> str:
    """Of the weights that a sync sends: the engine's, but unrounded ones where it quantises them itself."""
    unrounded = config.rollout.quant is not None and isinstance(
        config.rollout.engine, HFEngineConfig
    )
    return config.model.dtype if unrounded else config.rollout.engine.dtype
