"""`onepolicy audit A [B]`: read, judge, show, write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from onepolicy.audit import own
from onepolicy.audit.judge import Audited, judge
from onepolicy.audit.report import show, write_report
from onepolicy.audit.tally import tally
from onepolicy.config import UsageError


def audit(path: Path, mapping: Mapping[str, str], *, label: str | None = None) -> Audited:
    """Of one dump. UsageError: anything wrong with it."""
    return judge(
        tally(path, mapping), label or path.name, equal_on_purpose=own.equal_on_purpose(path)
    )


def run_audit(
    paths: Sequence[Path],
    mapping: Mapping[str, str],
    out: Path | None,
    console: Console,
    *,
    png: bool = False,
) -> list[Audited]:
    """One or two dumps: terminal summary; if a folder is given OUT/audit.html, audit.json and figures/."""
    if png and out is None:
        raise UsageError(
            "--png: figures are written into the folder of the report; give --out FOLDER too"
        )
    names = [path.name for path in paths]
    labels = names if len(set(names)) == len(names) else [str(path) for path in paths]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({side})" for label, side in zip(labels, "AB", strict=True)]
    audited = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        for path, label in zip(paths, labels, strict=True):
            bar = bars.add_task(label, total=1.0)
            found = tally(path, mapping, lambda done, bar=bar: bars.update(bar, completed=done))  # type: ignore[misc]
            audited.append(judge(found, label, equal_on_purpose=own.equal_on_purpose(path)))
    written = [] if out is None else write_report(out, audited, png=png)
    show(console, audited)
    for path, label in zip(paths, labels, strict=True):
        if own.is_run(path):
            console.print(f"{label}: {own.bitwise(path)}", highlight=False, soft_wrap=True)
    for each in written:
        console.print(f"wrote {each}", highlight=False, soft_wrap=True)
    return audited
