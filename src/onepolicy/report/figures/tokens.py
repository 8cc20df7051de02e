"""Sampled tokens under both engines: F(tau) and probability scatter.

`beyond` draws every share of things larger than x: tokens (F(tau)), positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onepolicy.correct.report import BINS_PER_SIGN, GROWTH, SMALLEST, histogram
from onepolicy.notation import counted, number
from onepolicy.record.statistics import Statistics
from onepolicy.report.figures.parts import (
    TAU,
    Array,
    Figure,
    LineStyle,
    LogScale,
    Series,
    Spec,
    Width,
    axis,
    limit,
    line,
    markers,
)
from onepolicy.report.figures.steps import F2_LIMITS

MAX_POINTS = 20_000  # of all scatters together: SVG stays usable
KEPT_EXTREMES = 500  # per scatter; the rest is a random subsample
MARKED = (1.25, 2.0, 5.0)
EDGES = np.concatenate([[0.0], SMALLEST * GROWTH ** np.arange(BINS_PER_SIGN + 1)])
"""[BINS_PER_SIGN + 2] of |log rho|: rank r of a histogram holds [EDGES[r], EDGES[r + 1])."""
LEAST_TAU = 1.001  # where the curve of F(tau) begins
ORDINARY = LineStyle("@ink", "dot", "circle", "")


@dataclass(frozen=True)
class Pairs:
    """n > 0 sampled tokens of one scoring, run or dump, under both sides."""

    label: str
    style: LineStyle
    trainer: Array  # [n] finite log-probabilities
    rollout: Array
    segment: Array | None = None  # [n] integers, sample of each token; None: of one sample

    @functools.cached_property
    def statistics(self) -> Statistics:
        segment = self.segment
        if segment is None:
            segment = np.zeros(len(self.trainer), np.int64)
        trainer, rollout = self.trainer.astype(np.float64), self.rollout.astype(np.float64)
        return Statistics.of(trainer, rollout, segment)

    def tail(self) -> Tail:
        """Return F(tau) of these tokens."""
        log_rho = self.trainer.astype(np.float64) - self.rollout
        counts = histogram(torch.from_numpy(log_rho))
        return Tail.of(self.label, self.style, self.statistics, counts)


@dataclass(frozen=True)
class Tail:
    """F(tau) of one scoring or dump: a curve, and its values at MARKED."""

    curve: Series  # x: tau, y: share of tokens
    marked: tuple[float, ...]
    tokens: int = 0

    @classmethod
    def of(cls, label: str, style: LineStyle, found: Statistics, counts: torch.Tensor) -> Tail:
        """Return F(tau) of tokens with these statistics and this histogram of log rho."""
        taus, shares = extreme_curve(counts)
        first = int(np.searchsorted(taus, LEAST_TAU))
        shown = slice(first, max(first, int((shares > 0).sum())) + 1)  # to the first 0
        curve = Series(label, style, shares[shown].tolist(), taus[shown].tolist())
        values = found.statistics()
        return cls(curve, tuple(values[f"f{tau:g}"] for tau in MARKED), found.tokens)


def extreme_curve(counts: torch.Tensor) -> tuple[Array, Array]:
    """Return tau and F(tau) at every bin edge of a histogram of log rho (correct/report.py).

    F(tau) is the share of tokens with max(rho, 1/rho) of at least tau.
    """
    middle = len(counts) // 2
    both_signs = counts[middle:].double()
    both_signs[1:] += counts[:middle].flip(0)
    beyond = both_signs.flip(0).cumsum(0).flip(0) / both_signs.sum()
    return np.exp(EDGES[: len(both_signs)]), beyond.numpy()


def extreme_tokens(tails: Sequence[Tail], where: str = "", width: Width = "wide") -> Figure:
    """Draw F(tau), the share of tokens with max(rho, 1/rho) > tau (R3 paper, equation 3).

    `where` completes the note, as in ` of the probe at step 10`.
    """
    curves = [each.curve for each in tails]
    end = max([2.5, *(each.x[-1] for each in curves if len(each.x))])
    shown = [tau for tau in MARKED if tau < end]
    least = [1 / each.tokens for each in tails if each.tokens]
    scale = LogScale.of(*(each.y for each in curves), [*least, 0.0], top=1.0)
    xaxis = axis(f"probability ratio {TAU} (log)", type="log", **_ratio_ticks(end))
    spots = [
        _spot(tau, share, each.curve.style, scale)
        for each in tails
        for tau, share in zip(shown, each.marked, strict=False)
    ]
    note = (
        f"F({TAU}){where}: share of tokens whose probability differs by more than a factor {TAU}, "
        f"either way, between rollout and trainer. Markers at "
        f"{' and '.join(f'{tau:g}' for tau in shown)}; an open one on the lowest line is exactly 0."
    )
    shares = [(each.curve.label, each.marked[1]) for each in tails]
    title = "No token is off by more than a factor of 2"
    if any(share for _, share in shares):
        named = ", ".join(f"{number(share, share=True)} {name}" for name, share in shares)
        title = f"Off by more than a factor of 2: {named}"
        if len(shares) == 1:
            share = number(shares[0][1], share=True)
            title = f"{share} of the tokens are off by more than a factor of 2"
    figure = beyond("f_tau", title, note, curves, xaxis, f"share beyond {TAU} (log)", scale, width)
    figure.data.extend(spots)
    limits = [limit(at, meaning) for at, meaning in F2_LIMITS.items()]
    figure.layout["shapes"] = [shape for shape, _ in limits]
    figure.layout["annotations"] = [text for _, text in limits]
    return figure


def beyond(
    name: str,
    title: str,
    note: str,
    series: Sequence[Series],
    xaxis: Spec,
    unit: str,
    scale: LogScale,
    width: Width = "wide",
) -> Figure:
    """Draw shares of things larger than x, on a log axis, each to its first 0."""
    data = []
    for each in series:
        shares = list(each.y)
        stop = len(shares)
        if 0.0 in shares:
            stop = shares.index(0.0) + 1
        x, y = list(each.x)[:stop], scale.lift(shares[:stop])
        data.append(line(each.label, x, y, each.style, hovertemplate="%{x:.3g}: %{y:.2g}"))
        data[-1]["line"]["width"] = 2.4
    return Figure(name, title, note, data, {"xaxis": xaxis, "yaxis": scale.axis(unit)}, width)


def scatter(name: str, pairs: Pairs, budget: int, where: str = "", width: Width = "half") -> Figure:
    """Draw rollout against trainer probability of at most `budget` tokens."""
    rollout, trainer = (np.exp(side.astype(np.float64)) for side in (pairs.rollout, pairs.trainer))
    chosen = subsample(np.abs(trainer - rollout), budget)
    x, y = rollout[chosen].round(5).tolist(), trainer[chosen].round(5).tolist()
    largest, top = max(rollout.max(), trainer.max()), 1.0
    if largest <= 0.5:
        top = float(f"{1.1 * largest:.1g}") or 1.0
    diagonal = line("equal", [0, top], [0, top], ORDINARY, hoverinfo="skip", opacity=0.6)
    hover = "rollout %{x}<br>trainer %{y}<extra></extra>"
    look = {"marker": {"size": 4, "opacity": 0.5}, "hovertemplate": hover}
    data = [markers(pairs.label, x, y, pairs.style, **look), diagonal]
    ticks = {"range": [-0.02 * top, 1.02 * top], "dtick": top / 4}
    layout = {
        "xaxis": axis("rollout probability", **ticks),
        "yaxis": axis("trainer probability", **ticks),
        "showlegend": False,
    }
    count, kept = counted(len(rollout), "token"), "the rest at random"
    shown = f"{len(chosen):,} of {count}{where} (the {KEPT_EXTREMES} farthest off, {kept})"
    if len(chosen) == len(rollout):
        shown = f"All {count}{where}"
    found, pearson = pairs.statistics, "undefined"
    if math.isfinite(found.pearson):
        pearson = f"{found.pearson:.6f}"
    title = f"Largest difference of probability {number(found.max_dp)}, {pairs.label}"
    note = f"{shown}; on the diagonal both agree. Correlation {pearson}."
    return Figure(name, title, note, data, layout, width, square=True)


def subsample(difference: Array, budget: int) -> Array:
    """Return the indices of at most `budget` tokens.

    These are the KEPT_EXTREMES with the largest difference and a random rest with a fixed seed.
    """
    if len(difference) <= budget:
        return np.arange(len(difference))
    order = np.argsort(-difference, kind="stable")
    kept = min(KEPT_EXTREMES, budget)
    rest = np.random.default_rng(0).choice(order[kept:], size=budget - kept, replace=False)
    return np.sort(np.concatenate([order[:kept], rest]))


def _spot(tau: float, share: float, style: LineStyle, scale: LogScale) -> Spec:
    marker = {"symbol": scale.symbols([share], style.symbol)}
    text = f"F({tau:g}) = {number(share)}<extra></extra>"
    look = {"marker": marker, "showlegend": False, "hovertemplate": text}
    return markers("", [tau], scale.lift([share]), style, **look)


def _ratio_ticks(end: float) -> Spec:
    """Return the settings of a log axis from 1 to `end`; more labels would overlap on a phone."""
    ticks = [1.0] if end >= 50 else [tick for tick in (1.0, *MARKED) if tick <= end]
    ticks += [10.0**power for power in range(1, math.ceil(math.log10(end)) + 1)]
    return {
        "range": [0, math.log10(end)],
        "tickmode": "array",
        "tickvals": ticks[:12],
        "ticktext": [f"{t:g}" for t in ticks[:12]],
    }
