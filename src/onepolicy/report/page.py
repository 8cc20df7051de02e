"""Frame of every report: palettes and templates."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.config import UsageError
from onepolicy.report.figure import FONT, Absent, Figure

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
}


def render(
    template: str, title: str, figures: list[Figure], *, footer: str = FOOTER, **values: Any
) -> str:
    """Return one HTML file that needs no other file.

    `template` is a file of templates/ that extends page.html; it escapes the `values`. Raises
    UsageError if plotly or jinja2 is not installed.
    """
    specs = [{"name": f.name, **f.spec()} for f in figures]
    # "<" as an escape: no text of a run can close the script element
    data = json.dumps(plain(specs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return _template(template).render(
        title=title,
        footer=footer,
        css=f":root {{ color-scheme: light dark; {_variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}\n"
        f"body {{ font: 15px/1.5 {FONT}; }}\n"
        + (TEMPLATES / "style.css").read_text(encoding="utf-8"),
        script=(TEMPLATES / "figures.js").read_text(encoding="utf-8"),
        plotly=_plotly(),
        data=data,
        **values,
    )


def macro(name: str, *values: Any) -> str:
    """Return the HTML of a macro of templates/parts.html."""
    return str(getattr(_template("parts.html").module, name)(*values))


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
    jinja.tests["figure"] = lambda item: isinstance(item, Figure)
    jinja.tests["absent"] = lambda item: isinstance(item, Absent)
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
