"""Causes of a gap as a waterfall, and whole distributions.

Input: the tree of OUT/measure.json.
"""

from __future__ import annotations

import math

from onepolicy.notation import DASH, number
from onepolicy.record.intervals import FEWEST_UNITS
from onepolicy.report.figures.parts import (
    NEUTRAL,
    REPLAY,
    ROLLOUT,
    SOFT,
    WITH,
    WITHOUT,
    Figure,
    LineStyle,
    LogScale,
    Series,
    Spec,
    axis,
    bars,
    line,
)
from onepolicy.report.figures.tokens import beyond
from onepolicy.report.words import Tree
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.rules import SMALL

ROW = 46  # pixels of one row of a horizontal figure


def distribution(found: Tree) -> Figure:
    """Draw the share of positions whose total variation exceeds x.

    The true share is between the two lines of a scoring.
    """
    looks = {"without_replay": WITHOUT, "with_replay": WITH}
    edges, above = found["edges"], found["above"]
    low = [Series(*looks[name], sides["low"], edges) for name, sides in above.items()]
    high = [sides["high"] for sides in above.values()]
    scale = LogScale.of(*(each.y for each in low), *high, [0.0], top=1.0)
    note = (
        "Total variation = half the sum of |p_trainer - p_rollout| over the vocabulary. Of tokens "
        "the engine did not return only the whole mass is known: thick lines take the least they "
        "can add, thin lines the most."
    )
    plain = found["metrics"]["without_replay"]
    ends = f"{number(plain['tv_low'])} {DASH} {number(plain['tv_high'])}"
    differs = number(plain["argmax_differs"], share=True)
    title = (
        f"Total variation {ends} on average; the likeliest token differs at {differs} of positions"
    )
    xaxis = LogScale.of(edges).axis("total variation x (log)") | {"tickangle": 0}
    figure = beyond("distribution", title, note, low, xaxis, "share beyond x (log)", scale)
    for each, most in zip(low, high, strict=True):
        thin = {"color": each.style.color, "dash": each.style.dash, "width": 0.8}
        more = line(f"{each.label}, at most", edges, scale.lift(most), each.style, line=thin)
        figure.data.append(more)
    return figure


def waterfall(tree: Tree) -> Figure:
    """Draw the gap, the part that each change removes, and the remainder."""
    fall = tree["waterfall"]
    total, steps, left = fall["total"], fall["bars"], remainder(fall)
    levels = [total["value"], *(bar["left"]["value"] for bar in steps)]
    changes = [change(bar) for bar in steps]
    unit, unit_name = _unit(max(abs(total["high"] or 0), *levels))
    names = [_named("the gap", number(total["value"]))]
    names += [
        _named(bar["name"], _with_share(each["value"], total["value"]))
        for bar, each in zip(steps, changes, strict=True)
    ]
    names.append(_named("remainder", number(left["value"])))
    data = [_bar("the gap", names[:1], [0.0], NEUTRAL, [total], unit)]
    for label, style, sign in (("taken away", REPLAY, -1), ("made larger", ROLLOUT, 1)):
        chosen = [i for i, each in enumerate(changes) if sign * each["value"] > 0]
        if chosen:
            rows, starts = [names[1 + i] for i in chosen], [levels[i] for i in chosen]
            data.append(_bar(label, rows, starts, style, [changes[i] for i in chosen], unit))
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
        f"95% interval of each bar's own length, where that reaches {number(HARMLESS_KL)}; none of "
        f"fewer than {FEWEST_UNITS} sequences."
    )
    height = 90 + ROW * len(names)
    return Figure("waterfall", fall_title(fall), note, data, layout, "wide", height=height)


def remainder(fall: Tree) -> Tree:
    """Return the estimate of the part that no change takes away."""
    found: Tree = fall["bars"][-1]["left"] if fall["bars"] else fall["total"]
    return found


def fall_title(fall: Tree) -> str:
    """Name the change that accounts for most of the gap."""
    total = fall["total"]["value"]
    if not total:
        return "There is no gap to explain"
    gap = f"the gap of {number(total)} nats"
    if total < HARMLESS_KL:
        return f"T{gap[1:]} per token is {SMALL}"
    first = max(fall["bars"], key=lambda bar: bar["removed"]["value"], default=None)
    if first is None or first["removed"]["value"] < 0.2 * total:
        unexplained = _share(remainder(fall)["value"] / total)
        return f"No single cause: {unexplained} of {gap} is left unexplained"
    share = _share(first["removed"]["value"] / total)
    title = f"{share} of {gap} per token comes from {first['name']}"
    if first["removed"]["low"] is None or first["removed"]["low"] > 0:
        return title
    return f"{title}, though its interval includes 0"


def shows_interval(estimate: Tree) -> bool:
    """Return whether an estimate has an interval, and is large enough to show it."""
    low, high = estimate["low"], estimate["high"]
    return low is not None and max(abs(low), abs(high)) >= HARMLESS_KL


def interval(estimate: Tree) -> str:
    """Return the interval as text; a dash if it is not known or too small to matter."""
    if not shows_interval(estimate):
        return DASH
    return f"{number(estimate['low'])} {DASH} {number(estimate['high'])}"


def change(bar: Tree) -> Tree:
    """Return the change of the gap in a step, which is negative if the gap became smaller."""
    removed = bar["removed"]
    if removed["low"] is None:
        return removed | {"value": -removed["value"]}
    return {"value": -removed["value"], "low": -removed["high"], "high": -removed["low"]}


def signed(value: float) -> str:
    """Return a change with its sign: -4e-3, +1e-3, nothing."""
    if value == 0:
        return "nothing"
    return "+" * (value > 0) + number(value)


def _bar(
    name: str,
    rows: list[str],
    starts: list[float],
    style: LineStyle,
    spans: list[Tree],
    unit: float,
) -> Spec:
    """Draw horizontal bars from `starts` over the estimates `spans`, with their intervals."""
    shown = [each if shows_interval(each) else dict.fromkeys(each, 0.0) for each in spans]
    up = [(each["high"] - each["value"]) / unit for each in shown]
    down = [(each["value"] - each["low"]) / unit for each in shown]
    texts = [
        f"{number(each['value'])} nats" + f" ({interval(each)})" * shows_interval(each)
        for each in spans
    ]
    look = {"base": [start / unit for start in starts], "orientation": "h", "text": texts}
    look |= {"textposition": "none", "hovertemplate": "%{text}<extra></extra>"}
    lengths = [each["value"] / unit for each in spans]
    return bars(name, lengths, rows, style, error_x=_whiskers(up, down, "@muted"), **look)


def _whiskers(above: list[float], below: list[float], color: str) -> Spec:
    look = {"type": "data", "thickness": 1.5, "width": 5, "color": color}
    return look | {"array": above, "arrayminus": below}


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
    look = {"color": "@muted", "width": 1, "dash": "dot"}
    ends = {"x0": level, "x1": level, "y0": names[i], "y1": names[i + 1]}
    return {"type": "line", "line": look, "layer": "below", **ends}


def _share(value: float) -> str:
    return "<0.1%" if 0 < value < 1e-3 else number(value, share=True)


def _rows(names: list[str]) -> Spec:
    order = {"type": "category", "categoryorder": "array", "categoryarray": names[::-1]}
    return order | {"showgrid": False, "ticks": ""}


def _named(name: str, value: str) -> str:
    return f"{name}<br><b>{value}</b>"


def _with_share(value: float, total: float) -> str:
    text = signed(value)
    if value == 0 or total < HARMLESS_KL:
        return text
    return f"{text} ({_share(abs(value) / total)})"
