"""Figures of the causes and the places of the gap. Input: the tree of OUT/measure.json."""

from __future__ import annotations

import math

from onepolicy.notation import DASH, number
from onepolicy.report.figure import (
    NEUTRAL,
    REPLAY,
    ROLLOUT,
    SOFT,
    TRAINER,
    Absent,
    Figure,
    LineStyle,
    LogScale,
    Spec,
    axis,
    bars,
    line,
    markers,
)
from onepolicy.report.words import Tree
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.rules import SMALL

SCORINGS = {"without_replay": ("without replay", TRAINER), "with_replay": ("with replay", REPLAY)}
QUANTITIES = {  # name in JSON -> (label, is a share)
    "argmax_differs": ("positions whose likeliest token differs", True),
    "tv_low": ("total variation, mean, at least", False),
    "tv_high": ("total variation, mean, at most", False),
    "tv_low_max": ("total variation, largest, at least", False),
    "kl_low": ("KL(rollout || trainer), nats, at least", False),
    "kl_shared": ("KL given that it is one of the {top}, nats", False),
    "overlap": ("of the {top}, also among the trainer's {top} likeliest", True),
    "mass_rollout": ("rollout's probability of the {top}", True),
    "mass_trainer": ("trainer's probability of the {top}", True),
}
HEADER = ("", *(label for label, _ in SCORINGS.values()))
WORST_HEADER = (
    "Text before",
    "Sampled",
    "TV",
    "Likeliest: p rollout / p trainer",
    "sequence, place",
)


def title(found: Tree) -> str:
    """Return the title of the table of distributions."""
    top = found["top"]
    return f"Whole distributions, from the rollout's {top} likeliest tokens of each position"


def rows(found: Tree) -> list[tuple[str, ...]]:
    """Return the rows under HEADER: distances between the distributions, of each scoring."""
    metrics = [found["metrics"].get(name, {}) for name in SCORINGS]
    rows = []
    for name, (label, share) in QUANTITIES.items():
        values = (number(each.get(name), share=share) for each in metrics)
        rows.append((label.format(top=found["top"]), *values))
    return rows


def figure(found: Tree) -> Figure:
    """Draw the share of positions whose total variation exceeds x.

    The true share is between the two lines of a scoring.
    """
    curves = [
        (*SCORINGS[name], sides["low"], sides["high"]) for name, sides in found["above"].items()
    ]
    scale = LogScale.of(
        *(values for *_, low, high in curves for values in (low, high)), [0.0], top=1.0
    )
    data: list[Spec] = []
    for label, style, low, high in curves:
        data.append(line(f"{label}, at least", found["edges"], scale.lift(low), style))
        thin = {"color": style.color, "dash": style.dash, "width": 0.8}
        data.append(line(f"{label}, at most", found["edges"], scale.lift(high), style, line=thin))
    layout = {
        "xaxis": LogScale.of(found["edges"]).axis("total variation x (log)") | {"tickangle": 0},
        "yaxis": scale.axis("share beyond x (log)"),
    }
    note = (
        "Total variation = half the sum of |p_trainer - p_rollout| over the vocabulary. Of tokens "
        "the engine did not return only the whole mass is known: thick lines take the least they "
        "can add, thin lines the most."
    )
    plain = found["metrics"]["without_replay"]
    least, most = number(plain["tv_low"]), number(plain["tv_high"])
    differs = number(plain["argmax_differs"], share=True)
    heading = (
        f"Total variation {least} {DASH} {most} on average; the likeliest token differs at "
        f"{differs} of positions"
    )
    return Figure("distribution", heading, note, data, layout, width="wide")


def worst_rows(found: Tree) -> list[tuple[str, ...]]:
    """Return the rows under WORST_HEADER: positions with the largest total variation."""
    return [
        (
            each["before"],
            repr(each["sampled"]),
            f"{number(each['tv_low'])} {DASH} {number(each['tv_high'])}",
            ", ".join(
                f"{c['token']!r} {number(c['p_rollout'])} / {number(c['p_trainer'])}"
                for c in each["candidates"]
            ),
            f"{each['sequence']}, {each['place']}",
        )
        for each in found["worst"]
    ]


