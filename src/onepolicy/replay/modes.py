"""Soft replay, weight replay and the gate mass of one router, as pure functions of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.replay.checks import RoutingError

# The functions with which routers turn logits into one probability per expert


def soften(
    route: Tensor,  # [T, K] int64
    native: Tensor,  # [T, K] int64
    scores: Tensor,  # [T, E] floating
    *,
    ratio: float,
) -> tuple[Tensor, Tensor]:
    """Replace replayed experts that the router finds too unlikely by its own choice.

    A replayed expert e stays if scores[e] >= ratio * min of scores over the row's native experts.
    The others give way to the best native experts that the row does not have yet, in column order.
    So no row gets an expert twice, and an expert that the router selects too is never replaced.
    With ratio = 1 no expert stays whose score is below those of all native experts. As ratio tends
    to 0, soft replay becomes r3.

    Args:
        route: the replayed experts.
        native: the experts that the router selects itself.
        scores: the router's probabilities, >= 0.
        ratio: in (0, 1].

    Returns:
        The experts to use, [T, K] int64, and which of them were replaced, [T, K] bool.
    """
    native_scores = scores.gather(-1, native)
    keep = scores.gather(-1, route) >= ratio * native_scores.amin(-1, keepdim=True)
    best_first = native.gather(-1, native_scores.argsort(dim=-1, descending=True, stable=True))
    kept = route.masked_fill(~keep, -1)
    taken = (best_first[:, :, None] == kept[:, None, :]).any(-1)
    # Experts that are not taken come first, the best of them in front.
    free = best_first.gather(-1, taken.to(torch.int8).argsort(dim=-1, stable=True))
    # The n-th replaced column takes the n-th free expert.
    nth = ((~keep).cumsum(-1) - 1).clamp(min=0)
    return torch.where(keep, route, free.gather(-1, nth)), ~keep


class _Recorded(torch.autograd.Function):
    """The recorded weights, with the live weights' gradient (straight through)."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, recorded: Tensor) -> Tensor:
        return recorded.to(live.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def replace_combine_weights(
    out: Any, recorded: Tensor, valid: Tensor | None, top_k: int, where: str
) -> Any:
    """Return a router's output with its combine weights [T, K] replaced by `recorded`.

    The gradient goes to the live weights. Rows that are not valid keep the live weights.

    Args:
        out: the router's output.
        recorded: [T, K], floating.
        valid: [T] bool; None if all rows are valid.
        top_k: K.
        where: the router's name, for messages.

    Raises:
        UsageError: the live weights' dtype cannot hold the recorded ones.
        RoutingError: the output has no recognisable combine weights.
    """
    position = combine_weights_position(out, top_k, where)
    live = out[position]
    if torch.promote_types(live.dtype, recorded.dtype) != live.dtype:
        raise UsageError(
            f"{where}: the trace's weights are {recorded.dtype}, but the router gives "
            f"{live.dtype}, which cannot hold them; train in the wider dtype, or roll out in the "
            "trainer's (in a recipe: rollout.engine.dtype)"
        )
    if valid is not None:
        recorded = torch.where(valid[:, None], recorded.to(live.dtype), live.detach())
    replaced = _Recorded.apply(live, recorded)  # type: ignore[no-untyped-call]
    return (*out[:position], replaced, *out[position + 1 :])


def combine_weights_position(out: Any, top_k: int, where: str) -> int:
    """Return the index of the combine weights [T, K] in a router's output.

    They are its only floating tensor of K columns. Raises RoutingError, naming the router `where`,
    if there is not exactly one.
    """
    found = []
    if isinstance(out, tuple):
        found = [i for i, item in enumerate(out) if _is_floating_matrix(item, top_k)]
    if len(found) != 1:
        raise RoutingError(
            f"{where}: its output has {len(found)} floating tensors of {top_k} columns, expected "
            "one, so its combine weights cannot be recorded or replayed; replay the experts alone, "
            "without weights=True (in a recipe: replay.mode=r3)"
        )
    return found[0]


def _is_floating_matrix(item: Any, columns: int) -> bool:
    return (
        isinstance(item, Tensor)
        and item.is_floating_point()
        and item.dim() == 2
        and item.shape[1] == columns
    )
