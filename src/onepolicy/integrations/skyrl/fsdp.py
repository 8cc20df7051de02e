"""Routing replay on SkyRL's FSDP backend, whose workers are handed routes and ignore them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.integrations.core.armed import ArmedReplay
from onepolicy.integrations.core.payload import to_trace
from onepolicy.types import RoutingTrace

ROUTES = "rollout_expert_indices"
WITHOUT_ROUTE = "router_padding_mask"
REPLAYED = ("_forward_micro_batch", "_forward_backward_micro")
"""Methods of the worker, of scoring and of training, that replay."""


def replaying(worker: Any) -> type:
    """Return a subclass of SkyRL's FSDPPolicyWorkerBase that replays in scoring and training.

    The reference has a worker of its own and is never replayed.

    Raises UsageError if this SkyRL's worker has other methods.
    """
    missing = [name for name in REPLAYED if not hasattr(worker, name)]
    if missing:
        raise UsageError(
            f"SkyRL: {worker.__name__} has no {' and no '.join(missing)}, so nothing would be "
            "replayed; install SkyRL 0.4"
        )

    class ReplayingPolicyWorker(worker):
        """SkyRL's FSDP policy worker, with replay."""

        def init_model(self, *args: Any, **kwargs: Any) -> Any:
            found = super().init_model(*args, **kwargs)
            if getattr(self.model, "sequence_parallel_size", 1) > 1:
                raise UsageError(
                    "SkyRL: a rank of sequence parallelism sees a slice of the tokens; run FSDP "
                    "with sequence_parallel_size=1, or replay on Megatron"
                )
            self.onepolicy_replay = ArmedReplay(self.model.model)
            # SkyRL asks for the routers' logits and reads no loss of them (`refuse_router_loss`).
            config: Any = self.onepolicy_replay.routers.model.config
            config.get_text_config().output_router_logits = False
            return found

        def _forward_micro_batch(self, micro_batch: Any) -> Any:
            with _replayed(self.onepolicy_replay, micro_batch.get):
                return super()._forward_micro_batch(micro_batch)

        def _forward_backward_micro(self, experience: Any, *args: Any, **kwargs: Any) -> Any:
            with _replayed(self.onepolicy_replay, functools.partial(getattr, experience)):
                return super()._forward_backward_micro(experience, *args, **kwargs)

    return ReplayingPolicyWorker


@contextmanager
def _replayed(armed: ArmedReplay, field: Callable[[str], Any]) -> Iterator[None]:
    """Replay the routes of a micro-batch. `field` returns one of its fields.

    Raises UsageError if it has none: samples that only fill up have some too.
    """
    routes = field(ROUTES)
    if routes is None:
        raise UsageError(
            f"SkyRL: a micro-batch has no {ROUTES}; set "
            "generator.inference_engine.enable_return_routed_experts=true, or leave out `replaying`"
        )
    with armed.batch(_traces(armed, routes, field("attention_mask"), field(WITHOUT_ROUTE))):
        yield


def _traces(
    armed: ArmedReplay,
    routes: Any,
    attention_mask: Tensor,  # [B, S]
    without_route: Tensor | None,  # [B, S] bool
) -> list[RoutingTrace]:
    """Return each sample's trace from SkyRL's PackedTensor of routes, one row a token.

    SkyRL fills rows that the engine did not capture with the experts 0 .. K-1: the last token's,
    those of a suffix such as a last tool reply, and those of samples and micro-batches that only
    fill up. `router_padding_mask` is true there. Without it only the last token's is known.

    Raises UsageError if the rows are not those of the samples' tokens.
    """
    fed = attention_mask.bool()
    lengths = fed.sum(1).tolist()
    bounds = routes.cu_seqlens.tolist()
    packed = [stop - start for start, stop in itertools.pairwise(bounds)]
    if packed != lengths:
        raise UsageError(
            f"SkyRL: rollout_expert_indices has samples of {packed} rows, the batch of {lengths} "
            "tokens; the routes belong to other samples, or another layout"
        )
    traces = [
        to_trace(armed.routers, routes.values[start:stop], tokens=tokens, form="skyrl")
        for (start, stop), tokens in zip(itertools.pairwise(bounds), lengths, strict=True)
    ]
    if without_route is None:
        return traces
    captured = [~row[kept] for row, kept in zip(without_route, fed, strict=True)]
    return [_only(trace, rows) for trace, rows in zip(traces, captured, strict=True)]


def _only(trace: RoutingTrace, captured: Tensor) -> RoutingTrace:
    """Return the trace with the rows that were not captured marked invalid. captured: [n] bool."""
    valid = trace.valid & captured[: len(trace)].to(trace.valid.device)
    return dataclasses.replace(trace, valid=valid).with_origin(trace.origin)
