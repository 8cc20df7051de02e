"""Interception of the top-k with which a router selects experts, inside the router's own forward.

Every router computes scores [N, E], selects K columns of each row with one top-k, and turns the
selected scores into weights by its family's own formula: softmax before or after, sigmoid with a
selection bias, renormalised, scaled, and so on. A replay replaces only the result of that top-k, by
`(scores.gather(-1, ids), ids)`. The formula, its gradients and its bits stay the family's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from onepolicy.replay.checks import RoutingError
from onepolicy.replay.comparison import LayerComparison, better_experts
from onepolicy.replay.layers import Router
from onepolicy.replay.modes import combine_weights_position, replace_combine_weights, soften
from onepolicy.replay.private_names import current_graph_task_id
from onepolicy.replay.recompute import called_by_checkpoint
from onepolicy.replay.selection import (
    answer,
    flat,
    gate_mass,
    groups_of,
    topk_operands,
)

PROBABILITIES = {torch.softmax, Tensor.softmax, F.softmax, torch.sigmoid, Tensor.sigmoid, F.sigmoid}
PROBABILITIES |= {torch.sqrt, Tensor.sqrt}  # of softplus (DeepSeek-V4)
_ABSENT = object()


def in_backward() -> bool:
    """Return whether autograd is running a backward on this thread.

    A router that is called from a backward is part of an activation recompute.
    """
    return not torch.compiler.is_compiling() and current_graph_task_id() != -1


@contextmanager
def override_attribute(
    name: str, values: Iterable[tuple[nn.Module, Callable[..., Any]]]
) -> Iterator[None]:
    """Set the attribute `name` of each module instance, and restore it when the context is left."""
    values = list(values)
    saved = [(module, module.__dict__.get(name, _ABSENT)) for module, _ in values]
    try:
        for module, value in values:
            module.__dict__[name] = value
        yield
    finally:
        for module, old in saved:
            if old is _ABSENT:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = old


class TopkHook(TorchFunctionMode):
    """A stand-in for one router's `forward` inside a record or replay context."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        if isinstance(getattr(router.module.forward, "__self__", None), TopkHook):
            raise RoutingError(
                f"layer {router.layer} is being recorded or replayed already; leave that context "
                "first (a replay also reports the router's own choice: replay(trace, native=True))"
            )
        self.router = router
        self._where = f"layer {router.layer}: {router.path!r} ({type(router.module).__name__})"
        self.forward = router.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:  # copy.deepcopy too
        raise RoutingError(
            f"{self._where} is being recorded or replayed, and a copy would stay so; copy or "
            "pickle the model outside the context"
        )

    def _check_not_sampling(self) -> None:
        if self.router.by_max and self.router.module.training:
            raise RoutingError(
                f"{self._where} draws its experts at random in train mode and makes no choice to "
                "record or replay; call .eval() on it"
            )

    def _check_one_selection(self, columns: int) -> None:
        """Raise unless the selections of one forward named K experts per token in all."""
        if columns != self.router.top_k:
            raise RoutingError(
                f"{self._where} ran {columns // self.router.top_k} top-{self.router.top_k} "
                f"selections of {self.router.num_experts} experts in its forward, expected one"
            )


