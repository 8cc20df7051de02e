"""Numbers and tables of the demonstration in docs/evidence.md, from the folder of its ten runs.

    make demonstration                                            # plays the runs, then this
    python benchmarks/evidence/demonstration.py runs/demonstration

Writes demonstration.json, in the tree, and the rows of docs/data/evidence.json that come from it.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.report.comparison import ArmRun, contrast

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "demonstration.json"
ARMS = ("off", "r3")
SEEDS = (0, 1, 2, 3, 4)


def main() -> None:
    (folder,) = map(Path, sys.argv[1:])
    found = [measured(folder, seed) for seed in SEEDS]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    sys.path.insert(0, str(FOLDER.parent))
    from doc_tables import Number, replace_rows, write_page

    for name, rows in tables(found).items():
        replace_rows("evidence", name, [[Number(cell) for cell in row] for row in rows])
    for page in ("evidence", "results", "README"):
        write_page(page)


def measured(folder: Path, seed: int) -> dict[str, Any]:
    """Return what the two runs of a seed gave; each list is without replay, then with."""
    off, r3 = (ArmRun.read(arm, seed, folder / f"{arm}-seed{seed}") for arm in ARMS)
    norms = [float(np.nanmax(run.values("train/grad_norm"))) for run in (off, r3)]
    ends = [run.held_out[-1] for run in (off, r3)]
    starts = [run.held_out[0] for run in (off, r3)]
    return asdict(contrast(off, r3)) | {"held_out": [starts, ends], "largest_norm": norms}


def tables(found: list[dict[str, Any]]) -> dict[str, list[list[str]]]:
    """Return the rows of each table of the page, as printed."""
    rows: dict[str, list[list[str]]] = {"real-k3": [], "real-reward": [], "real-norms": []}
    for each in found:
        seed, cut, gain = str(each["seed"]), each["k3_ratio"], each["reward_difference"]
        rows["real-k3"].append([seed, *map(nats, each["k3"]), *map(times, ends_of(cut))])
        rewards = [*each["reward"], *ends_of(gain), *each["held_out"][1]]
        rows["real-reward"].append([seed, *(f"{value:.2f}" for value in rewards)])
        rows["real-norms"].append([seed, *map(times, each["largest_norm"])])
    return rows


def ends_of(interval: dict[str, float]) -> list[float]:
    return [interval[name] for name in ("value", "low", "high")]


def nats(value: float) -> str:
    return f"{value:.2e}".replace("e-0", "e-")


def times(value: float) -> str:
    """Return a ratio or a norm with two digits at least."""
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


if __name__ == "__main__":
    main()
