"""Table and curves of quant_table.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onepolicy.report.figures.parts import (
    DENSE,
    NEUTRAL,
    REPLAY,
    ROLLOUT,
    TRAINER,
    Figure,
    axis,
    line,
)

EVAL = "eval/avg@2"
LAST = 10
LOOKS = {"recompute": ROLLOUT, "PPO-IS": DENSE, "Vanilla-IS": NEUTRAL, "TIS": TRAINER, "R3": REPLAY}
WINDOW = 5
CURVES: dict[str, tuple[str, dict[str, Any]]] = {
    EVAL: ("held-out accuracy, unquantised weights", {"range": [0, 1]}),
    "train/reward": ("training reward, quantised rollouts", {"range": [0, 1]}),
    "train/grad_norm": ("gradient norm before clipping", {"type": "log", "dtick": 1}),
    "train/entropy": ("entropy of the trainer, nats", {"type": "log", "dtick": 1}),
}
LEGEND = {"orientation": "h", "x": 0, "y": -0.18, "yanchor": "top"}
LABEL = {
    "y": 1.0,
    "xref": "paper",
    "yref": "paper",
    "xanchor": "center",
    "yanchor": "bottom",
    "showarrow": False,
}
HEADER = (
    "rollouts", "method", "seeds", "fell back", "largest fall", "held-out, last",
    "reward, last 10", "k3, mean", "gradient norm, largest", "entropy, last 10",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One run. rows: its metrics."""

    method: str
    quant: str
    seed: int
    rows: list[dict[str, Any]]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        known = [(row["step"], row[name]) for row in self.rows if row.get(name) is not None]
        return [step for step, _ in known], [value for _, value in known]

    @property
    def fall(self) -> float:
        """Return the largest fall of the held-out accuracy below its best so far."""
        best, worst = 0.0, 0.0
        for value in self.series(EVAL)[1]:
            best = max(best, value)
            worst = max(worst, best - value)
        return worst

    def last(self, name: str) -> float:
        return statistics.fmean(self.series(name)[1][-LAST:])


def table(found: list[Outcome], fall: float) -> str:
    """Return a row for every format and method: mean ± standard deviation over seeds."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    for quant, method in dict.fromkeys((each.quant, each.method) for each in found):
        runs = [each for each in found if (each.quant, each.method) == (quant, method)]
        k3 = (statistics.fmean(run.series("mismatch/k3")[1]) for run in runs)
        cells = (
            f"{sum(run.fall >= fall for run in runs)} of {len(runs)}",
            over(runs, lambda run: run.fall),
            over(runs, lambda run: run.series(EVAL)[1][-1]),
            over(runs, lambda run: run.last("train/reward")),
            f"{statistics.fmean(k3):.2g}",
            over(runs, lambda run: max(run.series("train/grad_norm")[1])),
            over(runs, lambda run: run.last("train/entropy")),
        )
        lines.append("| " + " | ".join((quant, method, str(len(runs)), *cells)) + " |")
    return "\n".join(lines)


def over(runs: list[Outcome], value: Callable[[Outcome], float]) -> str:
    values = [value(run) for run in runs]
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.3f}{spread}"


def figures(found: list[Outcome]) -> list[Figure]:
    """Draw one figure per quantity, a panel per format, a line per method."""
    return [panels(found, name) for name in CURVES]


def panels(found: list[Outcome], name: str) -> Figure:
    title, scale = CURVES[name]
    formats = list(dict.fromkeys(each.quant for each in found))
    data, layout = [], {"yaxis": axis(title, **scale), "annotations": [], "legend": LEGEND}
    for number, quant in enumerate(formats, start=1):
        suffix = "" if number == 1 else str(number)
        left, right = (number - 1) / len(formats) + 0.012, number / len(formats) - 0.012
        layout[f"xaxis{suffix}"] = axis("step", domain=[left, right])
        layout["annotations"].append(LABEL | {"text": f"<b>{quant}</b>", "x": (left + right) / 2})
        for method, look in LOOKS.items():
            runs = [
                each.series(name) for each in found if (each.quant, each.method) == (quant, method)
            ]
            if runs:
                mean = [
                    statistics.fmean(values)
                    for values in zip(*(run[1] for run in runs), strict=True)
                ]
                place = {"xaxis": f"x{suffix}", "legendgroup": method, "showlegend": number == 1}
                data.append(line(method, *smooth(runs[0][0], mean), look, **place))
    seeds = len({each.seed for each in found})
    note = f"Means of {seeds} seeds" + (f" and of {WINDOW} steps." if name != EVAL else ".")
    key = f"quant_{name.split('/')[1].replace('@', '')}"
    return Figure(key, f"{title[0].upper()}{title[1:]}", note, data, layout, width="wide")


def smooth(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return means of WINDOW steps, at the last of each. Evaluations, which are fewer, are not
    smoothed."""
    if len(steps) <= 2 * WINDOW:
        return steps, values
    ends = range(WINDOW, len(steps) + 1, WINDOW)
    return [steps[end - 1] for end in ends], [
        statistics.fmean(values[end - WINDOW : end]) for end in ends
    ]
