"""Numbers and tables of the demonstration in docs/evidence.md, from the folder of its ten runs.

    make demonstration                                            # plays the runs, then this
    python benchmarks/evidence/demonstration.py runs/demonstration
    python benchmarks/evidence/demonstration.py --steps FOLDER ... # the steps of these runs alone
    python benchmarks/evidence/demonstration.py --picture          # docs/figures/demonstration.png

The picture is that of `onepolicy compare` of PICTURED's k3, from the steps in the tree. The others
write demonstration.json and demonstration_steps.csv into the first folder, and print the tables.
With `--tree` they write those of the tree, and the rows of docs/data/evidence.json that come from
them; the sentences above the tables are then yours to mend.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.report.comparison import figures, headline
from onepolicy.report.contrast import ArmRun, contrast
from onepolicy.report.figures.parts import Figure
from onepolicy.report.png import write_figures
from onepolicy.verdict.rules import QUIET_KL

FOLDER = Path(__file__).resolve().parent
STEPS = FOLDER.parents[1] / "docs" / "data" / "demonstration_steps.csv"
METRICS = {"k3": "mismatch/k3", "reward": "train/reward", "norm": "train/grad_norm"}
RESULTS = FOLDER / "demonstration.json"
ARMS, LABELS = ("off", "r3"), ("without replay", "with replay")
PICTURED, PICTURE = "2", FOLDER.parents[1] / "docs" / "figures" / "demonstration.png"
SEEDS = (0, 1, 2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--steps", action="store_true", help="leave the other tables as they are")
    parser.add_argument("--picture", action="store_true", help="draw the steps in the tree")
    parser.add_argument("--tree", action="store_true", help="write the numbers of the docs")
    options = parser.parse_args()
    if options.picture:
        draw()
        return
    if not options.folders:
        parser.error("give the folders of the runs, or --picture")
    found = []
    results, steps = (options.folders[0] / path.name for path in (RESULTS, STEPS))
    if options.tree:
        results, steps = RESULTS, STEPS
    if not options.steps:
        if len(options.folders) > 1:
            parser.error("the other tables are of one folder: give one, or --steps")
        found = [measured(options.folders[0], seed) for seed in SEEDS]  # before a file is written
    write_steps(options.folders, steps)
    rows_of = {"real-steps": steps_table(read_steps(steps))}
    if not options.steps:
        results.write_text(json.dumps(found, indent=1) + "\n")
        rows_of |= tables(found)
    if options.tree:
        write_docs(rows_of)
        return
    for name, rows in rows_of.items():
        print(f"\n{name}", *map("  ".join, rows), sep="\n")


def write_docs(rows_of: dict[str, list[list[str]]]) -> None:
    """Write the rows of these tables into docs/data, and its pages."""
    sys.path.insert(0, str(FOLDER.parent))
    from doc_tables import Number, pages, replace_rows, write_page

    for name, rows in rows_of.items():
        replace_rows("evidence", name, [[Number(cell) for cell in row] for row in rows])
    for page in pages():
        write_page(page)


def measured(folder: Path, seed: int) -> dict[str, Any]:
    """Return what the two runs of a seed gave; each list is without replay, then with."""
    off, r3 = (ArmRun.read(arm, seed, folder / f"{arm}-seed{seed}") for arm in ARMS)
    norms = [float(np.nanmax(run.values("train/grad_norm"))) for run in (off, r3)]
    sampled = [run.accuracies("eval/avg@") for run in (off, r3)]
    starts, ends = ([each[at] for each in sampled] for at in (0, -1))
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


def write_steps(folders: Sequence[Path], path: Path) -> None:
    """Write k3, reward and gradient norm of every step of the runs in these folders."""
    lines = [["seed", "step", *(f"{name}_{arm}" for name in METRICS for arm in ARMS)]]
    found = {
        int(path.name.rpartition("seed")[2]): folder
        for folder in folders
        for path in folder.glob(f"{ARMS[0]}-seed*[0-9]")
    }
    for seed, folder in sorted(found.items()):
        runs = [ArmRun.read(arm, seed, folder / f"{arm}-seed{seed}") for arm in ARMS]
        columns = [run.values(metric) for metric in METRICS.values() for run in runs]
        for step, row in enumerate(zip(*columns, strict=True), 1):
            lines.append([str(seed), str(step), *(f"{value:.4g}" for value in row)])
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(lines)


def read_steps(path: Path = STEPS) -> dict[str, dict[str, np.ndarray]]:
    """Return {seed: {column: values of all steps}} of the file in the tree, or of another."""
    found: dict[str, dict[str, list[float]]] = {}
    with path.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            columns = found.setdefault(row.pop("seed"), {name: [] for name in row})
            for name, value in row.items():
                columns[name].append(float(value))
    return {
        seed: {name: np.array(values) for name, values in columns.items()}
        for seed, columns in found.items()
    }


def draw() -> None:
    """Write docs/figures/demonstration.png."""
    with tempfile.TemporaryDirectory() as folder:
        write_figures(Path(folder), [picture(read_steps()[PICTURED])], png=True)
        shutil.copy(Path(folder) / PICTURE.name, PICTURE)


def picture(columns: dict[str, np.ndarray]) -> Figure:
    """Return k3 by step of both runs of a seed, as `onepolicy compare` draws it."""
    runs = []
    for arm, label in zip(ARMS, LABELS, strict=True):
        named = [(metric, columns[f"{name}_{arm}"].tolist()) for name, metric in METRICS.items()]
        rows = [
            {"step": step} | {metric: values[step - 1] for metric, values in named}
            for step in range(1, len(named[0][1]) + 1)
        ]
        runs.append(ArmRun(arm, int(PICTURED), rows, label))
    drawn = figures(runs)[0]
    return replace(drawn, name=PICTURE.stem, title=f"{headline(runs)}. {drawn.title}")


def steps_table(found: dict[str, dict[str, np.ndarray]]) -> list[list[str]]:
    """Return a row a seed: steps, those above QUIET_KL, means and medians of k3."""
    rows = []
    for seed, columns in sorted(found.items()):
        off, r3 = columns["k3_off"], columns["k3_r3"]
        above = [str((values > QUIET_KL).sum()) for values in (off, r3)]
        cells = [seed, str(len(off)), *above]
        for statistic in (np.mean, np.median):
            ends = [float(statistic(values)) for values in (off, r3)]
            cells += [*map(nats, ends), times(ends[0] / ends[1])]
        rows.append(cells)
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
