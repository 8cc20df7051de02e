"""The JSONL files of a run folder. Their writer may be killed at any moment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onepolicy.bounded import refuse_holes
from onepolicy.config import UsageError
from onepolicy.config.json_shapes import Row, Sample, check_metrics, check_shape, parse_json
from onepolicy.files import leads_into

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
FIX = "remove the line or restore the file"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Return all objects of a file, each with its integer `step`.

    A last line that a killed writer cut short is left out. Raises UsageError on any other bad line.
    """
    try:
        if not path.is_file():
            raise UsageError(
                f"{path}: no such file; give the folder of a run that has taken at least one step"
            )
        if path.is_symlink() and not leads_into(path.parent, path):
            raise UsageError(f"{path}: a link out of its folder; put the file itself there")
        refuse_holes(path, FIX)
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    lines = data.split(b"\n")
    ended = data.endswith(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            row = parse_json(line, where, FIX)
        except UsageError:
            if number == len(lines) and not ended:  # half written
                break
            raise UsageError(f"{where}: not a JSON object ({line[:60]!r}); {FIX}") from None
        rows.append(check_shape(row, Row, where, FIX))
    return rows


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return all rows of metrics.jsonl.

    One row per step, in order. A value is a number or null (NaN, infinite).
    """
    path = folder / METRICS
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        where = f"{path}:{number}"
        check_metrics(row, where, FIX)
        if number > 1 and row["step"] <= rows[number - 2]["step"]:
            before = rows[number - 2]["step"]
            raise UsageError(f"{where}: step {row['step']} stands after step {before}; {FIX}")
    return rows


def known(rows: Sequence[dict[str, Any]], name: str, absent: float | None = None) -> list[float]:
    """Return a metric of the rows that have it. absent: value of rows without it."""
    values = [row.get(name, absent) for row in rows]
    return [float(x) for x in values if isinstance(x, int | float) and math.isfinite(x)]


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None of no value, or if it is not finite, which only damage can cause."""
    if not values or not math.isfinite(sum(values)):
        return None
    return sum(values) / len(values)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Return all readable rollouts of samples.jsonl; none if there is no such file."""
    path = folder / SAMPLES
    if not path.exists():
        return []
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        check_shape(row, Sample, f"{path}:{number}", FIX)
    return rows
