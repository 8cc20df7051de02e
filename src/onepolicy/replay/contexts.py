"""What `record()` and `replay()` hand out: a tape of the routes a forward took, and a replay with its account."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import mode

import torch
from torch import Tensor

from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.layers import Router
from onepolicy.replay.recompute import carried
from onepolicy.replay.seam import Recorder, Replayer, in_backward, override
from onepolicy.types import RoutingTrace, id_dtype


def _trace(ids: Tensor, routers: Sequence[Router]) -> RoutingTrace:  # ids [T, L, K] any integer dtype
    experts = routers[0].num_experts
    valid = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
    return RoutingTrace(ids.to(id_dtype(experts)), valid, tuple(r.layer for r in routers), experts)


class Tape:
    """Routes of every forward run while recording. Rows are the flattened [B * S] tokens the routers saw."""

    def __init__(self, routers: Sequence[Router], *, weights: bool = False) -> None:
        self._routers = routers
        self.recorders = [Recorder(router, weights=weights) for router in routers]

    def ids(self) -> list[Tensor]:
        """Of the last forward, per layer: [N, K] int64, the router's own tensors."""
        self.check()
        if not self.recorders[0].seen:
            raise RoutingError("no forward was recorded")
        return [recorder.seen[-1] for recorder in self.recorders]

    def take(self) -> list[Tensor]:
        """`ids()` of the one forward since the last `take()`, and forget it. The decode loop's way to read the tape."""
        taken = []
        for recorder in self.recorders:
            if len(recorder.seen) != 1:
                layer, times = recorder.router.layer, len(recorder.seen)
                raise RoutingError(f"layer {layer} fired {times} times since the last take(), expected one")
            taken.append(recorder.seen.pop())
        return taken

    def take_weights(self) -> list[Tensor] | None:
        """Combine weights [N, K] per layer of the forward whose ids were taken; None if they are not recorded."""
        if not self.recorders[0].keep_weights:
            return None
        return [recorder.weights.pop() for recorder in self.recorders]

    def trace(self) -> RoutingTrace:
        """Rows of all recorded forwards, one after the other."""
        self.check()
        if not self.recorders[0].seen:
            raise RoutingError("no forward was recorded")
        dtype = id_dtype(self._routers[0].num_experts)
        trace = _trace(torch.stack([torch.cat(r.seen).to(dtype) for r in self.recorders], dim=1), self._routers)
        if not self.recorders[0].keep_weights:
            return trace
        weights = torch.stack([torch.cat(r.weights) for r in self.recorders], dim=1)
        return dataclasses.replace(trace, weights=weights)

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


class Replayed:
    """One replayed forward. It and its backward's recomputes see the trace; nothing else does."""

    def __init__(
        self, routers: Sequence[Router], trace: RoutingTrace, *, native: bool, soft: float | None, weights: bool
    ) -> None:
        self._routers = routers
        # A recompute may come much later, and engines reuse their buffers.
        trace = dataclasses.replace(trace, ids=trace.ids.clone(), valid=trace.valid.clone())
        if weights and trace.weights is not None:
            trace = dataclasses.replace(trace, weights=trace.weights.clone())
        self._trace = trace
        self.layers = trace.layers
        valid = None if bool(trace.valid.all()) else trace.valid
        recorded = trace.weights.unbind(1) if weights and trace.weights is not None else [None] * len(routers)
        self._replayers = [
            Replayer(router, ids, valid, native=native, soft=soft, weights=own)
            for router, ids, own in zip(routers, trace.ids.unbind(1), recorded, strict=True)
        ]

    def native(self) -> RoutingTrace:
        """What the routers would have chosen themselves on the same rows, all of them valid."""
        chosen = []
        for replayer in self._replayers:
            if replayer.native is None:
                raise RoutingError("the router's own choice was not kept: replay(trace, native=True) and run a forward")
            chosen.append(replayer.native)
        return _trace(torch.stack(chosen, dim=1), self._routers)

    def check_alignment(self, bounds: Tensor | None = None) -> None:
        """RoutingError, naming the likely cause, if the routes are not those of this forward's tokens and weights.

        After a forward under replay(trace, native=True); bounds [S + 1]: first row of every packed sample and the end.
        """
        check_alignment(self._trace, self.native(), bounds)

    def gate_mass(self) -> Tensor:
        """[T, L] float32: how much of what its best experts score the replayed experts hold (`modes.gate_mass`)."""
        kept = [replayer.gate_mass for replayer in self._replayers if replayer.gate_mass is not None]
        if len(kept) != len(self._replayers):
            raise RoutingError("gate mass was not kept: replay(trace, native=True) and run a forward")
        return torch.stack(kept, dim=1)

    def replaced(self) -> Tensor:  # [L] float32
        """Soft replay: share of each layer's replayed experts (valid rows only) that gave way to the router's own."""
        return torch.stack([replayer.replaced for replayer in self._replayers if replayer.replaced is not None])

    def check(self) -> None:
        """Every router took its routes."""
        for replayer in self._replayers:
            if not replayer.fired:
                raise RoutingError(
                    f"layer {replayer.router.layer}: {replayer.router.path!r} did not fire while its routes were "
                    "replayed; no forward ran, or its block does not call it (a fused or replaced block?)"
                )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Routers replay; activation checkpoints started in here replay again when they recompute, whenever that is."""
        with self._installed(), carried(self._installed):
            yield

    @contextmanager
    def _installed(self) -> Iterator[None]:
        recompute = in_backward()
        before = [replayer.recompute for replayer in self._replayers]  # a checkpoint may stand inside another
        with override("forward", [(r.router.module, r.__call__) for r in self._replayers]):
            try:
                for replayer in self._replayers:
                    replayer.recompute = recompute
                yield
            finally:
                for replayer, outer in zip(self._replayers, before, strict=True):
                    replayer.recompute = outer
