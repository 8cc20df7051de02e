"""Bytes of a learner's rank and of the embedded engine's cache, one function a term.

`build/room.py` sums them on a GPU that both share, before weights are loaded. `onepolicy plan` sums
them for every device of a cluster. The micro-batch is a dry run (`train/dry_run.py`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import nn
from transformers import PreTrainedModel

from onepolicy.config import RunConfig, WeightsReplay
from onepolicy.config.lora import LoraConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.models.cache_size import cached_elements, state_bytes
from onepolicy.models.decode_attention import KEY_BLOCK
from onepolicy.replay.layers import find_routers, is_moe
from onepolicy.sync.adapters import Targets
from onepolicy.train.eight_bit_adamw import BLOCK, SLICE
from onepolicy.train.streamed_adamw import BUCKET_BYTES, STATE_BYTES

Shapes = tuple[tuple[int, int], ...]  # (rows, elements of a row) of parameters
FLOAT32 = 4
ITEMSIZE = {"float32": 4, "bfloat16": 2}
NF4 = 0.5 + FLOAT32 / 64  # bytes of a weight in nf4: its code, and its part of a scale
ROUNDING = 40  # bytes for each element of a slice while torchao rounds it: indices are int64
STREAMED_BUCKETS = 3  # one comes, one is computed, one goes (train/streamed_adamw.py)


def parameter_shapes(module: nn.Module) -> Shapes:
    """Return the rows of all parameters and the elements of a row."""
    return tuple((len(p), p.numel() // len(p)) for p in module.parameters())


def shard_sizes(shapes: Shapes, ranks: int) -> list[int]:
    """Return the elements of each parameter on one rank.

    FSDP2 divides the rows (the first dimension) and pads every rank's share to the largest. A row
    of three-dimensional experts is a whole expert.
    """
    return [math.ceil(rows / ranks) * width for rows, width in shapes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The counts of a model that bytes are made of."""

    vocab: int
    total: int  # parameters
    shapes: Shapes  # of all parameters
    cached: int  # elements that an engine caches of a token, over all layers
    states: int  # bytes of a sequence's states in recurrent layers
    experts: int  # routed experts of a MoE layer, 0 if dense
    top_k: int
    moe_layers: int  # routers
    adapter: int = 0  # parameters of A and B (train.lora), beside the above
    four_bit: int = 0  # of all parameters those that the trainer stores in nf4 (train.lora.base)


Sizes = TypeVar("Sizes", bound=ModelSizes)


def read_sizes(model: PreTrainedModel) -> ModelSizes:
    """Count a model, which may be made of fake or meta tensors."""
    text, experts, top_k, moe_layers = model.config.get_text_config(), 0, 0, 0
    if is_moe(model.config):
        routers = find_routers(model)
        experts, top_k, moe_layers = routers[0].num_experts, routers[0].top_k, len(routers)
    return ModelSizes(
        vocab=text.vocab_size,
        total=sum(parameter.numel() for parameter in model.parameters()),
        shapes=parameter_shapes(model),
        cached=sum(cached_elements(text, layer) for layer in range(text.num_hidden_layers)),
        states=state_bytes(model),
        experts=experts,
        top_k=top_k,
        moe_layers=moe_layers,
    )


def with_adapters(sizes: Sizes, model: PreTrainedModel, config: LoraConfig) -> Sizes:
    """Return the sizes with those of A and B. `model` may be made of fake or meta tensors.

    Raises UsageError for targets that the model does not have.
    """
    targets = Targets(model)
    modules, parameters = targets.choose(config.targets, type(model).__name__)
    count = four_bit = 0
    for name in (*(f"{path}.weight" for path in modules), *parameters):
        *experts, rows, columns = model.get_parameter(name).shape  # [O, I], or [E, O, I]
        count += math.prod(experts) * config.rank * (rows + columns)
    if config.base == "nf4":
        four_bit = sum(model.get_parameter(name).numel() for name in targets.matrices)
    return replace(sizes, adapter=count, four_bit=four_bit)


def trace_itemsize(sizes: ModelSizes) -> int:
    """Return the bytes of an expert id: one with up to 256 experts, else two."""
    return 1 + (sizes.experts > 256)


def route_bytes(sizes: ModelSizes) -> int:
    """Return the bytes of one token's routes in a RoutingTrace."""
    return sizes.moe_layers * sizes.top_k * trace_itemsize(sizes)


def kept_per_token(sizes: ModelSizes, config: RunConfig) -> int:
    """Return the bytes of a token's routes, with its combine weights if replay.mode = weights."""
    kept = route_bytes(sizes)
    if isinstance(config.replay, WeightsReplay):
        kept += FLOAT32 * sizes.moe_layers * sizes.top_k
    return kept


