"""Figures as files: plotly JSON, and PNG drawn by kaleido in the system's Chromium or Chrome."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onepolicy.config import UsageError
from onepolicy.files import write_text_atomically
from onepolicy.report.figures.parts import Figure, Spec
from onepolicy.report.page import LIGHT, plain

SIZES = {"third": (620, 400), "half": (820, 440), "wide": (1240, 480)}
"""Width and height without the title, in pixels at SCALE 1."""
SQUARE = (720, 720)
SCALE = 2
LINE = 18  # height of a line of the note [pixels]


def write_figures(folder: Path, figures: Sequence[Figure], *, png: bool) -> list[Path]:
    """Write FOLDER/NAME.json of every figure, and with `png` FOLDER/NAME.png; return their paths.

    Figures are in the light palette with title and note. Raises UsageError if kaleido or its
    browser is missing, or a figure cannot be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written, drawn = [], []
    for figure in figures:
        spec = plain(standing_alone(figure))
        path = folder / f"{figure.name}.json"
        write_text_atomically(path, json.dumps(spec, allow_nan=False))
        layout = spec["layout"]
        opts = {
            "format": "png",
            "width": layout["width"],
            "height": layout["height"],
            "scale": SCALE,
        }
        drawn.append({"fig": spec, "path": path.with_suffix(".png"), "opts": opts})
        written.append(path)
    if png and drawn:
        _draw(drawn)
        written += [each["path"] for each in drawn]
    return written


def standing_alone(figure: Figure) -> Spec:
    """Return the figure for use outside the page, with colours, title and note."""
    width, height = SIZES[figure.width]
    if figure.square:
        width, height = SQUARE
    height = figure.height or height
    note = textwrap.wrap(figure.note, width=(width - 40) // 7)
    top = 58 + LINE * len(note)
    title = {
        "text": f"<b>{figure.title}</b>",
        "subtitle": {"text": "<br>".join(note), "font": {"size": 12.5, "color": "@muted"}},
        "font": {"size": 16},
        "x": 0.02,
        "xanchor": "left",
        "y": 1 - 20 / (height + top),
        "yanchor": "top",
    }
    spec = figure.spec()
    layout = spec["layout"] | {
        "paper_bgcolor": "@paper",
        "plot_bgcolor": "@paper",
        "title": title,
        "width": width,
        "height": height + top,
        "margin": {"l": 62, "r": max(24, spec["layout"]["margin"]["r"]), "t": top + 26, "b": 52},
    }
    painted: Spec = _paint({"data": spec["data"], "layout": layout})
    return painted


def _paint(value: Any) -> Any:
    """Replace colours `@name` by those of the light palette."""
    if isinstance(value, dict):
        return {key: _paint(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_paint(item) for item in value]
    if isinstance(value, str) and value.startswith("@"):
        return LIGHT.get(value[1:], value)
    return value


def _draw(figures: list[dict[str, Any]]) -> None:
    try:
        import kaleido
        from kaleido.errors import BrowserFailedError, ChromeNotFoundError, KaleidoError
    except ImportError:
        raise UsageError(
            "PNG figures need kaleido; pip install 'onepolicy[report]', or leave --png out"
        ) from None
    try:  # without mathjax nothing is loaded from the network
        kaleido.write_fig_from_object_sync(figures, kopts={"mathjax": False}, cancel_on_error=True)
    except ChromeNotFoundError:
        raise UsageError(
            "PNG figures are drawn in Chromium or Chrome: install one, or leave --png out"
        ) from None
    except (BrowserFailedError, KaleidoError) as error:
        raise UsageError(
            f"PNG figures: the browser failed ({str(error)[:200]}); leave --png out"
        ) from None
