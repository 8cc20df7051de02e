"""`onepolicy audit A [B]`: reads one or two dumps, prints the verdict and writes the report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rich.progress import Progress, TaskID, TaskProgressColumn, TimeRemainingColumn

from onepolicy.audit.accumulator import accumulate_dump
from onepolicy.audit.assessment import AuditResult, assess
from onepolicy.audit.claims import (
    claims_equality,
    declared_by,
    describe_bit_equality,
    describe_pressure,
)
from onepolicy.audit.report import print_audit, write_report
from onepolicy.config import UsageError
from onepolicy.config.presets import framework_name
from onepolicy.console import Console, make_bars
from onepolicy.nonfinite import Nonfinite
from onepolicy.record.probes import is_run_folder
from onepolicy.record.read import BY_SIZE, ReadLimits
from onepolicy.verdict.declared import Declared, Format


def audit(
    path: Path,
    mapping: Mapping[str, str],
    *,
    label: str | None = None,
    progress: Callable[[float], None] = lambda done: None,
    nonfinite: Nonfinite = "skip",
    number_format: Format | None = None,
    limits: ReadLimits = BY_SIZE,
    framework: str = "",
) -> AuditResult:
    """Audit one dump. Raises UsageError for anything wrong with it.

    nonfinite: tokens inside the mask with a value that is not finite are left out and counted, or
    are an error. number_format: the coarsest of both sides; None: bfloat16, or what a run says.
    limits: the memory and the time that reading the files may take. framework: the trainer of the
    dump (`onepolicy config preset` lists the names), in whose settings the advice is given too;
    empty: the one that the dump names.
    """
    if framework:
        framework = framework_name(framework)
    declared = Declared(number_format or "bfloat16")
    if is_run_folder(path):
        if number_format is not None:
            raise UsageError(f"{path}: is a run folder of ours, which says it; leave --format out")
        declared = declared_by(path)
    accumulated = accumulate_dump(path, mapping, progress, nonfinite=nonfinite, limits=limits)
    return assess(
        accumulated,
        label or path.name,
        declared=declared,
        claims_equality=claims_equality(path),
        framework=framework,
    )


def run_audit(
    paths: Sequence[Path],
    mapping: Mapping[str, str],
    out: Path | None,
    console: Console,
    *,
    png: bool = False,
    nonfinite: Nonfinite = "skip",
    number_format: Format | None = None,
    limits: ReadLimits = BY_SIZE,
    framework: str = "",
) -> list[AuditResult]:
    """Audit one or two dumps and print a summary.

    out: folder for audit.html, audit.json and figures/; None: write nothing. png: write the figures
    as PNG files too. nonfinite, number_format, limits, framework: as of `audit`.
    """
    if png and out is None:
        raise UsageError(
            "--png: figures are written into the folder of the report; give --out FOLDER too"
        )
    labels = _labels(paths)
    results = []
    with make_bars(console, TaskProgressColumn(), TimeRemainingColumn()) as bars:
        for path, label in zip(paths, labels, strict=True):
            progress = partial(_set_done, bars, bars.add_task(label, total=1.0))
            results.append(
                audit(
                    path,
                    mapping,
                    label=label,
                    progress=progress,
                    nonfinite=nonfinite,
                    number_format=number_format,
                    limits=limits,
                    framework=framework,
                )
            )
    written = []
    if out is not None:
        written = write_report(out, results, png=png)
    for path, label in zip(paths, labels, strict=True):
        pressure = describe_pressure(path)
        if pressure is not None:
            console.print_line(f"{label}: not a real engine: {pressure}", style="bold red")
    print_audit(console, results)
    for path, label in zip(paths, labels, strict=True):
        if is_run_folder(path):
            console.print_line(f"{label}: {describe_bit_equality(path)}")
    for file in written:
        console.print_line(f"wrote {file}")
    return results


def _labels(paths: Sequence[Path]) -> list[str]:
    """Return a different label for each dump: its name, its path, or its path and side."""
    labels = [path.name for path in paths]
    if len(set(labels)) < len(labels):
        labels = [str(path) for path in paths]
    if len(set(labels)) < len(labels):
        labels = [f"{label} ({side})" for label, side in zip(labels, "AB", strict=True)]
    return labels


def _set_done(bars: Progress, task: TaskID, done: float) -> None:
    bars.update(task, completed=done)
