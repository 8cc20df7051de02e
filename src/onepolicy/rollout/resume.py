"""Completions that a weight update interrupted and that were resumed from their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.types import Completion, FinishReason, RoutingTrace, concat_given


def join_partial_completions(
    parts: Sequence[Completion], finish: FinishReason, first_slot: int
) -> Completion:
    """Return one completion made of all parts, with the routes that sampled each part.

    first_slot: of the first part's routes. The last token of a part is fed by the next part, so
    the parts' rows follow each other without a gap.
    """
    sampled = [part for part in parts if len(part.token_ids)]
    traces = [part.routing for part in parts if part.routing is not None]
    routing = None
    if traces:
        routing = RoutingTrace.concat(traces)
    return Completion(
        torch.cat([part.token_ids for part in parts]),
        torch.cat([part.logp for part in parts]),
        torch.cat([part.version for part in parts]),
        finish,
        routing,
        first_slot,
        top_ids=_concat_top([part.top_ids for part in parts]),
        top_logp=_concat_top([part.top_logp for part in parts]),
        support=concat_given([part.support for part in sampled]),
    )


def _concat_top(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the parts' top tokens, None if the first part has none."""
    if tensors[0] is None:
        return None
    return torch.cat([tensor for tensor in tensors if tensor is not None])
