"""The picture of `onepolicy compare`: how often k3 is large, then k3, reward and norms by step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from onepolicy.notation import counted, number
from onepolicy.report.arm_run import ArmRun
from onepolicy.report.figure import (
    DENSE,
    NEUTRAL,
    REPLAY,
    SOFT,
    Figure,
    LineStyle,
    LogScale,
    Spec,
    axis,
    line,
    markers,
)
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.rules import QUIET_KL, SMALL

FIRST = LineStyle("@arm-first", "solid", "circle", "")
OTHER = LineStyle("@arm-other", "solid", "circle", "")
STYLES = (FIRST, OTHER, DENSE, REPLAY, NEUTRAL, SOFT)
"""The first two differ in lightness too, so they differ in grey."""
K3, REWARD, NORM = "mismatch/k3", "train/reward", "train/grad_norm"
HEIGHTS = {"k3": 330, "reward": 130, "norm": 170}  # of the panels [pixels]
BAR, BETWEEN = 30, 52  # height of a bar, and between two panels [pixels]
APART = 34  # least distance of two labels at the ends of lines [pixels]
MOST_STEPS = 40  # of a running mean
Array = np.ndarray


def picture(runs: Sequence[ArmRun], title: str) -> Figure:
    """Draw the share of steps with a large k3, then k3, reward and gradient norm by step."""
    styles = dict(zip(dict.fromkeys(run.name for run in runs), STYLES * len(runs), strict=False))
    window = max(1, min(MOST_STEPS, len(runs[0].values(REWARD)) // 10))
    k3, norms = ([run.values(name) for run in runs] for name in (K3, NORM))
    scales = LogScale.of(*k3, (HARMLESS_KL, QUIET_KL)), LogScale.of(*norms)
    heights = {"share": BAR * len(styles), **HEIGHTS}
    domains = _domains(list(heights.values()))
    data = [_shares(runs, styles)]
    for run in runs:
        data += _curves(run, styles[run.name], scales, window)
    k3_axis, norm_axis = scales[0].axis("k3, nats per token", steps=5), scales[1].axis("norm")
    layout = {
        "xaxis": axis("step") | {"anchor": "y4"},
        "xaxis2": _share_axis(),
        "yaxis": {"domain": domains[0], "anchor": "x2", "showticklabels": False}
        | {"autorange": "reversed", "type": "category", "showgrid": False},
        "yaxis2": k3_axis | {"domain": domains[1]},
        "yaxis3": axis("reward") | {"domain": domains[2]},
        "yaxis4": norm_axis | {"domain": domains[3]},
        "shapes": [_threshold(limit) for limit in (HARMLESS_KL, QUIET_KL)],
        "annotations": [
            _named_threshold(HARMLESS_KL, f"{SMALL} below"),
            _named_threshold(QUIET_KL, "act above"),
            *_end_labels(runs, styles, k3_axis["range"], window),
        ],
        "showlegend": False,
        "margin": {"l": 58, "r": 112, "t": 26, "b": 46},
    }
    mean = "joins the steps"
    if window > 1:
        mean = f"is the mean of {window} steps"
    note = (
        f"A dot is a step, a line {mean}. k3 estimates "
        "KL(rollout \u2016 trainer) per token; the gradient norm is before clipping. A tick at the "
        "lower edge is a 0."
    )
    height = sum(heights.values()) + BETWEEN * len(heights) + 40
    return Figure("curves", title, note, data, layout, width="wide", height=height)


def _domains(heights: Sequence[int]) -> list[list[float]]:
    """Return the part of the height that each panel takes, from the top down."""
    whole = sum(heights) + BETWEEN * (len(heights) - 1)
    found, top = [], 1.0
    for height in heights:
        found.append([max(0.0, top - height / whole), top])
        top -= (height + BETWEEN) / whole
    return found


def _share_axis() -> Spec:
    title = f"share of steps with k3 above {number(QUIET_KL)}"
    return axis(title) | {
        "anchor": "y",
        "range": [0, 1],
        "tickvals": [0, 0.25, 0.5, 0.75, 1],
        "ticktext": ["0", "25%", "50%", "75%", "100%"],
        "side": "bottom",
    }


def _shares(runs: Sequence[ArmRun], styles: dict[str, LineStyle]) -> Spec:
    """Return a bar an arm, over the steps of all of its seeds that have a k3."""
    names, shares, texts = [], [], []
    for name in styles:
        found = np.concatenate([run.values(K3) for run in runs if run.name == name])
        found = found[np.isfinite(found)]
        above = int((found > QUIET_KL).sum())
        names.append(name)
        shares.append(above / max(1, found.size))
        texts.append(f" {_label(runs, name)}: {above} of {counted(found.size, 'step')}")
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"above {number(QUIET_KL)}",
        "x": shares,
        "y": names,
        "xaxis": "x2",
        "yaxis": "y",
        "text": texts,
        "textposition": ["inside" if share > 0.6 else "outside" for share in shares],
        "cliponaxis": False,
        "hoverinfo": "text",
        "marker": {"color": [style.color for style in styles.values()]},
    }


def _curves(
    run: ArmRun, style: LineStyle, scales: tuple[LogScale, LogScale], window: int
) -> list[Spec]:
    """Return dots and running means of k3 and norm, and the running mean of the reward."""
    reward = run.values(REWARD)
    steps = list(range(1, len(reward) + 1))
    shown = [line(run.name, steps, running_mean(reward, window), style, yaxis="y3")]
    for metric, scale, which in ((K3, scales[0], "y2"), (NORM, scales[1], "y4")):
        values = run.values(metric)
        dots = {
            "size": 4,
            "opacity": 0.4,
            "symbol": ["line-ns-open" if value <= 0 else "circle" for value in values],
        }
        lifted, mean = scale.lift(values.tolist()), scale.lift(running_mean(values, window))
        shown.append(markers(run.name, steps, lifted, style, yaxis=which, marker=dots))
        shown.append(line(run.name, steps, mean, style, yaxis=which))
    for each in shown:
        if each["mode"] == "lines":
            each["line"]["width"] = 2.6
    return shown


def running_mean(values: Array, window: int) -> list[float]:
    """Return the mean of each value and of the `window` - 1 before it, of those that are finite.

    NaN where there are not so many, or none is finite.
    """
    found = [math.nan] * (window - 1)
    for at in range(window, len(values) + 1):
        part, mean = values[at - window : at], math.nan
        if np.isfinite(part).any():
            mean = float(part[np.isfinite(part)].mean())
        found.append(mean)
    return found


def _label(runs: Sequence[ArmRun], name: str) -> str:
    return next(run.label for run in runs if run.name == name) or name


def _threshold(limit: float) -> Spec:
    stroke = {"color": "@muted", "width": 1, "dash": "dot"}
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": limit, "y1": limit, "yref": "y2"}
    return {"type": "line", "line": stroke, **ends}


def _named_threshold(limit: float, meaning: str) -> Spec:
    where = {"x": 0, "xref": "paper", "y": math.log10(limit), "yref": "y2", "yanchor": "bottom"}
    font = {"size": 11, "color": "@muted"}
    text = f"{number(limit)}, {meaning}"
    return {"text": text, "showarrow": False, "xanchor": "left", "xshift": 4, "font": font, **where}


def _end_labels(
    runs: Sequence[ArmRun], styles: dict[str, LineStyle], ends: Sequence[float], window: int
) -> list[Spec]:
    """Return the name of each arm where its line of k3 ends, its setting in grey below."""
    wanted = {}
    for name in styles:
        last = [running_mean(run.values(K3), window)[-1] for run in runs if run.name == name]
        positive = [math.log10(value) for value in last if value > 0]
        wanted[name] = sum(positive) / len(positive) if positive else ends[0]
    shown, least = [], APART / HEIGHTS["k3"] * (ends[1] - ends[0])
    above = math.inf
    for name in sorted(wanted, key=wanted.__getitem__, reverse=True):
        above = min(wanted[name], above - least)
        label = _label(runs, name)
        lines = [(f"<b>{label}</b>", styles[name].color, 0)]
        if label != name:
            lines.append((name, "@muted", -15))
        place = {"x": 1, "xref": "paper", "y": above, "yref": "y2", "xanchor": "left"}
        shown += [
            {"text": text, "font": {"color": color, "size": 12}, "yshift": shift}
            | {"showarrow": False, "xshift": 6, **place}
            for text, color, shift in lines
        ]
    return shown
