"""Which modules of a model route tokens to experts, and which decoder layer each belongs to.

A router is recognised by what it must know to do its work: whole-number attributes `top_k` and `num_experts`. Of a
block and its gate that both carry them the inner one counts. Nothing here depends on class names, so a family needs no
entry; a wrong guess fails loudly, because a router without exactly one expert-selecting top-k raises when it runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import nn

from onepolicy.config import UsageError
from onepolicy.replay.checks import RoutingError


@dataclass(frozen=True, slots=True)
class Router:
    """One module whose forward selects experts."""

    path: str  # as in model.named_modules()
    layer: int  # decoder index
    module: nn.Module
    num_experts: int
    top_k: int
    num_groups: int  # group-limited routing: experts come from the best `top_groups` of these; 1 = no groups
    top_groups: int


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Routers of the decoder's MoE layers, ascending. Multi-token-prediction heads are not part of the policy."""
    paths = [path for path, module in model.named_modules() if _is_router(module) and not _in_mtp_head(path, model)]
    routers = sorted((_describe(path, model) for path in paths if not _holds(path, paths)), key=lambda r: r.layer)
    if not routers:
        raise UsageError(
            f"{type(model).__name__} has no Mixture-of-Experts router, so there is nothing to record or replay; "
            "set replay.mode=off"
        )
    _check_one_shape(routers)
    _check_no_orphans(model, paths)
    return tuple(routers)


def decoder_index(path: str) -> int | None:
    """The first number in a module path: `model.layers.3.mlp.gate` -> 3; None if there is none."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _is_router(module: nn.Module) -> bool:
    top_k, experts = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    return isinstance(top_k, int) and isinstance(experts, int) and 0 < top_k <= experts


def _in_mtp_head(path: str, model: nn.Module) -> bool:
    if any(part.startswith("mtp") for part in path.split(".")):
        return True
    config = getattr(model, "config", None)
    depth = config.get_text_config().num_hidden_layers if config is not None else None
    index = decoder_index(path)
    return depth is not None and index is not None and index >= depth


def _describe(path: str, model: nn.Module) -> Router:
    module, layer = model.get_submodule(path), decoder_index(path)
    if layer is None:
        raise RoutingError(f"router {path!r} is not inside a numbered decoder layer")
    groups = getattr(module, "num_group", None) or 1
    top_groups = getattr(module, "topk_group", None) or groups
    return Router(path, layer, module, module.num_experts, module.top_k, groups, top_groups)  # type: ignore[arg-type]


def _holds(path: str, paths: list[str]) -> bool:
    return any(other.startswith(f"{path}.") for other in paths)


def _check_one_shape(routers: list[Router]) -> None:
    first = routers[0]
    for before, router in itertools.pairwise(routers):
        if before.layer == router.layer:
            raise RoutingError(f"layer {router.layer} has two routers, {before.path!r} and {router.path!r}")
        if (router.num_experts, router.top_k) != (first.num_experts, first.top_k):
            raise RoutingError(
                f"layer {router.layer} chooses {router.top_k} of {router.num_experts} experts, but layer {first.layer} "
                f"{first.top_k} of {first.num_experts}; a routing trace has one shape for all layers"
            )


def _check_no_orphans(model: nn.Module, routers: list[str]) -> None:
    """Experts without a recognised router would route natively, in silence."""
    for path, module in model.named_modules():
        has_experts = isinstance(getattr(module, "experts", None), nn.Module)
        if has_experts and path not in routers and not _holds(path, routers) and not _in_mtp_head(path, model):
            raise RoutingError(
                f"layer {decoder_index(path)}: {type(module).__name__} at {path!r} has experts but no router that can "
                "be recorded or replayed (a fused or replaced block?)"
            )
