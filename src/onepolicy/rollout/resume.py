"""Completions that an update of the weights interrupted, and that went on from their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from onepolicy.types import Completion, FinishReason, RoutingTrace


class PartialCompletion(Protocol):
    """What one request sampled: a whole completion, or what there was of it when it was interrupted."""

    @property
    def token_ids(self) -> Tensor: ...  # [n] int32

    @property
    def logp(self) -> Tensor: ...  # [n] float32

    @property
    def version(self) -> Tensor: ...  # [n] int32

    @property
    def routing(self) -> RoutingTrace | None: ...

    @property
    def top_ids(self) -> Tensor | None: ...  # [n, k] int32

    @property
    def top_logp(self) -> Tensor | None: ...  # [n, k] float32


def join_partial_completions(
    parts: Sequence[PartialCompletion], finish: FinishReason, first_slot: int
) -> Completion:
    """One completion of all parts; the routes of each are those it was sampled with, from `first_slot` on.

    The last token of a part is fed by the next one, so the parts' rows follow each other without a gap.
    """
    routes = [part.routing for part in parts if part.routing is not None]
    asked = parts[0].top_ids is not None
    return Completion(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logp for part in parts]),
        torch.cat([part.version for part in parts]),
        finish,
        RoutingTrace.concat(routes) if routes else None,
        first_slot,
        top_ids=torch.cat([part.top_ids for part in parts if part.top_ids is not None])
        if asked
        else None,
        top_logp=torch.cat([part.top_logp for part in parts if part.top_logp is not None])
        if asked
        else None,
    )
