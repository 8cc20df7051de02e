"""What `record()` and `replay()` hand out: a tape of the routes a forward took, and a replay with its account."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mode
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onepolicy.config.objective import MIN_AGREEMENT
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.layers import Router
from onepolicy.replay.recompute import carry_into_recomputes
from onepolicy.replay.topk_hook import TopkRecorder, TopkReplayer, in_backward, override_attribute
from onepolicy.types import RoutingTrace, TraceOrigin, id_dtype


def _trace(
    ids: Tensor, routers: Sequence[Router]
) -> RoutingTrace:  # ids [T, L, K] any integer dtype
    experts = routers[0].num_experts
    valid = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    return RoutingTrace(ids.to(id_dtype(experts)), valid, tuple(r.layer for r in routers), experts)


class _FedBatch(NamedTuple):
    """What one recorded forward was fed."""

    samples: int
    tokens: int  # of each sample
    cache: weakref.ref[Any] | None  # its key-value cache
    continues: bool  # does it go on where another recorded forward stopped?


class RouteRecorder:
    """Routes of every forward run while recording. Rows are the flattened [B * S] tokens the routers saw."""

    def __init__(self, routers: Sequence[Router], *, weights: bool = False) -> None:
        self._routers = routers
        self.recorders = [TopkRecorder(router, weights=weights) for router in routers]
        self._fed: list[_FedBatch] = []

    @contextmanager
    def watching_batches(self, layer: nn.Module) -> Iterator[None]:
        """Note the batches that a decoder layer is fed: routers see them flattened."""
        handle: RemovableHandle = layer.register_forward_pre_hook(self._note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or in_backward():
            return
        hidden = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return
        samples, tokens = hidden.shape[:2]
        found = kwargs.get("past_key_values", kwargs.get("past_key_value"))
        cache = weakref.ref(found) if hasattr(found, "__weakref__") else None
        before = self._fed[-1] if self._fed else None
        continues = (
            before is not None
            and before.samples == samples
            and (tokens == 1 or _same_cache(before.cache, cache))
        )
        self._fed.append(_FedBatch(samples, tokens, cache, continues))

    def forward_rows(self) -> list[int]:
        """Of every recorded forward."""
        return [len(ids) for ids in self.recorders[0].seen]

    def _origin(self) -> TraceOrigin:
        rows = self.forward_rows()
        if [fed.samples * fed.tokens for fed in self._fed] != rows:  # compiled code is not watched
            return TraceOrigin("recorded" if len(rows) == 1 else "recorded, several forwards")
        steps = tuple((fed.samples, fed.tokens) for fed in self._fed)
        by_step = any(fed.continues and fed.samples > 1 for fed in self._fed)
        return TraceOrigin("recorded", steps if by_step else ())

    def last_ids(self) -> list[Tensor]:
        """Of the last forward, per layer: [N, K] int64, the router's own tensors."""
        self.check()
        if not self.recorders[0].seen:
            raise RoutingError("no forward was recorded")
        return [recorder.seen[-1] for recorder in self.recorders]

    def pop_ids(self) -> list[Tensor]:
        """`last_ids()` of the one forward since the last `pop_ids()`, and forget it. The decode loop's way to read the tape."""
        taken = []
        for recorder in self.recorders:
            if len(recorder.seen) != 1:
                layer, times = recorder.router.layer, len(recorder.seen)
                raise RoutingError(
                    f"layer {layer} fired {times} times since the last pop_ids(), expected one"
                )
            taken.append(recorder.seen.pop())
        self._fed.clear()
        return taken

    def pop_weights(self) -> list[Tensor] | None:
        """Combine weights [N, K] per layer of the forward whose ids were taken; None if they are not recorded."""
        if not self.recorders[0].keep_weights:
            return None
        return [recorder.weights.pop() for recorder in self.recorders]

    def trace(self) -> RoutingTrace:
        """Rows of all recorded forwards, one after the other. Those of a `generate()` of several samples are by step,
        which no forward of the batch is: `op.routes_of_generate` gives each sample's."""
        self.check()
        if not self.recorders[0].seen:
            raise RoutingError("no forward was recorded")
        dtype = id_dtype(self._routers[0].num_experts)
        trace = _trace(
            torch.stack([torch.cat(r.seen).to(dtype) for r in self.recorders], dim=1), self._routers
        )
        if self.recorders[0].keep_weights:
            weights = torch.stack([torch.cat(r.weights) for r in self.recorders], dim=1)
            trace = dataclasses.replace(trace, weights=weights)
        return trace.with_origin(self._origin())

    def check(self) -> None:
        """Every router fired once per forward, on the same rows."""
        rows = [tuple(len(ids) for ids in recorder.seen) for recorder in self.recorders]
        usual = mode(rows)
        for router, own in zip(self._routers, rows, strict=True):
            if own != usual:
                raise RoutingError(
                    f"layer {router.layer}, {router.path!r}: fired {len(own)} times, others {len(usual)} times, or "
                    "on other row counts; a block must call its router once per forward (was it fused or replaced?)"
                )


