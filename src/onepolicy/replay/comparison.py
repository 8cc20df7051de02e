"""The rank of replayed experts in their router's scores, which a check of the forward reads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
