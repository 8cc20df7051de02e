"""Rows of the tables of docs/evidence.md, from the runs in the tree."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from run import finished_runs
from tables import Line, by_arm, curve, fails, spread

FOLDER = Path(__file__).parent


def rows(study: dict[str, Any], names: list[str]) -> list[list[str]]:
    """Return these values of every arm of a study."""
    lines = finished_runs(FOLDER / study.get("file", "runs.jsonl"))
    arms = by_arm(line for line in lines if line["study"] == study["name"])
    return [[one(arm, list(arms[arm].values()), name) for name in names] for arm in study["arms"]]


def one(arm: str, lines: list[Line], name: str) -> str:
    """Return one value of an arm: of its runs, or of the runs that went to their end."""
    whole = [line for line in lines if line["error"] is None]
    ends = [line["sampled"][-1] for line in whole]
    if name == "arm":
        return arm
    if name.startswith("first "):
        return curve(whole, name.removeprefix("first "), 0)
    if name.startswith("last "):
        return curve(whole, name.removeprefix("last "), -1)
    found = {
        "runs": len(lines),
        "failed": sum(map(fails, lines)),
        "start": f"{statistics.fmean(line['sampled'][0] for line in whole):.3f}",
        "end": f"{statistics.fmean(ends):.3f}",
        "sd": f"{spread(ends):.3f}",
        "lowest": f"{min(ends):.3f}",
        "spikes": rounded(statistics.median(line["spikes"] for line in lines)),
        "most spikes": rounded(max(line["spikes"] for line in lines)),
        "norm": rounded(statistics.median(line["largest_norm"] for line in lines)),
        "largest norm": rounded(max(line["largest_norm"] for line in lines)),
    }
    return str(found[name])


def rounded(value: float) -> str:
    """Return three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):.12g}"
