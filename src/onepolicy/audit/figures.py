"""Figures of an audit: |log rho| by row and place of each dump; and, of one dump or of two on the same axes, log-ratio
histogram, F(tau), curves over steps. Titles say what the data show."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from onepolicy.audit.judge import ONSET_RULE, Audited
from onepolicy.audit.schema import Array
from onepolicy.correct.histogram import BINS_PER_SIGN, GROWTH, SMALLEST, quantiles
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
    decade,
    line,
)
from onepolicy.report.words import number
from onepolicy.verdict.rules import QUIET_F2, QUIET_KL

SECOND = LineStyle("@trainer", "9px,3px", "diamond", "/")
SHOWN_BINS = 80
PICTURE_ROWS, PICTURE_PLACES = 96, 32
NARROWEST = 4
"""Tokens of a cell at least: with fewer, sure tokens beside unsure ones hide a fault."""
FAR = 5.0
"""Factor by which rows, places or halves stand out in the picture's title."""
FLOOR = 1e-4
"""Nats: the least |log rho| that the picture of rows and places tells apart."""
EDGES = np.concatenate([[0.0], SMALLEST * GROWTH ** np.arange(BINS_PER_SIGN + 1)])
"""[BINS_PER_SIGN + 2] of |log rho|: rank r of the histogram holds [EDGES[r], EDGES[r + 1])."""


def figures(audited: Sequence[Audited]) -> list[Figure | Absent]:
    looks = (NEUTRAL, SECOND)
    pairs = list(zip(audited, looks[: len(audited)], strict=True))
    return [
        *map(_by_row_and_place, audited),
        _histogram(pairs),
        _extreme(pairs),
        *_curves(pairs),
        _layers(pairs),
    ]


def _by_row_and_place(each: Audited) -> Figure | Absent:
    """Mean |log rho| of a sample of rows, in the order of the dump, over places among their tokens in the mask."""
    rows = [row.columns for row in each.tally.sample.rows(None) if row.columns["mask"].any()]
    name = f"rows-{each.label}" if each.label else "rows"
    name = "rows_" + hashlib.sha256(name.encode()).hexdigest()[:8]
    if not rows:
        return Absent(name, "By row and place: no row has a token in the mask.")
    rows = [
        rows[i] for i in np.linspace(0, len(rows) - 1, min(len(rows), PICTURE_ROWS)).astype(int)
    ]
    gaps = [np.abs(row["logp_trainer"] - row["logp_rollout"])[row["mask"]] for row in rows]
    wide = max(NARROWEST, math.ceil(max(map(len, gaps)) / PICTURE_PLACES))
    means = [[_cell(gap[at : at + wide]) for at in range(0, len(gap), wide)] for gap in gaps]
    longest = max(map(len, means))
    cells = [[*row, *[None] * (longest - len(row))] for row in means]
    known = [cell for row in means for cell in row]
    low, high = (float(np.quantile(known, share)) for share in (0.02, 0.998))
    high = max(high, low + 1)
    # not the page's own colours: where a row has ended, the background must not look like a small gap
    scale = {"colorscale": "Viridis", "zmin": low, "zmax": high}
    ticks = list(range(math.ceil(low), math.floor(high) + 1))
    named = [
        decade(tick) if tick > math.log10(FLOOR) else f"\u2264{decade(tick)}" for tick in ticks
    ]
    bar: Spec = {"title": {"text": "nats", "side": "right"}, "tickvals": ticks, "ticktext": named}
    bar |= {"thickness": 12, "outlinewidth": 0}
    drawn = {
        "type": "heatmap",
        "z": cells,
        "x0": wide / 2,
        "dx": wide,
        "y0": 0,
        "dy": 1,
        "colorbar": bar,
    } | scale
    drawn |= {
        "hovertemplate": "row %{y}, place %{x}: 10^%{z:.1f} nats<extra></extra>",
        "hoverongaps": False,
    }
    layout = {
        "xaxis": axis("place in the response"),
        "yaxis": axis("row of the sample", autorange="reversed"),
    }
    whose = f"{each.label}: mean" if each.label else "Mean"
    note = (
        f"{whose} |log {RHO}| of {len(rows)} rows, {wide} tokens a cell. Mismatch looks alike everywhere; a "
        "stripe is a row of other weights, a border that runs down a turn or a prompt, a step in a row a lost token."
    )
    return Figure(name, _picture_title(means, wide), note, [drawn], layout, "wide", height=420)


def _cell(gap: Array) -> float:
    return math.log10(max(float(gap.mean()), FLOOR))


