"""Curves over training steps: k3, F(2), reward, norms, ages; and the seconds of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from onepolicy.notation import number
from onepolicy.report.figures.parts import (
    RHO,
    Array,
    Figure,
    LogScale,
    Series,
    Spec,
    Width,
    axis,
    limit,
    line,
    markers,
)
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.rules import QUIET_F2, QUIET_KL, SMALL

MOST_STEPS = 40  # of a running mean
FEWEST_STEPS = 20
"""With fewer values a curve is its points; from here on they are faint behind a running mean."""
LABEL = 15  # height of a label at the end of a line [pixels]
HEIGHTS = {"third": 260, "half": 300, "wide": 360}  # as in templates/style.css
MEANING = f"k3 = mean({RHO} - 1 - log {RHO}), {RHO} = p_trainer / p_rollout of the sampled tokens"
K3_LIMITS = {
    HARMLESS_KL: f"{number(HARMLESS_KL)}, {SMALL} below",
    QUIET_KL: f"{number(QUIET_KL)}, act above",
}
F2_LIMITS = {QUIET_F2: f"{number(QUIET_F2, share=True)}, no concern below"}
TIME_PARTS = {  # part -> colour, fill pattern
    "rollout": ("@rollout-soft", ""),
    "wait": ("@rollout-soft", "|"),
    "score": ("@trainer-soft", "/"),
    "counterfactual": ("@replay", "x"),
    "update": ("@trainer", "\\"),
    "sync": ("@muted", "."),
    "eval": ("@ink", "-"),
}
Mark = tuple[float, str]  # a step, and its meaning


def k3(series: Sequence[Series], title: str, note: str = "", marks: Sequence[Mark] = ()) -> Figure:
    """Draw k3 over steps, with the limits of the verdict."""
    note = f"{MEANING}; 0 = same policy. {note}".strip()
    unit = "k3, nats per token"
    return over_steps("k3", title, note, series, unit, limits=K3_LIMITS, marks=marks)


def over_steps(
    name: str,
    title: str,
    note: str,
    series: Sequence[Series],
    unit: str,
    *,
    limits: Mapping[float, str] | None = None,
    log: bool = False,
    marks: Sequence[Mark] = (),
    width: Width = "wide",
) -> Figure:
    """Draw values by step: points, and from FEWEST_STEPS of them on their running mean.

    A step without a value is a gap. With limits, which are named, the axis is logarithmic; a value
    of 0 is a tick at its lower edge, and no line leads there.
    """
    log, limits = log or limits is not None, limits or {}
    scale = LogScale.of(*(each.y for each in series), limits)
    yaxis = scale.axis(unit, steps=5) if log else _linear(unit, series)
    data: list[Spec] = []
    ends: dict[str, tuple[str, list[float]]] = {}
    for each in series:
        y, shown = np.asarray(each.y, dtype=float), {"showlegend": False}
        steps, window = list(each.x), window_of(y)
        mean = running_mean(y, window)
        if log:
            mean = np.where(mean > 0, mean, math.nan)
        found = y.tolist()
        marker: Spec = {"size": 4, "opacity": 0.4}
        if window == 1:
            marker = {"size": 6, "opacity": 1}
        if log:
            symbols = ["line-ns-open" if v <= 0 else each.style.symbol for v in found]
            found, marker["symbol"] = scale.lift(found), symbols
        hover = {"hovertemplate": "step %{x}: %{y:.3g}"}
        data.append(markers(each.label, steps, found, each.style, marker=marker, **hover, **shown))
        data.append(line(each.label, steps, mean.tolist(), each.style, hoverinfo="skip", **shown))
        data[-1]["line"]["width"] = 2.6 if window > 1 else 1.4
        last = mean[np.isfinite(mean)]
        ends.setdefault(each.label, (each.style.color, []))[1].extend(last[-1:].tolist())
    lines = [limit(at, meaning) for at, meaning in limits.items()]
    crossed = [limit(at, meaning, vertical=True, log=False) for at, meaning in marks]
    texts = [text for _, text in (*lines, *crossed)]
    if len(ends) > 1:
        texts += _end_labels(ends, yaxis, HEIGHTS[width], log=log)
    layout = {"xaxis": step_axis(series), "yaxis": yaxis, "annotations": texts}
    layout["shapes"] = [shape for shape, _ in (*lines, *crossed)]
    return Figure(name, title, f"{note} {_drawing(series)}".strip(), data, layout, width)


def step_axis(series: Sequence[Series]) -> Spec:
    """Return the axis of training steps: from 0, or from the first of a fork's few steps."""
    found = [step for each in series for step in each.x] or [1]
    first, last = min(found), max(1, *found)
    if first == last or first <= last - first:
        first = min(0, first)
    width = last - first
    return axis("training step", range=[first - 0.01 * width, last + 0.02 * width], nticks=8)


