"""Print the tables of docs/evidence.md from runs.jsonl.

python benchmarks/evidence/tables.py main                    # needs scipy, of the extra dev
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from run import PLAN, RESULTS, finished_runs
from scipy.stats import binomtest, wilcoxon

Line = dict[str, Any]
Arms = dict[str, dict[int, Line]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", default=list(PLAN["study"]), metavar="STUDY")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--seeds", action="store_true", help="every run, a line each")
    options = parser.parse_args()
    lines = finished_runs(options.results)
    for study in options.studies:
        arms = by_arm(line for line in lines if line["study"] == study)
        if arms:
            print(f"\n### {study}\n{table(arms)}\n\n{tests(arms)}")
            if any(len(line["sampled"]) > 2 for runs in arms.values() for line in runs.values()):
                print(f"\n{courses(arms, PLAN['study'][study])}")
            if study.startswith("growth"):
                print(f"\n{growth(arms)}")
        if options.seeds:
            print(every_run(arms))


def by_arm(lines: Iterable[Line]) -> Arms:
    """Return arm -> seed -> line, in the order of plan.toml."""
    found: Arms = {arm: {} for arm in PLAN["arms"]}
    for line in lines:
        found[line["arm"]][line["seed"]] = line
    return {arm: runs for arm, runs in found.items() if runs}


def fails(line: Line) -> bool:
    """Return whether the run failed: it ended early, or learnt nothing.

    It learnt nothing if its last sampled held-out accuracy is not above that of the start.
    """
    return line["error"] is not None or line["sampled"][-1] <= line["sampled"][0]


def table(arms: Arms) -> str:
    """Return a row for every arm."""
    rows = [
        "| arm | runs | fail | held-out, start | held-out, end: mean ± sd (lowest) | "
        "k3, first → last tenth | routers | entropy, last | spikes a run, median (most) | "
        "largest norm, median (most) | halved gradient, first → last | "
        "k3 of the same batches without replay, first → last |",
        "|" + " --- |" * 12,
    ]
    for arm, runs in arms.items():
        lines = list(runs.values())
        whole = [line for line in lines if line["error"] is None]
        ends = [line["sampled"][-1] for line in whole]
        if not whole:
            rows.append(f"| {arm} | {len(lines)} | {len(lines)} |" + " |" * 9)
            continue
        rows.append(
            f"| {arm} | {len(lines)} | {sum(map(fails, lines))} | "
            f"{statistics.fmean(line['sampled'][0] for line in whole):.3f} | "
            f"{statistics.fmean(ends):.3f} ± {spread(ends):.3f} ({min(ends):.3f}) | "
            f"{curve(whole, 'k3', 0)} → {curve(whole, 'k3', -1)} | {curve(whole, 'routers', -1)} | "
            f"{curve(whole, 'entropy', -1)} | {middle([line['spikes'] for line in lines])} | "
            f"{middle([line['largest_norm'] for line in lines])} | "
            f"{curve(whole, 'halved', 0)} → {curve(whole, 'halved', -1)} | "
            f"{curve(whole, 'unreplayed', 0)} → {curve(whole, 'unreplayed', -1)} |"
        )
    return "\n".join(rows)


def courses(arms: Arms, study: dict[str, Any]) -> str:
    """Return best, last and crash of runs that were evaluated along the way, as in the R3 paper."""
    rows = ["| arm | best (median step) | last | crashed (median step) |", "|" + " --- |" * 4]
    for arm, runs in arms.items():
        found = course(runs.values(), study["eval_every"])
        ended = f"{found['crashed']} of {found['whole']}"
        if found["crash step"]:
            ended += f" ({found['crash step']})"
        rows.append(
            f"| {arm} | {found['best']} ({found['best step']}) | {found['last']} | {ended} |"
        )
    return "\n".join(rows)


def course(lines: Iterable[Line], every: int) -> dict[str, str]:
    """Return mean best and last accuracy, how many runs crashed, and the median steps of both.

    Of runs that went to their end; "" if none did. A run crashed if its last accuracy is below 80%
    of its best. The crash step is that of the first evaluation after the best from which on all are
    below; "" if no run crashed.
    """
    scores = [line["sampled"] for line in lines if line["error"] is None]
    if not scores:
        return dict.fromkeys(("last", "best", "best step", "crash step"), "") | {
            "whole": "0",
            "crashed": "0",
        }
    crashes = [every * at for each in scores if (at := crash(each)) is not None]
    return {
        "whole": str(len(scores)),
        "last": f"{statistics.fmean(each[-1] for each in scores):.3f}",
        "best": f"{statistics.fmean(map(max, scores)):.3f}",
        "best step": f"{statistics.median(every * each.index(max(each)) for each in scores):.0f}",
        "crashed": str(len(crashes)),
        "crash step": f"{statistics.median(crashes):.0f}" if crashes else "",
    }


def crash(scores: Sequence[float]) -> int | None:
    """Return the evaluation from which on a run stayed below 80% of its best, or None."""
    limit = 0.8 * max(scores)
    if scores[-1] >= limit:
        return None
    best = list(scores).index(max(scores))
    return max(at for at in range(best, len(scores)) if scores[at] >= limit) + 1


def growth(arms: Arms) -> str:
    """Return last tenth / first tenth of k3 without replay, a row per seed.

    Below the seeds: on how many of an arm it is above 1, and on how many of the seeds that the
    first arm has too it is below the first arm's.
    """
    found = {arm: {seed: ratio(line) for seed, line in runs.items()} for arm, runs in arms.items()}
    seeds = sorted({seed for ratios in found.values() for seed in ratios})
    rows = ["| seed | " + " | ".join(found) + " |", "|" + " --- |" * (len(found) + 1)]
    for seed in seeds:
        cells = [f"{each[seed]:.2f}" if seed in each else "" for each in found.values()]
        rows.append(f"| {seed} | " + " | ".join(cells) + " |")
    first = next(iter(found))
    above, below = [], []
    for each in found.values():
        above.append(f"{sum(value > 1 for value in each.values())} of {len(each)}")
        both = [(value, found[first][seed]) for seed, value in each.items() if seed in found[first]]
        below.append(f"{sum(here < there for here, there in both)} of {len(both)}")
    below[0] = ""
    rows.append("| above 1 | " + " | ".join(above) + " |")
    rows.append(f"| below {first} | " + " | ".join(below) + " |")
    return "\n".join(rows)


def ratio(line: Line) -> float:
    """Return last tenth / first tenth of k3 without replay."""
    k3 = line["curves"]["unreplayed"]
    if k3[0] is None:  # not trained with replay, so that k3 itself is without it
        k3 = line["curves"]["k3"]
    return float(k3[-1] / k3[0])


def spread(values: Sequence[float]) -> float:
    if len(values) < 2:
        return float("nan")
    return statistics.stdev(values)


def middle(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3g} ({max(values):.3g})"


def curve(lines: Sequence[Line], name: str, block: int) -> str:
    """Return the median over runs of a curve's block."""
    found = [line["curves"][name][block] for line in lines if name in line["curves"]]
    measured = [value for value in found if value is not None]
    if not measured:
        return ""
    return f"{statistics.median(measured):.2g}"