def _same_cache(first: weakref.ref[Any] | None, second: weakref.ref[Any] | None) -> bool:
    """Are both the same cache?"""
    return first is not None and second is not None and first() is not None and first() is second()


class ReplayHandle:
    """One replayed forward. It and its backward's recomputes see the trace; nothing else does."""

    def __init__(
        self,
        routers: Sequence[Router],
        trace: RoutingTrace,
        *,
        native: bool,
        soft: float | None,
        weights: bool,
        checked: bool = False,
    ) -> None:
        """checked: keep the routers' own choice for a check, and not for the caller."""
        self._routers = routers
        self._wants_native = native
        # A recompute may come much later, and engines reuse their buffers.
        trace = dataclasses.replace(trace, ids=trace.ids.clone(), valid=trace.valid.clone())
        if weights and trace.weights is not None:
            trace = dataclasses.replace(trace, weights=trace.weights.clone())
        self.trace = trace  # a copy
        self.layers = trace.layers
        valid = None if bool(trace.valid.all()) else trace.valid
        recorded = (
            trace.weights.unbind(1)
            if weights and trace.weights is not None
            else [None] * len(routers)
        )
        self._replayers = [
            TopkReplayer(
                router, ids, valid, native=native or checked, mass=native, soft=soft, weights=own
            )
            for router, ids, own in zip(routers, trace.ids.unbind(1), recorded, strict=True)
        ]

    def native(self) -> RoutingTrace:
        """What the routers would have chosen themselves on the same rows, all of them valid."""
        if not self._wants_native:
            raise RoutingError(
                "the router's own choice was not kept: replay(trace, native=True) and run a forward"
            )
        return self.native_trace()

    def native_trace(self) -> RoutingTrace:
        """`native()`, also where only a check wanted it."""
        chosen = []
        for replayer in self._replayers:
            if replayer.native is None:
                raise RoutingError(
                    "the router's own choice was not kept: run a forward under replay(trace, native=True)"
                )
            chosen.append(
                replayer.native.to(self.trace.ids.device)
            )  # layers may lie on several devices
        return _trace(torch.stack(chosen, dim=1), self._routers)

    def check_alignment(
        self, bounds: Tensor | None = None, *, least: float = MIN_AGREEMENT
    ) -> None:
        """RoutingError, naming the likely cause, if the routes are not those of this forward's tokens and weights.

        After a forward under replay(trace, native=True); bounds [S + 1]: first row of every packed sample and the end.
        least: how many of a router's experts must agree, see `alignment.check_alignment`.
        """
        check_alignment(self.trace, self.native(), bounds, least=least)

    def gate_mass(self) -> Tensor:
        """[T, L] float32: how much of what its best experts score the replayed experts hold (`modes.gate_mass`)."""
        kept = [
            replayer.gate_mass for replayer in self._replayers if replayer.gate_mass is not None
        ]
        if len(kept) != len(self._replayers):
            raise RoutingError(
                "gate mass was not kept: replay(trace, native=True) and run a forward"
            )
        return torch.stack([mass.to(self.trace.ids.device) for mass in kept], dim=1)

    def replaced_fraction(self) -> Tensor:  # [L] float32
        """Soft replay: share of each layer's replayed experts (valid rows only) that gave way to the router's own."""
        found = [replayer.replaced for replayer in self._replayers if replayer.replaced is not None]
        return torch.stack([share.to(self.trace.ids.device) for share in found])

    def check(self) -> None:
        """Every router took its routes."""
        for replayer in self._replayers:
            if not replayer.fired:
                raise RoutingError(
                    f"layer {replayer.router.layer}: {replayer.router.path!r} did not fire while its routes were "
                    "replayed; no forward ran, or its block does not call it (a fused or replaced block?)"
                )

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Routers replay; activation checkpoints started in here replay again when they recompute, whenever that is."""
        with self._installed(), carry_into_recomputes(self._installed):
            yield

    @contextmanager
    def _installed(self) -> Iterator[None]:
        recompute = in_backward()
        before = [
            replayer.recompute for replayer in self._replayers
        ]  # a checkpoint may stand inside another
        with override_attribute(
            "forward", [(r.router.module, r.__call__) for r in self._replayers]
        ):
            try:
                for replayer in self._replayers:
                    replayer.recompute = recompute
                yield
            finally:
                for replayer, outer in zip(self._replayers, before, strict=True):
                    replayer.recompute = outer
