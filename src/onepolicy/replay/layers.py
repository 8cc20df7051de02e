"""The routers of a model: the modules that select experts, and the decoder layer of each.

A router is recognised by the whole-number attributes `top_k` and `num_experts` (or, in older
transformers, `n_routed_experts`). If a block and its gate both have them, the gate counts, unless
the block has the method that selects (`route_tokens_to_experts`). A family that keeps its numbers
elsewhere has a line in a table below; nothing else depends on class names. A wrong guess raises as
soon as the router runs, because a router must select `top_k` experts exactly once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from onepolicy.config import UsageError
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.private_names import is_dtensor, is_fsdp_module

WITHOUT = 'in a recipe: replay.mode=off; in an adapter: attach(trainer, replay="off")'
# class -> attribute -> the path at which this class keeps it
_ATTRIBUTE_PATHS = {
    "DeepseekV2Moe": {"num_experts": "config.n_routed_experts"},  # transformers 5.0 to 5.12
    "DbrxFFN": {"num_experts": "experts.num_experts"},  # the block selects
    "Gemma4TextRouter": {"top_k": "config.top_k_experts", "num_experts": "config.num_experts"},
    "LongcatFlashTopkRouter": {
        "num_experts": "n_routed_experts"  # with the experts that return their input
    },
    "ZayaRouter": {"num_experts": "num_router_classes"},  # with the class that skips the experts
}
# What older transformers call these numbers
_SYNONYMS = {"num_experts": ("n_routed_experts",), "num_group": ("n_group",)}
# The method of a block that selects experts itself. Its gate only scores them.
_SELECTS = "route_tokens_to_experts"
# Experts are looked up by token id. They are the same in every engine: there is nothing to replay.
_BY_TOKEN_ID = ("DeepseekV4HashRouter",)
# One router for the MLP and one for the attention: two columns, in module order
_TWO_PER_LAYER = ("JetMoeTopKGating",)
# Selects with one max per expert (sparsemixer), not with a top-k
_BY_MAX = ("PhimoeTopKRouter",)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_REFUSED = {
    "DogeCDMoE": (
        "its router mixes the tokens of a batch (it views [B, S, 2 * keys] scores as "
        "[2, B * S, keys]), so a token's experts depend on later tokens and no engine can decode "
        "what the trainer computes"
    ),
}


@dataclass(frozen=True, slots=True)
class Router:
    """A module whose forward selects experts."""

    path: str  # as in model.named_modules()
    layer: int  # decoder index
    module: nn.Module
    num_experts: int  # including experts without weights
    top_k: int
    num_groups: int  # group-limited routing: groups of experts; 0 without groups
    top_groups: int  # experts come from this many of the best groups
    by_max: bool = False


def find_routers(model: nn.Module) -> tuple[Router, ...]:
    """Return the routers of the decoder's MoE layers, by ascending layer.

    Heads for multi-token prediction are not part of the policy and are left out.

    Raises:
        UsageError: the model is dense, or its family cannot be replayed.
        RoutingError: a block has experts but no recognised router, two layers share a router, the
            routers differ in their numbers, or the config has other MoE layers than were found.
    """
    _check_refused(model)
    paths = [
        path
        for path, module in model.named_modules()
        if _is_router(module) and not _in_mtp_head(path, model)
    ]
    selecting = [path for path in paths if hasattr(model.get_submodule(path), _SELECTS)]
    paths = [path for path in paths if not any(path.startswith(f"{up}.") for up in selecting)]
    inner_paths = [path for path in paths if not _contains_any(path, paths)]
    described = {_peft_wrapper(path, model): path for path in inner_paths}
    routers = [_describe(path, model, copy) for path, copy in described.items()]
    routers.sort(key=lambda router: router.layer)
    _check_no_orphans(model, paths)
    if not routers:
        raise UsageError(
            f"{type(model).__name__} has no Mixture-of-Experts router, so there is nothing to "
            f"record or replay; a dense model needs no replay ({WITHOUT})"
        )
    _check_one_shape(routers)
    _check_not_shared(model, routers)
    _check_complete(model, routers)
    return tuple(routers)


def moe_layers_of(config: Any) -> tuple[int, ...] | None:
    """Return the decoder indices of the MoE layers that a transformers config describes.

    None if the config does not say which layers these are. Families say it in one of five ways: a
    kind per layer, a number of experts per layer, a list of layers, every n-th layer, or all but
    the first ones.
    """
    text = config.get_text_config()
    for rule in (_by_kinds, _by_counts, _by_list, _by_interval, _by_dense_layers):
        layers = rule(text, range(text.num_hidden_layers))
        if layers is not None:
            return layers
    return None


def _by_kinds(text: Any, depth: range) -> tuple[int, ...] | None:
    kinds = getattr(text, "mlp_layer_types", None) or getattr(text, "layers_block_type", None)
    if not kinds or not {"moe", "sparse"} & set(kinds):  # "hash_moe" layers route by token id
        return None
    return tuple(i for i in depth if kinds[i] in ("moe", "sparse"))


def _by_counts(text: Any, depth: range) -> tuple[int, ...] | None:
    counts = getattr(text, "layers_num_experts", None)
    if not counts:
        return None
    return tuple(i for i in depth if counts[i] > 1)


def _by_list(text: Any, depth: range) -> tuple[int, ...] | None:
    layers = getattr(text, "moe_layers", None)
    if layers is None:
        return None
    return tuple(layers)


def _by_interval(text: Any, depth: range) -> tuple[int, ...] | None:
    if not hasattr(text, "moe_layer_interval"):
        return None
    first, last = text.moe_layer_start_index, text.moe_layer_end_index
    if last < 0:
        last = depth.stop - 1
    return tuple(i for i in depth if first <= i <= last and (i + 1) % text.moe_layer_interval == 0)


def _by_dense_layers(text: Any, depth: range) -> tuple[int, ...] | None:
    if hasattr(text, "mlp_only_layers"):
        step, dense = getattr(text, "decoder_sparse_step", 1), text.mlp_only_layers or ()
        return tuple(i for i in depth if i not in dense and (i + 1) % step == 0)
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if hasattr(text, name):
            return tuple(depth[getattr(text, name) :])
    return None


def decoder_index(path: str) -> int | None:
    """Return the first number in a module path, None if there is none.

    `model.layers.3.mlp.gate` -> 3
    """
    return next((int(part) for part in path.split(".") if part.isdecimal()), None)


def _int_attribute(module: nn.Module, name: str) -> int:
    """Return a module's `top_k`, `num_experts` or `num_group`, 0 if it has none."""
    path = _ATTRIBUTE_PATHS.get(type(module).__name__, {}).get(name)
    if path is not None:
        values = [attrgetter(path)(module)]
    else:
        values = [getattr(module, each, None) for each in (name, *_SYNONYMS.get(name, ()))]
    return next((value for value in values if isinstance(value, int)), 0)


