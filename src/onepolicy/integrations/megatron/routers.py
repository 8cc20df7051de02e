"""Record and replay of one bound Megatron model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.integrations.core.layout import sequence_first
from onepolicy.integrations.megatron.find import FoundRouters
from onepolicy.integrations.megatron.hooks import MegatronRecorder, MegatronReplayer
from onepolicy.integrations.megatron.settings import refuse_settings
from onepolicy.replay.bound import BoundRouters
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.replay.layers import Router
from onepolicy.replay.sample_checks import SampleChecks
from onepolicy.replay.topk_hook import TopkRecorder, TopkReplayer, override_attribute
from onepolicy.types import RoutingTrace, TraceOrigin, id_dtype, index_ids


class MegatronTape(RouteRecorder):
    """The routes of every forward that ran inside `record()`."""

    hook: ClassVar[type[TopkRecorder]] = MegatronRecorder

    def __init__(self, routers: Sequence[Router], ranks: SequenceRanks) -> None:
        super().__init__(routers)
        self._ranks = ranks

    def trace(self) -> RoutingTrace:
        """Return the routes of all recorded forwards, one after the other.

        With sequence parallelism this is a collective: every rank of the tensor-parallel group must
        call it, and gets the rows of all of them.

        Returns:
            A trace of ids [T, L, K], uint8 or uint16, all rows valid. A forward's rows are those of
            the tokens [B, S] that it was fed, sample by sample.

        Raises:
            RoutingError: no forward was recorded, a router ran more or less often than others, or
                the pipeline stage has no MoE layer.
        """
        if not self.recorders:
            raise RoutingError("this pipeline stage has no MoE layer, so it has no routes")
        self._check_not_empty()
        first = self.recorders[0]
        assert isinstance(first, MegatronRecorder)
        forwards = zip(*(recorder.seen for recorder in self.recorders), strict=True)
        traces = [
            by_sample(self._trace_of(list(ids)), batch)
            for ids, batch in zip(forwards, first.batches, strict=True)
        ]
        return RoutingTrace.concat(traces)

    def _trace_of(self, ids: list[Tensor]) -> RoutingTrace:  # per layer [n, K]
        router = self._routers[0]
        rows = self._ranks.gathered(torch.stack(ids, dim=1))
        valid = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        layers = tuple(router.layer for router in self._routers)
        return RoutingTrace(
            rows.to(id_dtype(router.num_experts)), valid, layers, router.num_experts
        )


class MegatronReplay(ReplayHandle):
    """One replayed forward: its trace, and the routers' own choice if that was kept.

    Rows are those of this rank's positions, sample by sample.
    """

    hook: ClassVar[type[TopkReplayer]] = MegatronReplayer

    def __init__(
        self,
        routers: Sequence[Router],
        trace: RoutingTrace,
        *,
        batch: int,
        native: bool,
        compared: Tensor | None,
    ) -> None:
        """Copy the trace. Arguments are those of `MegatronRouters.replay` and of the base class."""
        rows = by_position(trace, batch)
        if compared is not None:
            length = len(trace) // batch
            compared = compared % length * batch + compared // length
        super().__init__(routers, rows, native=native, soft=None, weights=False, compared=compared)
        self.trace = by_sample(self.trace, batch)
        self._batch = batch
        for replayer in self._replayers:
            assert isinstance(replayer, MegatronReplayer)
            replayer.batch = batch

    def native(self) -> RoutingTrace:
        """Return the routers' own choice, sample by sample."""
        return by_sample(super().native(), self._batch)

    def gate_mass(self) -> Tensor:
        """Return [T, L] float32, sample by sample; as of the base."""
        return self._by_sample(super().gate_mass())

    def lacking_experts(self) -> Tensor:
        """Return [T, L] float32, sample by sample; as of the base."""
        return self._by_sample(super().lacking_experts())

    def _by_sample(self, values: Tensor) -> Tensor:  # [S * B, L]
        return values.view(-1, self._batch, values.shape[1]).transpose(0, 1).flatten(0, 1)