def tests(arms: Arms) -> str:
    """Return the paired tests of every arm against recompute and against control."""
    rows = [
        "| against | arm | pairs | fail only there / only here | exact McNemar | "
        "end, here - there | Wilcoxon | k3 of the last tenth, here / there: median (range) | "
        "lower here | Wilcoxon of its logarithm |",
        "|" + " --- |" * 10,
    ]
    for base in ("recompute", "control"):
        for arm in arms:
            if base in arms and arm != base:
                rows.append(paired(base, arm, arms[base], arms[arm]))
    return "\n".join(rows)


def paired(base: str, arm: str, there: dict[int, Line], here: dict[int, Line]) -> str:
    """Return the row of two arms over the seeds that both have.

    Accuracies and late k3 are of runs that went to their end.
    """
    seeds = sorted(set(there) & set(here))
    only_there = sum(fails(there[seed]) and not fails(here[seed]) for seed in seeds)
    only_here = sum(fails(here[seed]) and not fails(there[seed]) for seed in seeds)
    row = f"| {base} | {arm} | {len(seeds)} | {only_there} / {only_here} | "
    gaps, ratios = end_gaps(there, here), late_ratios(there, here)
    if not gaps:
        return row + "| | | | | |"
    logs = [math.log(each) for each in ratios]
    return (
        row + f"{mcnemar(only_there, only_here):.2g} | {statistics.fmean(gaps):+.3f} ± "
        f"{spread(gaps):.3f} | {signed_rank(gaps):.2g} | {statistics.median(ratios):.2g} "
        f"({min(ratios):.2g} to {max(ratios):.2g}) | {sum(each < 1 for each in ratios)} of "
        f"{len(ratios)} | {signed_rank(logs):.2g} |"
    )


def whole_pairs(there: dict[int, Line], here: dict[int, Line]) -> list[tuple[Line, Line]]:
    """Return both runs of every seed on which both went to their end."""
    pairs = [(there[seed], here[seed]) for seed in sorted(there.keys() & here.keys())]
    return [pair for pair in pairs if all(line["error"] is None for line in pair)]


def end_gaps(there: dict[int, Line], here: dict[int, Line]) -> list[float]:
    """Return the last accuracies of whole pairs, here - there."""
    pairs = whole_pairs(there, here)
    return [mine["sampled"][-1] - other["sampled"][-1] for other, mine in pairs]


def late_ratios(there: dict[int, Line], here: dict[int, Line]) -> list[float]:
    """Return k3 of the last tenth of whole pairs, here / there."""
    return [late_k3(mine) / late_k3(other) for other, mine in whole_pairs(there, here)]


def late_k3(line: Line) -> float:
    """Return k3 of the last tenth of a run's steps, each arm's own: with replay where it has it."""
    return float(line["curves"]["k3"][-1])


def mcnemar(only_there: int, only_here: int) -> float:
    """Return the two-sided exact p of the discordant pairs."""
    discordant = only_there + only_here
    if not discordant:
        return 1.0
    return float(binomtest(only_there, discordant, 0.5).pvalue)


def signed_rank(gaps: Sequence[float]) -> float:
    if not any(gaps):
        return 1.0
    return float(wilcoxon(gaps).pvalue)


def every_run(arms: Arms) -> str:
    rows = ["\n| arm | seed | held-out | k3 by tenths | largest norm | spikes | fails |"]
    rows.append("|" + " --- |" * 7)
    for arm, runs in arms.items():
        for seed, line in sorted(runs.items()):
            held_out = ", ".join(f"{value:.3f}" for value in line["sampled"])
            k3 = ", ".join(f"{value:.1e}" for value in line["curves"]["k3"] if value is not None)
            rows.append(
                f"| {arm} | {seed} | {held_out} | {k3} | {line['largest_norm']} | "
                f"{line['spikes']} | {fails(line)} |"
            )
    return "\n".join(rows)


if __name__ == "__main__":
    main()