def _is_router(module: nn.Module) -> bool:
    if type(module).__name__ in _BY_TOKEN_ID:
        return False
    return 0 < _int_attribute(module, "top_k") <= _int_attribute(module, "num_experts")


def _in_mtp_head(path: str, model: nn.Module) -> bool:
    if any(part.startswith("mtp") for part in path.split(".")):
        return True
    config, index = getattr(model, "config", None), decoder_index(path)
    if config is None or index is None:
        return False
    depth: int = config.get_text_config().num_hidden_layers
    return index >= depth


def _peft_wrapper(path: str, model: nn.Module) -> str:
    """Return the path of peft's wrapper (`modules_to_save`) around a router, else the router's.

    The wrapper holds the original module and a copy for each adapter. Its forward runs the one that
    is active at that time. It may be around the router or around its block.
    """
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part in ("original_module", "modules_to_save"):
            wrapper = ".".join(parts[:i])
            children = dict(model.get_submodule(wrapper).named_children())
            if {"original_module", "modules_to_save"} <= children.keys():
                return wrapper
    return path


def _describe(path: str, model: nn.Module, copy: str) -> Router:
    """Return the router at `path`, with the numbers of the module at `copy`.

    The two paths differ where `path` is a wrapper of copies.
    """
    module, layer = model.get_submodule(copy), decoder_index(path)
    if layer is None:
        raise RoutingError(f"router {path!r} is not inside a numbered decoder layer")
    groups = _int_attribute(module, "num_group")
    return Router(
        path,
        layer,
        model.get_submodule(path),
        num_experts=_int_attribute(module, "num_experts"),
        top_k=_int_attribute(module, "top_k"),
        num_groups=groups,
        top_groups=getattr(module, "topk_group", None) or groups,
        by_max=type(module).__name__ in _BY_MAX,
    )


