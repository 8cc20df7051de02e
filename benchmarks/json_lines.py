"""Files of results: a JSON object a line, appended by one process at a time."""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Return the objects of a file, none if it is not there.

    A last line without its end was cut off by a kill or a full disk: it is left out, with a note.
    """
    if not path.exists():
        return []
    whole, _, cut = path.read_text(encoding="utf-8").rpartition("\n")
    if cut:
        print(f"{path}: the last line has no end, so it is left out", file=sys.stderr)
    return [json.loads(line) for line in whole.splitlines()]


def drop_cut_line(path: Path) -> None:
    """Cut a last line without its end off a file, so that the next one does not continue it."""
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


@contextmanager
def locked(path: Path, fix: str) -> Iterator[None]:
    """Lock a file, which is made if it is not there. Raises SystemExit if another process has it.

    fix: what to do then. The lock ends with the process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"{path}: another process has it; {fix}") from None
        yield


@contextmanager
def appending(path: Path) -> Iterator[Callable[[Line], None]]:
    """Lock a file of results, and yield a function that appends a line to it."""
    with locked(path, "wait for it, or give --results another file"):
        drop_cut_line(path)

        def append(line: Line) -> None:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

        yield append