class MegatronRouters(BoundRouters):
    """The MoE routers of one Megatron model, of all its pipeline stages. `routers_of` makes it.

    Attributes:
        stage_layers: the `layers` of this pipeline stage; all of them without pipeline parallelism.
    """

    def __init__(self, found: FoundRouters) -> None:
        self._routers = found.routers
        self.layers = found.layers
        self.stage_layers = tuple(router.layer for router in found.routers)
        self.num_experts = found.config.num_moe_experts
        self.top_k = found.config.moe_router_topk
        self.depth = found.config.num_layers
        self._checks = SampleChecks()

    @contextmanager
    def record(self) -> Iterator[MegatronTape]:
        """Record the routes of every forward in this context, see `record` of this package."""
        refuse_settings(self._routers, replaying=False)
        tape = MegatronTape(self._routers, self._sequence_ranks())
        forwards = [(recorder.router.module, recorder.__call__) for recorder in tape.recorders]
        with override_attribute("forward", forwards):
            yield tape
        if tape.recorders:
            tape.check()

    @contextmanager
    def replay(
        self, trace: RoutingTrace, *, batch: int = 1, native: bool = False, check: bool = True
    ) -> Iterator[MegatronReplay]:
        """Make the next forward use the trace's experts, see `replay` of this package."""
        refuse_settings(self._routers, replaying=True)
        layers = self.layers
        if isinstance(trace, RoutingTrace) and trace.layers == self.stage_layers:
            layers = self.stage_layers
        self.check_trace(trace, layers)
        whole = self._of_stage(trace)
        rows = self._sequence_ranks().own_rows(whole, batch)
        if batch > 1:
            starts = range(0, len(rows), len(rows) // batch)
            rows = rows.with_origin(TraceOrigin(tuple(starts)))
        # A rank may hold padding only, so the rows of all ranks say whether there are any.
        planned = compared = None
        if check and self._routers:
            planned = self._checks.plan(rows, has_routes=bool(whole.valid.any()))
        if planned is not None:
            compared = planned.rows
        handle = MegatronReplay(
            self._routers,
            rows,
            batch=batch,
            native=native,
            compared=compared,
        )
        with handle.replaying():
            yield handle
        handle.check()
        if planned is not None:
            planned(handle)

    def _sequence_ranks(self) -> SequenceRanks:
        if not self._routers:
            return SequenceRanks(None)
        return SequenceRanks.of(self._routers[0].module)

    def _of_stage(self, trace: RoutingTrace) -> RoutingTrace:
        """Return the columns of this pipeline stage's layers."""
        if trace.layers == self.stage_layers:
            return trace
        numbers = [trace.layers.index(layer) for layer in self.stage_layers]
        columns = torch.tensor(numbers, dtype=torch.int64, device=trace.ids.device)
        ids = index_ids(trace.ids.transpose(0, 1), columns).transpose(0, 1)
        part = RoutingTrace(ids, trace.valid, self.stage_layers, trace.num_experts)
        return part.with_origin(trace.origin)


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The ranks among which sequence parallelism divides the positions of a batch."""

    group: Any  # process group, None without sequence parallelism
    rank: int = 0
    size: int = 1

    @classmethod
    def of(cls, router: Any) -> SequenceRanks:
        """Return the ranks of a router's model."""
        if not router.config.sequence_parallel or router.tp_group.size() == 1:
            return cls(None)
        return cls(router.tp_group, router.tp_group.rank(), router.tp_group.size())

    def own_rows(self, trace: RoutingTrace, batch: int) -> RoutingTrace:
        """Return the rows of this rank's positions, sample by sample, of a trace [B * S].

        Raises:
            UsageError: the rows are not those of `batch` samples of one length, or the length is no
                multiple of the ranks.
        """
        if batch < 1 or len(trace) % batch:
            raise UsageError(
                f"replay: the trace has {len(trace)} rows, which are not those of batch={batch} "
                "samples of one length; padded tokens have rows too (op.pad_routes)"
            )
        if self.size == 1:
            return trace
        length = len(trace) // batch
        if length % self.size:
            raise UsageError(
                f"replay: {length} positions cannot be split over {self.size} ranks of sequence "
                "parallelism; pad the tokens, and the routes with invalid rows"
            )
        share = length // self.size
        if batch == 1:  # it may be packed, and rows know where samples begin
            return trace.rows(self.rank * share, (self.rank + 1) * share)
        rows = torch.arange(len(trace), device=trace.ids.device).view(batch, self.size, share)
        return trace.at(rows[:, self.rank].reshape(-1))

    def gathered(self, ids: Tensor) -> Tensor:
        """Return the rows of all ranks, in the order of the positions, of ids [n, L, K] int64."""
        if self.size == 1:
            return ids
        parts = [torch.empty_like(ids) for _ in range(self.size)]
        dist.all_gather(parts, ids.contiguous(), group=self.group)
        return torch.cat(parts)


def by_sample(trace: RoutingTrace, batch: int) -> RoutingTrace:
    """Return the rows [S * B] of a router, sample by sample."""
    if batch == 1:
        return trace
    return sequence_first(trace, len(trace) // batch)


def by_position(trace: RoutingTrace, batch: int) -> RoutingTrace:
    """Return the rows [B * S] of a trace, position by position, as the routers see them."""
    if batch == 1:
        return trace
    return sequence_first(trace, batch)