ROW = 46  # pixels of one row of a horizontal figure
NOTHING = "at or below 0"
REPEATED = {  # metric -> (name, description of the repetition)
    "counterfactual/repeat/k3": (
        "trainer, repeated",
        "the same forward a second time, packed in the opposite order",
    ),
    "engine_all/k3": ("engine, repeated", "the same requests with the same seeds a second time"),
}


def fall_figure(tree: Tree) -> Figure:
    """Draw the waterfall: the gap, the part that each change removes, and the remainder."""
    fall = tree["waterfall"]
    total, steps = fall["total"], fall["bars"]
    left = _remainder(fall)
    levels = [total["value"], *(bar["left"]["value"] for bar in steps)]
    changes = [change(bar) for bar in steps]
    unit, unit_name = _unit(max(abs(total["high"]), *levels))
    names = [_named("the gap", number(total["value"]))]
    names += [
        _named(bar["name"], _with_share(each["value"], total["value"]))
        for bar, each in zip(steps, changes, strict=True)
    ]
    names.append(_named("remainder", number(left["value"])))
    data = [_bar("the gap", names[:1], [0.0], NEUTRAL, [total], unit)]
    for label, style, worse in (("taken away", REPLAY, False), ("made larger", ROLLOUT, True)):
        chosen = [
            i
            for i, each in enumerate(changes)
            if (each["value"] > 0) == worse and each["value"] != 0
        ]
        if chosen:
            rows, starts = [names[1 + i] for i in chosen], [levels[i] for i in chosen]
            spans = [changes[i] for i in chosen]
            data.append(_bar(label, rows, starts, style, spans, unit))
    data.append(_bar("remainder", names[-1:], [0.0], SOFT, [left], unit))
    layout = {
        "xaxis": axis(f"k3, {unit_name} per token", rangemode="tozero", nticks=6, tickangle=0),
        "yaxis": _rows(names),
        "barmode": "overlay",
        "bargap": 0.4,
        "showlegend": False,
        "shapes": [_connector(names, i, level / unit) for i, level in enumerate(levels)],
    }
    note = (
        "Top to bottom: k3 of the same tokens after one more change each time. A bar reaching to "
        "the left is what the change took away; the last one is what no change explains. Whiskers: "
        f"95% interval of each bar's own length, where that reaches {number(HARMLESS_KL)}."
    )
    return Figure(
        "waterfall", fall_title(fall), note, data, layout, "wide", height=90 + ROW * len(names)
    )


def _remainder(fall: Tree) -> Tree:
    if not fall["bars"]:
        return fall["total"]
    return fall["bars"][-1]["left"]


def fall_title(fall: Tree) -> str:
    """Name the change that accounts for most of the gap."""
    total, bars_of = fall["total"]["value"], fall["bars"]
    if not total:
        return "There is no gap to explain"
    if total < HARMLESS_KL:
        return f"The gap of {number(total)} nats per token is {SMALL}"
    first = max(bars_of, key=lambda bar: bar["removed"]["value"], default=None)
    if first is None or first["removed"]["value"] < 0.2 * total:
        unexplained = _share(_remainder(fall)["value"] / total)
        return (
            f"No single cause: {unexplained} of the gap of {number(total)} nats is left unexplained"
        )
    share = _share(first["removed"]["value"] / total)
    title = f"{share} of the gap of {number(total)} nats per token comes from {first['name']}"
    if first["removed"]["low"] > 0:
        return title
    return f"{title}, though its interval includes 0"


