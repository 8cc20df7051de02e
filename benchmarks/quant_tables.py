"""Table and curves of quant_table.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onepolicy.report.figure import DENSE, NEUTRAL, REPLAY, ROLLOUT, TRAINER, Figure, axis, line

EVAL = "eval/avg@2"
LAST = 10
LOOKS = {"recompute": ROLLOUT, "PPO-IS": DENSE, "Vanilla-IS": NEUTRAL, "TIS": TRAINER, "R3": REPLAY}
CURVES = {
    EVAL: ("held-out accuracy, unquantised weights", "linear"),
    "train/reward": ("training reward, quantised rollouts", "linear"),
    "train/grad_norm": ("gradient norm before clipping", "log"),
    "train/entropy": ("entropy of the trainer, nats", "linear"),
}
HEADER = (
    "rollouts", "method", "seeds", "fell back", "largest fall", "held-out, first", "held-out, last", "reward, last 10",
    "k3, mean", "gradient norm, largest", "entropy, last 10",
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
        """Largest fall of the held-out accuracy below its best so far."""
        best, worst = 0.0, 0.0
        for value in self.series(EVAL)[1]:
            best = max(best, value)
            worst = max(worst, best - value)
        return worst

    def last(self, name: str) -> float:
        return statistics.fmean(self.series(name)[1][-LAST:])


def table(found: list[Outcome], fall: float) -> str:
    """A row for every format and method: mean ± standard deviation over seeds."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    for quant, method in dict.fromkeys((each.quant, each.method) for each in found):
        runs = [each for each in found if (each.quant, each.method) == (quant, method)]
        cells = (
            f"{sum(run.fall >= fall for run in runs)} of {len(runs)}",
            over(runs, lambda run: run.fall),
            over(runs, lambda run: run.series(EVAL)[1][0]),
            over(runs, lambda run: run.series(EVAL)[1][-1]),
            over(runs, lambda run: run.last("train/reward")),
            f"{statistics.fmean(statistics.fmean(run.series('mismatch/k3')[1]) for run in runs):.2g}",
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
    """One per format and quantity: the mean over seeds of every method."""
    out = []
    for quant in dict.fromkeys(each.quant for each in found):
        for name, (title, scale) in CURVES.items():
            data = []
            for method, look in LOOKS.items():
                runs = [each.series(name) for each in found if (each.quant, each.method) == (quant, method)]
                if runs:
                    steps = runs[0][0]
                    mean = [statistics.fmean(values) for values in zip(*(run[1] for run in runs), strict=True)]
                    data.append(line(method, steps, mean, look))
            key = f"{quant.replace(' ', '_')}_{name.replace('/', '_').replace('@', '')}"
            layout = {"xaxis": axis("step"), "yaxis": axis(title, type=scale)}
            seeds = len({each.seed for each in found if each.quant == quant})
            out.append(Figure(key, f"{quant} rollouts: {title}", f"Mean of {seeds} seeds.", data, layout))
    return out
