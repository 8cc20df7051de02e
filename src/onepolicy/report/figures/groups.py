"""k3 of groups of tokens: by turn of an episode, and by age."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from onepolicy.divergence.breakdown import turn_name
from onepolicy.notation import counted, number
from onepolicy.report.figures.parts import Figure, LineStyle, LogScale, Spec, Width, axis, line
from onepolicy.report.words import ARROW

K3, TOKENS = "mismatch/k3_turn@", "train/tokens_turn@"
AGE_K3, AGE_TOKENS = "mismatch/k3_staleness@", "staleness/tokens@"
NATIVE = "counterfactual/"


@dataclass(frozen=True)
class Curve:
    """k3 of one scoring by group: the first turn of each bin, or the age; from 0, ascending."""

    label: str
    style: LineStyle
    tokens: dict[int, float]
    k3: dict[int, float]  # of all these tokens
    spread: dict[int, tuple[float, float]]  # lowest and highest k3 of a batch
    batches: int

    @classmethod
    def of(
        cls,
        label: str,
        style: LineStyle,
        rows: Sequence[Mapping[str, float | None]],
        prefix: str = "",
        *,
        k3: str = K3,
        tokens: str = TOKENS,
    ) -> Self:
        """Build a curve from the metrics of batches.

        `prefix` is that of the names of k3; the counts of tokens have none.
        """
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            for name, value in row.items():
                if name.startswith(prefix + k3) and value is not None:
                    group = name.removeprefix(prefix + k3)
                    found[int(group)].append((row.get(tokens + group) or 0.0, value))
        counts = {group: sum(n for n, _ in found[group]) for group in sorted(found)}
        counts = {group: count for group, count in counts.items() if count > 0}
        means = {g: sum(n * v for n, v in found[g]) / count for g, count in counts.items()}
        ends = {g: (min(v for _, v in found[g]), max(v for _, v in found[g])) for g in counts}
        return cls(label, style, counts, means, ends, len(rows))


def by_turn(curves: Sequence[Curve], where: str = "") -> Figure:
    """Draw k3 by turn. `where` is a sentence for the note that names the batches."""
    turns = sorted({turn for curve in curves for turn in curve.tokens})
    names = [turn_name(turn) for turn in turns]
    order = {"type": "category", "categoryorder": "array", "categoryarray": names}
    note = f"k3 of the tokens the model wrote in its first, second, ... turn. {where}"
    if any(curve.batches > 1 for curve in curves):
        note += " Whiskers: the lowest and the highest of them."
    shared = set.intersection(*(set(curve.k3) for curve in curves))
    title = "k3 by turn"
    if shared:
        first, last = min(shared), max(shared)
        ends = (f"{number(c.k3[first])} {ARROW} {number(c.k3[last])} {c.label}" for c in curves)
        title = f"k3 from turn {turn_name(first)} to turn {turn_name(last)}: {', '.join(ends)}"
    xaxis = axis("turn of the model", **order)
    return _figure("turns", title, note, curves, xaxis, dict(zip(turns, names, strict=True)))


def by_age(curves: Sequence[Curve], where: str, name: Callable[[int], str] = str) -> Figure:
    """Draw the mean k3 of tokens of each age.

    `where` says of which tokens, as in `of the run`; `name` names a group that has several ages.
    """
    note = (
        "k3 between the weights that sampled a token and those that train on it, over all tokens "
        f"{where}."
    )
    found = curves[0].k3
    first, last = min(found), max(found)
    title = f"k3 is {number(found[first])} nats of tokens {name(first)} updates old"
    if len(found) > 1:
        title += f", {number(found[last])} of those {name(last)} old"
    groups = sorted({age for curve in curves for age in curve.k3})
    ages: dict[int, str | int] = {age: age for age in groups}
    xaxis = axis("updates old", rangemode="tozero", dtick=max(1, last // 12))
    if any(name(age) != str(age) for age in groups):
        ages = {age: name(age) for age in groups}
        order = {"type": "category", "categoryorder": "array", "categoryarray": [*ages.values()]}
        xaxis = axis("updates old", **order)
    return _figure("k3_staleness", title, note, curves, xaxis, ages, "half", whiskers=False)


def _figure(
    name: str,
    title: str,
    note: str,
    curves: Sequence[Curve],
    xaxis: Spec,
    names: Mapping[int, str | int],
    width: Width = "wide",
    *,
    whiskers: bool = True,
) -> Figure:
    spreads = [ends for curve in curves for ends in curve.spread.values() if whiskers]
    scale = LogScale.of(*(curve.k3.values() for curve in curves), *spreads)
    data = []
    for curve in curves:
        y, look = scale.lift(curve.k3.values()), curve.style
        symbols = scale.symbols(curve.k3.values(), look.symbol)
        settings: Spec = {
            "mode": "lines+markers",
            "marker": {"size": 8, "color": look.color, "symbol": symbols},
            "text": [counted(round(tokens), "token") for tokens in curve.tokens.values()],
            "hovertemplate": "%{x}: %{y:.3g} nats, %{text}<extra></extra>",
        }
        if whiskers and curve.batches > 1:
            ends = [scale.lift(pair) for pair in curve.spread.values()]
            settings["error_y"] = {
                "type": "data",
                "array": [max(0.0, high - at) for at, (_, high) in zip(y, ends, strict=True)],
                "arrayminus": [max(0.0, at - low) for at, (low, _) in zip(y, ends, strict=True)],
                "color": look.color,
                "thickness": 1,
                "width": 4,
            }
        data.append(line(curve.label, [names[g] for g in curve.k3], y, look, **settings))
    layout = {"xaxis": xaxis, "yaxis": scale.axis("k3, nats per token (log)")}
    return Figure(name, title, note.strip(), data, layout, width)
