"""The routers of a Megatron-core model, and the MoE layers of all its pipeline stages.

A model's own modules are walked. Megatron's list of all routers of the process
(`RouterReplay.global_router_replay_instances`) also has those of a reference model and of
prediction heads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from onepolicy.config import UsageError
from onepolicy.replay.layers import Router


class MegatronClasses(NamedTuple):
    """The classes of Megatron-core that the adapter looks for."""

    moe_layer: Any
    topk_router: Any
    prediction_heads: tuple[Any, ...]
    checkpoint: Any  # the autograd function of activation recompute


@cache
def megatron_classes() -> MegatronClasses:
    """Return the classes, or raise UsageError if Megatron-core is missing or too old."""
    try:
        from megatron.core.tensor_parallel.random import CheckpointFunction
        from megatron.core.transformer.moe import router_replay  # noqa: F401  since 0.16
        from megatron.core.transformer.moe.moe_layer import BaseMoELayer
        from megatron.core.transformer.moe.router import TopKRouter
        from megatron.core.transformer.multi_token_prediction import (
            MultiTokenPredictionBlock,
            MultiTokenPredictionLayer,
        )
    except ImportError as error:
        raise UsageError(
            f"onepolicy.integrations.megatron needs megatron-core 0.16 or newer ({error}); "
            "docs/other_trainers.md names the versions that were run"
        ) from None
    heads = MultiTokenPredictionBlock, MultiTokenPredictionLayer
    return MegatronClasses(BaseMoELayer, TopKRouter, heads, CheckpointFunction)


@dataclass(frozen=True, slots=True)
class FoundRouters:
    """The routers of one model, or of one pipeline stage of it."""

    routers: tuple[Router, ...]  # by ascending layer
    layers: tuple[int, ...]  # decoder index of each MoE layer, of all stages
    config: Any  # TransformerConfig


def find_routers(model: nn.Module) -> FoundRouters:
    """Return the routers of a model's decoder.

    Heads for multi-token prediction are left out: their layers are numbered from 1 again, and the
    rollout has no routes of theirs.

    Raises:
        UsageError: the model has no MoE layer, a router of another class than TopKRouter, two
            routers of one layer, or routers of different sizes. Or Megatron-core is missing.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"expected a Megatron model, got {type(model).__name__}; with virtual pipeline stages "
            "give the chunk that forward_step was handed"
        )
    classes = megatron_classes()
    heads = [
        path for path, part in model.named_modules() if isinstance(part, classes.prediction_heads)
    ]
    routers = [
        _described(path, part)
        for path, part in model.named_modules()
        if isinstance(part, classes.moe_layer) and not _inside(path, heads)
    ]
    if not routers:
        return _without_routers(model)
    routers.sort(key=lambda router: router.layer)
    _check_routers(routers)
    config = routers[0].module.config
    found = tuple(router.layer for router in routers)
    return FoundRouters(tuple(routers), _layers_of_all_stages(found, config), config)


def _inside(path: str, outer: list[str]) -> bool:
    return any(path == head or path.startswith(f"{head}.") for head in outer)


def _described(path: str, moe_layer: Any) -> Router:
    router = moe_layer.router
    if not isinstance(router, megatron_classes().topk_router):
        raise UsageError(
            f"{path}: the router is {type(router).__name__}, but only Megatron's TopKRouter (and "
            "its subclasses) asks for replayed experts"
        )
    if router.layer_number is None:
        raise UsageError(f"{path}: the router has no layer_number, so its routes are not known")
    return Router(
        path=f"{path}.router".lstrip("."),
        layer=router.layer_number - 1,
        module=router,
        num_experts=router.num_experts,
        top_k=router.topk,
        num_groups=0,  # Megatron's own top-k looks after its groups
        top_groups=0,
    )


def _check_routers(routers: list[Router]) -> None:
    first = routers[0]
    for before, router in itertools.pairwise(routers):
        if before.layer == router.layer:
            raise UsageError(
                f"{before.path} and {router.path} are both the router of layer {router.layer}: "
                "the module holds two models; give the one to record or replay"
            )
        if (router.num_experts, router.top_k) != (first.num_experts, first.top_k):
            raise UsageError(
                f"layer {router.layer} routes to {router.top_k} of {router.num_experts} experts, "
                f"layer {first.layer} to {first.top_k} of {first.num_experts}; a trace has one "
                "number of experts and of experts per token"
            )


def _without_routers(model: nn.Module) -> FoundRouters:
    """Return the layers of the other stages, for a pipeline stage without MoE layers."""
    config: Any = next((m.config for m in model.modules() if hasattr(m, "config")), None)
    stages = getattr(config, "pipeline_model_parallel_size", 1)
    if stages == 1 or not getattr(config, "num_moe_experts", None):
        raise UsageError(
            f"{type(model).__name__} has no Mixture-of-Experts layer, so there is nothing to "
            "record or replay; a dense model needs no replay"
        )
    return FoundRouters((), _layers_of_config(config), config)


def _layers_of_all_stages(found: tuple[int, ...], config: Any) -> tuple[int, ...]:
    """Return the MoE layers of the whole model. `found` are those of this stage.

    A stack with other layers than `moe_layer_freq` says (a hybrid of Mamba and attention) gives
    those of this stage, so its traces must be the stage's own.
    """
    if config.pipeline_model_parallel_size == 1:
        return found
    layers = _layers_of_config(config)
    if found == tuple(layer for layer in layers if found[0] <= layer <= found[-1]):
        return layers
    return found


def _layers_of_config(config: Any) -> tuple[int, ...]:
    pattern, depth = config.moe_layer_freq, range(config.num_layers)
    if isinstance(pattern, int):
        return tuple(layer for layer in depth if layer % pattern == 0)
    return tuple(layer for layer in depth if pattern[layer])
