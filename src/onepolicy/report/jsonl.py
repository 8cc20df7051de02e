"""JSON lines as a run folder holds them: appended while a process lives that may be killed at any moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onepolicy.config import UsageError


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All objects of a file, each with its integer `step`. A last line cut short (its writer was killed) is left out;
    any other bad line raises."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file; give the folder of a run that has taken at least one step")
    lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if row is not None:
            if type(row.get("step")) is not int:
                raise UsageError(f"{path}:{number}: no integer `step`; remove the line or restore the file")
            rows.append(row)
        elif number < len(lines):
            raise UsageError(f"{path}:{number}: not a JSON object ({line[:60]!r}); remove the line or restore the file")
    return rows


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # JSONDecodeError, UnicodeDecodeError; thousands of digits or brackets
        return None
    return row if isinstance(row, dict) else None