def cache_row_bytes(sizes: ModelSizes, config: RunConfig, length: int, itemsize: int) -> int:
    """Return the bytes of an embedded engine's row: keys, values, states and routes of a sequence.

    It has a whole row for every layer, also for one with a window. itemsize: of a cached element.
    """
    rows, routes = -(-length // KEY_BLOCK) * KEY_BLOCK, 0
    if config.replay.mode != "off":
        routes = length * kept_per_token(sizes, config)
    return sizes.cached * rows * itemsize + sizes.states + routes


@dataclass(frozen=True, slots=True)
class OptimiserMemory:
    """Bytes of one rank's moments and masters."""

    moments: float  # on the device between updates
    masters: float  # on the device, float32 behind bfloat16 parameters
    # moments and masters in the host's memory: page-locked, so each tensor takes a power of two
    host: float
    working: float  # on the device, most at once in an update beside the above
    moved: float = 0.0  # in an update from the host to the device, and as many back


def optimiser_memory(
    shapes: Shapes, config: RunConfig, ranks: int, *, cpu: bool, one_memory: bool
) -> OptimiserMemory:
    """Compute the bytes of AdamW's state.

    shapes: of the parameters. one_memory: they are in the host's memory anyway, so nothing is
    moved there.
    """
    shards, itemsize = shard_sizes(shapes, ranks), ITEMSIZE[config.model.dtype]
    shard, largest = sum(shards), max(shards)
    moments, masters = 2 * FLOAT32 * shard, 0.0
    if itemsize != FLOAT32:
        masters = FLOAT32 * shard
    if config.optim.state == "device":
        return OptimiserMemory(moments, masters, 0.0, 0.0)
    bucket = min(shard, max(BUCKET_BYTES / STATE_BYTES, largest))
    if config.optim.state == "8bit":
        rounded = shard * 2 * (1 + FLOAT32 / BLOCK)
        rounding = ROUNDING * min(SLICE, largest)
        return OptimiserMemory(rounded, masters, 0.0, bucket * 2 * FLOAT32 + rounding)
    if one_memory:
        return OptimiserMemory(moments, masters, 0.0, 0.0)
    buckets = 1 if cpu else min(STREAMED_BUCKETS, math.ceil(shard / bucket))
    moved = moments + masters
    state = moved / shard
    host = moved
    if not cpu:
        host = state / FLOAT32 * sum(1 << (FLOAT32 * size - 1).bit_length() for size in shards)
    return OptimiserMemory(0.0, 0.0, host, bucket * buckets * state, moved)


@dataclass(frozen=True, slots=True)
class RankState:
    """Bytes on one rank that do not depend on the micro-batch."""

    parameters: float  # its shard, in model.dtype, and all adapters
    gradients: float
    optimiser: OptimiserMemory
    critic_gradients: float
    # at rest: reference, critic with its AdamW, the model that records routes, older weights
    others: float


def rank_state(
    sizes: ModelSizes, config: RunConfig, ranks: int, *, cpu: bool, one_memory: bool = False
) -> RankState:
    """Compute the bytes of a rank. FSDP2 shards every tensor of a parameter's shape over the ranks.

    Adapters are whole on every rank and float32 whatever model.dtype is, so there are no masters
    behind them, and the frozen weights have neither gradients nor moments. one_memory: see
    `optimiser_memory`.
    """
    itemsize, adapter = ITEMSIZE[config.model.dtype], float(FLOAT32 * sizes.adapter)
    elements = sum(shard_sizes(sizes.shapes, ranks))
    shard, gradients = elements * itemsize, float(elements * FLOAT32)
    state = OptimiserMemory(2.0 * adapter, 0.0, 0.0, 0.0)
    if not adapter:
        state = optimiser_memory(sizes.shapes, config, ranks, cpu=cpu, one_memory=one_memory)
    parameters = shard + adapter - sizes.four_bit / ranks * (itemsize - NF4)
    others = critic_gradients = 0.0
    if config.numerics == ON_POLICY:  # tokens are scored under their own weights (OwnWeights)
        others += (config.rollout.max_staleness or 0) * parameters
    if config.objective.has_critic:
        critic_gradients = gradients
        others += shard + state.moments + state.masters
    kl = config.objective.kl
    if kl.coef and not (adapter and kl.reference is None):  # else the adapter is turned off
        others += shard
    if config.uses_reprefill:  # a second, unsharded copy of the model records routes
        others += sizes.total * ITEMSIZE[config.rollout.engine.dtype]
    return RankState(
        parameters=parameters,
        gradients=adapter or gradients,
        optimiser=state,
        critic_gradients=critic_gradients,
        others=others,
    )
