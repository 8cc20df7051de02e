"""The one page builder: the parts of a page, its palettes, and the file that needs no other.

`run_page.py`, `measure.py`, `comparison.py` and `audit/report.py` fill pages. Verdicts
and tables are printed from the same objects by `terminal.py`.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.config import UsageError
from onepolicy.files import write_text_atomically
from onepolicy.report.figures.parts import FONT, Absent, Figure

TEMPLATES = Path(__file__).parent / "templates"
FOOTER = "Where a figure shows them: the rollout is orange-red, the trainer blue, replay green."

LIGHT = {
    "page": "#f5f6f8",
    "paper": "#ffffff",
    "ink": "#1d2430",
    "muted": "#5b6575",
    "line": "#e4e7ec",
    "rollout": "#b54700",
    "rollout-soft": "#eaa679",
    "trainer": "#0b63b8",
    "trainer-soft": "#8fbce6",
    "replay": "#00795a",
    "dense": "#8b3f78",
    "soft": "#b3bcc9",
    "arm-first": "#d9771f",
    "arm-other": "#123f7a",
    "bad": "#b42318",
    "good": "#1f7a48",
    "veil": "rgba(255,255,255,0.8)",
}
DARK = {
    "page": "#0f1217",
    "paper": "#181d25",
    "ink": "#e6e9ee",
    "muted": "#98a2b3",
    "line": "#2b323d",
    "rollout": "#f58a4b",
    "rollout-soft": "#9c562c",
    "trainer": "#6db3f7",
    "trainer-soft": "#3a6691",
    "replay": "#35c99a",
    "dense": "#d99bc8",
    "soft": "#4d586a",
    "arm-first": "#ffb266",
    "arm-other": "#4a86d8",
    "bad": "#ff8a80",
    "good": "#5ad28f",
    "veil": "rgba(24,29,37,0.8)",
}

Tile = tuple[str, str, str, str]
"""Name, value, small print, and "good", "bad" or nothing."""


@dataclass(frozen=True)
class Card:
    """A verdict: its sentence, the setting to make, its reasons."""

    sentence: str
    badge: str = ""
    action: str = ""  # of a verdict (verdict/rules.py)
    bad: bool = False
    setting: str = ""
    lines: Sequence[str] = ()
    small: Sequence[str] = ()  # definitions, and what was not looked at
    title: str = ""  # of one dump of several
    tiles: Sequence[Tile] = ()


@dataclass(frozen=True)
class Table:
    """Rows of texts under a header; the first cell of a row is its name."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    texts: bool = False  # the cells are sentences

    @property
    def kind(self) -> str:
        """Return how the page draws it: tables of many columns are stacked on a phone."""
        kinds = ["texts" if self.texts else "numbers"]
        if self.texts or len(self.header) > 3:
            kinds.append("stacked")
        return " ".join(kinds)


@dataclass(frozen=True)
class Excerpt:
    """A text in parts, each "plain", "muted" or "mark", and a note under it."""

    parts: Sequence[tuple[str, str]]
    note: str


@dataclass(frozen=True)
class Drawing:
    """A picture in SVG, which has both themes itself, and its description."""

    svg: str
    description: str

    @property
    def address(self) -> str:
        """Return the picture as an address, so that its styles are its own."""
        return f"data:image/svg+xml;base64,{b64encode(self.svg.encode()).decode()}"


@dataclass(frozen=True)
class Section:
    """A heading, a question and its answers; a folded one is opened by a click."""

    title: str
    lead: str
    items: Sequence[Figure | Absent | Table | Excerpt | Drawing]
    folded: bool = False


@dataclass(frozen=True)
class Page:
    """All that a page shows, from the top down."""

    title: str
    heading: str
    kicker: str
    cards: Sequence[Card]
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = ()
    notices: Sequence[str] = ()  # in red, before all else
    details: Sequence[tuple[str, str]] = ()  # name and text of what is folded at the end
    footer: str = FOOTER

    def figures(self) -> Iterator[Figure]:
        """Yield the figures in their order."""
        for section in self.sections:
            yield from (item for item in section.items if isinstance(item, Figure))


def write_page(path: Path, page: Page) -> Path:
    """Write a page as one file that loads nothing. Return its path.

    Raises UsageError if plotly or jinja2 is not installed.
    """
    specs = [{"name": figure.name, **figure.spec()} for figure in page.figures()]
    # "<" as an escape: no text of a run can close the script element
    data = json.dumps(
        plain({"figures": specs, "print": LIGHT}), allow_nan=False, separators=(",", ":")
    ).replace("<", "\\u003c")
    css = (
        f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
        f"body {{ font: 15px/1.5 {FONT}; }}\n"
    )
    text = _template("page.html").render(
        page=page,
        css=css + (TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "figures.js").read_text(encoding="utf-8"),
        plotly=_plotly(),
        data=data,
    )
    return write_text_atomically(path, text)


def _template(name: str) -> Any:
    try:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined
    except ImportError:
        raise UsageError("the HTML report needs jinja2; pip install 'onepolicy[report]'") from None
    loader = FileSystemLoader(TEMPLATES)
    jinja = Environment(
        loader=loader,
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for kind in (Figure, Absent, Table, Excerpt, Drawing):
        jinja.tests[kind.__name__.lower()] = lambda item, kind=kind: isinstance(item, kind)
    return jinja.get_template(name)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError(
            "the HTML report needs plotly; pip install 'onepolicy[report]', or set "
            "log.report=false in a run"
        ) from None
    return get_plotlyjs()


def plain(value: Any) -> Any:
    """Return a JSON-ready value: NaN and infinity as null (a gap), floats at six digits."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, float):
        return float(f"{value:.6g}")
    return value


def _variables(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {color};" for name, color in palette.items())
