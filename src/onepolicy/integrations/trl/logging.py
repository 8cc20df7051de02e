"""Metrics in TRL's own log."""

from __future__ import annotations

from typing import Any

from onepolicy.integrations.core.metrics import COUNTS, LARGEST
from onepolicy.integrations.trl.ranks import gather_json


class TrlLog:
    """The numbers that `trainer.log` averages and reports."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def add(self, metrics: dict[str, float]) -> None:
        """Add numbers of this process. All processes must call it as often."""
        of_ranks: list[dict[str, float]] = gather_json(self._trainer.accelerator, metrics)
        names = sorted({name for one in of_ranks for name in one})
        for name in names:
            values = [one[name] for one in of_ranks if name in one]
            value = sum(values) / len(values)
            last = name.rpartition("/")[2]
            if last in LARGEST:
                value = max(values)
            elif last in COUNTS:
                value = sum(values)
            self._trainer._metrics["train"][name].append(value)
