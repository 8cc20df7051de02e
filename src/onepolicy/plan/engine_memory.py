"""Bytes on an engine's device: its copy of the weights, and its cache."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from onepolicy.config import (
    HFEngineConfig,
    QuantFormat,
    RolloutReplay,
    RunConfig,
    VLLMEngineConfig,
)
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.quant import Fp8, Fp8Weight
from onepolicy.config.serve import ServeConfig
from onepolicy.plan.dims import Dims
from onepolicy.plan.hardware import Cluster
from onepolicy.plan.step_work import StepWork, devices_per_replica, replicated
from onepolicy.rollout.copies import quantise_policy
from onepolicy.rollout.vllm.memory import cache_bytes, memory_args
from onepolicy.rollout.vllm.quant import hf_equivalent
from onepolicy.train.fake_kernels import kernel_stand_ins
from onepolicy.train.memory import FLOAT32, ITEMSIZE, cache_row_bytes, trace_itemsize


@dataclass(frozen=True, slots=True)
class EngineWeights:
    """An engine's copy of the weights, in bytes, over all its devices."""

    total: float
    routed: float  # of these in routed experts
    embedding: float  # of these in the input embedding, of which a token reads one row
    converted: float = 0.0  # parameters that are converted to floats at every use
    copied: float = 0.0  # of these in weights that a float32 copy is read in place of

    def bytes_read(self, touched: float, *, converts: bool) -> float:
        """Return the bytes that one forward reads. touched: share of the routed experts it uses.

        converts: the device converts quantised weights, of all experts of a layer.
        """
        if converts and self.converted:
            return self.total - self.embedding + 2 * FLOAT32 * self.converted
        return self.total - self.embedding - self.copied - self.routed * (1 - touched)


def engine_weights(dims: Dims, config: RunConfig, hf_config: PreTrainedConfig) -> EngineWeights:
    """Compute the size of the weights that the recipe's engine holds."""
    engine, quant = config.rollout.engine, config.rollout.quant
    itemsize = ITEMSIZE[engine.dtype]
    head_copy = 0.0
    if isinstance(engine, HFEngineConfig) and engine.lm_head == "float32":
        head_copy = FLOAT32 * dims.head_size
    if quant is None:
        total: float = dims.total * itemsize + head_copy
        embedding: float = dims.embedding * itemsize
        if config.numerics != ON_POLICY or engine.dtype == "float32":
            return EngineWeights(total, dims.routed * itemsize, embedding)
        copied = kept_in_float32(dims, lm_head=not head_copy)
        total += FLOAT32 * copied
        return EngineWeights(total, FLOAT32 * dims.routed, embedding, copied=itemsize * copied)
    experts_only = not isinstance(engine, HFEngineConfig) and hf_equivalent(quant)[1]
    parts = quantised_parts(hf_config, quant, engine.dtype, experts_only=experts_only)
    experts, expert_parameters = parts.pop("experts", (0.0, 0))
    total = math.fsum(size for size, _ in parts.values()) + experts + head_copy
    converted = 0.0
    if isinstance(quant, Fp8 | Fp8Weight):
        converted = dims.total - sum(parameters for _, parameters in parts.values())
    embedding = 0.0
    if dims.embedding:
        embedding = parts["embeddings"][0]
    routed = experts * dims.routed / max(1, expert_parameters)
    return EngineWeights(total, routed, embedding, converted)


def kept_in_float32(dims: Dims, *, lm_head: bool) -> float:
    """Return the parameters that an engine with on-policy numerics on a CPU keeps in float32 too.

    These are all that multiply (invariant/ops.py), of two dimensions or more. Routers count too,
    also in families that convert their weight themselves. lm_head: the output layer is one of them,
    and not kept in float32 by itself.
    """
    matrices = sum(rows * width for rows, width in dims.shapes if width > 1) - dims.embedding
    if lm_head:
        return matrices
    return matrices - dims.head_size


def quantised_parts(
    config: PreTrainedConfig, quant: QuantFormat, dtype: str, *, experts_only: bool = False
) -> dict[str, tuple[float, int]]:
    """Quantise a model of fake tensors as the embedded engine does.

    Return part -> (bytes, parameters). experts_only: quantise only experts, as vLLM's int8 does.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), kernel_stand_ins(cpu=True):
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=getattr(torch, dtype))
        sizes = quantise_policy(model.eval(), quant, experts_only=experts_only).sizes()
        return {part.part: (part.bytes_after, part.parameters) for part in sizes.parts}


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes on one device of an engine, and the tokens and sequences that its cache holds."""

    weights: float
    cache: float
    tokens: float  # of all sequences together
    sequences: int  # of the planned length
    room: float  # bytes that its device has for it; inf if it shares the learner's device
    # of a second engine, on the learner's device (RunConfig.has_evaluator)
    evaluator: float
    routes: float = 0.0  # in the host's memory, of all tokens in the cache


