"""Megatron's settings under which a router does not ask for replayed experts, or must not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onepolicy.config import UsageError
from onepolicy.replay.layers import Router

# Balancing types under which the router's own top-k chooses the experts.
_TOPK_TYPES = ("none", "aux_loss", "seq_aux_loss", "global_aux_loss")
_RANDOM = ("moe_router_force_load_balancing", "moe_router_force_biased")


def refuse_settings(routers: Sequence[Router], *, replaying: bool) -> None:
    """Raise UsageError that names every setting with which record, or replay, would be wrong."""
    problems: dict[str, None] = {}
    for router in routers:
        problems |= dict.fromkeys(_problems(router.module, replaying=replaying))
    if problems:
        doing = "recorded"
        if replaying:
            doing = "replayed"
        raise UsageError("\n  ".join([f"this Megatron model cannot be {doing}:", *problems]))


def _problems(router: Any, *, replaying: bool) -> Iterator[str]:
    config = router.config
    yield from _problems_of_selection(router, config)
    if config.cuda_graph_impl != "none":
        yield (
            f"cuda_graph_impl={config.cuda_graph_impl!r}: a graph repeats the experts that it "
            "captured; set it to 'none'"
        )
    if config.overlap_moe_expert_parallel_comm:
        yield (
            "overlap_moe_expert_parallel_comm=True: it runs the parts of a layer by a schedule of "
            "its own, in which a forward has no context; set it to False"
        )
    if replaying:
        yield from _problems_of_replay(router, config)


def _problems_of_selection(router: Any, config: Any) -> Iterator[str]:
    if config.moe_router_fusion:
        yield (
            "moe_router_fusion=True: the fused router returns before it asks for replayed experts; "
            "set it to False"
        )
    kinds = config.moe_router_load_balancing_type
    if isinstance(kinds, str):
        kinds = [kinds]
    for kind in kinds:
        if kind not in _TOPK_TYPES:
            yield (
                f"moe_router_load_balancing_type={kind!r} chooses the experts without the router's "
                f"top-k; set it to one of {', '.join(_TOPK_TYPES)}"
            )
    for name in _RANDOM:
        if getattr(config, name, None):
            yield f"{name}={getattr(config, name)}: the router chooses at random; leave it unset"
    action = getattr(router.router_replay, "router_replay_action", None)
    if action is not None:
        yield (
            f"Megatron's own RouterReplay is armed ({action}); call "
            "RouterReplay.clear_global_router_replay_action()"
        )


def _problems_of_replay(router: Any, config: Any) -> Iterator[str]:
    if router.is_aux_loss_enabled():
        yield (
            f"moe_aux_loss_coeff={config.moe_aux_loss_coeff}: the load-balancing loss counts the "
            "router's own choice and pulls it away from the replayed experts; set it to 0.0"
        )
    if config.moe_expert_capacity_factor is not None:
        yield (
            f"moe_expert_capacity_factor={config.moe_expert_capacity_factor} drops tokens from the "
            "experts that are replayed; set it to None"
        )
    if (config.fp8 or config.fp4) and _recomputes_routers(config):
        yield (
            "fp8 or fp4 with activation recompute: Transformer Engine's checkpoint does not carry "
            "the routes into the recompute; leave 'moe' out of recompute_modules"
        )


def _recomputes_routers(config: Any) -> bool:
    if config.recompute_granularity == "full":
        return True
    return config.recompute_granularity == "selective" and "moe" in config.recompute_modules
