"""Which ways to spread a model over processes replay works under, and the refusal of the others.

A replay needs every router of the model to see the rows of the trace, in order. Data parallelism (FSDP2, DDP) keeps
that if routes are sharded with `input_ids`; tensor and expert parallelism of transformers run the whole router on every
rank, and the seam sits inside it, before experts are renumbered. `tests/tiny/test_replay_fsdp.py` runs these.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from onepolicy.config import UsageError
from onepolicy.replay.layers import Router


def refuse_unknown_sharding(model: nn.Module, routers: Sequence[Router], *, wrapper: nn.Module) -> None:
    """UsageError if a router would not see all tokens of its process's batch, or not as plain tensors.

    wrapper: what holds the model, or the model itself; FSDP2 may manage either.
    """
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    if distributed is not None and distributed.pp_size > 1:
        raise UsageError(
            f"record and replay do not work under pipeline parallelism (pp_size={distributed.pp_size}): a stage has "
            "only some of the trace's layers; use FSDP2, tensor or expert parallelism"
        )
    if distributed is not None and "sequence_parallel" in _styles(model):
        raise UsageError(
            "record and replay do not work with sequence_parallel in the model's tp_plan: routers may see a part of "
            "the sequence; take it out of the plan"
        )
    managed = {part for module in wrapper.modules() if isinstance(module, FSDPModule) for part in module.modules()}
    for router in routers:
        sharded = [name for name, p in router.module.named_parameters() if isinstance(p, DTensor)]
        if sharded and router.module not in managed:
            raise UsageError(
                f"layer {router.layer}: {sharded[0]} of {router.path!r} is a DTensor that FSDP2 does not gather, so "
                "its scores are no plain tensor and cannot be replayed; leave the router out of the parallel plan"
            )


def masks_weights(model: nn.Module) -> bool:
    """Do routers zero the combine weights of experts that live on other ranks (transformers' `ep_router`)?"""
    distributed = getattr(getattr(model, "config", None), "distributed_config", None)
    return distributed is not None and distributed.ep_size > 1 and "ep_router" in _styles(model)


def _styles(model: nn.Module) -> set[str]:
    plans = (getattr(model, "tp_plan", None), getattr(model, "ep_plan", None))
    return {style for plan in plans for style in (plan or {}).values()}