class TopkRecorder(TopkHook):
    """A hook that keeps the ids [N, K] int64 of every forward of one router."""

    def __init__(self, router: Router, *, weights: bool = False) -> None:
        super().__init__(router)
        self.keep_weights = weights
        self.weights: list[Tensor] = []  # combine weights [N, K] of every forward, if kept
        self.seen: list[Tensor] = []  # ids [N, K] of every forward
        # Scores [N, E], top-k values and ids [N, K] of each selection in this forward
        self._selections: list[tuple[Tensor, Tensor, Tensor]] = []
        # Index of the ids in the router's output; known after the first forward
        self._position: int | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, ids = self.observe(args, kwargs)
        if not in_backward():
            self.seen.append(ids)
            if self.keep_weights:
                position = combine_weights_position(out, self.router.top_k, self._where)
                self.weights.append(out[position].detach())
        return out

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """Run the router; return its output and the ids [N, K] that it selected."""
        if self._position is not None:
            # Ten times cheaper than a function mode, and a decode loop pays for it at every step.
            out = self.forward(*args, **kwargs)
            return out, out[self._position]
        out, (_, _, ids) = self.observe_selection(args, kwargs)
        if isinstance(out, tuple):
            self._position = next((i for i, item in enumerate(out) if item is ids), None)
        return out, ids

    def observe_selection(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
        """Run the router; return its output and its selection.

        The selection is the scores [N, E] it was made from, and its values and ids [N, K].
        """
        self._check_not_sampling()
        self._selections.clear()
        with self:
            out = self.forward(*args, **kwargs)
        self._check_one_selection(sum(ids.shape[1] for _, _, ids in self._selections))
        if len(self._selections) == 1:
            return out, self._selections.pop()
        # The router selected one expert after the other, and masked scores in between.
        scores, values, ids = zip(*self._selections, strict=True)
        return out, (scores[0], torch.cat(values, 1), torch.cat(ids, 1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        scores, k, width = topk_operands(self.router, func, args, kwargs)
        if k and width == self.router.num_experts:
            self._selections.append((flat(scores), flat(out[0]), flat(out[1])))
        return out


class TopkReplayer(TopkHook):
    """A hook that makes one router select given experts in one forward and its recomputes.

    native: also keep the router's own choice. mass: also keep the gate mass (`gate_mass`).
    soft: the ratio of `modes.soften`. weights: recorded combine weights, used as
    `modes.replace_combine_weights` does. comparison: also compare the experts with the scores.
    """

    def __init__(
        self,
        router: Router,
        route: Tensor,  # [T, K] uint8 or uint16
        valid: Tensor | None,  # [T] bool, None = all rows
        *,
        native: bool,
        mass: bool = False,
        soft: float | None = None,
        weights: Tensor | None = None,  # [T, K] floating
        comparison: LayerComparison | None = None,
    ) -> None:
        super().__init__(router)
        self.comparison = comparison
        self.called = False
        # Whether this call is an activation recompute. Compiled code cannot call `in_backward`.
        self.recompute = False
        self.native: Tensor | None = None  # [T, K], dtype of route
        self.gate_mass: Tensor | None = None  # [T] float32
        self.replaced: Tensor | None = None  # [] float32, fraction that soft replay replaced
        self._thread = threading.get_ident()
        self._route, self._valid = route, valid
        self._keep_native, self._keep_mass = native, mass
        self._soft, self._weights = soft, weights
        self._target: Tensor | None = None  # [T, K] int64 while the router runs
        self._selected = 0  # experts per token that this forward has selected
        self._probabilities: Tensor | None = None  # [T, E] the router's own, for soft replay
        self._needs_native = native or valid is not None or soft is not None
        # These routers select from scores that depend on what they selected before. Their own
        # choice takes a forward of its own.
        self._needs_native_forward = router.num_groups > 1 or router.by_max
        self._recorder = TopkRecorder(router)
        # Scores, values and ids of the router's own choice, while the router runs
        self._native_selection: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward() and not self.recompute and called_by_checkpoint():
            # A checkpoint of another forward, which was not replayed
            return self.forward(*args, **kwargs)
        self._refuse_foreign_checkpoint()
        if not self.called:
            self._begin_first_call(args, kwargs)
        elif not (self.recompute or in_backward()):  # a recompute takes the forward's routes
            raise RoutingError(
                f"layer {self.router.layer} was called twice in one replay; open one replay "
                "context per forward"
            )
        self._check_not_sampling()
        # The only int64 copy: one layer at a time has it.
        self._target, self._selected = self._route.to(torch.int64), 0
        try:
            with self:
                out = self.forward(*args, **kwargs)
        finally:
            self._target = self._native_selection = self._probabilities = None
        self._check_one_selection(self._selected)
        self._needs_native = False
        if self._weights is not None:
            out = replace_combine_weights(
                out, self._weights, self._valid, self.router.top_k, self._where
            )
        return out

    def _refuse_foreign_checkpoint(self) -> None:
        """Raise if a checkpoint of another thread calls the router.

        Only the thread that opened the replay carries it into recomputes
        (`recompute.carry_into_recomputes`).
        """
        if (
            torch.compiler.is_compiling()
            or self.recompute
            or threading.get_ident() == self._thread
            or in_backward()
        ):
            return
        if called_by_checkpoint():
            raise RoutingError(
                f"layer {self.router.layer} is replayed in one thread and checkpointed in another, "
                "where its recompute would route natively; open the replay in the thread that runs "
                "the forward"
            )

    def _begin_first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.called = True
        wanted = self._needs_native or self.comparison is not None
        if wanted and self._needs_native_forward:
            with torch.no_grad():
                _, self._native_selection = self._recorder.observe_selection(args, kwargs)
                scores, _, ids = self._native_selection
                self._move_routes(scores)
                self._check_rows(len(ids))
                self._compare(scores, None, lambda rows: ids.index_select(0, rows))
            if self._needs_native:
                self._fill_invalid_rows(ids)

    def _replayed_selection(
        self, func: Any, scores: Tensor, k: int, select: Callable[[Tensor], Any]
    ) -> Any:
        """Return the selection of the next k replayed experts.

        `select(scores)` returns the router's own selection from scores [..., E].
        """
        assert self._target is not None
        rows = flat(scores)
        self._move_routes(scores)
        self._check_rows(len(rows))
        first, self._selected = self._selected, self._selected + k
        if self._selected > self.router.top_k:
            return select(scores)  # too many selections; an error when the router is done
        selected = None
        if first == 0 and self._compares() and not self._needs_native_forward:
            replayed = None
            if not self._needs_native:  # the target will stay as it is
                selected = answer(func, scores, self._target[:, :k])
                replayed = flat(selected[0].detach())
            with torch.no_grad():
                self._compare(rows, replayed, self._own_choice(rows, select))
        if first == 0 and self._needs_native:
            selected = None
            with torch.no_grad():
                self._keep_native_choice(rows, lambda: select(scores))
        if selected is None:
            selected = answer(func, scores, self._target[:, first : self._selected])
        return selected

    def _keep_native_choice(self, rows: Tensor, select: Callable[[], Any]) -> None:
        """Use the router's own choice from the scores `rows` [T, E] as the modes ask for."""
        if not self._needs_native_forward:
            values, ids = select()
            self._native_selection = (rows, flat(values), flat(ids))
            self._fill_invalid_rows(self._native_selection[2])
            self._target = self._route.to(torch.int64)
        self._apply_soft_replay(rows)
        assert self._native_selection is not None
        assert self._target is not None
        scores, values, ids = self._native_selection
        if self._keep_native:
            self.native = ids.to(self._route.dtype)
        if self._keep_mass:
            self.gate_mass = gate_mass(rows.gather(-1, self._target), values, scores)

    def _compares(self) -> bool:
        """Return whether this call is to be compared: the first one, not a recompute."""
        return self.comparison is not None and self.comparison.better is None

    def _compare(
        self,
        scores: Tensor,
        replayed: Tensor | None,
        own_choice: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """Compare the replayed experts with the scores [T, E], once.

        replayed: their scores [T, K], if all rows are valid and they are known.
        own_choice: returns the router's own choice [m, K] for rows [m]. None: it is their top-k.
        """
        if self._compares():
            assert self.comparison is not None
            self.comparison.keep(self._better(scores, replayed), scores, own_choice)

    def _own_choice(
        self, rows: Tensor, select: Callable[[Tensor], Any]
    ) -> Callable[[Tensor], Tensor] | None:
        """Return a function that chooses for some of the rows [T, E]; None for a plain top-k."""
        return None

    def _better(self, scores: Tensor, replayed: Tensor | None) -> Tensor:
        assert self.comparison is not None
        if replayed is None:
            replayed = scores.gather(-1, self._route_in_range())
        return better_experts(scores, replayed, self.comparison.scratch)

    def _route_in_range(self) -> Tensor:
        """Return the replayed experts [T, K] int64, 0 in rows that may hold any number."""
        route = self._route.to(torch.int64) if self._target is None else self._target  # not begun
        return route if self._valid is None else torch.where(self._valid[:, None], route, 0)

    def leave_native(self, valid: Tensor) -> None:
        """Let the router choose itself in rows where `valid` [T] is false, from now on."""
        self._valid, self._needs_native = valid.to(self._route.device), True

    def _move_routes(self, scores: Tensor) -> None:
        """Move the routes to the device of the scores.

        The model's parameters may be offloaded, or on several devices.
        """
        device = scores.device
        if self._route.device == device:
            return
        self._route = self._route.to(device)
        if self._target is not None:
            self._target = self._target.to(device)
        if self._valid is not None:
            self._valid = self._valid.to(device)
        if self._weights is not None:
            self._weights = self._weights.to(device)

    def _fill_invalid_rows(self, native: Tensor) -> None:
        """Give invalid rows the router's own choice [T, K], so that a recompute has the same."""
        self._check_rows(len(native))
        if self._valid is not None:
            route = torch.where(self._valid[:, None], self._route.to(torch.int64), native)
            self._route = route.to(self._route.dtype)

    def _apply_soft_replay(self, scores: Tensor) -> None:
        """Replace unlikely experts, once: a recompute takes the forward's routes."""
        if self._soft is None or self.replaced is not None:
            return
        assert self._native_selection is not None
        assert self._target is not None
        if self._probabilities is None:
            self._probabilities = scores.detach().softmax(-1)
        native, p = self._native_selection[2], self._probabilities
        self._target, replaced = soften(self._target, native, p, ratio=self._soft)
        if self._valid is not None:
            replaced = replaced[self._valid]
        self.replaced = replaced.float().mean()
        self._route = self._target.to(self._route.dtype)

    def _check_rows(self, rows: int) -> None:
        found = len(self._route)
        if rows == found:
            return
        fix = (
            "give a row for every token that is fed, padding included: op.pad_routes(traces, "
            "attention_mask)"
        )
        if rows == found + 1:
            fix = (
                "an engine never feeds the last token that it samples, so that token has no row: "
                "feed input_ids[:, :-1], or add a row that the model routes itself with "
                "op.pad_routes([trace], torch.ones_like(input_ids))"
            )
        raise RoutingError(
            f"layer {self.router.layer} routes {rows} tokens, but the trace has {found} rows; {fix}"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        router = self.router
        assert self._target is not None
        scores, k, width = topk_operands(router, func, args, kwargs)
        if k and width == router.num_experts:
            named = {name: value for name, value in (kwargs or {}).items() if name != "input"}
            return self._replayed_selection(
                func, scores, k, lambda given: func(given, *args[1:], **named)
            )
        if k and width == router.num_groups:
            self._move_routes(scores)
            self._apply_soft_replay(scores)  # before its groups are named
            return answer(func, scores, groups_of(self._target, router))
        out = func(*args, **(kwargs or {}))
        wanted = self._soft is not None and not self._selected
        if wanted and func in PROBABILITIES and out.shape[-1:] == (router.num_experts,):
            self._probabilities = flat(out.detach())
        return out
