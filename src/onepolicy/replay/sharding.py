"""Which sharded models can be recorded and replayed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from onepolicy.config import UsageError
from onepolicy.replay.layers import Router
from onepolicy.replay.private_names import is_dtensor, is_fsdp_module


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
