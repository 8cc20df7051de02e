"""A check while a run goes on: the first steps could teach something."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from onepolicy.config import RunConfig
from onepolicy.run.learning_check import nothing_learnt
from onepolicy.run.log import read_metrics
from onepolicy.run.run_folder import Json

PATIENCE = 3
"""Steps without any signal at the start of a run, after which the run reports it [steps]."""


class LearningMonitor:
    """A check during the run. It reports once that the first steps had nothing to learn from."""

    def __init__(self, config: RunConfig, run: Path, note: Callable[[str], None]) -> None:
        self._config, self._run, self._note = config, run, note
        self._rows: list[Json] = []
        if (run / "metrics.jsonl").exists():
            self._rows = read_metrics(run)
        self._done = False

    def after_step(self, step: int, metrics: Json) -> None:
        """Check a training step, whose samples are written already."""
        if self._done:
            return
        self._rows.append({"step": step, **metrics})
        if sum("train/reward" in row for row in self._rows) < PATIENCE:
            return
        self._done = True
        found = nothing_learnt(self._config, self._rows, self._run)
        if found is not None and found["learnt"] == "nothing":
            warning = f"warning, after step {step}: {found['verdict']}"
            self._note("\n".join([warning, *found["why"], "The run goes on."]))