def engine_memory(
    dims: Dims,
    config: RunConfig,
    cluster: Cluster,
    work: StepWork,
    weights: EngineWeights,
    tensor_parallel: int,
    share: float | None = None,
) -> EngineMemory:
    """Compute the memory of one device of an engine.

    share: of the device's memory, where a learner has the rest; None: the engine has a device.

    The cache of a server is the memory that the weights leave. The embedded engine has rows for
    every sequence.
    """
    engine, own_weights = config.rollout.engine, weights.total / tensor_parallel
    room = _replica_room(config, cluster)
    evaluator = evaluator_bytes(dims, config, cluster)
    if isinstance(engine, HFEngineConfig):
        tokens: float = engine.max_num_seqs * (engine.max_len or dims.context)
        cache: float = embedded_cache_bytes(dims, config, cluster)
        return EngineMemory(own_weights, cache, tokens, engine.max_num_seqs, room, evaluator)
    cache = cache_bytes(
        vllm_memory_args(config, cluster, share),
        memory=cluster["memory"],
        weights=own_weights,
        reserve=cluster["engine_reserve"],
    )
    per_sequence = sequence_cache_bytes(dims, config, cluster, work.length, tensor_parallel)
    sequences = max(0, math.floor(cache / per_sequence))
    tokens = max(0.0, cache / per_sequence * work.length)
    routes = 0.0
    if engine.kind != "sglang" and isinstance(config.replay, RolloutReplay):
        # of dense layers too. 0.31 and newer: the default of aux_output_config.max_bytes
        routes = tokens * dims.layers * dims.top_k * trace_itemsize(dims)
    return EngineMemory(own_weights, cache, tokens, sequences, room, evaluator, routes)


def vllm_memory_args(
    config: RunConfig, cluster: Cluster, share: float | None = None
) -> dict[str, Any]:
    """Return the memory arguments of the recipe's engine, as it will be started.

    A server is taken to be started with the defaults of `onepolicy engine serve`, for its memory.
    SGLang's share of a device counts as vLLM's. A server on a CPU takes the constant's share.
    """
    engine = config.rollout.engine
    if share is None:
        share = cluster["engine_share"]
    if replicated(config):
        share *= min(1.0, devices_per_replica(config, cpu=cluster.is_cpu))
    if isinstance(engine, VLLMEngineConfig):
        return memory_args(engine, cpu=cluster.is_cpu, share=share)
    return memory_args(ServeConfig(), cpu=False, share=share)


def _replica_room(config: RunConfig, cluster: Cluster) -> float:
    """Return the bytes that a replica may use of its device; inf without replicas."""
    if not replicated(config):
        return math.inf
    device_share = min(1.0, devices_per_replica(config, cpu=cluster.is_cpu))
    return cluster["memory"] * device_share - cluster["engine_reserve"]


def evaluator_bytes(dims: Dims, config: RunConfig, cluster: Cluster) -> float:
    """Return the bytes of the engine that evaluates alone; 0 without one."""
    if not config.has_evaluator:
        return 0.0
    weights = dims.total * ITEMSIZE[config.rollout.engine.dtype]
    return weights + embedded_cache_bytes(dims, config, cluster)


def embedded_cache_bytes(dims: Dims, config: RunConfig, cluster: Cluster) -> float:
    """Return the bytes of the embedded engine's keys, values, states and routes."""
    engine, itemsize = config.rollout.engine, cache_itemsize(dims, config, cluster)
    length = engine.max_len or dims.context
    return engine.max_num_seqs * cache_row_bytes(dims, config, length, itemsize)


def cache_itemsize(dims: Dims, config: RunConfig, cluster: Cluster) -> int:
    """Return the bytes of a cached element.

    Elements have the engine's dtype. On a CPU the embedded engine caches float32, except for latent
    attention.
    """
    latent = any(layer.latent for layer in dims.attention)
    if isinstance(config.rollout.engine, HFEngineConfig) and cluster.is_cpu and not latent:
        return FLOAT32
    return ITEMSIZE[config.rollout.engine.dtype]


def sequence_cache_bytes(
    dims: Dims, config: RunConfig, cluster: Cluster, length: float, tensor_parallel: int
) -> float:
    """Return the bytes of one sequence's keys, values and states on one device.

    MLA's latent is on every device.
    """
    heads = min(tensor_parallel, max(layer.heads for layer in dims.attention))
    cached = dims.kv_elements(length) * cache_itemsize(dims, config, cluster)
    return (cached + dims.states) / heads


def sent_dtype(config: RunConfig) -> str:
    """Return the dtype of the weights that a sync sends.

    It is the engine's, or model.dtype if the engine quantises unrounded weights itself.
    """
    quantises = config.rollout.quant is not None
    if quantises and isinstance(config.rollout.engine, HFEngineConfig):
        return config.model.dtype
    return config.rollout.engine.dtype
