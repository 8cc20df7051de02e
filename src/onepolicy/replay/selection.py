"""A router's selection: its call, the answer to it, and how replayed experts rank in its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepolicy.replay.layers import Router

_TOPK = (torch.topk, torch.Tensor.topk)
_MAX = (torch.max, torch.Tensor.max)
_NO_TENSOR = torch.empty(0)


def topk_operands(
    router: Router, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[Tensor, int, int]:
    """Return (scores, k, width) of a call that selects k of `width` experts or groups per token.

    k is 0 for any other call. Routers with groups also score their groups with a 3-D top-k, whose
    last axis is as long as the experts' if there is one group. In routers without groups a 3-D call
    is the selection for [B, S] tokens.
    """
    if func not in _TOPK and not (router.by_max and func in _MAX):
        return _NO_TENSOR, 0, 0
    named = kwargs or {}
    scores = args[0] if args else named["input"]
    width = scores.shape[-1]
    if func in _MAX:  # one expert per call
        return scores, int(bool(named.get("keepdim"))), width
    k = args[1] if len(args) > 1 else named["k"]
    if scores.dim() > 2 and router.num_groups:
        return scores, 0, width
    selects_groups = router.num_groups > 1 and (k, width) == (router.top_groups, router.num_groups)
    if selects_groups or k == router.top_k:
        return scores, k, width
    return scores, 0, width


def flat(x: Tensor) -> Tensor:
    """Return x [..., n] as [T, n]; x itself if it has two dimensions."""
    if x.dim() == 2:
        return x
    return x.reshape(-1, x.shape[-1])


def answer(func: Any, scores: Tensor, ids: Tensor) -> Any:
    """Return the result of `func` as if it had selected these ids [T, k]."""
    shape = (*scores.shape[:-1], ids.shape[1])
    if ids.shape != shape:
        ids = ids.view(shape)
    values = scores.gather(-1, ids)
    if func in _MAX:
        return torch.return_types.max((values, ids))
    return torch.return_types.topk((values, ids))


def groups_of(ids: Tensor, router: Router) -> Tensor:
    """Return the groups [T, max(K, top_groups)] to keep for the experts `ids` [T, K].

    No replayed expert must be masked out of its own scores, because DeepSeek-V2 weighs the scores
    that remain. A group may be named more than once: routers only mark the groups they are given.
    """
    groups = ids // (router.num_experts // router.num_groups)
    missing = router.top_groups - groups.shape[1]
    if missing <= 0:
        return groups
    return torch.cat([groups, groups[:, :1].expand(-1, missing)], 1)


def better_experts(scores: Tensor, replayed: Tensor, scratch: Scratch) -> Tensor:
    """Return [T] float32: how many experts score above the lowest one of a row's K experts.

    It is K - 1 or, if scores are tied, less where the router chooses the same K experts itself. It
    costs a tenth of the router's own top-k.

    Args:
        scores: [T, E], that the router selects from.
        replayed: [T, K], those of the replayed experts.
        scratch: memory of the last call.
    """
    lowest = replayed.amin(-1, keepdim=True)
    if torch.compiler.is_compiling():
        return (scores > lowest).sum(-1, dtype=torch.float32)
    # Written as numbers: a sum of them is four times as fast as one of booleans.
    return torch.gt(scores, lowest, out=scratch.like(scores)).sum(-1)


class Scratch:
    """Memory for the comparisons of one forward, one layer after the other."""

    def __init__(self) -> None:
        self._memory: dict[torch.device, Tensor] = {}

    def like(self, scores: Tensor) -> Tensor:
        """Return float32 memory of this shape on this device. Its values are of no meaning."""
        found = self._memory.get(scores.device)
        if found is None or found.shape != scores.shape:
            found = torch.empty_like(scores, dtype=torch.float32)
            self._memory[scores.device] = found
        return found


class LayerComparison:
    """The comparison of one router's replayed experts with its scores, in one forward.

    Attributes:
        rows: [m] int64, for which the router's own choice can be told.
        better: [T] float32, see `better_experts`. None until the router has run.
        judge: called with `better` as soon as it is known.
    """

    def __init__(self, rows: Tensor, top_k: int, scratch: Scratch) -> None:
        self.rows = rows
        self.scratch = scratch
        self.better: Tensor | None = None
        self.judge: Callable[[Tensor], None] | None = None
        self._top_k = top_k
        # Of the rows: the router's own choice [m, K] int64, or the scores [m, E] that tell it
        self._choice: Tensor | None = None
        self._scores: Tensor | None = None

    def keep(
        self, better: Tensor, scores: Tensor, own_choice: Callable[[Tensor], Tensor] | None
    ) -> None:
        """Keep the numbers of the check. To choose experts waits until it asks, which is seldom.

        own_choice: returns the router's own choice [m, K] for rows [m]. None: it is their top-k.
        """
        self.better = better
        rows = self.rows.to(scores.device)
        if own_choice is None:
            self._scores = scores.detach().index_select(0, rows)
        else:
            self._choice = own_choice(rows)
        if self.judge is not None:
            self.judge(better)

    def own_choice(self) -> Tensor | None:
        """Return the router's own choice for the rows, [m, K] int64; None if it has not run."""
        if self._choice is None and self._scores is not None:
            self._choice = self._scores.topk(self._top_k, -1)[1]
        return self._choice

    def forget_rows(self) -> None:
        """Free the rows' scores: the replay may live until a backward ends."""
        self._choice = self._scores = None


def gate_mass(
    replayed: Tensor,  # [T, K]
    native: Tensor,  # [T, K]
    scores: Tensor,  # [T, E]
) -> Tensor:
    """Return [T] float32: the replayed experts' scores as a fraction of the best K experts' scores.

    It is in [0, 1], and 1 if both are the same experts or tied. With `low` the row's lowest score,

        gate_mass = sum(replayed - low) / sum(native - low)

    Subtracting `low` makes one definition serve all scores that a top-k may see: probabilities,
    sigmoids with a selection bias, logits. For softmax scores `low` is nearly 0, and the result is
    the ratio of the router's probabilities. Where scores are masked with -inf, `low` is the lowest
    of the scores compared.

    Args:
        replayed: scores of the replayed experts.
        native: scores of the experts that the router selects itself.
        scores: all scores that the router selects from.
    """
    low = scores.amin(-1, keepdim=True).float()
    compared = torch.where(replayed.isneginf(), native, torch.minimum(replayed, native))
    low = torch.where(low.isneginf(), compared.amin(-1, keepdim=True).float(), low)
    mass = (replayed.float() - low).clamp(min=0).sum(-1) / (native.float() - low).sum(-1)
    return mass.nan_to_num(nan=1.0, posinf=1.0)  # all scores are equal
