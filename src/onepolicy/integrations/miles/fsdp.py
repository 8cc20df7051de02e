"""Routing replay on miles' FSDP backend for every transformers family that we replay.

miles has adapters of its own for three families, which rebind their routers' forward. For the
others `install` here binds the routers and keeps miles' bookkeeping: one queue per layer, filled by
miles from the rollout, taken in the order of the forwards. The differences: rows of -1 are routed
by the model itself (miles replays the experts 0 .. K-1), recomputes of activation checkpoints carry
the replay of their forward (miles takes from the queue a second time), and every sample's routes
are compared with the routers' own choice in every forward (docs/replay.md).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from onepolicy.integrations.core.armed import error_of, refuse_outer_checkpoint
from onepolicy.integrations.core.layout import sample_starts
from onepolicy.replay.checks import RoutingError, refuse_router_loss
from onepolicy.replay.layers import is_moe
from onepolicy.replay.routers import Routers, bind_routers
from onepolicy.replay.topk_hook import in_backward
from onepolicy.types import RoutingTrace, TraceOrigin, id_dtype


def extend(module: Any) -> None:
    """Replace `install` of miles' module `routing_replay` by one that knows more families."""
    theirs = module.install

    def install(model: nn.Module, hf_config: Any) -> int:
        manager = module.routing_replay_manager
        known = module.resolve_routing_replay_adapter(hf_config) is not None
        if not manager.enabled or known or not is_moe(hf_config):
            count: int = theirs(model, hf_config)
            return count
        return QueuedReplay(model, manager).layers

    module.install = install


class QueuedReplay:
    """The routers of a model, with hooks that replay what miles' queues hold.

    Attributes:
        layers: the number of MoE layers.
    """

    def __init__(self, model: nn.Module, manager: Any) -> None:
        """Find the routers, and add a queue per layer to miles' manager.

        Raises UsageError if the model has no routers that can be replayed, or a router loss.
        """
        self._routers: Routers = bind_routers(model)
        refuse_router_loss(self._routers.model.config)
        self._manager = manager
        self._queues = [manager.create_replay(stream_idx=i) for i in self._routers.layers]
        self._open: AbstractContextManager[Any] | None = None
        self._recorded: Any = None
        bound = self._routers.model
        bound.register_forward_pre_hook(self._before, with_kwargs=True)
        bound.register_forward_hook(self._after, always_call=True)

    @property
    def layers(self) -> int:
        return len(self._queues)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stage = self._manager.stage
        if stage == "fallthrough" or in_backward():
            return
        refuse_outer_checkpoint()
        if stage == "record":
            self._open = self._routers.record()
            self._recorded = self._open.__enter__()
            return
        if stage != "replay_forward":
            raise RoutingError(
                f"miles runs a forward in stage {stage!r}, for which there are no routes; a "
                "forward that trains or scores must run in stage replay_forward"
            )
        trace = self._next_trace()
        starts = sample_starts(args, kwargs, len(trace))
        trace = trace.with_origin(TraceOrigin(starts))
        if trace.valid.any():
            self._open = self._routers.replay(trace)
            self._open.__enter__()

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if in_backward():
            return
        opened, recorded = self._open, self._recorded
        self._open = self._recorded = None
        if opened is not None:
            opened.__exit__(*error_of(output))
        if recorded is not None:
            for queue, ids in zip(self._queues, recorded.pop_ids(), strict=True):
                queue.record(ids)

    def _next_trace(self) -> RoutingTrace:
        """Return the routes of the next forward. Rows of -1, miles' padding, are invalid."""
        ids = torch.stack([queue.pop_forward() for queue in self._queues], dim=1)
        valid = (ids >= 0).flatten(1).all(1)
        kept = ids.clamp(min=0).to(id_dtype(self._routers.num_experts))
        return RoutingTrace(kept, valid, self._routers.layers, self._routers.num_experts)
