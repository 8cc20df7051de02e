"""Routes, log-probabilities and supports of one generation, by the tokens that they belong to.

TRL has no place for them on the way from its samplers to its batch. With tools it calls the sampler
once per turn, with the whole path so far as the prompt, and cuts what exceeds its budget. So an
entry belongs to a path, prompt and completion of one call, and a sample takes the entry that covers
the most of its own path.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.integrations.core.layout import fit
from onepolicy.integrations.core.payload import to_trace
from onepolicy.integrations.core.supports import fit_support
from onepolicy.replay.routers import Routers
from onepolicy.support.trace import SupportTrace
from onepolicy.types import RoutingTrace


@dataclass(slots=True)
class SampledPath:
    """The tokens of one call of the sampler, and the values that came with them."""

    tokens: tuple[int, ...]
    prompt: int  # tokens of the prompt
    routes: Any = None  # in the sampler's form, or a RoutingTrace
    logp: Sequence[float | None] | None = None  # of the completion
    support: SupportTrace | None = None  # of the completion


class RouteBook:
    """The paths that the samplers of one process reported since the last `clear`."""

    def __init__(self, routers: Routers | None, form: str) -> None:
        """Make an empty book.

        Args:
            routers: the trainer's routers; None if nothing is replayed.
            form: payload form of the routes (`integrations.core.payload.FORMS`).
        """
        self._routers, self._form = routers, form
        self._paths: list[SampledPath] = []
        self._taken = 0  # paths that `take_routed` has seen

    def clear(self) -> None:
        """Drop all paths."""
        self._paths.clear()
        self._taken = 0

    def add(
        self,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        routes: Any = None,
        logp: Sequence[float | None] | None = None,
        support: SupportTrace | None = None,
    ) -> None:
        """Add one call's path with all that is known of it."""
        tokens = (*prompt, *completion)
        self._paths.append(SampledPath(tokens, len(prompt), routes, logp, support))

    def take_routed(self) -> list[SampledPath]:
        """Return the paths with routes that were added since the last call, in order."""
        new = [path for path in self._paths[self._taken :] if path.routes is not None]
        self._taken = len(self._paths)
        return new

    def extend(self, entries: Sequence[SampledPath]) -> None:
        """Add the paths of another process."""
        self._paths += entries

    def traces(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[RoutingTrace | None]:
        """Return each sample's trace of tokens - 1 rows; None if no path with routes covers it.

        A path covers a sample if one is the beginning of the other: the sample was cut, or went on
        with tokens that were not sampled. Of several the longest common beginning counts. Equal
        samples take equal paths in order.

        Raises:
            UsageError: as of `integrations.core.payload.to_trace`.
        """
        known = _PathFinder([path for path in self._paths if path.routes is not None])
        traces: list[RoutingTrace | None] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            path = known.take((*prompt, *completion))
            if path is None:
                traces.append(None)
            else:
                traces.append(self._trace(path, len(prompt) + len(completion) - 1))
        return traces

    def logps(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[Sequence[float | None]] | None:
        """Return each sample's log-probabilities; None unless every sample is covered.

        For trainers without tools, where a sample is one call.
        """
        known = _PathFinder([path for path in self._paths if path.logp is not None])
        found: list[Sequence[float | None]] = []
        for prompt, completion in zip(prompts, completions, strict=True):
            path = known.take((*prompt, *completion))
            if path is None or path.logp is None or len(path.logp) < len(completion):
                return None
            found.append(path.logp[: len(completion)])
        return found

    def supports(
        self, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
    ) -> list[SupportTrace]:
        """Return each sample's supports, missing where no path has them. As `logps`."""
        known = _PathFinder([path for path in self._paths if path.support is not None])
        found = []
        for prompt, completion in zip(prompts, completions, strict=True):
            path = known.take((*prompt, *completion))
            support = SupportTrace.missing(len(completion))
            if path is not None and path.support is not None:
                support = fit_support(path.support, len(completion))
            found.append(support)
        return found

    def _trace(self, path: SampledPath, rows: int) -> RoutingTrace:
        trace = path.routes
        if not isinstance(trace, RoutingTrace):
            assert self._routers is not None
            trace = to_trace(self._routers, trace, tokens=len(path.tokens), form=self._form)
        return fit(fit(trace, len(path.tokens) - 1), rows)


class _PathFinder:
    """Paths to be found by a sample's tokens."""

    def __init__(self, paths: Sequence[SampledPath]) -> None:
        self._paths = paths
        self._exact: dict[tuple[int, ...], deque[SampledPath]] = {}
        for path in paths:
            self._exact.setdefault(path.tokens, deque()).append(path)

    def take(self, tokens: tuple[int, ...]) -> SampledPath | None:
        """Return the path that covers the most of these tokens; None if none does."""
        equal = self._exact.get(tokens)
        if equal:
            path = equal.popleft()
            equal.append(path)
            return path
        best, covered = None, 0
        for path in self._paths:
            common = min(len(path.tokens), len(tokens))
            if common >= covered and path.tokens[:common] == tokens[:common]:
                best, covered = path, common
        return best