def window_of(values: Array) -> int:
    """Return how many steps are averaged: a tenth of those with a value, at most MOST_STEPS."""
    known = int(np.isfinite(values).sum())
    if known < FEWEST_STEPS or known < len(values) // 2:
        return 1
    return min(MOST_STEPS, known // 10)


def running_mean(values: Array, window: int) -> Array:  # [steps] float64
    """Return the mean of each value and of the `window` - 1 before it, of those that there are.

    NaN where there are not so many, or none, or one is infinite.
    """
    if window == 1:
        return values
    found = np.full(len(values), math.nan)
    for at in range(window, len(values) + 1):
        part = values[at - window : at]
        if np.isfinite(part).any() and not np.isinf(part).any():
            found[at - 1] = part[np.isfinite(part)].mean()
    return found


def _drawing(series: Sequence[Series]) -> str:
    windows = {window_of(np.asarray(each.y, dtype=float)) for each in series} - {1}
    if not windows:
        return ""
    most, least = max(windows), min(windows)
    steps = f"{most}" if most == least else f"{least} or {most}"
    return f"A dot is a step, the line the mean of {steps} steps."


def _linear(unit: str, series: Sequence[Series]) -> Spec:
    """Return a linear axis over all finite values and 0."""
    known = [v for each in series for v in np.asarray(each.y, float).tolist() if math.isfinite(v)]
    low, high = min([0.0, *known]), max([0.0, *known])
    if low == high:
        high = 1.0
    room = 0.06 * (high - low)
    return axis(unit, range=[low - room, high + room], nticks=6)


def _end_labels(
    ends: Mapping[str, tuple[str, list[float]]], yaxis: Spec, height: int, *, log: bool
) -> list[Spec]:
    """Return the name of each series above the end of its line, apart from the others."""
    low, high = yaxis["range"]
    wanted = {}
    for label, (_, values) in ends.items():
        known = [math.log10(v) if log else v for v in values if not log or v > 0]
        if values:  # without any there is no line to name
            wanted[label] = sum(known) / len(known) if known else low
    apart = LABEL / (height - 90) * (high - low)
    places, above = {}, math.inf
    for label in sorted(wanted, key=wanted.__getitem__, reverse=True):
        above = min(wanted[label], above - apart, high - apart)
        places[label] = above
    floor = low - apart
    for label in reversed(places):  # back up from the lower edge
        places[label] = floor = max(places[label], floor + apart)
    common = {"x": 1, "xref": "paper", "xanchor": "right", "yanchor": "bottom", "showarrow": False}
    common |= {"bgcolor": "@veil", "borderpad": 0, "yshift": 2}
    return [
        {"text": f"<b>{label}</b>", "y": place, "font": {"color": ends[label][0], "size": 12}}
        | common
        for label, place in places.items()
    ]


def seconds(steps: Sequence[int], total: Array, parts: Mapping[str, Array]) -> Figure:
    """Draw the seconds per step, stacked; time that belongs to no part is `other`."""
    ordered = [part for part in TIME_PARTS if part in parts]
    ordered += [part for part in parts if part not in TIME_PARTS]
    rest = total - sum((parts[part] for part in ordered), np.zeros(len(total)))
    spent = {part: parts[part] for part in ordered} | {"other": np.clip(rest, 0, None)}
    looks = TIME_PARTS | {"other": ("@line", "")}
    data = [
        _area(part, steps, values, *looks.get(part, ("@muted", "+")))
        for part, values in spent.items()
    ]
    shares = {part: values.sum() / total.sum() for part, values in spent.items()}
    listed = ", ".join(f"{part} {share:.0%}" for part, share in shares.items())
    note = f"Over the whole run: {listed}. Mean step: {number(total.mean())} s."
    most = max(shares, key=shares.__getitem__)
    layout = {
        "xaxis": axis("training step"),
        "yaxis": axis("seconds per step", rangemode="tozero"),
        "hovermode": "x unified",
    }
    title = f"The largest part of a step is {most}: {shares[most]:.0%}"
    return Figure("time", title, note, data, layout, "wide")


def _area(name: str, steps: Sequence[int], spent: Array, color: str, pattern: str) -> Spec:
    fill = {"shape": pattern, "size": 6, "solidity": 0.2, "fillmode": "overlay"}
    return {
        "type": "scatter",
        "mode": "lines" if len(steps) > 1 else "lines+markers",
        "name": name,
        "x": steps,
        "y": spent.tolist(),
        "stackgroup": "time",
        "line": {"width": 0.5, "color": color},
        "fillcolor": color,
        "fillpattern": fill | {"fgcolor": "@paper", "bgcolor": color},
    }


def stretched(values: Sequence[float]) -> bool:
    """Return whether a curve above 0 needs a log axis: its top is far above its median."""
    known = [value for value in itertools.filterfalse(math.isnan, values) if value > 0]
    return bool(known) and max(known) > 30 * float(np.median(known))
