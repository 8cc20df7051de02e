"""Figures of an audit, of one dump or of two on the same axes: log-ratio histogram, F(tau), curves over steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from onepolicy.audit.judge import ONSET_RULE, Audited
from onepolicy.audit.schema import Array
from onepolicy.correct.histogram import BINS_PER_SIGN, GROWTH, SMALLEST, quantiles
from onepolicy.report.figure import NEUTRAL, RHO, TAU, Absent, Figure, LogScale, Look, Spec, axis, bars, line

SECOND = Look("@trainer", "9px,3px", "diamond", "/")
SHOWN_BINS = 80
EDGES = np.concatenate([[0.0], SMALLEST * GROWTH ** np.arange(BINS_PER_SIGN + 1)])
"""[BINS_PER_SIGN + 2] of |log rho|: rank r of the histogram holds [EDGES[r], EDGES[r + 1])."""


def figures(audited: Sequence[Audited]) -> list[Figure | Absent]:
    looks = (NEUTRAL, SECOND)
    pairs = list(zip(audited, looks[: len(audited)], strict=True))
    return [_histogram(pairs), _extreme(pairs), *_curves(pairs), _layers(pairs)]


def extreme_curve(counts: torch.Tensor) -> tuple[Array, Array]:
    """(tau, F(tau)) at every bin edge: share of tokens with max(rho, 1/rho) of at least tau."""
    centre = len(counts) // 2
    both = counts[centre:].double()
    both[1:] += counts[:centre].flip(0)
    beyond = both.flip(0).cumsum(0).flip(0) / both.sum()
    return np.exp(EDGES[: len(both)]), beyond.numpy()


def _histogram(pairs: list[tuple[Audited, Look]]) -> Figure:
    reach = max(_reach(each.tally.histogram) for each, _ in pairs)
    edges = np.linspace(-reach, reach, SHOWN_BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    data = [line(a.label, middle.tolist(), _density(a.tally.histogram, edges).tolist(), look) for a, look in pairs]
    for each in data:
        each["line"] |= {"shape": "hvh"}
    inside = min(float(_cumulative(a.tally.histogram, edges)[[0, -1]] @ [-1, 1]) for a, _ in pairs)
    note = f"Density of log {RHO}, {RHO} = p_trainer / p_rollout, over {inside:.2%} of the tokens."
    layout = {"xaxis": axis(f"log {RHO} (nats)"), "yaxis": axis("density", rangemode="tozero")}
    return Figure("log_ratio", "Narrow and centred on 0 means one policy", note, data, layout)


def _reach(counts: torch.Tensor) -> float:
    low, high = quantiles(counts, (0.001, 0.999)).log().abs().tolist()
    return max(1.2 * max(low, high), 1e-5)


def _cumulative(counts: torch.Tensor, points: Array) -> Array:
    """Share of tokens with log rho below each point: tokens are spread evenly within their bin."""
    borders = np.concatenate([-EDGES[:0:-1], EDGES[1:]])  # the middle bin reaches from -SMALLEST to SMALLEST
    share = np.concatenate([[0.0], counts.double().cumsum(0).numpy()])
    return np.interp(points, borders, share / share[-1])


def _density(counts: torch.Tensor, edges: Array) -> Array:
    return np.diff(_cumulative(counts, edges)) / np.diff(edges)


def _extreme(pairs: list[tuple[Audited, Look]]) -> Figure:
    curves = {}
    for each, _ in pairs:
        taus, shares = extreme_curve(each.tally.histogram)
        shown = np.flatnonzero((taus >= 1.001) & (shares > 0))[::4]
        curves[each.label] = (taus[shown].tolist(), shares[shown].tolist())
    scale = LogScale.of(*(shares for _, shares in curves.values()), top=1.0)
    data = [line(a.label, *curves[a.label], look, hovertemplate="%{x:.3g}: %{y:.2g}") for a, look in pairs]
    end = max([2.2, *(taus[-1] for taus, _ in curves.values() if taus)])
    small = (1.0, 1.25, 2.0, 5.0) if end < 50 else (1.0,)  # or they overlap on a phone
    ticks = [t for t in small if t <= end] + [10.0**k for k in range(1, math.ceil(math.log10(end)) + 1)]
    x = {
        "type": "log",
        "range": [0, math.log10(end)],
        "tickmode": "array",
        "tickvals": ticks[:12],
        "ticktext": [f"{t:g}" for t in ticks[:12]],
    }
    layout = {
        "xaxis": axis(f"probability ratio {TAU} (log)", **x),
        "yaxis": scale.axis(f"share of tokens beyond {TAU} (log)"),
    }
    note = f"F({TAU}): share of tokens whose probability differs by more than a factor {TAU}, either way."
    return Figure("f_tau", "Few tokens beyond a factor of 2", note, data, layout)


def _curves(pairs: list[tuple[Audited, Look]]) -> list[Figure | Absent]:
    if not any(len(each.tally.steps) > 1 for each, _ in pairs):
        return [Absent("k3", "Curves over training: the dump has no column step, or one step only.")]
    onsets = [each.onset for each, _ in pairs]
    found = [f"{a.label}: step {onset}" for (a, _), onset in zip(pairs, onsets, strict=True) if onset is not None]
    note = f"k3 = mean({RHO} - 1 - log {RHO}). Onset of divergence: {'; '.join(found) or 'none'} ({ONSET_RULE})."
    title = "k3 diverges where the line stands" if found else "k3 should stay low and flat"
    out: list[Figure | Absent] = [_over_steps(pairs, "k3", "k3 (nats per token, log)", title, note, width="wide")]
    if any(sketch.numbers()["f2"] for each, _ in pairs for sketch in each.tally.steps.values()):
        text = "Share of tokens off by more than a factor of 2."
        out.append(_over_steps(pairs, "f2", "F(2) (log)", "Extreme tokens over training", text))
    else:
        out.append(Absent("f2", "Extreme tokens over training: no token is off by more than a factor of 2."))
    marks = [_mark(onset, look) for (_, look), onset in zip(pairs, onsets, strict=True) if onset is not None]
    for figure in out:
        if isinstance(figure, Figure):
            figure.layout["shapes"] = marks
    rewards = []
    for a, look in pairs:
        if found_rewards := sorted(a.tally.rewards.items()):
            means = [total / count for _, (total, count) in found_rewards]
            rewards.append(line(a.label, [step for step, _ in found_rewards], means, look))
    if not rewards:
        return [*out, Absent("reward", "Reward: the dump has no column reward.")]
    layout = {"xaxis": axis("step"), "yaxis": axis("mean reward"), "shapes": marks}
    return [*out, Figure("reward", "Does reward fall after the onset?", "Mean over a step's rows.", rewards, layout)]


def _layers(pairs: list[tuple[Audited, Look]]) -> Figure | Absent:
    data = []
    for each, look in pairs:
        routes = each.tally.routes
        if routes is not None and routes.slots:
            shares = (routes.per_layer / routes.slots).tolist()
            data.append(bars(each.label, list(range(len(shares))), shares, look))
    if not data:
        return Absent("layers", "Routers per layer: the dump has no columns routes_rollout and routes_trainer.")
    note = "Share of tokens for which a layer's router chose another set of experts on the two sides."
    layout = {"xaxis": axis("MoE layer, in the order of the dump"), "yaxis": axis("share", tickformat=".1%")}
    return Figure("layers", "Routers that differ: no layer should stand out", note, data, layout)


def _over_steps(
    pairs: list[tuple[Audited, Look]],
    name: str,
    unit: str,
    title: str,
    note: str,
    width: Literal["half", "wide"] = "half",
) -> Figure:
    series = {
        a.label: [(step, sketch.numbers()[name]) for step, sketch in sorted(a.tally.steps.items())] for a, _ in pairs
    }
    scale = LogScale.of(*([value for _, value in points] for points in series.values()))
    data = [
        line(a.label, [s for s, _ in points], scale.lift(v for _, v in points), look)
        for a, look in pairs
        if (points := series[a.label])
    ]
    return Figure(name, title, note, data, {"xaxis": axis("step"), "yaxis": scale.axis(unit)}, width)


def _mark(step: int, look: Look) -> Spec:
    stroke = {"color": "@bad", "width": 1.5, "dash": look.dash if look.dash != "solid" else "dot"}
    return {"type": "line", "x0": step, "x1": step, "y0": 0, "y1": 1, "yref": "paper", "line": stroke}
