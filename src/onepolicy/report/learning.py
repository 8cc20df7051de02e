"""Figures over training steps: reward and evaluation, length, entropy, gradient norm, time."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from onepolicy.notation import number
from onepolicy.report.figure import (
    NEUTRAL,
    ROLLOUT,
    TRAINER,
    Absent,
    Figure,
    LineStyle,
    Spec,
    axis,
    line,
    markers,
)
from onepolicy.report.run import Run
from onepolicy.report.words import NOT_PARTS, accuracy, course, unlearnt

EVAL_SYMBOLS = ("star", "triangle-up", "x", "cross")
TIME_PARTS = {  # part -> colour, fill pattern
    "rollout": ("@rollout-soft", ""),
    "wait": ("@rollout-soft", "|"),
    "score": ("@trainer-soft", "/"),
    "counterfactual": ("@replay", "x"),
    "update": ("@trainer", "\\"),
    "sync": ("@muted", "."),
    "eval": ("@ink", "-"),
}


def learning_figures(run: Run) -> list[Figure | Absent]:
    """Return the figures of reward, response length, entropy and gradient norm."""
    return [
        reward(run),
        single(run, "length", "train/response_length", "tokens", ROLLOUT, "Response length",
               "Mean sampled tokens per rollout. A sudden jump to the limit means answers stopped "
               "ending."),
        single(run, "entropy", "train/entropy", "nats", TRAINER, "Entropy",
               "Mean entropy of the trainer's next-token distribution on sampled tokens. Healthy: "
               "level, or falling slowly."),
        single(run, "grad_norm", "train/grad_norm", "", TRAINER, "Gradient norm",
               "Before clipping. Spikes before a fall of the reward are a warning; exactly 0 "
               "teaches nothing.",
               log=True),
    ]  # fmt: skip


def reward(run: Run) -> Figure | Absent:
    """Draw the reward and the evaluations over steps."""
    steps, values = run.points("train/reward")
    if not steps:
        return Absent("reward", "Reward: metrics.jsonl has no train/reward.")
    window = max(5, len(steps) // 25)
    raw = {"color": ROLLOUT.color, "width": 1}
    data = [line("training reward, per step", steps, values, ROLLOUT, line=raw, opacity=0.45)]
    if len(steps) >= 4 * window:
        mean = line(f"mean of {window} steps", steps, trailing_mean(values, window), ROLLOUT)
        mean["line"]["width"] = 2.6
        data.append(mean)
    scores = [name for name in run.names("eval/") if name != "eval/response_length"]
    for name, symbol in zip(scores, EVAL_SYMBOLS, strict=False):
        style = LineStyle(NEUTRAL.color, "solid", symbol, "")
        points = markers(name.replace("eval/", "evaluation, "), *run.points(name), style)
        thin = {"color": "@muted", "width": 1, "dash": "dot"}
        data.append(points | {"mode": "lines+markers", "line": thin, "cliponaxis": False})
    layout = {"xaxis": step_axis(), "yaxis": axis("reward, accuracy")}
    layout |= _crash_line(run.summary.get("crash_step"))
    held_out = "no evaluation was run (eval.every = 0)."
    if scores:
        held_out = "evaluation uses held-out problems."
    note = f"Training reward is sampled at the training temperature; {held_out}"
    idle = unlearnt(run.summary)
    title = f"Reward {course(values)}"
    if run.summary.get("score") in scores:
        judged = run.summary["score"]
        title += f"; {accuracy(judged)} {course(run.points(judged)[1])}"
    if idle is not None:
        title = f"Reward: {idle.learnt} was learnt from it"
    return Figure("reward", title, note, data, layout, width="wide")


def _crash_line(step: int | None) -> Spec:
    if step is None:
        return {}
    stroke = {"color": "@ink", "width": 1.5, "dash": "dash"}
    text = {"text": "crash", "showarrow": False, "xanchor": "left", "xshift": 4}
    return {
        "shapes": [
            {
                "type": "line",
                "x0": step,
                "x1": step,
                "y0": 0,
                "y1": 1,
                "yref": "paper",
                "line": stroke,
            }
        ],
        "annotations": [{"x": step, "y": 1, "yref": "paper", **text}],
    }


def single(
    run: Run,
    name: str,
    metric: str,
    unit: str,
    style: LineStyle,
    title: str,
    note: str,
    *,
    log: bool = False,
) -> Figure | Absent:
    """Draw one metric over steps.

    With `log` the axis is logarithmic if the largest value is far above the median.
    """
    steps, values = run.points(metric)
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return Absent(name, f"{title}: metrics.jsonl has no {metric}.")
    shown = unit or "norm"
    yaxis = axis(shown, rangemode="tozero")
    if log and min(finite) > 0 and max(finite) > 30 * np.median(finite):
        yaxis = axis(f"{shown} (log)", type="log")
    trace = line(metric, steps, values, style)
    layout = {"xaxis": step_axis(), "yaxis": yaxis, "showlegend": False}
    return Figure(name, f"{title} {course(values, unit)}", note, [trace], layout, "third")


def time_split(run: Run) -> Figure | Absent:
    """Draw the seconds per step, stacked; time that belongs to no part is `other`."""
    rows = [row for row in run.rows if row.get("time/step") is not None]
    if not rows:
        return Absent("time", "Time per step: metrics.jsonl has no time/step.")
    steps = [row["step"] for row in rows]
    total = np.array([row["time/step"] for row in rows], dtype=np.float64)
    found = [
        name.removeprefix("time/")
        for name in run.names("time/")
        if name.removeprefix("time/") not in NOT_PARTS
    ]
    parts = [part for part in TIME_PARTS if part in found]
    parts += [part for part in found if part not in TIME_PARTS]
    data, rest = [], total
    for part in parts:
        seconds = np.array([row.get(f"time/{part}") or 0.0 for row in rows], dtype=np.float64)
        data.append(_area(part, steps, seconds, *TIME_PARTS.get(part, ("@muted", "+"))))
        rest = rest - seconds
    data.append(_area("other", steps, np.clip(rest, 0, None), "@line", ""))
    shares = [(sum(trace["y"]) / total.sum(), trace["name"]) for trace in data]
    listed = ", ".join(f"{name} {share:.0%}" for share, name in shares)
    note = f"Over the whole run: {listed}. Mean step: {number(total.mean())} s."
    most, name = max(shares)
    layout = {
        "xaxis": step_axis(),
        "yaxis": axis("seconds per step", rangemode="tozero"),
        "hovermode": "x unified",
    }
    title = f"The largest part of a step is {name}: {most:.0%}"
    return Figure("time", title, note, data, layout, width="wide")


def step_axis() -> Spec:
    """Return the axis of training steps."""
    return axis("training step", rangemode="tozero")


def trailing_mean(values: list[float], window: int) -> list[float]:
    """Return the mean of the last `window` values up to each one, without NaN.

    The sums are exact, so one is made of the last: a window of a long run has thousands of values.
    """
    out, total, known = [], Fraction(), 0
    for end, value in enumerate(values):
        if math.isfinite(value):
            total, known = total + Fraction(value), known + 1
        if end >= window and math.isfinite(values[end - window]):
            total, known = total - Fraction(values[end - window]), known - 1
        mean = math.nan
        if known:
            mean = float(total / known)
        out.append(mean)
    return out


def _area(name: str, steps: list[int], seconds: np.ndarray, color: str, pattern: str) -> Spec:
    fill = {
        "shape": pattern,
        "size": 6,
        "solidity": 0.2,
        "fgcolor": "@paper",
        "bgcolor": color,
        "fillmode": "overlay",
    }
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": steps,
        "y": seconds.tolist(),
        "stackgroup": "time",
        "line": {"width": 0.5, "color": color},
        "fillcolor": color,
        "fillpattern": fill,
    }
