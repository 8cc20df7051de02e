"""What a step hands on: its rollouts, its result, its seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from onepolicy.types import Group, TokenBatch


@dataclass(
    slots=True, repr=False
)  # asyncio prints results into errors it throws away, and these are large
class Rollouts:
    groups: list[Group]
    metrics: dict[str, float]  # what became of the episodes


@dataclass(slots=True, repr=False)
class StepResult:
    groups: list[Group]
    batch: TokenBatch
    without_replay: TokenBatch | None = None  # the same batch scored without replay, on probe steps
    metrics: dict[str, float] = field(default_factory=dict)


class StepTimer:
    """Seconds per named part of a step."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start

    def metrics(self) -> dict[str, float]:
        return {f"time/{part}": s for part, s in self.seconds.items()} | {
            "time/step": time.perf_counter() - self.start
        }
