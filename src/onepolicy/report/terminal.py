"""In the terminal: cards and tables of the pages, and checks of an engine."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import JustifyMethod, RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.console import make_table
from onepolicy.report import run_summary
from onepolicy.report.page import Card, Tile
from onepolicy.report.page import Table as Told
from onepolicy.report.words import Tree

STYLES = {"bug": "bold red", "unclear": "bold red", "nothing": "bold green"}


def verdict_parts(card: Card) -> list[RenderableType]:
    """Return a verdict as a page shows it: badge, sentence, setting, reasons."""
    style = STYLES.get(card.action, "bold yellow")
    if not card.action:
        style = "bold red" if card.bad else "bold"
    parts = [Text(card.title, style="bold underline")] if card.title else []
    parts += [Text(card.badge.upper(), style=style)] if card.badge else []
    parts.append(Text(card.sentence, style=style))
    if card.setting:
        parts.append(Text(f"  Set: {card.setting}"))
    parts += [Text(f"  {line}") for line in card.lines]
    parts += [Text(f"  {line}", style="dim") for line in card.small]
    return [*parts]


def told(table: Told, *, right: bool = False) -> Table:
    """Return a table of a page. right: numbers end at one place, and are never broken."""
    shown = make_table(
        title=table.title or None, title_justify="left", pad_edge=False, box=SIMPLE_HEAD
    )
    shown.show_header = any(table.header)
    shown.add_column(table.header[0], overflow="fold")
    justify: JustifyMethod = "right" if right else "left"
    for name in table.header[1:]:
        shown.add_column(Text(name), justify=justify, no_wrap=right)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def summary_parts(summary: Tree) -> list[RenderableType]:
    """Return what a run's page begins with: its card, tiles and comparison, then the paths."""
    parts: list[RenderableType] = []
    if summary.get("pressure"):
        parts.append(Text(f"Not a real engine: {summary['pressure']}.", style="bold red"))
    card, compared = run_summary.card(summary), run_summary.comparison_table(summary)
    parts += verdict_parts(card)
    if card.tiles:
        parts.append(_tiles(card.tiles))
    if compared is not None:
        parts.append(told(compared))
    named = ((name, summary.get(name)) for name in ("run", "report"))
    return [*parts, *(Text(f"{name}: {path}") for name, path in named if path)]


def _tiles(tiles: Sequence[Tile]) -> Table:
    """Return a row for each tile: name, value, small print."""
    table = make_table(*("name", "value", ""), show_header=False, pad_edge=False, box=None)
    for name, value, more, kind in tiles:
        style = {"bad": "bold red", "good": "green"}.get(kind, "bold")
        table.add_row(Text(name), Text(value, style), Text(more, "dim"))
    return table


def checks_table(checks: Sequence[tuple[str, bool | None, str, str]]) -> Table:
    """Return a table of checks of an engine: (name, passed or None, measurement, fix)."""
    states = {
        True: Text("pass", "green"),
        False: Text("FAIL", "bold red"),
        None: Text("not applicable", "dim"),
    }
    table = make_table("check", "result", "measured")
    for name, passed, measured, fix in checks:
        text = measured
        if fix:
            text = f"{measured}. To do: {fix}"
        table.add_row(name, states[passed], Text(text))
    return table
