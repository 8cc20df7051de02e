"""Values that a step passes on: its rollouts, its result and its times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from onepolicy.types import Group, TokenBatch


# repr=False: asyncio prints results into error texts, and these are large.
@dataclass(slots=True, repr=False)
class Rollouts:
    """The episodes of a step."""

    groups: list[Group]
    metrics: dict[str, float]  # of the episodes: failed, dropped, refilled


@dataclass(slots=True, repr=False)
class StepResult:
    """The groups, the scored batch and the metrics of a step."""

    groups: list[Group]
    batch: TokenBatch
    # the whole batch scored before the update, with and without replay, in counterfactual steps
    with_replay: TokenBatch | None = None
    without_replay: TokenBatch | None = None
    metrics: dict[str, float] = field(default_factory=dict)


class StepTimer:
    """Seconds of each named part of a step: `with timer("update"): ...`."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        """Return time/PART of every part, and time/step since the timer was made."""
        times = {f"time/{part}": seconds for part, seconds in self.seconds.items()}
        return times | {"time/step": time.perf_counter() - self.start}
