"""The comparison of replayed routes with the routers' own choice: how often, and its errors."""

from __future__ import annotations

from dataclasses import dataclass

from onepolicy.replay.alignment import MIN_ROWS, check_alignment, check_captured
from onepolicy.replay.checks import MisalignedRoutesError, RoutingError, constant_layers
from onepolicy.replay.contexts import ReplayHandle
from onepolicy.types import RoutingTrace

CHECK_EVERY = 32
"""Forwards between two checks of the routes of one trace source.

A check costs up to 15% of a small model's forward (docs/replay_checks.md), so less than 1% of 32.
"""


class SourceChecks:
    """The sources of traces that passed their check on one model."""

    def __init__(self) -> None:
        # Trace source that passed its check -> forwards since then
        self._unchecked: dict[str, int] = {}

    def plan(self, trace: RoutingTrace, *, check: bool) -> PlannedCheck:
        """Return the checks of a forward that replays this trace, and count the forward.

        Raises:
            RoutingError: the trace's source is due, and none of its rows is valid.
        """
        suspicious = bool(constant_layers(trace).any())
        due = check and self._is_due(trace)
        return PlannedCheck(self, trace.origin.source, suspicious=suspicious, due=due)

    def clear(self) -> None:
        """Check the next trace of every source again."""
        self._unchecked.clear()

    def compare(self, source: str, handle: ReplayHandle) -> None:
        """Raise MisalignedRoutesError unless the replayed routes are mostly the routers' own."""
        try:
            check_alignment(handle.trace, handle.native_trace())
        except MisalignedRoutesError as error:
            self._unchecked.pop(source, None)
            raise MisalignedRoutesError(
                f"{error}. To replay them all the same, give check=False",
                layers_wrong=error.layers_wrong,
            ) from None
        if int(handle.trace.valid.sum()) >= MIN_ROWS:
            self._unchecked[source] = 0

    def _is_due(self, trace: RoutingTrace) -> bool:
        """Return whether to check this trace, and count its forward.

        A source that failed is due until one of its traces passes.
        """
        source = trace.origin.source
        if source in self._unchecked:
            self._unchecked[source] += 1
            return self._unchecked[source] >= CHECK_EVERY
        if len(trace) and not trace.valid.any():
            raise RoutingError(
                f"none of the trace's {len(trace)} rows is valid, so replaying it would do "
                "nothing: no route was captured, or all are marked as missing. To let the model "
                "route these tokens itself, give check=False"
            )
        return True


@dataclass(frozen=True, slots=True)
class PlannedCheck:
    """The checks of one replayed forward. Call it with the replay when the forward has run."""

    checks: SourceChecks
    source: str
    suspicious: bool  # a layer has the same experts in every row
    due: bool  # compare the routes with the routers' own choice

    @property
    def needs_native(self) -> bool:
        """Return whether the replay must keep the routers' own choice."""
        return self.suspicious or self.due

    def __call__(self, handle: ReplayHandle) -> None:
        """Raise RoutingError if the routes were not replayed, or are those of another forward."""
        handle.check()
        if self.suspicious:
            check_captured(handle.trace, handle.native_trace())
        if self.due:
            self.checks.compare(self.source, handle)
