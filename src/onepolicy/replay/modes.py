"""What soft replay and weight replay do to one router's routes, and what replayed routes cost. Pure functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from onepolicy.config import UsageError
from onepolicy.replay.checks import RoutingError

# The functions with which routers turn logits into one probability per expert
PROBABILITIES = (torch.softmax, Tensor.softmax, F.softmax, torch.sigmoid, Tensor.sigmoid, F.sigmoid)


def soften(route: Tensor, own: Tensor, scores: Tensor, *, ratio: float) -> tuple[Tensor, Tensor]:
    """Keep a replayed expert e of a row while scores[e] >= ratio * min over the row's own experts of scores.

    route [T, K] int64: replayed experts; own [T, K] int64: what the router selects; scores [T, E] >= 0, see `Scorer`.
    Returns ids [T, K] int64 and which of them were replaced [T, K] bool. A replaced column takes the best of the
    router's own experts that the row does not have yet, so no expert comes twice; experts the router selects too are
    never replaced. ratio = 1 leaves no expert whose score is below all of the router's own; ratio -> 0 is r3.
    """
    own_scores = scores.gather(-1, own)
    keep = scores.gather(-1, route) >= ratio * own_scores.amin(-1, keepdim=True)
    own = own.gather(-1, own_scores.argsort(dim=-1, descending=True, stable=True))
    taken = (own[:, :, None] == route.masked_fill(~keep, -1)[:, None, :]).any(-1)
    free = own.gather(
        -1, taken.to(torch.int8).argsort(dim=-1, stable=True)
    )  # not taken first, best first
    column = ((~keep).cumsum(-1) - 1).clamp(
        min=0
    )  # the n-th replaced column takes the n-th free expert
    return torch.where(keep, route, free.gather(-1, column)), ~keep


class _Recorded(torch.autograd.Function):
    """Forward: the recorded weights. Backward: all of the gradient to the live ones (straight through)."""

    @staticmethod
    def forward(ctx: Any, live: Tensor, recorded: Tensor) -> Tensor:
        return recorded.to(live.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def replace_combine_weights(
    out: Any, recorded: Tensor, valid: Tensor | None, top_k: int, where: str
) -> Any:
    """A router's output with its combine weights [T, K] replaced by `recorded`; rows not valid keep the live ones."""
    position = combine_weights_position(out, top_k, where)
    live = out[position]
    if torch.promote_types(live.dtype, recorded.dtype) != live.dtype:
        raise UsageError(
            f"{where}: the trace's weights are {recorded.dtype}, but the router gives {live.dtype}, which cannot hold "
            "them; train in the wider dtype, or roll out in the trainer's (in a recipe: rollout.engine.dtype)"
        )
    if valid is not None:
        recorded = torch.where(valid[:, None], recorded.to(live.dtype), live.detach())
    replaced = _Recorded.apply(live, recorded)  # type: ignore[no-untyped-call]
    return (*out[:position], replaced, *out[position + 1 :])


def combine_weights_position(out: Any, top_k: int, where: str) -> int:
    """Where the combine weights [T, K] stand in a router's output: its one floating tensor of K columns."""
    items = out if isinstance(out, tuple) else ()
    found = [
        i
        for i, item in enumerate(items)
        if isinstance(item, Tensor)
        and item.is_floating_point()
        and item.dim() == 2
        and item.shape[1] == top_k
    ]
    if len(found) != 1:
        raise RoutingError(
            f"{where}: its output has {len(found)} floating tensors of {top_k} columns, expected one, so its combine "
            "weights cannot be recorded or replayed; replay the experts alone, without weights=True (in a recipe: "
            "replay.mode=r3)"
        )
    return found[0]


def gate_mass(
    replayed: Tensor, native: Tensor, scores: Tensor
) -> Tensor:  # [T, K], [T, K], [T, E] -> [T] float32
    """How much of the best K experts' scores the replayed K hold, in [0, 1]; 1 if both are the same experts, or tied.

    Scores are those the top-k sees (probabilities, sigmoids with the selection bias, logits), counted from the row's
    lowest one, so that one definition serves all of them: sum(replayed - low) / sum(native - low). For softmax scores
    `low` is nearly 0 and this is the share of router probability. Where scores are masked with -inf, `low` is the
    lowest of those compared.
    """
    low = scores.amin(-1, keepdim=True).float()
    compared = torch.where(replayed.isneginf(), native, torch.minimum(replayed, native))
    low = torch.where(low.isneginf(), compared.amin(-1, keepdim=True).float(), low)
    held = (replayed.float() - low).clamp(min=0).sum(-1) / (native.float() - low).sum(-1)
    return held.nan_to_num(nan=1.0, posinf=1.0)  # all scores are equal
