"""Rows of the tables of docs/evidence_tables.md that are computed: runs under routing pressure.

The runs are lines of turns_pressure.jsonl, written by benchmarks/turn_curves.py. `turns` of a table
in docs/data/interaction.json says which rows: "reward", a row for each number of allowed turns;
"gain", a row for each pair of them.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tables import signed_rank, spread

RESULTS = Path(__file__).with_name("turns_pressure.jsonl")
MOST = 16
Runs = dict[tuple[str, int, int], dict[str, Any]]


def rows(which: str, values: list[str]) -> list[list[str]]:
    """Return these values of every row; "" for none."""
    found = runs(RESULTS)
    turns = sorted({turns for _, turns, _ in found})
    if which == "reward":
        texts = [by_turns(found, each) for each in turns]
    else:
        texts = [gain(found, each) for each in turns if each < MOST]
    return [[text.get(value, "") for value in values] for text in texts]


def runs(path: Path) -> Runs:
    """Return the runs by arm, allowed turns and seed."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {(line["arm"], line["turns"], line["seed"]): line for line in lines}


def by_turns(found: Runs, turns: int) -> dict[str, str]:
    """Return both arms' held-out accuracy, difference and k3 with so many allowed turns."""
    texts = {"turns": str(turns)}
    for arm in ("off", "r3"):
        mine = [run for (name, each, _), run in found.items() if (name, each) == (arm, turns)]
        scores = [run["scores"]["eval/avg@2"] for run in mine]
        texts |= {arm: f"{statistics.fmean(scores):.3f}", f"{arm} sd": f"{spread(scores):.3f}"}
        k3 = [statistics.fmean(row["mismatch/k3"] for row in run["rows"]) for run in mine]
        texts |= {f"{arm} k3": f"{statistics.median(k3):.1e}", f"{arm} highest": f"{max(k3):.1e}"}
        texts[f"{arm} lowest"] = f"{min(k3):.1e}"
        reward = [statistics.fmean(row["train/reward"] for row in run["rows"]) for run in mine]
        texts[f"{arm} reward"] = f"{statistics.fmean(reward):.3f}"
    return texts | summary(differences(found, turns))


def gain(found: Runs, turns: int) -> dict[str, str]:
    """Return D(16) - D(turns), D the difference of the arms on a seed."""
    most, fewer = differences(found, MOST), differences(found, turns)
    both = {seed: most[seed] - fewer[seed] for seed in sorted(most.keys() & fewer.keys())}
    return {"turns": str(turns)} | summary(both)


def differences(found: Runs, turns: int) -> dict[int, float]:
    """Return r3 - off in held-out accuracy, by seed, where both arms are there."""
    score = {key: run["scores"]["eval/avg@2"] for key, run in found.items()}
    return {
        seed: score["r3", turns, seed] - score["off", turns, seed]
        for arm, each, seed in sorted(found)
        if arm == "off" and each == turns and ("r3", turns, seed) in found
    }


def summary(by_seed: dict[int, float]) -> dict[str, str]:
    """Return what is said of a difference by seed."""
    each = list(by_seed.values())
    found = {
        "seeds": str(len(each)),
        "mean": f"{statistics.fmean(each):.3f}",
        "error": f"{spread(each) / len(each) ** 0.5:.3f}",
        "above": str(sum(value > 0 for value in each)),
        "below": str(sum(value < 0 for value in each)),
        "wilcoxon": f"{signed_rank(each):.2g}",
    }
    return found | {f"seed {seed}": f"{value:.3f}" for seed, value in by_seed.items()}
