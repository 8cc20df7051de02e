"""Reading of a run folder for a report, with checks of every file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onepolicy.config import UsageError
from onepolicy.config.json_shapes import RunInfo, Settings, Summary, read_json_object
from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.record.probes import probe_files, read_probe
from onepolicy.record.schema import Scored
from onepolicy.report.jsonl import read_metrics, read_samples

Tree = dict[str, Any]

RUN_FIX = "is this the folder of a run that has finished?"
SUMMARY_FIX = "delete it and resume the run, which writes it again"


@dataclass(frozen=True)
class Run:
    """Content of a run folder."""

    folder: Path
    config: Tree
    info: Tree  # run.json
    summary: Tree
    rows: list[Tree]  # metrics.jsonl, one per step
    samples: list[Tree]
    probe: Scored | None  # the last one

    @property
    def replay(self) -> bool:
        """True if the scoring that trained replayed the rollout's routes."""
        return self.config.get("replay", {}).get("mode") in ROLLOUT_MODES

    def points(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of the rows that have this metric.

        A null becomes NaN, which a figure shows as a gap.
        """
        rows = [row for row in self.rows if name in row]
        values = [math.nan if row[name] is None else float(row[name]) for row in rows]
        return [row["step"] for row in rows], values

    def names(self, prefix: str) -> list[str]:
        """Return the metric names with a prefix, in order of first appearance."""
        return list(
            dict.fromkeys(name for row in self.rows for name in row if name.startswith(prefix))
        )


def load_run(folder: Path, summary: Tree | None = None) -> Run:
    """Read a run folder. Raises UsageError if a file is missing or damaged.

    summary: in place of summary.json, which only a finished run has.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such run folder")
    rows = read_metrics(folder)
    if not rows:
        raise UsageError(
            f"{folder / 'metrics.jsonl'}: empty; a report needs at least one finished step"
        )
    if summary is None:
        summary = read_json_object(folder / "summary.json", Summary, SUMMARY_FIX)
    return Run(
        folder=folder,
        config=read_json_object(folder / "config.json", Settings, RUN_FIX),
        info=read_json_object(folder / "run.json", RunInfo, RUN_FIX),
        summary=summary,
        rows=rows,
        samples=read_samples(folder),
        probe=next((read_probe(step, path) for step, path in probe_files(folder)[-1:]), None),
    )
