"""Routing replay on SkyRL's FSDP backend, whose workers are handed routes and ignore them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.integrations.core.armed import ArmedReplay
from onepolicy.integrations.core.payload import to_trace
from onepolicy.replay.checks import refuse_router_loss
from onepolicy.types import RoutingTrace

ROUTES = "rollout_expert_indices"


def replaying(worker: Any) -> type:
    """Return a subclass of SkyRL's FSDPPolicyWorkerBase that replays in scoring and training.

    A micro-batch without routes is routed natively. The reference has a worker of its own and is
    never replayed.
    """

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
            refuse_router_loss(self.onepolicy_replay.routers.model.config)
            return found

        def _forward_micro_batch(self, micro_batch: Any) -> Any:
            mask, routes = micro_batch["attention_mask"], micro_batch.get(ROUTES)
            with _replayed(self.onepolicy_replay, routes, mask):
                return super()._forward_micro_batch(micro_batch)

        def _forward_backward_micro(self, experience: Any, *args: Any, **kwargs: Any) -> Any:
            routes = getattr(experience, ROUTES)
            with _replayed(self.onepolicy_replay, routes, experience.attention_mask):
                return super()._forward_backward_micro(experience, *args, **kwargs)

    return ReplayingPolicyWorker


@contextmanager
def _replayed(armed: ArmedReplay, routes: Any, attention_mask: Tensor) -> Iterator[None]:
    if routes is None:
        yield
        return
    with armed.batch(_traces(armed, routes, attention_mask)):
        yield


def _traces(armed: ArmedReplay, routes: Any, attention_mask: Tensor) -> list[RoutingTrace]:
    """Return each sample's trace from SkyRL's PackedTensor of routes, one row a token.

    SkyRL fills the last token's row with the experts 0 .. K-1, which only its place tells.

    Raises UsageError if the rows are not those of the samples' tokens.
    """
    lengths = attention_mask.long().sum(1).tolist()
    bounds = routes.cu_seqlens.tolist()
    packed = [stop - start for start, stop in itertools.pairwise(bounds)]
    if packed != lengths:
        raise UsageError(
            f"SkyRL: rollout_expert_indices has samples of {packed} rows, the batch of {lengths} "
            "tokens; the routes belong to other samples, or another layout"
        )
    parts = [routes.values[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [
        to_trace(armed.routers, part, tokens=tokens, form="skyrl")
        for part, tokens in zip(parts, lengths, strict=True)
    ]
