"""Rows of the tables of docs/evidence.md, from the runs in the tree.

`study` of a table in docs/data/evidence.json names the runs: `names`, the studies and how the page
calls them ("a+b": the runs of both, whose seeds differ); `arms`, unset: all; `against`, for pairs
of arms by seed (a table: for each arm its own); `each` = "seed", for the growth of k3 in every arm
by seed; `file`, if not runs.jsonl. `turns`: the runs of turn_rows.py.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import turn_rows
from run import PLAN, finished_runs
from tables import (
    Arms,
    Line,
    by_arm,
    course,
    curve,
    end_gaps,
    fails,
    late_ratios,
    mcnemar,
    ratio,
    signed_rank,
    spread,
)

FOLDER = Path(__file__).parent


def rows(study: dict[str, Any], values: list[str]) -> list[list[str]]:
    """Return these values of every arm, or of every arm against another; "" for none."""
    if "turns" in study:
        return turn_rows.rows(study["turns"], values)
    lines = finished_runs(FOLDER / study.get("file", "runs.jsonl"))
    found = []
    for name, label in study["names"].items():
        parts = name.split("+")
        arms = by_arm(line for line in lines if line["study"] in parts)
        if study.get("each") == "seed":
            found += by_seed(arms, values)
            continue
        for arm in study.get("arms", arms):
            bases = study.get("against", [""])
            for base in bases[arm] if isinstance(bases, dict) else bases:
                texts = {"study": label, "arm": arm, "against": base}
                texts |= paired(arms, base, arm) if base else numbers(list(arms[arm].values()))
                every = PLAN["study"][parts[0]].get("eval_every")
                if every and not base:
                    texts |= course(arms[arm].values(), every)
                found.append([texts.get(value, "") for value in values])
    return found


def by_seed(arms: Arms, values: list[str]) -> list[list[str]]:
    """Return the growth of k3 in every arm, and where it ended, a row per seed."""
    seeds = sorted({seed for runs in arms.values() for seed in runs})
    found = []
    for seed in seeds:
        texts = {"seed": str(seed)}
        for arm, runs in arms.items():
            if seed in runs:
                texts[arm] = f"{ratio(runs[seed]):.2f}"
                for name in ("entropy", "routers"):
                    texts[f"{arm} {name}"] = rounded(runs[seed]["curves"][name][-1], digits=2)
        found.append([texts.get(value, "") for value in values])
    return found


def numbers(lines: list[Line]) -> dict[str, str]:
    """Return what the runs of an arm gave.

    Accuracies and curves are of runs that went to their end.
    """
    found = {"runs": str(len(lines)), "failed": str(sum(map(fails, lines)))}
    whole = [line for line in lines if line["error"] is None]
    if not whole:
        return found
    ends = [line["sampled"][-1] for line in whole]
    found |= {
        "end": f"{statistics.fmean(ends):.3f}",
        "sd": f"{spread(ends):.3f}",
        "lowest": f"{min(ends):.3f}",
        "spikes": rounded(statistics.median(line["spikes"] for line in lines)),
        "most spikes": rounded(max(line["spikes"] for line in lines)),
        "norm": rounded(statistics.median(line["largest_norm"] for line in lines)),
        "largest norm": rounded(max(line["largest_norm"] for line in lines)),
    }
    for name in ("k3", "halved", "routers", "entropy", "rejected"):
        found[f"first {name}"] = curve(whole, name, 0)
        found[f"last {name}"] = curve(whole, name, -1)
    return found | {f"seed {line['seed']}": f"{line['sampled'][-1]:.2f}" for line in whole}


def paired(arms: Arms, base: str, arm: str) -> dict[str, str]:
    """Return the paired tests of an arm against another, over the seeds that both have.

    Accuracies and late k3 are of pairs that went to their end; without one there are none.
    """
    there, here = arms[base], arms[arm]
    seeds = sorted(set(there) & set(here))
    only_there = sum(fails(there[seed]) and not fails(here[seed]) for seed in seeds)
    only_here = sum(fails(here[seed]) and not fails(there[seed]) for seed in seeds)
    found = {
        "pairs": str(len(seeds)),
        "only there": str(only_there),
        "only here": str(only_here),
        "mcnemar": f"{mcnemar(only_there, only_here):.2g}",
    }
    gaps, late = end_gaps(there, here), late_ratios(there, here)
    if not gaps:
        return found
    return found | {
        "gap": f"{statistics.fmean(gaps):.3f}",
        "gap sd": f"{spread(gaps):.3f}",
        "gap interval": interval(gaps),
        "wilcoxon": f"{signed_rank(gaps):.1g}",
        "k3 ratio": f"{statistics.median(late):.2g}",
        "k3 lowest": f"{min(late):.2g}",
        "k3 highest": f"{max(late):.2g}",
        "k3 lower": str(sum(each < 1 for each in late)),
        "k3 wilcoxon": f"{signed_rank([math.log(each) for each in late]):.2g}",
    }


def interval(gaps: list[float]) -> str:
    """Return the 95% interval of the mean: percentiles of 10,000 means of gaps drawn again."""
    drawn = np.random.default_rng(0).choice(gaps, size=(10_000, len(gaps)))
    low, high = np.quantile(drawn.mean(axis=1), (0.025, 0.975))
    return f"{low:+.3f} to {high:+.3f}"


def rounded(value: float, digits: int = 3) -> str:
    """Return so many digits, without an exponent."""
    return f"{float(f'{value:.{digits}g}'):.12g}"