def noise_figure(tree: Tree) -> Figure:
    """Draw the effect of single changes by themselves, on a log axis beside the whole gap."""
    rows = noise_rows(tree)
    total = tree["waterfall"]["total"]["value"]
    scale = LogScale.of([v for _, each, _ in rows for v in (each["value"], each["high"])], [total])
    names = [_named(name, number(each["value"])) for name, each, _ in rows]
    values = [each["value"] for _, each, _ in rows]
    lifted = scale.lift(values)
    above, below = [], []
    for (_, each, _), x in zip(rows, lifted, strict=True):
        shown = shows_interval(each)
        above.append(max(0.0, each["high"] - x) * shown)
        below.append(max(0.0, x - max(each["low"], scale.floor)) * shown)
    error = {
        "type": "data",
        "array": above,
        "arrayminus": below,
        "thickness": 1.5,
        "width": 5,
        "color": "@ink",
    }
    marker = {"symbol": scale.symbols(values, "circle"), "size": 10}
    hover = "%{x:.3g} nats<extra></extra>"
    points = markers("", lifted, names, NEUTRAL, marker=marker, error_x=error, hovertemplate=hover)
    shapes = []
    if total > 0:
        gap = {"type": "line", "x0": total, "x1": total, "y0": 0, "y1": 1, "yref": "paper"}
        shapes.append(gap | {"line": {"color": "@rollout", "width": 1.5, "dash": "dash"}})
    layout = {
        "xaxis": scale.axis("nats per token (log)", steps=2) | {"tickangle": 0},
        "yaxis": _rows(names),
        "showlegend": False,
        "shapes": shapes,
    }
    note = (
        "Each change by itself, so these do not add up. The dashed line is the whole gap; an "
        f"open circle at the left end is {NOTHING}. Whiskers: 95% bootstrap over sequences, "
        f"where that reaches {number(HARMLESS_KL)}."
    )
    return Figure(
        "noise",
        _noise_title(rows, total),
        note,
        [points],
        layout,
        "wide",
        height=90 + ROW * len(names),
    )


def noise_rows(tree: Tree) -> list[tuple[str, Tree, str]]:
    """Return (name, estimate, description) of every single change; repeats have no interval."""
    repeated = tree["metrics"]["repeated_forward"]
    out = [
        (
            name,
            {"value": repeated[key], "low": repeated[key], "high": repeated[key]},
            f"k3 between two passes: {how}",
        )
        for key, (name, how) in REPEATED.items()
        if key in repeated
    ]
    return [*out, *((each["name"], each["nats"], each["how"]) for each in tree["alone"])]


def _noise_title(rows: list[tuple[str, Tree, str]], total: float) -> str:
    name, largest, _ = max(rows, key=lambda row: row[1]["value"])
    if max(total, largest["value"]) < HARMLESS_KL:
        return f"Every change by itself is {SMALL}"
    if total <= 0 or largest["value"] < 0.1 * total:
        return "No change by itself comes near the gap"
    title = f"By itself, {name} moves {number(largest['value'])} nats per token"
    if total < HARMLESS_KL:
        return title
    return f"{title}: {number(largest['value'] / total)} times the gap"


def breakdown_figures(tree: Tree) -> list[Figure | Absent]:
    """Draw the share of the gap against the share of the tokens, for every breakdown."""
    out: list[Figure | Absent] = []
    height = 110 + ROW * max(map(len, tree["breakdowns"].values()))
    for i, (name, rows) in enumerate(tree["breakdowns"].items()):
        labels = [row["name"] for row in rows]
        tokens = sum(row["tokens"] for row in rows)
        shares = [row["tokens"] / tokens for row in rows]
        gap = [row["share"] for row in rows]
        data = [
            _shares("of the tokens", labels, shares, SOFT),
            _shares("of the gap", labels, gap, NEUTRAL),
        ]
        layout = {
            "xaxis": axis(
                "share", tickformat=".0%", range=[0, 1.02 * max([*gap, *shares])], nticks=6
            ),
            "yaxis": _rows(labels) | {"title": {"text": name}},
            "legend": {
                "orientation": "h",
                "x": 0,
                "y": 1.02,
                "yanchor": "bottom",
                "traceorder": "reversed",
            },
        }
        most = max(rows, key=lambda row: row["share"])
        of_gap = number(most["share"], share=True)
        of_tokens = number(most["tokens"] / tokens, share=True)
        title = f"By {name}: {most['name']} holds {of_gap} of the gap on {of_tokens} of the tokens"
        note = "A dark bar longer than its light one: these tokens are worse than average."
        out.append(Figure(f"breakdown-{i}", title, note, data, layout, height=height))
    return out


