"""Which modules of a model route tokens to experts, and which decoder layer each belongs to.

A router is recognised by what it must know to do its work: whole-number attributes `top_k` and `num_experts`. Of a
block and its gate that both carry them the inner one counts. A family that keeps them elsewhere is one line of a table
below, nothing else depends on class names. A wrong guess fails loudly, because a router that does not select `top_k`
experts exactly once raises when it runs.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from onepolicy.config import UsageError
from onepolicy.replay.checks import RoutingError

# class -> where it keeps what others call `top_k` and `num_experts`
_ELSEWHERE = {
    "DbrxFFN": {"num_experts": "experts.num_experts"},  # the block selects
    "Gemma4TextRouter": {"top_k": "config.top_k_experts", "num_experts": "config.num_experts"},
    "LongcatFlashTopkRouter": {
        "num_experts": "n_routed_experts"
    },  # with the experts that return their input
    "ZayaRouter": {"num_experts": "num_router_classes"},  # with the class that skips the experts
}
_BY_TOKEN_ID = (
    "DeepseekV4HashRouter",
)  # experts looked up by token id: the same in every engine, nothing to replay
_TWO_PER_LAYER = ("JetMoeTopKGating",)  # the MLP's and the attention's, columns in module order
_BY_MAX = ("PhimoeTopKRouter",)  # selects with one max per expert (sparsemixer), not with a top-k
_REFUSED = {
    "DogeCDMoE": "its router mixes the tokens of a batch (it views [B, S, 2 * keys] scores as [2, B * S, keys]), so a "
    "token's experts depend on later tokens and no engine can decode what the trainer computes",
}


@dataclass(frozen=True, slots=True)
class Router:
    """One module whose forward selects experts."""

    path: str  # as in model.named_modules()
    layer: int  # decoder index
    module: nn.Module
    num_experts: int  # what it selects from, experts without weights included
    top_k: int
    num_groups: int  # group-limited routing: experts come from the best `top_groups` of these; 0 = no such routing
    top_groups: int
    by_max: bool = False


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Routers of the decoder's MoE layers, ascending. Multi-token-prediction heads are not part of the policy."""
    _check_refused(model)
    paths = [
        path
        for path, module in model.named_modules()
        if _is_router(module) and not _in_mtp_head(path, model)
    ]
    copies = {_peft_wrapper(path, model): path for path in paths if not _contains_any(path, paths)}
    routers = sorted(
        (_describe(path, model, copy) for path, copy in copies.items()), key=lambda r: r.layer
    )
    _check_no_orphans(model, paths)
    if not routers:
        raise UsageError(
            f"{type(model).__name__} has no Mixture-of-Experts router, so there is nothing to record or replay; "
            "a dense model needs no replay (in a recipe: replay.mode=off)"
        )
    _check_one_shape(routers)
    _check_not_shared(model, routers)
    _check_complete(model, routers)
    return tuple(routers)


def moe_layers_of(config: Any) -> tuple[int, ...] | None:
    """Decoder indices of the MoE layers as a transformers config tells them; None if it says nothing about layers.

    One rule per way of saying it: kinds per layer, a list of layers, every n-th, all but the first.
    """
    text = config.get_text_config()
    depth = range(text.num_hidden_layers)
    kinds = getattr(text, "mlp_layer_types", None) or getattr(text, "layers_block_type", None)
    if kinds and {"moe", "sparse"} & set(kinds):  # "hash_moe" layers route by token id
        return tuple(i for i in depth if kinds[i] in ("moe", "sparse"))
    if counts := getattr(text, "layers_num_experts", None):
        return tuple(i for i in depth if counts[i] > 1)
    if getattr(text, "moe_layers", None) is not None:
        return tuple(text.moe_layers)
    if hasattr(text, "moe_layer_interval"):
        first, last, step = (
            text.moe_layer_start_index,
            text.moe_layer_end_index,
            text.moe_layer_interval,
        )
        last = last if last >= 0 else depth.stop - 1
        return tuple(i for i in depth if first <= i <= last and (i + 1) % step == 0)
    if hasattr(text, "mlp_only_layers"):
        step = getattr(text, "decoder_sparse_step", 1)
        return tuple(
            i for i in depth if i not in (text.mlp_only_layers or ()) and (i + 1) % step == 0
        )
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if hasattr(text, name):
            return tuple(depth[getattr(text, name) :])
    return None


