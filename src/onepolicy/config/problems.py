"""Files of problems and prompts, read and checked line by line. Loads no torch, so that a bad line is said at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from onepolicy.config.base import UsageError
from onepolicy.config.task import JsonlTask

SHOWN = 60  # characters of a bad value in a message


@dataclass(frozen=True, slots=True)
class Row:
    """A problem of a file."""

    number: int  # of its line, from 1
    prompt: str
    answer: str
    where: str  # path:line


def read_task(task: JsonlTask, section: str = "task") -> tuple[list[Row], list[Row]]:
    """Return the rows that are trained on and those that are held out. UsageError for any line that is none.

    section: where these settings stand in a recipe.
    """
    rows = read_rows(task.path, f"{section}.path")
    if task.held_out_path is not None:
        held_out = read_rows(task.held_out_path, f"{section}.held_out_path")
    else:
        if len(rows) <= task.held_out:
            raise UsageError(
                f"{section}.held_out: {task.held_out} lines are held out, but {task.path} has {len(rows)}, which "
                f"leaves none to train on; lower {section}.held_out, give {section}.held_out_path, or add lines"
            )
        rows, held_out = rows[: -task.held_out], rows[-task.held_out :]
    _check_disjoint(rows, held_out)
    return rows, held_out


def check_held_out(
    task: JsonlTask, asked: int, held_out: int, lines: int, section: str = "task"
) -> None:
    """UsageError, naming both settings, if an evaluation asks for more problems than are held out.

    held_out, lines: rows that are held out, and rows of the training file before any were.
    """
    if asked <= held_out:
        return
    if task.held_out_path is not None:
        source = f"{task.held_out_path} ({section}.held_out_path) has {held_out}"
        more = f"add lines to {task.held_out_path}"
    else:
        source = f"{held_out} lines of {task.path} are held out ({section}.held_out)"
        more = f"set {section}.held_out={asked}"
        if lines <= asked:
            more = (
                f"hold out more: {task.path} has {lines} lines, and some must be left to train on"
            )
    raise UsageError(
        f"eval.problems: {asked} are asked for, but {source}; set eval.problems={held_out}, or {more}"
    )


def read_rows(path: str, field: str) -> list[Row]:
    """Return the file's rows in order. UsageError for any line that is none."""
    return [
        _row(path, number, line) for number, line in enumerate(read_lines(path, field), start=1)
    ]


def read_prompts(path: str) -> list[str]:
    """The file's prompts in order. Its first line says which kind it is: JSON objects start with a brace."""
    lines = read_lines(path, "--prompts")
    if not lines[0].lstrip().startswith(b"{"):
        return [
            _decoded(path, number, line)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            found.append(text_field(parse_line(where, line), "prompt", where))
    return found


def read_lines(path: str, field: str) -> list[bytes]:
    """The file's lines, without blank ones at its end; at least one."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(
            f"{field}: {path} is not a file; give the path of a JSONL file of prompts and answers"
        )
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UsageError(
            f'{field}: {path} is empty; it needs lines of {{"prompt": "...", "answer": "..."}}'
        )
    return lines


def _row(path: str, number: int, line: bytes) -> Row:
    where = f"{path}:{number}"
    row = parse_line(where, line)
    prompt, answer = (
        text_field(row, "prompt", where),
        text_field(row, "answer", where, numbers=True),
    )
    return Row(number, prompt, answer, where)


class WrittenFloat(float):
    """A number of a JSON text that is no integer, and how it is written there."""

    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text = text
        return made


def parse_line(where: str, line: bytes) -> dict[str, object]:
    """The JSON object on this line; `where` names it in errors."""
    shown = line[:SHOWN].decode(errors="replace")
    try:
        row = json.loads(line, parse_float=WrittenFloat)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}: not JSON ({error.msg} at column {error.colno}): {shown!r}; every line is one JSON object"
        ) from None
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of thousands of digits; brackets as deep
        raise UsageError(
            f"{where}: cannot be read ({error}): {shown!r}; mend or remove the line"
        ) from None
    if not isinstance(row, dict):
        raise UsageError(
            f'{where}: {shown!r} is not an object; write {{"prompt": "...", "answer": "..."}}'
        )
    return row


def text_field(row: dict[str, object], field: str, where: str, *, numbers: bool = False) -> str:
    """The field's text. numbers: of a number its text too, an integer in decimal and any other as it is written."""
    if field not in row:
        has = ", ".join(map(repr, row)) or "nothing"
        raise UsageError(
            f"{where}: field {field!r} is missing (the line has {has}); add it, or rename the field"
        )
    value = row[field]
    if numbers and type(value) is int:
        return str(value)
    if numbers and isinstance(value, WrittenFloat):
        return value.text
    if not isinstance(value, str):
        kind = "float" if isinstance(value, float) else type(value).__name__
        wanted = "a string or a number" if numbers else "a string"
        raise UsageError(
            f"{where}: field {field!r} is {kind} {str(value)[:SHOWN]}, not {wanted}; put it in quotes"
        )
    if not value.strip():
        raise UsageError(
            f"{where}: field {field!r} is empty ({value!r}); fill it in or remove the line"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = value[error.start : error.end]
        raise UsageError(
            f"{where}: field {field!r} has {bad!r} at character {error.start}, half of a surrogate pair and no "
            "character; mend the line"
        ) from None
    return value


def _check_disjoint(train: list[Row], held_out: list[Row]) -> None:
    trained = {row.prompt: row for row in train}
    for row in held_out:
        if (twin := trained.get(row.prompt)) is not None:
            raise UsageError(
                f"held-out prompt {row.prompt[:SHOWN]!r} ({row.where}) is trained on as well ({twin.where}); remove "
                "one of the two lines"
            )


def _decoded(path: str, number: int, line: bytes) -> str:
    try:
        return line.decode().rstrip("\r")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start})"
        ) from None
