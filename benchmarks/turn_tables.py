"""Tables and figures of turn_curves.py."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.divergence.breakdown import turn_name
from onepolicy.report.figures.groups import K3, NATIVE, Curve, by_turn
from onepolicy.report.figures.parts import (
    NEUTRAL,
    REPLAY,
    TRAINER,
    Figure,
    LineStyle,
    Spec,
    axis,
    line,
)

LOOKS = {"off": TRAINER, "r3": REPLAY, "off + tis": NEUTRAL}
LAST = 5
Row = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """One run. rows: metrics of its steps; scores: evaluation of its last weights."""

    arm: str
    turns: int
    seed: int
    rows: list[Row]
    scores: dict[str, float]

    def reward(self, last: int) -> float:
        """Return the mean training reward of the last steps."""
        return mean(row["train/reward"] for row in self.rows[-last:])

    @property
    def k3(self) -> float:
        return mean(row["mismatch/k3"] for row in self.rows)


VALUES: dict[str, Callable[[Outcome], float]] = {
    "held-out accuracy, sampled (avg@2)": lambda run: run.scores["eval/avg@2"],
    "held-out accuracy, greedy": lambda run: run.scores["eval/greedy"],
    f"training reward, last {LAST} steps": lambda run: run.reward(LAST),
    "training reward, all steps": lambda run: run.reward(len(run.rows)),
}


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else float("nan")


def cell(values: Sequence[float], digits: int = 3) -> str:
    """Return mean ± standard deviation; for one value, the value."""
    if len(values) < 2:
        return "".join(f"{value:.{digits}f}" for value in values)
    return f"{mean(values):.{digits}f} ± {spread(values):.{digits}f}"


def tables(found: list[Outcome]) -> str:
    """Return Markdown: each arm's reward, and the differences to `off` on the same seed and
    turns."""
    own = (table(found, title, value) for title, value in VALUES.items())
    return "\n\n".join((*own, k3_table(found), turn_table(probes(found))))


def table(found: list[Outcome], title: str, value: Callable[[Outcome], float]) -> str:
    """Return mean and standard deviation over the seeds, of every arm and of its differences to
    `off` seed by seed."""
    arms = list(dict.fromkeys(run.arm for run in found))
    others = [arm for arm in arms if arm != "off"]
    rows = [(f"turns: {title}", *arms, *(f"{arm} - off" for arm in others), "seeds")]
    for turns in sorted({run.turns for run in found}):
        by_arm = {arm: seeds(found, arm, turns, value) for arm in arms}
        differences = [
            [by_arm[arm][s] - by_arm["off"][s] for s in sorted(by_arm[arm])] for arm in others
        ]
        cells = [cell([*by_arm[arm].values()]) for arm in arms]
        rows.append((str(turns), *cells, *map(signed, differences), str(len(by_arm["off"]))))
    return markdown(rows)


def signed(differences: Sequence[float]) -> str:
    if len(differences) < 2:
        return "".join(f"{value:+.3f}" for value in differences)
    each = ", ".join(f"{x:+.3f}" for x in differences)
    return f"{mean(differences):+.3f} ± {spread(differences):.3f} ({each})"


def seeds(
    found: list[Outcome], arm: str, turns: int, value: Callable[[Outcome], float]
) -> dict[int, float]:
    return {run.seed: value(run) for run in found if (run.arm, run.turns) == (arm, turns)}


def k3_table(found: list[Outcome]) -> str:
    arms = [arm for arm in LOOKS if any(run.arm == arm for run in found)]
    rows = [("turns: k3 over all steps", *arms)]
    for turns in sorted({run.turns for run in found}):
        values = [[*seeds(found, arm, turns, lambda run: run.k3).values()] for arm in arms]
        rows.append(
            (str(turns), *(f"{mean(v):.1e} ({min(v):.1e} to {max(v):.1e})" for v in values))
        )
    return markdown(rows)


def markdown(rows: list[tuple[str, ...]]) -> str:
    head, *body = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((head, "|" + " --- |" * len(rows[0]), *body))


def probes(found: list[Outcome]) -> list[Row]:
    """Return the steps of the r3 runs with the most turns that were scored both with and without
    replay."""
    most = max(run.turns for run in found)
    rows = [row for run in found if (run.arm, run.turns) == ("r3", most) for row in run.rows]
    return [row for row in rows if f"{NATIVE}{K3}0" in row]


def turn_curves(rows: Sequence[Row]) -> list[Curve]:
    """Draw two scorings of the same tokens."""
    return [
        Curve.of("with replay", REPLAY, rows),
        Curve.of("without replay", TRAINER, rows, NATIVE),
    ]


def turn_table(rows: Sequence[Row]) -> str:
    replayed, native = turn_curves(rows)
    lines = [("turns", "tokens", "k3 without replay (lowest to highest)", "with replay", "ratio")]
    for turn, count in native.tokens.items():
        cells = (
            f"{c.k3[turn]:.1e} ({c.spread[turn][0]:.1e} to {c.spread[turn][1]:.1e})"
            for c in (native, replayed)
        )
        lines.append(
            (turn_name(turn), f"{count:.0f}", *cells, f"{native.k3[turn] / replayed.k3[turn]:.2f}")
        )
    return markdown(lines)


def figures(found: list[Outcome]) -> list[Figure]:
    rows = probes(found)
    where = (
        f"The r3 runs with the most turns, steps 1, 4, 7, 10: {len(rows)} batches, "
        f"each scored twice."
    )
    return [
        reward_figure(found),
        dataclasses.replace(by_turn(turn_curves(rows), where), name="turns_k3"),
    ]


def reward_figure(found: list[Outcome]) -> Figure:
    turns = sorted({run.turns for run in found})
    data = []
    for place, (arm, look) in enumerate(LOOKS.items()):
        if not any(run.arm == arm for run in found):
            continue
        values = [
            [*seeds(found, arm, t, lambda run: run.scores["eval/avg@2"]).values()] for t in turns
        ]
        x = [
            t * 1.04 ** (place - 1) for t in turns
        ]  # side by side, or the bars would hide each other
        data.append(points(arm, x, values, look))
    xaxis = axis(
        "allowed turns",
        type="log",
        tickmode="array",
        tickvals=turns,
        ticktext=[str(t) for t in turns],
    )
    note = (
        "Share of 64 held-out problems solved, 2 samples each, "
        "by the policy after training under the same limit: mean "
        f"and standard deviation of {len({run.seed for run in found})} seeds. "
        f"A problem takes 2 to 16 turns."
    )
    layout = {"xaxis": xaxis, "yaxis": axis("held-out accuracy", rangemode="tozero")}
    return Figure("turns_reward", "Reward against the number of allowed turns", note, data, layout)


def points(
    name: str, x: Sequence[float], values: Sequence[Sequence[float]], style: LineStyle
) -> Spec:
    """Draw means, joined, with bars of one standard deviation."""
    bars = {
        "type": "data",
        "array": [spread(each) for each in values],
        "thickness": 1.2,
        "width": 3,
    }
    marker = {"symbol": style.symbol, "size": 7, "color": style.color}
    middle = [mean(each) for each in values]
    return line(name, x, middle, style, mode="lines+markers", marker=marker, error_y=bars)
