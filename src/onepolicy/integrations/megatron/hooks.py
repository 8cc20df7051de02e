"""One router of Megatron, recorded or replayed through the place of its own RouterReplay.

Megatron's router asks `router_replay.get_replay_topk` for the experts of its scores, and computes
the combine weights of the answer by its own formula. Inside a forward that is recorded or replayed
a hook sits on that attribute of this one router. So neither the flag `moe_enable_routing_replay`
nor Megatron's class and its queues are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onepolicy.divergence.routing import differing_experts
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.topk_hook import TopkHook, TopkRecorder, TopkReplayer

OwnTopk = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A router's own selection: scores [N, E] -> values and ids [N, K]."""


class _RouterReplaySeat(TopkHook):
    """A hook that takes the place of a router's `router_replay` while the router runs."""

    _limited_to_groups = False  # the router chooses among the experts of its best groups

    def __enter__(self) -> Any:
        router: Any = self.router.module
        self._replaced = router.router_replay
        router.router_replay = self
        return self

    def __exit__(self, *exception: object) -> None:
        router: Any = self.router.module
        router.router_replay = self._replaced

    def get_replay_topk(
        self,
        scores: Tensor,  # [N, E]
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the values and ids [N, K] of the experts to use. Megatron's router calls it."""
        self._limited_to_groups = bool(group_topk)
        return self._choose(
            scores, topk, lambda x: default_compute_topk(x, topk, num_groups, group_topk)
        )

    def _choose(self, scores: Tensor, k: int, own: OwnTopk) -> tuple[Tensor, Tensor]:
        """Return values and ids [N, K]. `own` gives those that the router selects from scores."""
        raise NotImplementedError


class MegatronRecorder(_RouterReplaySeat, TopkRecorder):
    """A hook that keeps the ids [N, K] int64 of every forward of one router."""

    def __init__(self, router: Any, *, weights: bool = False) -> None:
        super().__init__(router, weights=weights)
        self.batches: list[int] = []  # samples of every forward in `seen`

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = len(self.seen)
        out = super().__call__(*args, **kwargs)
        if len(self.seen) > before:  # no recompute
            self.batches.append(_samples(args))
        return out

    def _choose(self, scores: Tensor, k: int, own: OwnTopk) -> tuple[Tensor, Tensor]:
        values, ids = own(scores)
        # Without gradients Megatron 0.19 leaves a row unsorted. Recorded in the order of a training
        # forward, the routes give that forward's sums over K, to the bit.
        order = values.detach().argsort(dim=1, descending=True, stable=True)
        self._selections.append((scores, values.gather(1, order), ids.gather(1, order)))
        return values, ids


class MegatronReplayer(_RouterReplaySeat, TopkReplayer):
    """A hook that makes one router select given experts in one forward and its recomputes."""

    batch = 1  # samples that a forward must have
    _own: OwnTopk

    def _begin_first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = _samples(args)
        if found != self.batch:
            raise RoutingError(
                f"layer {self.router.layer} is fed {found} samples, but the routes are those of "
                f"{self.batch}: Megatron's rows are ordered by position, so with another number "
                f"each token would get another token's experts; give replay(batch={found})"
            )
        super()._begin_first_call(args, kwargs)

    def _choose(self, scores: Tensor, k: int, own: OwnTopk) -> tuple[Tensor, Tensor]:
        grad = torch.is_grad_enabled()

        def own_choice(rows: Tensor) -> tuple[Tensor, Tensor]:
            whole = rows.detach()
            if self._limited_to_groups:  # its function knows the number of rows
                whole = torch.cat([whole, scores[len(rows) :].detach()])
            # Megatron 0.19 orders the ids of a row by whether gradients are on.
            with torch.set_grad_enabled(grad):
                values, ids = own(whole)
            return values[: len(rows)], ids[: len(rows)]

        self._own = own_choice
        selected = self._replayed_selection(torch.topk, scores, k, own_choice)
        return selected[0], selected[1]

    def _own_choice(
        self, rows: Tensor, select: Callable[[Tensor], Any]
    ) -> Callable[[Tensor], Tensor]:
        return lambda at: select(rows.index_select(0, at))[1]

    def _better(self, scores: Tensor, replayed: Tensor | None) -> Tensor:
        if not self._limited_to_groups:
            return super()._better(scores, replayed)
        # An expert of another group may score high, so the scores alone do not tell.
        own = self._own(scores)[1]
        return differing_experts(self._route_in_range(), own).float() + (self.router.top_k - 1)


def _samples(args: tuple[Any, ...]) -> int:
    """Return the samples B of a router's input [S, B, H]."""
    hidden = args[0]
    assert isinstance(hidden, Tensor)
    assert hidden.dim() == 3
    return hidden.shape[1]