def shows_interval(estimate: Tree) -> bool:
    """Return whether an estimate is large enough to show its interval."""
    return max(abs(estimate["low"]), abs(estimate["high"])) >= HARMLESS_KL


def interval(estimate: Tree) -> str:
    """Return the interval as text; a dash if the estimate is too small to matter."""
    if not shows_interval(estimate):
        return DASH
    return f"{number(estimate['low'])} {DASH} {number(estimate['high'])}"


def _shares(name: str, labels: list[str], values: list[float], style: LineStyle) -> Spec:
    return bars(
        name, values, labels, style, orientation="h", hovertemplate="%{y}: %{x:.1%}<extra></extra>"
    )


def _bar(
    name: str,
    rows: list[str],
    starts: list[float],
    style: LineStyle,
    spans: list[Tree],
    unit: float,
) -> Spec:
    """Draw horizontal bars from `starts` over the estimates `spans`, with their intervals."""
    up = [(each["high"] - each["value"]) / unit * shows_interval(each) for each in spans]
    down = [(each["value"] - each["low"]) / unit * shows_interval(each) for each in spans]
    error = {
        "type": "data",
        "array": up,
        "arrayminus": down,
        "thickness": 1.5,
        "width": 5,
        "color": "@muted",
    }
    text = [
        f"{number(each['value'])} nats" + f" ({interval(each)})" * shows_interval(each)
        for each in spans
    ]
    base = [start / unit for start in starts]
    settings = {
        "base": base,
        "orientation": "h",
        "error_x": error,
        "text": text,
        "textposition": "none",
    }
    lengths = [each["value"] / unit for each in spans]
    return bars(name, lengths, rows, style, hovertemplate="%{text}<extra></extra>", **settings)


def change(bar: Tree) -> Tree:
    """Return the change of the gap in a step, which is negative if the gap became smaller."""
    removed = bar["removed"]
    return {"value": -removed["value"], "low": -removed["high"], "high": -removed["low"]}


def _unit(largest: float) -> tuple[float, str]:
    """Return a power of ten that leaves short numbers on the axis, and its name."""
    exponent = 0
    if largest > 0:
        exponent = math.floor(math.log10(largest))
    if exponent >= -2:
        return 1.0, "nats"
    return 10.0**exponent, f"10<sup>\u2212{-exponent}</sup> nats"


def _connector(names: list[str], i: int, level: float) -> Spec:
    """Return the line from the end of one bar to the next row."""
    line = {"color": "@muted", "width": 1, "dash": "dot"}
    return {
        "type": "line",
        "x0": level,
        "x1": level,
        "y0": names[i],
        "y1": names[i + 1],
        "line": line,
        "layer": "below",
    }


def _share(value: float) -> str:
    if 0 < value < 1e-3:
        return "<0.1%"
    return number(value, share=True)


def _rows(names: list[str]) -> Spec:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": names[::-1],
        "showgrid": False,
        "ticks": "",
    }


def _named(name: str, value: str) -> str:
    return f"{name}<br><b>{value}</b>"


def signed(value: float) -> str:
    """Return a change with its sign: -4e-3, +1e-3, nothing."""
    if value == 0:
        return "nothing"
    return "+" * (value > 0) + number(value)


def _with_share(value: float, total: float) -> str:
    text = signed(value)
    if value == 0 or total < HARMLESS_KL:
        return text
    return f"{text} ({_share(abs(value) / total)})"
