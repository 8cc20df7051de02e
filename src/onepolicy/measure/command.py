"""`onepolicy measure` once torch is loaded: measure, write and print."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from onepolicy.console import Console, status_printer
from onepolicy.measure import bitwise, measure, result
from onepolicy.measure.bitwise import Bitwise
from onepolicy.measure.result import Measurement
from onepolicy.report import bitwise as bitwise_report
from onepolicy.report import measure as measure_report


def measure_and_show(
    tree: dict[str, Any],
    overrides: list[str],
    *,
    loaded: str,
    out: Path | None,
    png: bool,
    short: bool,
    **options: Any,
) -> int:
    """Measure, print the verdict and return the exit status.

    loaded: the model in words. out: folder of the report. short: print no tables. options: of
    `measure_model`.
    """
    with status_printer("measure") as show_status:
        show_status(f"loading {loaded}")
        found = measure.measure_model(tree, overrides, **options, say=show_status)
    if isinstance(found, Bitwise):
        return _show_bitwise(found, out)
    return _show_measurement(found, out, png=png, short=short)


def _show_measurement(found: Measurement, out: Path | None, *, png: bool, short: bool) -> int:
    written: Path | None = None
    if out is not None:
        result.write(found, out)
        written = measure_report.write_report(out, png=png)
    console = Console()
    summary = measure_report.short_summary if short else measure_report.summary
    for part in summary(result.to_tree(found)):
        console.print(part)
    if written is None and not short:
        console.print_line(f"--out FOLDER writes a page with {measure_report.IN_THE_PAGE}.")
    elif written is not None:
        console.print_line(f"written: {written}, with {measure_report.IN_THE_PAGE}")
    return 0


def _show_bitwise(found: Bitwise, out: Path | None) -> int:
    """Print the comparison. Return 1 if any bit differs or could differ, else 0."""
    written: Path | None = None
    if out is not None:
        written = bitwise.write(found, out)
    console = Console()
    for part in bitwise_report.summary(dataclasses.asdict(found) | {"holds": found.holds}):
        console.print(part)
    if written is not None:
        console.print_line(f"written: {written} (bits have no charts, so there is no report.html)")
    return int(not found.holds)
