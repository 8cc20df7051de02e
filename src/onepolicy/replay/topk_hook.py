"""The seam: the expert-selecting top-k inside a router's own forward, observed or answered for it.

Every router computes scores [N, E], selects K columns of each row with one top-k and turns what was selected into
weights by its family's own formula (softmax before or after, sigmoid with a selection bias, renormalised, scaled, ...).
Answering only the top-k, with `(scores.gather(-1, ids), ids)`, leaves that formula, its gradients and its bits alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onepolicy.replay.checks import RoutingError
from onepolicy.replay.layers import Router
from onepolicy.replay.modes import (
    PROBABILITIES,
    combine_weights_position,
    gate_mass,
    replace_combine_weights,
    soften,
)
from onepolicy.replay.recompute import called_by_checkpoint

_TOPK = (torch.topk, torch.Tensor.topk)
_MAX = (torch.max, torch.Tensor.max)
_ABSENT = object()
_NO_TENSOR = torch.empty(0)


def in_backward() -> bool:
    """Is autograd running a backward on this thread? A router called from there is an activation recompute."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


@contextmanager
def override_attribute(
    name: str, values: Iterable[tuple[nn.Module, Callable[..., Any]]]
) -> Iterator[None]:
    """Give each module an instance attribute `name`; on exit put back exactly what was there."""
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
    """What stands in for one router's `forward` inside a record or replay context."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        if isinstance(getattr(router.module.forward, "__self__", None), TopkHook):
            raise RoutingError(
                f"layer {router.layer} is being recorded or replayed already; leave that context first (a replay also "
                "reports the router's own choice: replay(trace, native=True))"
            )
        self.router = router
        self._where = f"layer {router.layer}: {router.path!r} ({type(router.module).__name__})"
        self.forward = router.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:  # copy.deepcopy too
        raise RoutingError(
            f"{self._where} is being recorded or replayed, and a copy would be for ever; copy or pickle the "
            "model outside the context"
        )

    def _check_sampling(self) -> None:
        if self.router.by_max and self.router.module.training:
            raise RoutingError(
                f"{self._where} draws its experts at random in train mode and makes no choice to record or replay; "
                "call .eval() on it"
            )

    def _once(self, columns: int) -> None:
        """columns: how many experts per token all selections of one forward have named."""
        if columns != self.router.top_k:
            raise RoutingError(
                f"{self._where} ran {columns // self.router.top_k} "
                f"top-{self.router.top_k} selections of {self.router.num_experts} experts in its forward, expected one"
            )


class TopkRecorder(TopkHook):
    """Keeps the ids [N, K] int64 of every forward of one router."""

    def __init__(self, router: Router, *, weights: bool = False) -> None:
        super().__init__(router)
        self.keep_weights = weights
        self.weights: list[Tensor] = []  # combine weights [N, K] of every forward, if kept
        self.seen: list[Tensor] = []
        self._found: list[
            tuple[Tensor, Tensor, Tensor]
        ] = []  # scores [N, E]; their top-k values and ids [N, K]
        self._position: int | None = (
            None  # of the ids in the router's output, once a first forward has shown it
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        out, ids = self.observe(args, kwargs)
        if not in_backward():
            self.seen.append(ids)
            if self.keep_weights:
                self.weights.append(
                    out[combine_weights_position(out, self.router.top_k, self._where)].detach()
                )
        return out

    def observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Tensor]:
        """The router's own output, and the experts it selected."""
        if (
            self._position is not None
        ):  # ten times cheaper than a function mode, and decoding pays for it every step
            out = self.forward(*args, **kwargs)
            return out, out[self._position]
        out, (_, _, ids) = self.observe_selection(args, kwargs)
        if isinstance(out, tuple):
            self._position = next((i for i, item in enumerate(out) if item is ids), None)
        return out, ids

    def observe_selection(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, tuple[Tensor, Tensor, Tensor]]:
        """The router's own output; the scores [N, E] it selected from, the values and the ids [N, K] it selected."""
        self._check_sampling()
        self._found.clear()
        with self:
            out = self.forward(*args, **kwargs)
        self._once(sum(ids.shape[1] for _, _, ids in self._found))
        if len(self._found) == 1:
            return out, self._found.pop()
        scores, values, ids = zip(
            *self._found, strict=True
        )  # one expert after the other, from scores masked meanwhile
        return out, (scores[0], torch.cat(values, 1), torch.cat(ids, 1))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        scores, k, width = _operands(self.router, func, args, kwargs)
        if k and width == self.router.num_experts:
            self._found.append((_rows(scores), _rows(out[0]), _rows(out[1])))
        return out


