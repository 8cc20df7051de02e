"""One run of a comparison: its arm and its measured steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onepolicy.config import UsageError
from onepolicy.config.json_shapes import Summary, read_json_object
from onepolicy.report.jsonl import read_metrics
from onepolicy.report.run import SUMMARY_FIX
from onepolicy.report.words import Tree, unlearnt

Array = np.ndarray


@dataclass(frozen=True)
class ArmRun:
    """The measured steps of one arm with one seed."""

    name: str
    seed: int
    rows: list[Tree]
    label: str = ""  # "without replay" or "with replay", where that is how the arms differ
    unlearnt: str = ""  # the run's own sentence if its rewards taught nothing or little

    @classmethod
    def read(cls, name: str, seed: int, folder: Path, label: str = "") -> ArmRun:
        """Return the run in this folder.

        Raises UsageError if its log is missing, or if the log or the summary is damaged.
        """
        rows = read_metrics(folder)
        if not any("train/reward" in row for row in rows):
            raise UsageError(f"{folder}: its log has no step; is it the folder of a finished run?")
        summary = folder / "summary.json"
        if not summary.is_file():
            return cls(name, seed, rows, label)
        idle = unlearnt(read_json_object(summary, Summary, SUMMARY_FIX))
        if idle is None:
            return cls(name, seed, rows, label)
        return cls(name, seed, rows, label, idle.verdict)

    @property
    def phrase(self) -> str:
        """Return the arm as a sentence names it, after a number."""
        return self.label or f"in {self.name}"

    def values(self, metric: str) -> Array:  # [steps] float64, NaN where a step has none
        """Return a metric of every step."""
        steps = [row for row in self.rows if "train/reward" in row]
        found = [row.get(metric) for row in steps]
        return np.array([math.nan if value is None else value for value in found], dtype=float)

    def accuracies(self, metric: str) -> list[float]:
        """Return the held-out accuracies of the evaluations: of "eval/avg@" or "eval/greedy".

        NaN where an evaluation has none.
        """
        found = [row[name] for row in self.rows for name in row if name.startswith(metric)]
        return [math.nan if value is None else value for value in found]