def _contains_any(path: str, paths: list[str]) -> bool:
    return any(inner.startswith(f"{path}.") for inner in paths)


def _check_one_shape(routers: list[Router]) -> None:
    first = routers[0]
    for before, router in itertools.pairwise(routers):
        if before.layer == router.layer and type(router.module).__name__ not in _TWO_PER_LAYER:
            raise RoutingError(
                f"layer {router.layer} has two routers, {before.path!r} and {router.path!r}"
            )
        if (router.num_experts, router.top_k) != (first.num_experts, first.top_k):
            raise RoutingError(
                f"layer {router.layer} chooses {router.top_k} of {router.num_experts} experts, but "
                f"layer {first.layer} {first.top_k} of {first.num_experts}; a routing trace has "
                "one shape for all layers"
            )


def _check_refused(model: nn.Module) -> None:
    for path, module in model.named_modules():
        reason = _REFUSED.get(type(module).__name__)
        if reason is not None:
            raise UsageError(
                f"{type(model).__name__} cannot be recorded or replayed; train it without replay "
                f"({WITHOUT}). {type(module).__name__} at {path!r}: {reason}"
            )
    config: Any = getattr(model, "config", None)  # a module of one's own may have none
    passes = 1
    if config is not None:
        passes = getattr(config.get_text_config(), "loop_num_passes", 1)
    if passes > 1:
        raise UsageError(
            f"{type(model).__name__} cannot be recorded or replayed; train it without replay "
            f"({WITHOUT}). A forward runs its looped layers {passes} times (loop_num_passes), each "
            "time with other experts, and a route has one row a layer"
        )


def _check_no_orphans(model: nn.Module, routers: list[str]) -> None:
    """Raise if a block has experts but no recognised router: it would silently route natively."""
    by_token = [
        path for path, module in model.named_modules() if type(module).__name__ in _BY_TOKEN_ID
    ]
    known = [*routers, *by_token]
    for path, module in model.named_modules():
        has_experts = isinstance(getattr(module, "experts", None), nn.Module)
        has_router = path in known or _contains_any(path, known)
        if has_experts and not has_router and not _in_mtp_head(path, model):
            raise RoutingError(
                f"layer {decoder_index(path)}: {type(module).__name__} at {path!r} has experts but "
                "no router that can be recorded or replayed (a fused or replaced block?)"
            )


def _check_not_shared(model: nn.Module, routers: list[Router]) -> None:
    """Raise if two layers share a router, which then runs twice per forward, for tokens of both."""
    known = {id(router.module): router for router in routers}
    for path, module in model.named_modules(remove_duplicate=False):
        router = known.get(id(module))
        if router is not None and decoder_index(path) not in (None, router.layer):
            raise RoutingError(
                f"layers {router.layer} and {decoder_index(path)} share one router, "
                f"{router.path!r} and {path!r}; its routes could not be distinguished"
            )


def _check_complete(model: nn.Module, routers: list[Router]) -> None:
    """Raise if the config has other MoE layers than were found.

    A layer whose block was replaced as a whole would silently route natively.
    """
    config = getattr(model, "config", None)
    if config is None:
        return
    expected, found = moe_layers_of(config), {router.layer for router in routers}
    if expected is None or found == set(expected):
        return
    missing, extra = sorted(set(expected) - found), sorted(found - set(expected))
    raise RoutingError(
        f"the config of {type(model).__name__} has experts in layers {sorted(expected)}, but "
        f"routers were found in {sorted(found)}; missing: {missing}, unexpected: {extra} (a fused "
        "or replaced block?)"
    )