def decoder_index(path: str) -> int | None:
    """The first number in a module path: `model.layers.3.mlp.gate` -> 3; None if there is none."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def decoder_layer(model: nn.Module, router: Router) -> nn.Module:
    """The decoder layer that holds a router."""
    parts = router.path.split(".")
    number = next(place for place, part in enumerate(parts) if part.isdecimal())
    return model.get_submodule(".".join(parts[: number + 1]))


def _int_attribute(module: nn.Module, name: str) -> int:
    """`top_k` or `num_experts` of a router; 0 if the module has no such number."""
    where = _ELSEWHERE.get(type(module).__name__, {}).get(name, name)
    value = attrgetter(where)(module) if where != name else getattr(module, name, None)
    return value if isinstance(value, int) else 0


def _is_router(module: nn.Module) -> bool:
    if type(module).__name__ in _BY_TOKEN_ID:
        return False
    return 0 < _int_attribute(module, "top_k") <= _int_attribute(module, "num_experts")


def _in_mtp_head(path: str, model: nn.Module) -> bool:
    if any(part.startswith("mtp") for part in path.split(".")):
        return True
    config = getattr(model, "config", None)
    depth = config.get_text_config().num_hidden_layers if config is not None else None
    index = decoder_index(path)
    return depth is not None and index is not None and index >= depth


def _peft_wrapper(path: str, model: nn.Module) -> str:
    """What peft's `modules_to_save` put around a router, or around a block with one; else the router itself.

    It holds the original and a copy for each adapter, and its forward runs one of them, whichever is active then.
    """
    parts = path.split(".")
    for place, part in enumerate(parts):
        if part in ("original_module", "modules_to_save"):
            children = dict(model.get_submodule(".".join(parts[:place])).named_children())
            if {"original_module", "modules_to_save"} <= children.keys():
                return ".".join(parts[:place])
    return path


def _describe(path: str, model: nn.Module, copy: str) -> Router:
    """copy: path of a module that knows the numbers; `path` itself unless that is a wrapper of copies."""
    module, layer = model.get_submodule(copy), decoder_index(path)
    if layer is None:
        raise RoutingError(f"router {path!r} is not inside a numbered decoder layer")
    groups = getattr(module, "num_group", None) or 0
    top_groups = getattr(module, "topk_group", None) or groups
    experts, top_k = _int_attribute(module, "num_experts"), _int_attribute(module, "top_k")
    by_max = type(module).__name__ in _BY_MAX
    return Router(
        path, layer, model.get_submodule(path), experts, top_k, groups, top_groups, by_max
    )


def _contains_any(path: str, paths: list[str]) -> bool:
    return any(other.startswith(f"{path}.") for other in paths)


def _check_one_shape(routers: list[Router]) -> None:
    first = routers[0]
    for before, router in itertools.pairwise(routers):
        if before.layer == router.layer and type(router.module).__name__ not in _TWO_PER_LAYER:
            raise RoutingError(
                f"layer {router.layer} has two routers, {before.path!r} and {router.path!r}"
            )
        if (router.num_experts, router.top_k) != (first.num_experts, first.top_k):
            raise RoutingError(
                f"layer {router.layer} chooses {router.top_k} of {router.num_experts} experts, but layer {first.layer} "
                f"{first.top_k} of {first.num_experts}; a routing trace has one shape for all layers"
            )


def _check_refused(model: nn.Module) -> None:
    for path, module in model.named_modules():
        reason = _REFUSED.get(type(module).__name__)
        if reason is not None:
            raise UsageError(
                f"{type(model).__name__} cannot be recorded or replayed; train it without replay (in a recipe: "
                f"replay.mode=off). "
                f"{type(module).__name__} at {path!r}: {reason}"
            )


def _check_no_orphans(model: nn.Module, routers: list[str]) -> None:
    """Experts without a recognised router would route natively, in silence."""
    by_token = [
        path for path, module in model.named_modules() if type(module).__name__ in _BY_TOKEN_ID
    ]
    known = [*routers, *by_token]
    for path, module in model.named_modules():
        has_experts = isinstance(getattr(module, "experts", None), nn.Module)
        if (
            has_experts
            and path not in known
            and not _contains_any(path, known)
            and not _in_mtp_head(path, model)
        ):
            raise RoutingError(
                f"layer {decoder_index(path)}: {type(module).__name__} at {path!r} has experts but no router that can "
                "be recorded or replayed (a fused or replaced block?)"
            )


def _check_not_shared(model: nn.Module, routers: list[Router]) -> None:
    """A block that stands in two layers fires twice per forward, for tokens of either."""
    known = {id(router.module): router for router in routers}
    for path, module in model.named_modules(remove_duplicate=False):
        router = known.get(id(module))
        if router is not None and decoder_index(path) not in (None, router.layer):
            raise RoutingError(
                f"layers {router.layer} and {decoder_index(path)} share one router, {router.path!r} and {path!r}; "
                "its routes could not be told apart"
            )


def _check_complete(model: nn.Module, routers: list[Router]) -> None:
    """A layer that the config calls MoE, whose block was replaced whole, would route natively, in silence."""
    config = getattr(model, "config", None)
    told = moe_layers_of(config) if config is not None else None
    found = {router.layer for router in routers}
    if told is not None and found != set(told):
        missing, extra = sorted(set(told) - found), sorted(found - set(told))
        raise RoutingError(
            f"the config of {type(model).__name__} has experts in layers {sorted(told)}, but routers were found in "
            f"{sorted(found)}; missing: {missing}, unexpected: {extra} (a fused or replaced block?)"
        )
