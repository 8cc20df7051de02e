"""Tables and figure of lora_curves.py, and the rule by which LoRA learns like full training.

The rule was fixed before the first run. The rate of adapters was fixed twice: 3e-3, from one pilot,
was left after the first run's reward had halved within 20 steps, and 1e-3 took its place before any
other run (the arm `hf-lora-fast` keeps the first). A run's rise is the mean reward of its last
BLOCK steps less that of its first BLOCK. LoRA's reward rises as in the full run if, on the same
engine, the mean rise of its seeds is at least SHARE of the full runs', and no seed falls. Its k3 is
the mean over steps and seeds, and may be at most LARGEST_K3 times the full runs'.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from onepolicy.report.figures.parts import ROLLOUT, TRAINER, Figure, Spec, axis, line
from onepolicy.report.png import write_figures

BLOCK, SHARE, LARGEST_K3, SEEDS = 8, 0.5, 2.0, (0, 1, 2)
ENGINES = {"hf": "embedded", "vllm": "vLLM"}
TRAINED = {
    "full": "all weights",
    "lora": "LoRA, merged",
    "lora-native": "LoRA, native",
    "lora-rank4": "LoRA, rank 4",
    "lora-fast": "LoRA, rate 3e-3",
}
BEGIN = "<!-- curves: written by benchmarks/lora_curves.py -->"
END = "<!-- end of the curves -->"
Run = dict[str, Any]


def ends(run: Run) -> tuple[float, float]:
    """Return the mean reward of a run's first and last steps."""
    return fmean(run["reward"][:BLOCK]), fmean(run["reward"][-BLOCK:])


def of_arm(runs: Sequence[Run], arm: str) -> list[Run]:
    return [run for run in runs if run["arm"] == arm]


def k3_ratio(runs: Sequence[Run], engine: str) -> float:
    """Return the mean k3 of an engine's LoRA runs over that of the full runs of the same seeds."""
    lora, full = paired(runs, engine)
    return fmean(fmean(run["k3"]) for run in lora) / fmean(fmean(run["k3"]) for run in full)


def paired(runs: Sequence[Run], engine: str) -> tuple[list[Run], list[Run]]:
    """Return the LoRA runs of an engine and the full runs of the same seeds."""
    lora, full = of_arm(runs, f"{engine}-lora"), of_arm(runs, f"{engine}-full")
    seeds = {run["seed"] for run in lora} & {run["seed"] for run in full}
    return [r for r in lora if r["seed"] in seeds], [r for r in full if r["seed"] in seeds]


def rises_alike(runs: Sequence[Run], engine: str) -> bool:
    """Return whether the rule of this file holds for an engine's runs."""
    rises = [[last - first for first, last in map(ends, arm)] for arm in paired(runs, engine)]
    return min(rises[0]) > 0 and fmean(rises[0]) >= SHARE * fmean(rises[1])


def table(runs: Sequence[Run]) -> list[str]:
    """Return the lines of the page: what the rule says of each engine, and how far each arm came.

    Every run is a line of benchmarks/lora_curves.jsonl."""
    return [*(f"- {verdict(runs, engine)}" for engine in ENGINES), "", *table_of_rises(runs)]


def table_of_rises(runs: Sequence[Run]) -> list[str]:
    """Return how far each rank and rate came with the embedded engine."""
    rows = [
        f"Rise: last {BLOCK} rewards less the first {BLOCK}. Embedded engine.",
        "",
        "| what is trained | rank | rate | mean rise | lowest seed |",
        "|---|---|---|---|---|",
    ]
    for arm, trained in TRAINED.items():
        found = of_arm(runs, f"hf-{arm}")
        if found:
            settings = dict(setting.split("=", 1) for setting in found[0]["settings"])
            rises = [last - first for first, last in map(ends, found)]
            rows.append(
                f"| {trained} | {settings.get('train.lora.rank', '')} | {settings['optim.lr']} | "
                f"{fmean(rises):.2f} | {min(rises):.2f} |"
            )
    return rows


def verdict(runs: Sequence[Run], engine: str) -> str:
    pairs = len(paired(runs, engine)[0])
    if pairs < len(SEEDS):
        return f"{ENGINES[engine]}: {pairs} of {len(SEEDS)} pairs of runs are there: not decided."
    words = {True: "rises as in the full runs", False: "does not rise as in the full runs"}
    return (
        f"{ENGINES[engine]}: by the rule the reward of LoRA {words[rises_alike(runs, engine)]}; "
        f"its k3 is {k3_ratio(runs, engine):.2f} times theirs."
    )


def write_page(runs: Sequence[Run], page: Path) -> None:
    """Write the table into its page, in place of the one that is there."""
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text("\n".join([before + BEGIN, *table(runs), END + after]))


def write_figure(runs: Sequence[Run], folder: Path, *, png: bool) -> None:
    """Draw the reward of every compared run, one engine beside the other."""
    data: list[Spec] = []
    for number, engine in enumerate(ENGINES):
        for arm, style in (("full", TRAINER), ("lora", ROLLOUT)):
            for run in of_arm(runs, f"{engine}-{arm}"):
                blocks = [run["reward"][at : at + 4] for at in range(0, len(run["reward"]), 4)]
                x = [4 * at + 2.5 for at in range(len(blocks))]
                drawn = line(TRAINED[arm], x, [fmean(block) for block in blocks], style)
                first = not number and run["seed"] == min(SEEDS)
                places = {"xaxis": "x" + "2" * number, "yaxis": "y", "showlegend": first}
                data.append(drawn | places)
    where = {"xaxis": [0, 0.48], "xaxis2": [0.52, 1]}
    titles = [f"step, {words} engine" for words in ENGINES.values()]
    layout: Spec = {
        name: axis(title, domain=domain)
        for (name, domain), title in zip(where.items(), titles, strict=True)
    }
    layout["yaxis"] = axis("reward, mean of 4 steps")
    note = "The quickstart on a small policy of the tree: one line a seed, the same seeds in both."
    figure = Figure("lora_curves", "LoRA beside full training", note, data, layout, width="wide")
    write_figures(folder, [figure], png=png)
