"""The comparison of every replayed sample with the routers' own choice, in every forward.

Two things are kept while a forward runs. For a few rows of every sample, the experts that the
router would have chosen itself: they give the agreement and the likely cause. For all rows, how
many of their experts the router's scores rank too low (`ReplayHandle.lacking_experts`): they say
which samples are wrong, to the row.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.replay import MIN_AGREEMENT
from onepolicy.divergence.routing import signed_ids
from onepolicy.replay.checks import MisalignedRoutesError, RoutingError, constant_layers
from onepolicy.replay.contexts import ReplayHandle
from onepolicy.replay.evidence import (
    EVIDENCE,
    Comparison,
    WrongRows,
    chernoff,
    new_rows,
)
from onepolicy.replay.misalignment import cause_of_layers, cause_of_repeat, cause_of_sample
from onepolicy.replay.windows import check_captured, check_samples, message
from onepolicy.types import RoutingTrace, id_dtype, index_ids

OnMismatch = Literal["stop", "drop"]
BETWEEN = 16
"""Rows of a sample that are compared beside its first and its last one.

They are at random places, one in each sixteenth of the sample.
"""

LIMIT_EVIDENCE = 5.0
"""Nats by which a layer must be below MIN_AGREEMENT: sharp where it has thousands of experts."""

USUAL_AGREEMENT = 0.95
"""Agreement of right routes of the same weights, or more (docs/replay.md)."""


class SampleChecks:
    """The checks of the forwards of one model."""

    def __init__(self) -> None:
        self._forwards = 0
        self._has_replayed = False

    def plan(
        self,
        trace: RoutingTrace,
        *,
        on_mismatch: OnMismatch = "stop",
        has_routes: bool | None = None,
    ) -> PlannedCheck | None:
        """Return the check of a forward that replays this trace, None if there is none.

        has_routes: whether a row is valid, on any rank. None: as in this trace.

        Raises:
            RoutingError: the first trace of this model has no valid row.
            UsageError: `on_mismatch` has another value.
        """
        if on_mismatch not in ("stop", "drop"):
            raise UsageError(f'replay: on_mismatch is {on_mismatch!r}, expected "stop" or "drop"')
        if len(trace) == 0:
            return None
        own_routes = bool(trace.valid.any())
        if has_routes is None:
            has_routes = own_routes
        if not has_routes and not self._has_replayed:
            raise RoutingError(
                f"none of the trace's {len(trace)} rows is valid, so replaying it would do "
                "nothing: no route was captured, or all are marked as missing. To let the model "
                "route these tokens itself, give check=False"
            )
        self._has_replayed |= has_routes
        if not own_routes:
            return None
        self._forwards += 1
        bounds = torch.tensor([*trace.origin.starts, len(trace)])
        rows = some_rows(trace.valid, bounds, seed=self._forwards)
        return PlannedCheck(bounds, rows, on_mismatch)


def some_rows(valid: Tensor, bounds: Tensor, *, seed: int) -> Tensor:
    """Return some valid rows of every sample, [m] int64, ascending: its first, its last, BETWEEN.

    Args:
        valid: [T] bool.
        bounds: [S + 1] int64 on the CPU, first row of every sample, then T.
        seed: of the places. Torch's own generator is left alone: it belongs to the model.
    """
    rows = valid.nonzero()[:, 0]
    draw = random.Random(seed).random
    places: list[int] = []
    for start, stop in itertools.pairwise(torch.searchsorted(rows.cpu(), bounds).tolist()):
        inner = stop - start - 2
        if inner < BETWEEN:
            places += range(start, stop)
            continue
        edges = [start + 1 + inner * number // BETWEEN for number in range(BETWEEN + 1)]
        between = [
            first + int(draw() * (last - first)) for first, last in itertools.pairwise(edges)
        ]
        places += [start, *between, stop - 1]
    return rows[torch.tensor(places, device=rows.device)]


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """The check of one replayed forward. Call it with the replay when the forward has run."""

    bounds: Tensor  # [S + 1] int64 on the CPU, first row of every sample, then T
    rows: Tensor  # [m] int64, rows whose own choice is kept
    on_mismatch: OnMismatch

    def prepare(self, handle: ReplayHandle) -> None:
        """Make the replay drop wrong samples, if that was asked for."""
        if self.on_mismatch != "drop":
            return

        def judge(lacking: Tensor) -> Tensor:
            wrong = Comparison(lacking, _first_layer(handle.trace), self.bounds).wrong_rows()
            handle.dropped = tuple(each.sample for each in wrong)
            keep = torch.ones_like(handle.trace.valid)
            for sample in handle.dropped:
                keep[slice(*self.bounds[sample : sample + 2].tolist())] = False
            return keep

        handle.judge_first_layer(judge)

    def __call__(self, handle: ReplayHandle) -> None:
        """Raise MisalignedRoutesError if the routes are not those of this forward."""
        try:
            self._compare(handle)
        except MisalignedRoutesError as error:
            raise MisalignedRoutesError(
                f"{error}. To replay them all the same, give check=False",
                layers_wrong=error.layers_wrong,
            ) from None
        finally:
            handle.forget_rows()

    def _compare(self, handle: ReplayHandle) -> None:
        if handle.dropped and not handle.trace.valid.any():
            return  # all were dropped
        lacking = handle.lacking_experts()
        self._check_layers(handle, lacking)
        found = Comparison(lacking, handle.trace, self.bounds)
        if found.suspicious():
            self._check_captured(handle)
            wrong = found.wrong_rows()
            if wrong:
                self._refuse(handle, min(wrong, key=lambda each: each.agreement))
        if handle.keeps_native:
            check_samples(handle.trace, handle.native(), self.bounds, least=MIN_AGREEMENT)

    def _check_captured(self, handle: ReplayHandle) -> None:
        """Raise if an engine did not capture a layer: it has the same experts in every row."""
        if constant_layers(handle.trace, self.bounds).any():
            check_captured(handle.trace, self._native(handle), self.bounds)

    def _check_layers(self, handle: ReplayHandle, lacking: Tensor) -> None:
        """Raise if a layer agrees in less than MIN_AGREEMENT. lacking [T, L]: of all rows."""
        trace, rows = handle.trace, self.rows
        if handle.dropped:
            rows = rows[trace.valid[rows]]
        # No more than the lacking experts can miss, and they cost less to count.
        if lacking[rows].mean(0).max() <= (1 - MIN_AGREEMENT) * trace.top_k:
            return
        own = handle.native_rows()
        if handle.dropped:
            own = own[trace.valid[self.rows]]
        routes = index_ids(signed_ids(trace.ids), rows).long()
        agreement = (routes[..., None] == own[..., None, :]).sum((2, 3)) / trace.top_k  # [m, L]
        if agreement.mean(0).min() >= MIN_AGREEMENT:
            return
        # A text that repeats itself comes to few hidden states, where a near tie shows every time.
        new = trace.valid & new_rows(trace, self.bounds)
        agreement, rows = agreement[new[rows]], rows[new[rows]]
        if len(rows) == 0:
            return
        mean, wrong = _too_low(agreement, lacking / trace.top_k, rows, new, trace.top_k)
        if not wrong:
            return
        self._check_captured(handle)
        where = f"layer {trace.layers[wrong[0]]} agree in {mean[wrong[0]]:.0%}"
        if len(mean) > 1:
            where += f" ({len(wrong)} of {len(mean)} layers are below {MIN_AGREEMENT:.0%})"
        native, overall = self._native(handle), float(mean.mean())
        cause, layers_wrong = cause_of_layers(trace, native, wrong, overall, self.bounds)
        raise MisalignedRoutesError(message(where, MIN_AGREEMENT, cause), layers_wrong=layers_wrong)

    def _refuse(self, handle: ReplayHandle, wrong: WrongRows) -> None:
        trace, native = handle.trace, self._native(handle)
        start, stop = self.bounds[wrong.sample : wrong.sample + 2].tolist()
        where = f"sample {wrong.sample} of the batch, rows {wrong.first - start} to "
        where += f"{wrong.last - start}, agree in about {wrong.agreement:.0%}"
        if len(self.bounds) == 2:
            where = f"rows {wrong.first} to {wrong.last} agree in about {wrong.agreement:.0%}"
        if wrong.column is None:
            cause = cause_of_repeat(trace.at(slice(start, stop)), wrong.first - start)
            cause = cause or cause_of_sample(trace, native, self.bounds, wrong.sample)
        else:
            where = f"layer {trace.layers[wrong.column]} of {where}"
            part = slice(start, stop)
            cause, _ = cause_of_layers(
                trace.at(part), native.at(part), [wrong.column], wrong.agreement
            )
        raise MisalignedRoutesError(
            message(where, MIN_AGREEMENT, cause), layers_wrong=wrong.column is not None
        )

    def _native(self, handle: ReplayHandle) -> RoutingTrace:
        """Return the routers' own choice. Only the rows that were compared are valid."""
        if handle.keeps_native:
            return handle.native()
        trace = handle.trace
        ids = torch.zeros(trace.ids.shape, dtype=torch.int64, device=trace.ids.device)
        ids[self.rows] = handle.native_rows()
        valid = torch.zeros_like(trace.valid)
        valid[self.rows] = True
        return RoutingTrace(
            ids.to(id_dtype(trace.num_experts)), valid, trace.layers, trace.num_experts
        )


