"""The figures of an audit. Titles say what the data show.

The heatmap of rows is drawn for each dump. The other figures show one dump, or two on the same
axes: the histogram of log-ratios, F(tau), curves over steps, routers per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from onepolicy.audit.assessment import ONSET_RULE, AuditResult
from onepolicy.audit.row_heatmap import row_heatmap
from onepolicy.correct.report import BINS_PER_SIGN, GROWTH, SMALLEST, quantiles
from onepolicy.notation import number
from onepolicy.record.schema import Array
from onepolicy.report.figure import (
    NEUTRAL,
    RHO,
    TAU,
    Absent,
    Figure,
    LineStyle,
    LogScale,
    Spec,
    axis,
    bars,
    line,
)
from onepolicy.report.routing import stands_out
from onepolicy.verdict.rules import QUIET_F2, QUIET_KL

SECOND = LineStyle("@trainer", "9px,3px", "diamond", "/")
HISTOGRAM_BINS = 80
EDGES = np.concatenate([[0.0], SMALLEST * GROWTH ** np.arange(BINS_PER_SIGN + 1)])
"""[BINS_PER_SIGN + 2] of |log rho|: rank r of the histogram holds [EDGES[r], EDGES[r + 1])."""
StyledResult = tuple[AuditResult, LineStyle]


def audit_figures(results: Sequence[AuditResult]) -> list[Figure | Absent]:
    """Return all figures of one or two dumps, or why a figure is absent."""
    assert len(results) <= 2, "a third result has no line style"
    styled = list(zip(results, (NEUTRAL, SECOND), strict=False))
    return [
        *map(row_heatmap, results),
        _log_ratio_histogram(styled),
        _extreme_tokens(styled),
        *_step_curves(styled),
        _routers_per_layer(styled),
    ]


def extreme_curve(counts: torch.Tensor) -> tuple[Array, Array]:
    """Return tau and F(tau) at every bin edge.

    F(tau) is the share of tokens with max(rho, 1/rho) of at least tau.
    """
    middle = len(counts) // 2
    both_signs = counts[middle:].double()
    both_signs[1:] += counts[:middle].flip(0)
    beyond = both_signs.flip(0).cumsum(0).flip(0) / both_signs.sum()
    return np.exp(EDGES[: len(both_signs)]), beyond.numpy()


def _log_ratio_histogram(styled: list[StyledResult]) -> Figure:
    histograms = [result.accumulated.histogram for result, _ in styled]
    reach = max(_reach(histogram) for histogram in histograms)
    edges = np.linspace(-reach, reach, HISTOGRAM_BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    data = []
    for (result, style), histogram in zip(styled, histograms, strict=True):
        density = _density(histogram, edges).tolist()
        curve = line(result.label, middle.tolist(), density, style)
        curve["line"] |= {"shape": "hvh"}
        data.append(curve)
    ends = [_cumulative_share(histogram, edges)[[0, -1]] for histogram in histograms]
    inside = min(float(each @ [-1, 1]) for each in ends)
    covered = number(inside, share=True)
    note = f"Density of log {RHO}, {RHO} = p_trainer / p_rollout, over {covered} of the tokens."
    layout = {"xaxis": axis(f"log {RHO} (nats)"), "yaxis": axis("density", rangemode="tozero")}
    return Figure("log_ratio", _log_ratio_title(styled), note, data, layout)


def _log_ratio_title(styled: list[StyledResult]) -> str:
    parts = []
    for result, _ in styled:
        logs = quantiles(result.accumulated.histogram, (0.01, 0.5, 0.99)).log().tolist()
        text = _describe_log_ratios(*logs)
        if len(styled) > 1:
            text = f"{result.label}: {text}"
        parts.append(text)
    return "; ".join(parts)


def _describe_log_ratios(low: float, middle: float, high: float) -> str:
    """Describe the 1%, 50% and 99% quantiles of log rho."""
    text = f"log {RHO} of 98% of the tokens is from {number(low)} to {number(high)}"
    reach = max(abs(low), abs(high))
    if reach == 0:
        return f"{text}, exactly 0"
    if abs(low + high) > reach or abs(middle) > 0.1 * reach:
        return f"{text}, to one side of 0"
    return f"{text}, centred on 0"


def _reach(counts: torch.Tensor) -> float:
    """Return the largest |log rho| to draw."""
    low, high = quantiles(counts, (0.001, 0.999)).log().abs().tolist()
    furthest: float = max(low, high)
    return max(1.2 * furthest, 1e-5)


def _cumulative_share(counts: torch.Tensor, points: Array) -> Array:
    """Return the share of tokens with log rho below each point, interpolated within bins."""
    # The middle bin reaches from -SMALLEST to SMALLEST.
    borders = np.concatenate([-EDGES[:0:-1], EDGES[1:]])
    share = np.concatenate([[0.0], counts.double().cumsum(0).numpy()])
    below: Array = np.interp(points, borders, share / share[-1])
    return below


def _density(counts: torch.Tensor, edges: Array) -> Array:
    return np.diff(_cumulative_share(counts, edges)) / np.diff(edges)


def _extreme_tokens(styled: list[StyledResult]) -> Figure:
    curves = []
    for result, _ in styled:
        taus, shares = extreme_curve(result.accumulated.histogram)
        shown = np.flatnonzero((taus >= 1.001) & (shares > 0))[::4]
        curves.append((taus[shown].tolist(), shares[shown].tolist()))
    scale = LogScale.of(*(shares for _, shares in curves), top=1.0)
    data = [
        line(result.label, *curve, style, hovertemplate="%{x:.3g}: %{y:.2g}")
        for (result, style), curve in zip(styled, curves, strict=True)
    ]
    largest_tau = max([2.2, *(taus[-1] for taus, _ in curves if taus)])
    layout = {
        "xaxis": axis(f"probability ratio {TAU} (log)", **_tau_axis(largest_tau)),
        "yaxis": scale.axis(f"share of tokens beyond {TAU} (log)"),
        "shapes": [_horizontal_line(QUIET_F2)],
    }
    note = (
        f"F({TAU}): share of tokens whose probability differs by more than a factor {TAU}, either "
        f"way. Dotted: {number(QUIET_F2, share=True)}, below which F(2) is no concern."
    )
    beyond = []
    for result, _ in styled:
        assert result.accumulated.overall is not None
        f2 = result.accumulated.overall.statistics()["f2"]
        beyond.append(number(f2, share=True))
    title = f"{' and '.join(beyond)} of the tokens are off by more than a factor of 2"
    return Figure("f_tau", title, note, data, layout)


def _tau_axis(largest: float) -> Spec:
    """Return the settings of a log axis from 1 to `largest`."""
    candidates = [1.0, 1.25, 2.0, 5.0]
    if largest >= 50:  # more labels would overlap on a phone
        candidates = [1.0]
    ticks = [tau for tau in candidates if tau <= largest]
    ticks += [10.0**power for power in range(1, math.ceil(math.log10(largest)) + 1)]
    ticks = ticks[:12]
    return {
        "type": "log",
        "range": [0, math.log10(largest)],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{tau:g}" for tau in ticks],
    }


def _horizontal_line(value: float) -> Spec:
    """Return a dotted line across the figure."""
    return {
        "type": "line",
        "x0": 0,
        "x1": 1,
        "xref": "paper",
        "y0": value,
        "y1": value,
        "line": {"color": "@muted", "width": 1, "dash": "dot"},
    }


def _vertical_line(step: int, style: LineStyle) -> Spec:
    """Return a line at the onset of divergence."""
    dash = style.dash
    if dash == "solid":
        dash = "dot"
    return {
        "type": "line",
        "x0": step,
        "x1": step,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": {"color": "@bad", "width": 1.5, "dash": dash},
    }


def _step_curves(styled: list[StyledResult]) -> list[Figure | Absent]:
    """Return the curves of k3, F(2) and reward over steps, with the onset of divergence."""
    if not any(len(result.accumulated.steps) > 1 for result, _ in styled):
        return [
            Absent("k3", "Curves over training: the dump has no column step, or one step only.")
        ]
    onsets = [
        _vertical_line(result.onset, style) for result, style in styled if result.onset is not None
    ]
    figures = [_k3_curve(styled), _f2_curve(styled)]
    for figure, quiet in zip(figures, (QUIET_KL, QUIET_F2), strict=True):
        if isinstance(figure, Figure):
            figure.layout["shapes"] = [*onsets, _horizontal_line(quiet)]
    return [*figures, _reward_curve(styled, onsets)]


def _k3_curve(styled: list[StyledResult]) -> Figure | Absent:
    found = [
        f"{result.label}: step {result.onset}" for result, _ in styled if result.onset is not None
    ]
    onsets = "; ".join(found) or "none"
    note = f"k3 = mean({RHO} - 1 - log {RHO}). Onset of divergence: {onsets} ({ONSET_RULE})."
    title = _no_onset_title(styled)
    if found:
        title = f"k3 diverges ({onsets})"
    return _curve_over_steps(styled, "k3", "k3 (nats per token, log)", title, note, width="wide")


def _no_onset_title(styled: list[StyledResult]) -> str:
    k3 = _values_over_steps(styled, "k3")
    return (
        f"No onset of divergence: k3 is between {number(min(k3))} and {number(max(k3))} nats at "
        "every step"
    )


def _f2_curve(styled: list[StyledResult]) -> Figure | Absent:
    if not any(_values_over_steps(styled, "f2")):
        why = "Extreme tokens over training: no token is off by more than a factor of 2."
        return Absent("f2", why)
    title = "Extreme tokens over training"
    note = "Share of tokens off by more than a factor of 2."
    return _curve_over_steps(styled, "f2", "F(2) (log)", title, note)


def _values_over_steps(styled: list[StyledResult], name: str) -> list[float]:
    """Return a statistic at every step of every dump."""
    steps = [stats for result, _ in styled for stats in result.accumulated.steps.values()]
    return [stats.statistics()[name] for stats in steps]


def _reward_curve(styled: list[StyledResult], onsets: list[Spec]) -> Figure | Absent:
    data = []
    for result, style in styled:
        rewards = sorted(result.accumulated.rewards.items())
        if rewards:
            steps = [step for step, _ in rewards]
            means = [reward.mean for _, reward in rewards]
            data.append(line(result.label, steps, means, style))
    if not data:
        return Absent("reward", "Reward: the dump has no column reward.")
    layout = {"xaxis": axis("step"), "yaxis": axis("mean reward"), "shapes": onsets}
    title = "Mean reward; no onset of divergence to compare with"
    if onsets:
        title = "Mean reward, with the onset of divergence"
    return Figure("reward", title, "Mean over a step's rows.", data, layout)


def _curve_over_steps(
    styled: list[StyledResult],
    name: str,
    unit: str,
    title: str,
    note: str,
    width: Literal["half", "wide"] = "half",
) -> Figure:
    series = []
    for result, _ in styled:
        steps = sorted(result.accumulated.steps.items())
        series.append([(step, stats.statistics()[name]) for step, stats in steps])
    scale = LogScale.of(*([value for _, value in points] for points in series))
    data = []
    for (result, style), points in zip(styled, series, strict=True):
        if points:
            values = scale.lift(value for _, value in points)
            data.append(line(result.label, [step for step, _ in points], values, style))
    layout = {"xaxis": axis("step"), "yaxis": scale.axis(unit)}
    return Figure(name, title, note, data, layout, width)


def _routers_per_layer(styled: list[StyledResult]) -> Figure | Absent:
    data = []
    for result, style in styled:
        routes = result.accumulated.routes
        if routes is not None and routes.slots:
            shares = (routes.per_layer / routes.slots).tolist()
            data.append(bars(result.label, list(range(len(shares))), shares, style))
    if not data:
        return Absent(
            "layers",
            "Routers per layer: the dump has no columns routes_rollout and routes_trainer.",
        )
    note = (
        "Share of tokens for which a layer's router chose another set of experts on the two sides. "
        "A layer stands out above twice the median of the others."
    )
    layout = {
        "xaxis": axis("MoE layer, in the order of the dump"),
        "yaxis": axis("share", tickformat=".1%"),
    }
    worst = max(data, key=lambda bar: max(bar["y"]))["y"]
    most = f"{number(max(worst), share=True)} of the tokens"
    title = f"No layer stands out: other experts for at most {most}"
    if stands_out(worst):
        title = f"Layer {worst.index(max(worst))} would choose otherwise most: for {most}"
    return Figure("layers", title, note, data, layout)
