"""The objects that `Routers.record()` and `Routers.replay()` yield."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mode
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onepolicy.config.replay import MIN_AGREEMENT
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.comparison import LayerComparison, Scratch
from onepolicy.replay.layers import Router
from onepolicy.replay.recompute import carry_into_recomputes
from onepolicy.replay.topk_hook import (
    TopkRecorder,
    TopkReplayer,
    in_backward,
    override_attribute,
)
from onepolicy.types import RoutingTrace, TraceOrigin, id_dtype


class _FedBatch(NamedTuple):
    """The batch that one recorded forward was fed."""

    samples: int
    tokens: int  # per sample
    cache: weakref.ref[Any] | None  # the key-value cache
    continues: bool  # whether it continues the sequences of the forward before


class RouteRecorder:
    """The routes of every forward that ran inside `Routers.record()`.

    Its rows are the flattened [B * S] tokens that the routers saw, forward after forward.
    """

    hook: ClassVar[type[TopkRecorder]] = TopkRecorder

    def __init__(self, routers: Sequence[Router], *, weights: bool = False) -> None:
        self._routers = routers
        self.recorders = [self.hook(router, weights=weights) for router in routers]
        self._fed: list[_FedBatch] = []

    def trace(self) -> RoutingTrace:
        """Return the routes of all recorded forwards, one after the other.

        Rows of a `generate()` of several samples are ordered by step. No forward of the batch has
        that order, so `op.routes_of_generate` returns each sample's rows.

        Returns:
            A trace of ids [T, L, K], uint8 or uint16, all rows valid. Its combine weights are
            [T, L, K] in the router's dtype if they were recorded, else None.

        Raises:
            RoutingError: no forward was recorded, or a router ran more or less often than others.
        """
        self._check_not_empty()
        dtype, device = id_dtype(self._routers[0].num_experts), self.recorders[0].seen[0].device
        ids = [torch.cat(recorder.seen).to(device, dtype) for recorder in self.recorders]
        trace = _trace(torch.stack(ids, dim=1), self._routers)
        if self.recorders[0].keep_weights:
            weights = [torch.cat(recorder.weights).to(device) for recorder in self.recorders]
            trace = dataclasses.replace(trace, weights=torch.stack(weights, dim=1))
        return trace.with_origin(self._origin())

    def pop_ids(self) -> list[Tensor]:
        """Return the ids [N, K] int64 of each layer in the last forward, and drop them.

        A decode loop calls this after every forward, so that the recording does not grow.

        Raises:
            RoutingError: not exactly one forward ran since the last call.
        """
        popped = []
        for recorder in self.recorders:
            if len(recorder.seen) != 1:
                layer, times = recorder.router.layer, len(recorder.seen)
                raise RoutingError(
                    f"layer {layer} was called {times} times since the last pop_ids(), expected one"
                )
            popped.append(recorder.seen.pop())
        self._fed.clear()
        return popped

    def pop_weights(self) -> list[Tensor] | None:
        """Return each layer's combine weights [N, K] of the forward whose ids were popped.

        None if the recording has no weights.
        """
        if not self.recorders[0].keep_weights:
            return None
        return [recorder.weights.pop() for recorder in self.recorders]

    def forward_rows(self) -> list[int]:
        """Return the number of rows of every recorded forward."""
        return [len(ids) for ids in self.recorders[0].seen]

    def check(self) -> None:
        """Raise RoutingError unless every router ran once per forward, on the same rows."""
        rows = [tuple(len(ids) for ids in recorder.seen) for recorder in self.recorders]
        usual = mode(rows)
        for router, found in zip(self._routers, rows, strict=True):
            if found != usual:
                raise RoutingError(
                    f"layer {router.layer}, {router.path!r}: was called {len(found)} times, others "
                    f"{len(usual)} times, or on other row counts; a block must call its router "
                    "once per forward (was it fused or replaced?)"
                )

    @contextmanager
    def watching_batches(self, layer: nn.Module) -> Iterator[None]:
        """Note the batches that this decoder layer is fed, because routers see them flattened."""
        handle: RemovableHandle = layer.register_forward_pre_hook(
            self._note_batch, with_kwargs=True
        )
        try:
            yield
        finally:
            handle.remove()

    def _note_batch(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return
        samples, tokens = hidden.shape[:2]
        given = kwargs.get("past_key_values", kwargs.get("past_key_value"))
        cache = None
        if hasattr(given, "__weakref__"):
            cache = weakref.ref(given)
        continues = False
        if self._fed and self._fed[-1].samples == samples:
            continues = tokens == 1 or _same_cache(self._fed[-1].cache, cache)
        self._fed.append(_FedBatch(samples, tokens, cache, continues))

    def _origin(self) -> TraceOrigin:
        rows = self.forward_rows()
        if [fed.samples * fed.tokens for fed in self._fed] != rows:  # compiled code is not watched
            return TraceOrigin()
        starts, first = [0], 0
        for fed in self._fed:
            if not fed.continues:
                starts += [first + sample * fed.tokens for sample in range(fed.samples)]
            first += fed.samples * fed.tokens
        steps: tuple[tuple[int, int], ...] = ()
        if any(fed.continues and fed.samples > 1 for fed in self._fed):
            steps = tuple((fed.samples, fed.tokens) for fed in self._fed)
        return TraceOrigin(tuple(sorted(set(starts))), steps)

    def _check_not_empty(self) -> None:
        self.check()
        if not self.recorders[0].seen:
            raise RoutingError("no forward was recorded")


class ReplayHandle:
    """One replayed forward: its trace, and the routers' own choice if that was kept.

    Only that forward, and the recomputes of its backward, replay the trace.

    Attributes:
        trace: the routes. The rows of dropped samples are not valid.
        dropped: numbers of the samples that `on_mismatch="drop"` left to the routers.
    """

    hook: ClassVar[type[TopkReplayer]] = TopkReplayer

    def __init__(
        self,
        routers: Sequence[Router],
        trace: RoutingTrace,
        *,
        native: bool,
        soft: float | None,
        weights: bool,
        compared: Tensor | None = None,  # [m] int64
    ) -> None:
        """Copy the trace: a recompute may come much later, and engines reuse their buffers.

        native, soft, weights: as of `Routers.replay`. compared: rows for which a check by `Routers`
        wants the routers' own choice; it is not offered to the caller.
        """
        self._routers = routers
        self._wants_native = native
        self.trace = _copied(trace, weights=weights)
        self.layers = trace.layers
        self.dropped: tuple[int, ...] = ()
        valid = None
        if not bool(trace.valid.all()):
            valid = self.trace.valid
        recorded: Sequence[Tensor | None] = [None] * len(routers)
        if weights and self.trace.weights is not None:
            recorded = self.trace.weights.unbind(1)
        self._comparisons: list[LayerComparison | None] = [None] * len(routers)
        if compared is not None:
            scratch = Scratch()
            self._comparisons = [LayerComparison(compared, r.top_k, scratch) for r in routers]
        self._replayers = [
            self.hook(
                router,
                self.trace.ids[:, column],
                valid,
                native=native,
                mass=native,
                soft=soft,
                weights=recorded[column],
                comparison=comparison,
            )
            for column, (router, comparison) in enumerate(
                zip(routers, self._comparisons, strict=True)
            )
        ]

    def native(self) -> RoutingTrace:
        """Return the routers' own choice on the same rows, as a trace of valid rows.

        Raises:
            RoutingError: it was not kept. Open `replay(trace, native=True)` and run a forward.
        """
        if not self._wants_native:
            raise RoutingError(
                "the router's own choice was not kept: replay(trace, native=True) and run a forward"
            )
        chosen = []
        for replayer in self._replayers:
            if replayer.native is None:
                raise RoutingError(
                    "the router's own choice was not kept: run a forward under "
                    "replay(trace, native=True)"
                )
            # A model's layers may be on several devices.
            chosen.append(replayer.native.to(self.trace.ids.device))
        return _trace(torch.stack(chosen, dim=1), self._routers)

    @property
    def keeps_native(self) -> bool:
        """Return whether the caller asked for the routers' own choice."""
        return self._wants_native

    def lacking_experts(self) -> Tensor:
        """Return [T, L] float32: how many of a row's K experts the router replaces, at most.

        Only for a replay that is checked, after its forward. These are the other experts that score
        above the lowest replayed one (`comparison.better_experts`).
        """
        better = self._stacked(
            [None if each is None else each.better for each in self._comparisons]
        )
        return self._lacking(better)

    def _lacking(self, better: Tensor) -> Tensor:
        return (better - (self.trace.top_k - 1)).clamp_(0, self.trace.top_k)

    def native_rows(self) -> Tensor:
        """Return [m, L, K] int64: the routers' own choice for the rows that are compared.

        Only for a replay that is checked, after its forward.
        """
        return self._stacked(
            [None if each is None else each.own_choice() for each in self._comparisons]
        )

    def forget_rows(self) -> None:
        """Free the memory of `native_rows`, which a check asks for when the forward is done."""
        for each in self._comparisons:
            if each is not None:
                each.forget_rows()

    def judge_first_layer(self, judge: Callable[[Tensor], Tensor]) -> None:
        """Drop the rows that `judge` finds wrong in the first layer, before any is replayed there.

        judge: is given the first layer's `lacking_experts` [T, 1] and returns the rows that stay
        valid, [T] bool.
        """

        def drop(better: Tensor) -> None:
            if torch.compiler.is_compiling():
                raise RoutingError(
                    'on_mismatch="drop" decides while the first router runs, which a compiled '
                    'router cannot; leave it uncompiled, or give on_mismatch="stop"'
                )
            keep = judge(self._lacking(better[:, None].to(self.trace.ids.device)))
            if bool(keep.all()):
                return
            self.trace.valid.logical_and_(keep)
            for replayer in self._replayers:
                replayer.leave_native(self.trace.valid)

        first = self._comparisons[0]
        assert first is not None, "a check judges what its replay was told to keep"
        first.judge = drop

    def _stacked(self, per_layer: list[Tensor | None]) -> Tensor:
        device = self.trace.ids.device  # a model's layers may be on several
        kept = [each.to(device) for each in per_layer if each is not None]
        assert len(kept) == len(self._replayers), (
            "a check asks for what its replay was told to keep"
        )
        return torch.stack(kept, dim=1)

    def check_alignment(
        self, bounds: Tensor | None = None, *, least: float = MIN_AGREEMENT
    ) -> None:
        """Raise if the routes are not those of this forward's tokens and weights.

        Call it after a forward under `replay(trace, native=True)`.

        Args:
            bounds: [S + 1] integer, the first row of every packed sample, then T; None if unknown.
            least: the lowest agreement that passes, see `onepolicy.check_alignment`.

        Raises:
            RoutingError: the routes are of another forward. The message names the likely cause.
        """
        check_alignment(self.trace, self.native(), bounds, least=least)

    def gate_mass(self) -> Tensor:
        """Return [T, L] float32: the replayed experts' part of the best experts' scores.

        See `modes.gate_mass`.

        Raises:
            RoutingError: it was not kept. Open `replay(trace, native=True)` and run a forward.
        """
        kept = [
            replayer.gate_mass for replayer in self._replayers if replayer.gate_mass is not None
        ]
        if len(kept) != len(self._replayers):
            raise RoutingError(
                "gate mass was not kept: replay(trace, native=True) and run a forward"
            )
        return torch.stack([mass.to(self.trace.ids.device) for mass in kept], dim=1)

    def replaced_fraction(self) -> Tensor:
        """Return [L] float32: the fraction of each layer's experts that soft replay replaced.

        Only valid rows count.
        """
        found = [replayer.replaced for replayer in self._replayers if replayer.replaced is not None]
        return torch.stack([fraction.to(self.trace.ids.device) for fraction in found])

    def check(self) -> None:
        """Raise RoutingError unless every router ran and took its routes."""
        for replayer in self._replayers:
            if not replayer.called:
                raise RoutingError(
                    f"layer {replayer.router.layer}: {replayer.router.path!r} was not called while "
                    "its routes were replayed; no forward ran, or its block does not call it (a "
                    "fused or replaced block?)"
                )

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Replay in here, and in every later recompute of a checkpoint that starts in here."""
        with self._installed(), carry_into_recomputes(self._installed):
            yield

    @contextmanager
    def _installed(self) -> Iterator[None]:
        recompute = in_backward()
        # A checkpoint may be inside another one.
        before = [replayer.recompute for replayer in self._replayers]
        forwards = [(replayer.router.module, replayer.__call__) for replayer in self._replayers]
        with override_attribute("forward", forwards):
            try:
                for replayer in self._replayers:
                    replayer.recompute = recompute
                yield
            finally:
                for replayer, outer in zip(self._replayers, before, strict=True):
                    replayer.recompute = outer


def _copied(trace: RoutingTrace, *, weights: bool) -> RoutingTrace:
    if weights and trace.weights is not None:
        trace = dataclasses.replace(trace, weights=trace.weights.clone())
    return dataclasses.replace(trace, ids=trace.ids.clone(), valid=trace.valid.clone())


def _trace(ids: Tensor, routers: Sequence[Router]) -> RoutingTrace:
    """Return a trace of valid rows with these ids [T, L, K] of any integer dtype."""
    num_experts = routers[0].num_experts
    valid = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    layers = tuple(router.layer for router in routers)
    return RoutingTrace(ids.to(id_dtype(num_experts)), valid, layers, num_experts)


def _same_cache(first: weakref.ref[Any] | None, second: weakref.ref[Any] | None) -> bool:
    return first is not None and second is not None and first() is not None and first() is second()
