"""The figure of |log rho| by row and by position in the response."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from onepolicy.notation import counted
from onepolicy.report.figures.parts import RHO, Absent, Array, Figure, Spec, axis, decade

MAX_ROWS, MAX_COLUMNS = 96, 32
MIN_CELL_TOKENS = 4
"""With fewer tokens in a cell, certain tokens beside uncertain ones hide a fault."""
FAR = 5.0
"""Factor by which rows, or positions must stand out for the title to name them."""
FLOOR = 1e-4
"""The smallest |log rho| that the colours distinguish [nats]."""


def row_heatmap(
    gaps: list[Array], label: str, growth: Callable[[list[Array]], str]
) -> Figure | Absent:
    """Draw the mean |log rho| of rows, in their order.

    A cell is some consecutive tokens inside the mask. gaps: |log rho| of each row. label: of the
    dump, if there are several. growth: says how gaps grow or fall along the rows, if they do.
    """
    gaps, name = [gap for gap in gaps if len(gap)], f"rows_{digest(label)}"
    if not gaps:
        return Absent(name, "By row and place: no row has a token in the mask.")
    chosen = np.linspace(0, len(gaps) - 1, min(len(gaps), MAX_ROWS)).astype(int)
    gaps = [gaps[i] for i in chosen]
    width = max(MIN_CELL_TOKENS, math.ceil(max(map(len, gaps)) / MAX_COLUMNS))
    means = [
        [_log_mean(gap[start : start + width]) for start in range(0, len(gap), width)]
        for gap in gaps
    ]
    layout = {
        "xaxis": axis("place in the response"),
        "yaxis": axis("row of the sample", autorange="reversed"),
    }
    whose = f"{label}: mean" if label else "Mean"
    note = (
        f"{whose} |log {RHO}| of {counted(len(gaps), 'row')}, {counted(width, 'token')} a cell. "
        "Mismatch looks alike in all rows, and may grow along them; a stripe is a row of other "
        "weights, a border that runs down a turn or a prompt, a step in a row a lost token."
    )
    data, title = [_heatmap(means, width)], _title(means, width, growth(gaps))
    return Figure(name, title, note, data, layout, "wide", height=420)


def digest(label: str) -> str:
    """Return a short name of a dump that is one word."""
    name = f"rows-{label}" if label else "rows"
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8]


def _log_mean(gap: Array) -> float:
    return math.log10(max(float(gap.mean()), FLOOR))


def _heatmap(means: list[list[float]], width: int) -> Spec:
    """Return plotly's heatmap. means: log10 of the mean gap of each cell, by row."""
    longest = max(map(len, means))
    cells = [[*row, *[None] * (longest - len(row))] for row in means]
    known = [cell for row in means for cell in row]
    low, high = (float(np.quantile(known, share)) for share in (0.02, 0.998))
    high = max(high, low + 1)
    ticks = list(range(math.ceil(low), math.floor(high) + 1))
    colour_bar: dict[str, Any] = {
        "title": {"text": "nats", "side": "right"},
        "tickvals": ticks,
        "ticktext": [_tick_text(tick) for tick in ticks],
        "thickness": 12,
        "outlinewidth": 0,
    }
    return {
        "type": "heatmap",
        "z": cells,
        "x0": width / 2,
        "dx": width,
        "y0": 0,
        "dy": 1,
        "colorbar": colour_bar,
        # These are not the page's own colours: the background after the end of a row must not
        # look like a small gap.
        "colorscale": "Viridis",
        "zmin": low,
        "zmax": high,
        "hovertemplate": "row %{y}, place %{x}: 10^%{z:.1f} nats<extra></extra>",
        "hoverongaps": False,
    }


def _tick_text(tick: int) -> str:
    if tick > math.log10(FLOOR):
        return decade(tick)
    return f"\u2264{decade(tick)}"


def _title(means: list[list[float]], width: int, grown: str) -> str:
    """Return whether rows or positions stand out from the median, or the gap grows or falls."""
    rows = np.array([_mean_gap(row) for row in means])
    columns = [
        [cell for cell in column if cell is not None] for column in itertools.zip_longest(*means)
    ]
    # Only columns that enough rows reach are compared.
    full = [column for column in columns if len(column) >= max(8, len(means) // 4)]
    positions = np.array([_mean_gap(column) for column in full])
    for name, values in (("rows", rows), (f"stretches of {width} tokens", positions)):
        if len(values) < 8:
            continue
        far = int((values > FAR * np.median(values)).sum())
        if far >= max(1, 0.02 * len(values)):
            verb = "is" if far == 1 else "are"
            return (
                f"{far} of {len(values)} {name} {verb} {FAR:g} times farther apart than the "
                "middle one"
            )
    if grown:
        return f"{grown[0].upper()}{grown[1:]}"
    return f"No row and no place stands out by a factor of {FAR:g}"


def _mean_gap(cells: list[float]) -> float:
    """Return the mean of cells that are log10 of nats [nats]."""
    return float(np.mean([10**cell for cell in cells]))