class TopkReplayer(TopkHook):
    """Makes one router select the experts of `route` in one forward and in every recompute of it."""

    def __init__(
        self,
        router: Router,
        route: Tensor,  # [T, K] uint8 | uint16
        valid: Tensor | None,  # [T] bool, None = all rows
        *,
        native: bool,
        mass: bool = False,
        soft: float | None = None,
        weights: Tensor | None = None,  # [T, K] floating
    ) -> None:
        """native: also keep the router's own choice; mass: and the gate mass, see `modes.gate_mass`; soft, weights: see
        `modes.soften`, `modes.with_weights`."""
        super().__init__(router)
        self.fired = False
        self._thread = threading.get_ident()
        self.recompute = False  # what runs now is an activation recompute (compiled code cannot ask `in_backward`)
        self.native: Tensor | None = None  # [T, K], dtype of route
        self.gate_mass: Tensor | None = None  # [T] float32, see `gate_mass`
        self._route = route
        self._valid = valid
        self._keep_native, self._keep_mass = native, mass
        self._target: Tensor | None = None  # [T, K] int64 while the router runs
        self._answered = 0  # experts per token
        self.replaced: Tensor | None = (
            None  # [] float32, share of replayed experts that soft replay replaced
        )
        self._soft, self._weights = soft, weights
        self._probabilities: Tensor | None = None  # [T, E] the router's own, for soft replay
        self._wants_own = native or valid is not None or soft is not None
        self._hides_own = router.num_groups > 1 or router.by_max
        self._recorder = TopkRecorder(router)
        self._own: tuple[Tensor, Tensor, Tensor] | None = (
            None  # scores, values and ids of the router's own choice
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if in_backward() and not self.recompute and called_by_checkpoint():
            return self.forward(
                *args, **kwargs
            )  # a checkpoint of another forward, which was not replayed
        self._refuse_foreign_checkpoint()
        if not self.fired:
            self._first_call(args, kwargs)
        elif not (self.recompute or in_backward()):  # a recompute takes what the forward took
            raise RoutingError(
                f"layer {self.router.layer} fired twice in one replay; open one replay context per forward"
            )
        self._check_sampling()
        self._target, self._answered = (
            self._route.to(torch.int64),
            0,
        )  # the only int64 copy, one layer at a time
        try:
            with self:
                out = self.forward(*args, **kwargs)
        finally:
            self._target = self._own = self._probabilities = None
        self._once(self._answered)
        self._wants_own = False
        if self._weights is not None:
            out = replace_combine_weights(
                out, self._weights, self._valid, self.router.top_k, self._where
            )
        return out

    def _refuse_foreign_checkpoint(self) -> None:
        """Only the thread that opened the replay has its checkpoints recomputed in it (`recompute.carried`)."""
        if (
            torch.compiler.is_compiling()
            or self.recompute
            or threading.get_ident() == self._thread
            or in_backward()
        ):
            return
        if called_by_checkpoint():
            raise RoutingError(
                f"layer {self.router.layer} is replayed in one thread and checkpointed in another, where its recompute "
                "would route natively; open the replay in the thread that runs the forward"
            )

    def _first_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.fired = True
        if (
            self._wants_own and self._hides_own
        ):  # once answered, it selects from scores masked by the answer
            with torch.no_grad():
                _, self._own = self._recorder.observe_selection(args, kwargs)
            self._follow(self._own[0])
            self._fill(self._own[2])

    def _answer(self, func: Any, scores: Tensor, k: int, select: Callable[[], Any]) -> Any:
        """The replayed selection of k experts; `select()` makes the router's own from the same scores."""
        assert self._target is not None
        rows = _rows(scores)
        self._follow(scores)
        self._check_rows(len(rows))
        first, self._answered = self._answered, self._answered + k
        if self._answered > self.router.top_k:
            return select()  # too many selections, an error when the router is done
        if self._wants_own and first == 0:
            with torch.no_grad():
                if not self._hides_own:
                    values, own = select()
                    self._own = (rows, _rows(values), _rows(own))
                    self._fill(self._own[2])
                    self._target = self._route.to(torch.int64)
                self._soften(rows)
                assert self._own is not None
                own_scores, values, own = self._own
                if self._keep_native:
                    self.native = own.to(self._route.dtype)
                if self._keep_mass:
                    self.gate_mass = gate_mass(rows.gather(-1, self._target), values, own_scores)
        return _select(func, scores, self._target[:, first : self._answered])

    def _follow(self, scores: Tensor) -> None:
        """Move the routes to where the router computes: its parameters may be offloaded, or lie on several devices."""
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

    def _fill(self, own: Tensor) -> None:
        """Rows without a route take the router's own choice [T, K]. A recompute must not choose again."""
        self._check_rows(len(own))
        if self._valid is not None:
            self._route = torch.where(self._valid[:, None], self._route.to(torch.int64), own).to(
                self._route.dtype
            )

    def _soften(self, scores: Tensor) -> None:
        """Let live scores overrule the route, once: a recompute takes what the forward took."""
        if self._soft is None or self.replaced is not None:
            return
        assert self._own is not None
        assert self._target is not None
        probabilities = (
            scores.detach().softmax(-1) if self._probabilities is None else self._probabilities
        )
        self._target, replaced = soften(self._target, self._own[2], probabilities, ratio=self._soft)
        self.replaced = (replaced if self._valid is None else replaced[self._valid]).float().mean()
        self._route = self._target.to(self._route.dtype)

    def _check_rows(self, rows: int) -> None:
        if rows != len(self._route):
            raise RoutingError(
                f"layer {self.router.layer} routes {rows} tokens, but the trace has {len(self._route)} rows"
            )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        router = self.router
        assert self._target is not None
        scores, k, width = _operands(router, func, args, kwargs)
        if k and width == router.num_experts:
            return self._answer(func, scores, k, lambda: func(*args, **(kwargs or {})))
        if k and width == router.num_groups:
            self._follow(scores)
            self._soften(scores)  # before its groups are named
            return _select(func, scores, _groups_of(self._target, router))
        out = func(*args, **(kwargs or {}))
        if func in PROBABILITIES and self._soft is not None and not self._answered:
            self._probabilities = _rows(out.detach())
        return out


def _operands(
    router: Router, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[Tensor, int, int]:
    """(scores, k, width) of a call that selects k of `width` experts or groups for every token; k = 0 of any other.

    Group-limited routers also score groups with a 3-D top-k, and with one group its last axis is as long as the
    experts'. Of routers without groups a 3-D call is the selection for [B, S] tokens.
    """
    if func not in _TOPK and not (router.by_max and func in _MAX):
        return _NO_TENSOR, 0, 0
    named = kwargs or {}
    scores = args[0] if args else named["input"]
    if func in _MAX:  # one expert per call
        k = 1 if named.get("keepdim") else 0
        return scores, k, scores.shape[-1]
    k, width = args[1] if len(args) > 1 else named["k"], scores.shape[-1]
    if scores.dim() > 2 and router.num_groups:
        return scores, 0, width
    groups = router.num_groups > 1 and (k, width) == (router.top_groups, router.num_groups)
    return scores, k if groups or k == router.top_k else 0, width


def _rows(x: Tensor) -> Tensor:  # [..., n] -> [T, n], itself if it is that already
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _select(func: Any, scores: Tensor, ids: Tensor) -> Any:
    """What `func` returns, had it selected these ids [T, k]."""
    ids = ids.view(*scores.shape[:-1], ids.shape[1])
    kind = torch.return_types.max if func in _MAX else torch.return_types.topk
    return kind((scores.gather(-1, ids), ids))


def _groups_of(ids: Tensor, router: Router) -> Tensor:  # [T, K] -> [T, max(K, top_groups)]
    """Groups to keep, so that no replayed expert is masked out of its own scores (DeepSeek-V2 weighs what is left).

    A group may be named more than once: the routers only mark the groups they are given.
    """
    groups = ids // (router.num_experts // router.num_groups)
    missing = router.top_groups - groups.shape[1]
    return groups if missing <= 0 else torch.cat([groups, groups[:, :1].expand(-1, missing)], 1)
