"""Parts of all figures: line styles, axes, and a log axis that shows zero.

Figures are plain plotly JSON. A colour `@name` is resolved in the browser from the page's CSS
variables, so that one figure serves the light and the dark theme; report/png.py resolves it from
the light palette.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Spec = dict[str, Any]
Array = np.ndarray
Width = Literal["third", "half", "wide"]

TAU = "\N{GREEK SMALL LETTER TAU}"
RHO = "\N{GREEK SMALL LETTER RHO}"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
AXIS: Spec = {
    "gridcolor": "@line",
    "linecolor": "@line",
    "zeroline": False,
    "automargin": True,
    "tickfont": {"color": "@muted"},
    "title": {"font": {"size": 13, "color": "@muted"}, "standoff": 8},
}
LAYOUT: Spec = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "barmode": "group",
    "bargap": 0.25,
    "hovermode": "closest",
    "font": {"family": FONT, "size": 12.5, "color": "@ink"},
    "margin": {"l": 58, "r": 20, "t": 26, "b": 46},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "@line", "activecolor": "@muted"},
    "hoverlabel": {"bgcolor": "@paper", "bordercolor": "@line", "font": {"color": "@ink"}},
}


@dataclass(frozen=True)
class LineStyle:
    """A colour with a second sign (dash, marker, fill), for readers who do not see colours."""

    color: str
    dash: str
    symbol: str
    pattern: str


ROLLOUT = LineStyle("@rollout", "solid", "circle", "")
TRAINER = LineStyle("@trainer", "9px,3px", "diamond", "/")
REPLAY = LineStyle("@replay", "dot", "square", "x")
DENSE = LineStyle("@dense", "12px,3px,2px,3px", "triangle-up", "-")
NEUTRAL = LineStyle("@ink", "solid", "star", "")
SOFT = LineStyle("@soft", "dot", "circle", "")
ARMS = (
    LineStyle("@arm-first", "solid", "circle", ""),
    LineStyle("@arm-other", "7px,2px", "diamond", "/"),
    DENSE,
    REPLAY,
    NEUTRAL,
    SOFT,
)
"""Arms of a comparison, or dumps. The first two differ in lightness too, so they differ in grey."""
WITHOUT, WITH = ("without replay", TRAINER), ("with replay", REPLAY)
"""Label and style of both scorings of a batch."""


@dataclass(frozen=True)
class Series:
    """Values of one run, arm, dump or scoring, under the name and in the style of all figures."""

    label: str
    style: LineStyle
    y: Any  # a sequence of numbers, or an array
    x: Any = ()  # as many as y; none: 0, 1, ...

    def __post_init__(self) -> None:
        if not len(self.x):
            object.__setattr__(self, "x", range(len(self.y)))


@dataclass(frozen=True)
class Figure:
    """A plotly figure with its title and note."""

    name: str  # id of its div: fig-<name>
    title: str  # statement of the result
    note: str  # help to read the figure
    data: list[Spec]
    layout: Spec
    width: Width = "half"  # of the page
    square: bool = False
    height: int | None = None  # pixels in the page; None: that of its width

    def spec(self) -> Spec:
        """Return {data, layout} for plotly with the parts of all figures; colours stay @name."""
        given: Spec = {"xaxis": {}, "yaxis": {}}
        given |= {name: v for name, v in self.layout.items() if name[:5] in given}
        axes = {
            name: AXIS | settings | {"title": AXIS["title"] | settings.get("title", {})}
            for name, settings in given.items()
        }
        return {"data": self.data, "layout": LAYOUT | self.layout | axes}


@dataclass(frozen=True)
class Absent:
    """A figure that is left out, with the reason."""

    name: str
    why: str


LOWEST_DECADE = -300
"""Lower powers of 10 are next to 0 for floats, or 0."""


@dataclass(frozen=True)
class LogScale:
    """A log axis that shows zero.

    Values <= 0 are drawn at `floor`, one decade below the smallest positive value, and labelled 0.
    """

    floor: float
    top: float
    has_zero: bool

    @classmethod
    def of(cls, *series: Iterable[float], top: float | None = None) -> LogScale:
        """Return the axis that holds all values of the series, up to `top` if it is given."""
        values = [float(v) for values in series for v in values if math.isfinite(v)]
        positive = [v for v in values if v > 0]
        smallest, largest = min(positive, default=1e-7), max(positive, default=1e-7)
        has_zero = len(positive) < len(values)
        low = max(LOWEST_DECADE, math.floor(math.log10(smallest)) - has_zero)
        high = math.ceil(math.log10(top or largest))
        return cls(10.0**low, 10.0 ** max(high, low + 1), has_zero)

    def lift(self, values: Iterable[float]) -> list[float]:
        """Return the values with `floor` in place of those <= 0."""
        return [self.floor if v <= 0 else v for v in values]

    def symbols(self, values: Iterable[float], symbol: str) -> list[str]:
        """Return the marker of each value: open for zero."""
        return [f"{symbol}-open" if v <= 0 else symbol for v in values]

    def axis(self, title: str, *, steps: int = 6) -> Spec:
        """Return the axis with about `steps` labels."""
        low, high = round(math.log10(self.floor)), round(math.log10(self.top))
        stride = max(1, (high - low) // steps)
        ticks = list(range(high, low - 1, -stride))[::-1]
        if self.has_zero:
            ticks = [low, *(t for t in ticks if t > low)]
        text = ["0" if self.has_zero and t == low else decade(t) for t in ticks]
        margin = 0.06 * (high - low)
        return axis(title) | {
            "type": "log",
            "range": [low - margin, high + margin],
            "tickmode": "array",
            "tickvals": [10.0**t for t in ticks],
            "ticktext": text,
        }


def decade(exponent: int) -> str:
    """Return the label of a power of ten."""
    power = f"10<sup>{exponent}</sup>".replace("-", "\u2212")
    return {0: "1", 1: "10", -1: "0.1", -2: "0.01"}.get(exponent, power)


def axis(title: str, **settings: Any) -> Spec:
    """Return a plotly axis."""
    return {"title": {"text": title}, **settings}


def line(name: str, x: Sequence[Any], y: Sequence[Any], style: LineStyle, **more: Any) -> Spec:
    """Return a plotly line."""
    stroke = {"color": style.color, "dash": style.dash, "width": 1.8}
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": stroke} | more


def markers(name: str, x: Sequence[Any], y: Sequence[Any], style: LineStyle, **more: Any) -> Spec:
    """Return plotly markers."""
    marker = {"color": style.color, "symbol": style.symbol, "size": 8} | more.pop("marker", {})
    spec = {"type": "scatter", "mode": "markers", "name": name, "x": x, "y": y, "marker": marker}
    return spec | more


def bars(name: str, x: Sequence[Any], y: Sequence[Any], style: LineStyle, **more: Any) -> Spec:
    """Return plotly bars."""
    pattern = {"shape": style.pattern, "size": 7, "solidity": 0.15, "fillmode": "overlay"}
    marker = {"color": style.color, "pattern": pattern | {"fgcolor": "@paper"}}
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": marker} | more


def limit(
    at: float, meaning: str, *, vertical: bool = False, log: bool = True
) -> tuple[Spec, Spec]:
    """Return a dotted line across the figure, and its meaning beside its beginning."""
    along, across = ("y", "x") if vertical else ("x", "y")
    stroke = {"color": "@muted", "width": 1.2, "dash": "5px,3px"}
    ends = {f"{along}0": 0, f"{along}1": 1, f"{along}ref": "paper"}
    ends |= {f"{across}0": at, f"{across}1": at}
    place = math.log10(at) if log else at
    where = {across: place, along: 0, f"{along}ref": "paper"}
    if vertical:
        where |= {"y": 1, "xanchor": "left", "yanchor": "top", "xshift": 3}
    else:
        where |= {"xanchor": "left", "yanchor": "bottom", "xshift": 4}
    font = {"size": 11, "color": "@muted"}
    text = {"text": meaning, "showarrow": False, "font": font, "bgcolor": "@veil", **where}
    return {"type": "line", "line": stroke, "layer": "between", **ends}, text
