"""The end of a run in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from onepolicy.report.outcome import failed, outcome
from onepolicy.report.words import (
    ARROW,
    RAN,
    ROLLOUTS_OWN,
    Compared,
    Tree,
    compared,
    cut_by,
    no_signal,
    number,
    overlap_words,
    ran_the_rollouts,
    time_shares,
    unlearnt,
)


def summary_table(summary: Tree) -> Table:
    """Two columns, what and how much; a quantity the summary does not have gets no row. Keys: see report/words.py."""
    table = Table(
        title=f"{summary['steps']} steps", show_header=False, title_justify="left", pad_edge=False
    )
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(summary):
        table.add_row(name, Text.assemble(*text) if isinstance(text, list) else Text(text))
    return table


def checks_table(checks: Sequence[tuple[str, bool | None, str, str]]) -> Table:
    """What was asked of an engine: (name, passed or None, what was measured, what to do)."""
    states = {
        True: Text("pass", "green"),
        False: Text("FAIL", "bold red"),
        None: Text("not applicable", "dim"),
    }
    table = Table("check", "result", "measured")
    for name, passed, measured, mend in checks:
        table.add_row(
            name, states[passed], Text(f"{measured}. To do: {mend}" if mend else measured)
        )
    return table


def _rows(summary: Tree) -> list[tuple[str, str | list[tuple[str, str]]]]:
    rows: list[tuple[str, str | list[tuple[str, str]]]] = []
    idle = unlearnt(summary)
    rows.append(("verdict", [(outcome(summary), "bold red" if failed(summary) else "bold")]))
    if idle is not None:
        rows.append(("why", "\n".join(idle.why)))
    if (parent := summary.get("parent")) is not None:
        rows.append(("continued from", f"{parent['run']}, step {parent['step']}"))
    if summary.get("reward_first") is not None and summary.get("reward_last") is not None:
        rows.append(
            (
                "reward",
                f"{number(summary['reward_first'])} {ARROW} {number(summary['reward_last'])}",
            )
        )
    if (best := summary.get("eval_best")) is not None:
        rows.append(
            (
                _score(summary),
                _course(summary) + f"best {number(best['value'])} at step {best['step']}",
            )
        )
        crash = summary.get("crash_step")  # judged by evaluations
        none = [("none", "green" if idle is None else "")]  # what never rose cannot fall
        rows.append(("crash", none if crash is None else [(f"at step {crash}", "bold red")]))
    if skipped := summary.get("updates_skipped"):
        rows.append(
            ("updates skipped", [(f"{skipped:.0f}: their gradients were not finite", "bold red")])
        )
    if silent := no_signal(summary):
        rows.append(("groups without signal", silent))
    found = compared(summary)
    rows += [(entry.name, _mismatch_cell(entry, summary)) for entry in found]
    if any(ran_the_rollouts(entry, summary) for entry in found):
        rows.append((RAN.capitalize(), f"{ROLLOUTS_OWN} with replay"))
    if (overlap := summary.get("asynchronous")) is not None:
        rows.append(("sampled while learning", overlap_words(overlap)))
    if split := time_shares(summary):
        rows.append(("time per step", split))
    if saved := (summary.get("time") or {}).get("score_saved"):
        rows.append(
            (
                "scoring left out",
                f"about {number(saved)} s per step saved: the rollout is the anchor",
            )
        )
    if summary.get("tokens_per_second") is not None:
        rows.append(("tokens / s", number(summary["tokens_per_second"])))
    rows += [(name, str(summary[name])) for name in ("run", "report") if summary.get(name)]
    return rows


def _score(summary: Tree) -> str:
    return f"held-out {(summary.get('score') or 'score').removeprefix('eval/')}"


def _course(summary: Tree) -> str:
    first, last = summary.get("eval_first"), summary.get("eval_last")
    return f"{number(first['value'])} {ARROW} {number(last['value'])}, " if first and last else ""


def _mismatch_cell(entry: Compared, summary: Tree) -> str | list[tuple[str, str]]:
    if entry.without_replay is None:
        return entry.show(entry.trained)
    by = cut_by(entry, summary)
    cut = f"  ({by})" if by else ""
    return [
        (entry.show(entry.without_replay), "blue"),
        (f" without {ARROW} ", "dim"),
        (entry.show(entry.with_replay), "green"),
        (f" with replay{cut}", "dim"),
    ]