def _picture_title(means: list[list[float]], wide: int) -> str:
    """Whether rows, or places, stand out: against the middle one; else whether the halves of rows differ."""
    rows = np.array([np.mean([10**cell for cell in row]) for row in means])
    columns = list(itertools.zip_longest(*means))
    full = [c for c in columns if sum(cell is not None for cell in c) >= max(8, len(means) // 4)]
    places = np.array([np.mean([10**cell for cell in c if cell is not None]) for c in full])
    for name, values in (("rows", rows), (f"stretches of {wide} tokens", places)):
        far = int((values > FAR * np.median(values)).sum())
        if len(values) >= 8 and far >= max(1, 0.02 * len(values)):
            verb = "is" if far == 1 else "are"
            return f"{far} of {len(values)} {name} {verb} {FAR:g} times farther apart than the middle one"
    early, late = (float(np.mean([_half(row)[which] for row in means])) for which in (0, 1))
    if max(early, late) > FAR * min(early, late):
        which, times = ("second", late / early) if late > early else ("first", early / late)
        return f"The {which} halves of the rows are {times:.2g} times farther apart than the others"
    return f"No row and no place stands out by a factor of {FAR:g}"


def _half(row: list[float]) -> tuple[float, float]:
    """Mean of a row's first and of its second half [nats]; of a row of one cell that cell twice."""
    middle = len(row) // 2
    first, second = row[:middle] or row, row[middle:]
    return float(np.mean([10**cell for cell in first])), float(
        np.mean([10**cell for cell in second])
    )


def extreme_curve(counts: torch.Tensor) -> tuple[Array, Array]:
    """(tau, F(tau)) at every bin edge: share of tokens with max(rho, 1/rho) of at least tau."""
    centre = len(counts) // 2
    both = counts[centre:].double()
    both[1:] += counts[:centre].flip(0)
    beyond = both.flip(0).cumsum(0).flip(0) / both.sum()
    return np.exp(EDGES[: len(both)]), beyond.numpy()


def _histogram(pairs: list[tuple[Audited, LineStyle]]) -> Figure:
    reach = max(_reach(each.tally.histogram) for each, _ in pairs)
    edges = np.linspace(-reach, reach, SHOWN_BINS + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    data = [
        line(a.label, middle.tolist(), _density(a.tally.histogram, edges).tolist(), style)
        for a, style in pairs
    ]
    for each in data:
        each["line"] |= {"shape": "hvh"}
    inside = min(float(_cumulative(a.tally.histogram, edges)[[0, -1]] @ [-1, 1]) for a, _ in pairs)
    note = f"Density of log {RHO}, {RHO} = p_trainer / p_rollout, over {inside:.2%} of the tokens."
    layout = {"xaxis": axis(f"log {RHO} (nats)"), "yaxis": axis("density", rangemode="tozero")}
    return Figure("log_ratio", _ratio_title(pairs), note, data, layout)


def _ratio_title(pairs: list[tuple[Audited, LineStyle]]) -> str:
    said = []
    for each, _ in pairs:
        low, middle, high = quantiles(each.tally.histogram, (0.01, 0.5, 0.99)).log().tolist()
        wide = f"log {RHO} of 98% of the tokens is from {low:.2g} to {high:.2g}"
        reach = max(abs(low), abs(high))
        if reach == 0:
            side = ", exactly 0"
        elif abs(low + high) > reach or abs(middle) > 0.1 * reach:
            side = ", to one side of 0"
        else:
            side = ", centred on 0"
        said.append((f"{each.label}: " if len(pairs) > 1 else "") + wide + side)
    return "; ".join(said)


def _reach(counts: torch.Tensor) -> float:
    low, high = quantiles(counts, (0.001, 0.999)).log().abs().tolist()
    furthest: float = max(low, high)
    return max(1.2 * furthest, 1e-5)


def _cumulative(counts: torch.Tensor, points: Array) -> Array:
    """Share of tokens with log rho below each point: tokens are spread evenly within their bin."""
    borders = np.concatenate(
        [-EDGES[:0:-1], EDGES[1:]]
    )  # the middle bin reaches from -SMALLEST to SMALLEST
    share = np.concatenate([[0.0], counts.double().cumsum(0).numpy()])
    below: Array = np.interp(points, borders, share / share[-1])
    return below


def _density(counts: torch.Tensor, edges: Array) -> Array:
    return np.diff(_cumulative(counts, edges)) / np.diff(edges)


def _extreme(pairs: list[tuple[Audited, LineStyle]]) -> Figure:
    curves = {}
    for each, _ in pairs:
        taus, shares = extreme_curve(each.tally.histogram)
        shown = np.flatnonzero((taus >= 1.001) & (shares > 0))[::4]
        curves[each.label] = (taus[shown].tolist(), shares[shown].tolist())
    scale = LogScale.of(*(shares for _, shares in curves.values()), top=1.0)
    data = [
        line(a.label, *curves[a.label], style, hovertemplate="%{x:.3g}: %{y:.2g}")
        for a, style in pairs
    ]
    end = max([2.2, *(taus[-1] for taus, _ in curves.values() if taus)])
    small = (1.0, 1.25, 2.0, 5.0) if end < 50 else (1.0,)  # or they overlap on a phone
    ticks = [t for t in small if t <= end] + [
        10.0**k for k in range(1, math.ceil(math.log10(end)) + 1)
    ]
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
        "shapes": [_level(QUIET_F2)],
    }
    note = f"F({TAU}): share of tokens whose probability differs by more than a factor {TAU}, either way."
    beyond = [
        number(a.tally.total.numbers()["f2"], share=True)
        for a, _ in pairs
        if a.tally.total is not None
    ]
    title = f"{' and '.join(beyond)} of the tokens are off by more than a factor of 2"
    return Figure(
        "f_tau",
        title,
        f"{note} Dotted: {QUIET_F2:.1%}, below which F(2) is no concern.",
        data,
        layout,
    )


def _level(value: float) -> Spec:
    """A dotted line across."""
    stroke = {"color": "@muted", "width": 1, "dash": "dot"}
    return {
        "type": "line",
        "x0": 0,
        "x1": 1,
        "xref": "paper",
        "y0": value,
        "y1": value,
        "line": stroke,
    }


def _curves(pairs: list[tuple[Audited, LineStyle]]) -> list[Figure | Absent]:
    if not any(len(each.tally.steps) > 1 for each, _ in pairs):
        return [
            Absent("k3", "Curves over training: the dump has no column step, or one step only.")
        ]
    onsets = [each.onset for each, _ in pairs]
    found = [
        f"{a.label}: step {onset}"
        for (a, _), onset in zip(pairs, onsets, strict=True)
        if onset is not None
    ]
    note = f"k3 = mean({RHO} - 1 - log {RHO}). Onset of divergence: {'; '.join(found) or 'none'} ({ONSET_RULE})."
    title = f"k3 diverges ({'; '.join(found)})" if found else _course(pairs)
    out: list[Figure | Absent] = [
        _over_steps(pairs, "k3", "k3 (nats per token, log)", title, note, width="wide")
    ]
    if any(sketch.numbers()["f2"] for each, _ in pairs for sketch in each.tally.steps.values()):
        text = "Share of tokens off by more than a factor of 2."
        out.append(_over_steps(pairs, "f2", "F(2) (log)", "Extreme tokens over training", text))
    else:
        out.append(
            Absent(
                "f2", "Extreme tokens over training: no token is off by more than a factor of 2."
            )
        )
    marks = [
        _mark(onset, style)
        for (_, style), onset in zip(pairs, onsets, strict=True)
        if onset is not None
    ]
    for figure in out:
        if isinstance(figure, Figure):
            figure.layout["shapes"] = [
                *marks,
                _level(QUIET_KL if figure.name == "k3" else QUIET_F2),
            ]
    rewards = []
    for a, style in pairs:
        if found_rewards := sorted(a.tally.rewards.items()):
            means = [total / count for _, (total, count) in found_rewards]
            rewards.append(line(a.label, [step for step, _ in found_rewards], means, style))
    if not rewards:
        return [*out, Absent("reward", "Reward: the dump has no column reward.")]
    layout = {"xaxis": axis("step"), "yaxis": axis("mean reward"), "shapes": marks}
    title = (
        "Mean reward, with the onset of divergence"
        if marks
        else "Mean reward; no onset of divergence to compare with"
    )
    return [*out, Figure("reward", title, "Mean over a step's rows.", rewards, layout)]


def _course(pairs: list[tuple[Audited, LineStyle]]) -> str:
    found = [sketch.numbers()["k3"] for each, _ in pairs for sketch in each.tally.steps.values()]
    return f"No onset of divergence: k3 is between {number(min(found))} and {number(max(found))} nats at every step"


def _layers(pairs: list[tuple[Audited, LineStyle]]) -> Figure | Absent:
    data = []
    for each, style in pairs:
        routes = each.tally.routes
        if routes is not None and routes.slots:
            shares = (routes.per_layer / routes.slots).tolist()
            data.append(bars(each.label, list(range(len(shares))), shares, style))
    if not data:
        return Absent(
            "layers",
            "Routers per layer: the dump has no columns routes_rollout and routes_trainer.",
        )
    note = (
        "Share of tokens for which a layer's router chose another set of experts on the two sides."
    )
    layout = {
        "xaxis": axis("MoE layer, in the order of the dump"),
        "yaxis": axis("share", tickformat=".1%"),
    }
    most = max((value, at) for bar in data for at, value in enumerate(bar["y"]))
    title = f"Routers would choose otherwise most in layer {most[1]}: for {number(most[0], share=True)} of the tokens"
    return Figure("layers", title, note, data, layout)


def _over_steps(
    pairs: list[tuple[Audited, LineStyle]],
    name: str,
    unit: str,
    title: str,
    note: str,
    width: Literal["half", "wide"] = "half",
) -> Figure:
    series = {
        a.label: [(step, sketch.numbers()[name]) for step, sketch in sorted(a.tally.steps.items())]
        for a, _ in pairs
    }
    scale = LogScale.of(*([value for _, value in points] for points in series.values()))
    data = [
        line(a.label, [s for s, _ in points], scale.lift(v for _, v in points), style)
        for a, style in pairs
        if (points := series[a.label])
    ]
    return Figure(
        name, title, note, data, {"xaxis": axis("step"), "yaxis": scale.axis(unit)}, width
    )


def _mark(step: int, style: LineStyle) -> Spec:
    stroke = {"color": "@bad", "width": 1.5, "dash": style.dash if style.dash != "solid" else "dot"}
    return {
        "type": "line",
        "x0": step,
        "x1": step,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": stroke,
    }
