"""In the terminal: verdicts and tables of the pages, the summary of a run, checks of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.console import make_table
from onepolicy.notation import counted, number
from onepolicy.report.outcome import failed, outcome
from onepolicy.report.page import Card
from onepolicy.report.page import Table as Told
from onepolicy.report.words import (
    ARROW,
    RAN,
    ROLLOUTS_OWN,
    Compared,
    Tree,
    accuracy,
    compared,
    cut_by,
    describe_overlap,
    no_signal,
    ran_the_rollouts,
    time_shares,
    unlearnt,
)

STYLES = {"bug": "bold red", "unclear": "bold red", "nothing": "bold green"}


def verdict_parts(card: Card) -> list[RenderableType]:
    """Return a verdict as a page shows it: badge, sentence, setting, reasons."""
    style = STYLES.get(card.action, "bold yellow")
    parts = [Text(card.title, style="bold underline")] if card.title else []
    parts += [Text(card.badge.upper(), style=style), Text(card.sentence, style=style)]
    if card.setting:
        parts.append(Text(f"  Set: {card.setting}"))
    parts += [Text(f"  {line}") for line in card.lines]
    parts += [Text(f"  {line}", style="dim") for line in card.small]
    return [*parts]


def told(table: Told, *, right: bool = False) -> Table:
    """Return a table of a page. right: numbers end at one place, and are never broken."""
    shown = make_table(title=table.title or None, title_justify="left", pad_edge=False)
    shown.show_header = any(table.header)
    shown.add_column(table.header[0], overflow="fold")
    justify: Literal["right", "left"] = "right" if right else "left"
    for name in table.header[1:]:
        shown.add_column(Text(name), justify=justify, no_wrap=right)
    for row in table.rows:
        shown.add_row(*map(Text, row))
    return shown


def summary_table(summary: Tree) -> Table:
    """Return a table of names and values; a quantity that the summary lacks has no row.

    report/words.py lists the keys.
    """
    table = Table(
        title=counted(summary["steps"], "step"),
        show_header=False,
        title_justify="left",
        pad_edge=False,
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(summary):
        cell = Text.assemble(*text) if isinstance(text, list) else Text(text)
        table.add_row(name, cell)
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


Cell = str | list[tuple[str, str]]  # text, or parts of it with their styles


def _rows(summary: Tree) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = []
    if summary.get("pressure"):
        rows.append(("not a real engine", [(summary["pressure"], "bold red")]))
    rows.append(("verdict", _verdict_cell(summary)))
    idle, parent = unlearnt(summary), summary.get("parent")
    if idle is not None:
        rows.append(("why", "\n".join(idle.why)))
    if parent is not None:
        rows.append(("continued from", f"{parent['run']}, step {parent['step']}"))
    rows += _learning_rows(summary)
    found = compared(summary)
    rows += [(entry.name, _mismatch_cell(entry, summary)) for entry in found]
    if any(ran_the_rollouts(entry, summary) for entry in found):
        rows.append((RAN.capitalize(), f"{ROLLOUTS_OWN} with replay"))
    rows += _time_rows(summary)
    rows += [(name, str(summary[name])) for name in ("run", "report") if summary.get(name)]
    return rows


def _verdict_cell(summary: Tree) -> Cell:
    style = "bold"
    if failed(summary):
        style = "bold red"
    return [(outcome(summary), style)]


def _learning_rows(summary: Tree) -> list[tuple[str, Cell]]:
    """Return the rows on rewards, evaluations, crash and updates."""
    rows: list[tuple[str, Cell]] = []
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        rows.append(("reward", f"{number(first)} {ARROW} {number(last)}"))
    best = summary.get("eval_best")
    if best is not None:
        text = f"{_course(summary)}best {number(best['value'])} at step {best['step']}"
        rows.append((accuracy(summary.get("score")), text))
        rows.append(("crash", _crash_cell(summary)))
    skipped, silent = summary.get("updates_skipped"), no_signal(summary)
    if skipped:
        text = f"{skipped:.0f}: their gradients were not finite"
        rows.append(("updates skipped", [(text, "bold red")]))
    if silent:
        rows.append(("groups without signal", silent))
    return rows


def _crash_cell(summary: Tree) -> Cell:
    crash = summary.get("crash_step")
    if crash is not None:
        return [(f"at step {crash}", "bold red")]
    if unlearnt(summary) is not None:  # a score that never rose cannot fall
        return [("none", "")]
    return [("none", "green")]


def _time_rows(summary: Tree) -> list[tuple[str, Cell]]:
    rows: list[tuple[str, Cell]] = []
    overlap, shares = summary.get("asynchronous"), time_shares(summary)
    saved = (summary.get("time") or {}).get("score_saved")
    if overlap is not None:
        rows.append(("sampled while learning", describe_overlap(overlap)))
    if shares:
        rows.append(("time per step", shares))
    if saved:
        text = f"about {number(saved)} s per step saved: the rollout is the behaviour policy"
        rows.append(("scoring left out", text))
    if summary.get("tokens_per_second") is not None:
        rows.append(("tokens / s, with prompts", number(summary["tokens_per_second"])))
    return rows


def _course(summary: Tree) -> str:
    first, last = summary.get("eval_first"), summary.get("eval_last")
    if not first or not last:
        return ""
    return f"{number(first['value'])} {ARROW} {number(last['value'])}, "


def _mismatch_cell(entry: Compared, summary: Tree) -> Cell:
    if entry.without_replay is None:
        return entry.show(entry.trained)
    cut = cut_by(entry, summary)
    if cut:
        cut = f"  ({cut})"
    return [
        (entry.show(entry.without_replay), "blue"),
        (f" without {ARROW} ", "dim"),
        (entry.show(entry.with_replay), "green"),
        (f" with replay{cut}", "dim"),
    ]