def is_moe(hf_config: Any) -> bool:
    """Return whether a transformers config describes a model with more than one routed expert.

    Needs no weights.
    """
    text = hf_config.get_text_config()
    for config in (text, getattr(text, "ffn_config", None)):
        for name in _EXPERT_COUNTS:
            count = getattr(config, name, None)
            if isinstance(count, (list, tuple)):  # one number per layer
                count = max(count, default=0)
            if isinstance(count, int) and count > 1:
                return True
    return False


def require_moe(hf_config: Any, mode: str = "r3") -> None:
    """Raise UsageError if the config is of a dense model, which has no routes to replay.

    Needs no weights. mode: the setting `replay.mode`, for the message.
    """
    if not is_moe(hf_config):
        raise UsageError(
            f"replay.mode={mode} needs a Mixture-of-Experts model, but "
            f"model_type={hf_config.model_type!r} has no routed experts; set replay.mode=off"
        )


def refuse_unknown_sharding(
    model: nn.Module, routers: Sequence[Router], *, wrapper: nn.Module
) -> None:
    """Raise UsageError if a router would not see plain tensors of all its process's tokens.

    wrapper: the module that contains the model, or the model itself. FSDP2 may manage either.
    """
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if distributed is not None and distributed.pp_size > 1:
        raise UsageError(
            "record and replay do not work under pipeline parallelism "
            f"(pp_size={distributed.pp_size}): a stage has only some of the trace's layers; use "
            "FSDP2, tensor or expert parallelism"
        )
    if distributed is not None and "sequence_parallel" in _parallel_styles(model):
        raise UsageError(
            "record and replay do not work with sequence_parallel in the model's tp_plan: routers "
            "may see a part of the sequence; take it out of the plan"
        )
    managed = {
        part for module in wrapper.modules() if is_fsdp_module(module) for part in module.modules()
    }
    for router in routers:
        sharded = [name for name, p in router.module.named_parameters() if is_dtensor(p)]
        if sharded and router.module not in managed:
            raise UsageError(
                f"layer {router.layer}: {sharded[0]} of {router.path!r} is a DTensor that FSDP2 "
                "does not gather, so its scores are no plain tensor and cannot be replayed; leave "
                "the router out of the parallel plan"
            )


def masks_combine_weights(model: nn.Module) -> bool:
    """Return whether routers zero the combine weights of other ranks' experts.

    transformers' `ep_router` does.
    """
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if distributed is None or distributed.ep_size <= 1:
        return False
    return "ep_router" in _parallel_styles(model)


def _parallel_styles(model: nn.Module) -> set[str]:
    plans = (getattr(model, "tp_plan", None), getattr(model, "ep_plan", None))
    return {style for plan in plans for style in (plan or {}).values()}


def layer_stacks(model: Any, routers: Sequence[Router]) -> tuple[tuple[nn.ModuleList, int], ...]:
    """Return the lists of layers that the routers are in, with their lengths now."""
    stacks = {}
    for router in routers:
        parts = router.path.split(".")
        above = (model.get_submodule(".".join(parts[:n])) for n in range(1, len(parts)))
        outermost = next((module for module in above if isinstance(module, nn.ModuleList)), None)
        if outermost is not None:
            stacks[id(outermost)] = outermost, len(outermost)
    return tuple(stacks.values())


def transformers_model(model: nn.Module) -> nn.Module:
    """Return the model, or the one inside a wrapper that does not show its config (as DDP)."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"bind_routers: expected a model, got {type(model).__name__}")
    if hasattr(model, "config"):
        return model
    # Not at the top: a vLLM server imports this file, and brings a transformers of its own.
    from transformers import PreTrainedModel

    inner = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, PreTrainedModel)
    }
    outermost = [path for path in inner if not any(path.startswith(f"{up}.") for up in inner)]
    if len(outermost) > 1:
        raise UsageError(
            f"{type(model).__name__} holds several models, {', '.join(outermost)}; bind the one to "
            "replay"
        )
    if not outermost:
        return model
    return inner[outermost[0]]