def _too_low(
    agreement: Tensor, lacking: Tensor, rows: Tensor, counted: Tensor, top_k: int
) -> tuple[Tensor, list[int]]:
    """Return the agreement [L] of all rows, and the layers where it is below MIN_AGREEMENT.

    The agreement is known of some rows, the share of lacking experts, which is no less than what
    misses there, of all. So what misses in all rows is estimated by their ratio (Cochran, Sampling
    Techniques 1977, chapter 6). It must be too low by 3 standard errors, lower than right routes of
    the usual agreement come by chance, and than those of MIN_AGREEMENT easily come: an engine that
    differs by nearly as much may be below it in one forward.

    Args:
        agreement: [m, L], of the rows that were compared.
        lacking: [T, L], share of experts that the router would replace, at most.
        rows: [m] int64, that were compared.
        counted: [T] bool, the rows that could have been.
        top_k: K.
    """
    count, some = int(counted.sum()), len(rows)
    missing, at_most = 1 - agreement, lacking[rows]
    ratio = missing.mean(0) / at_most.mean(0).clamp(min=1e-9)
    mean = 1 - ratio * lacking[counted].mean(0)
    rest = (missing - ratio * at_most).std(0, correction=0)
    error = rest * (max(0.0, 1 - some / count) / some) ** 0.5
    highest = mean + 3 * error
    unusual = chernoff(highest, count * top_k, USUAL_AGREEMENT) > EVIDENCE
    too_low = chernoff(mean, count * top_k, MIN_AGREEMENT) > LIMIT_EVIDENCE
    wrong = (highest < MIN_AGREEMENT) & unusual & too_low
    return mean, wrong.nonzero()[:, 0].tolist()


def _first_layer(trace: RoutingTrace) -> RoutingTrace:
    return RoutingTrace(trace.ids[:, :1], trace.valid, trace.layers[:1], trace.num_experts)
