"""Files of problems and prompts, read and checked line by line, before torch is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from onepolicy.config.task import JsonlTask, ProgramTask, ReActTask, TaskConfig
from onepolicy.errors import UsageError

SHOWN = 60  # characters of a bad value in a message


@dataclass(frozen=True, slots=True)
class ProblemRow:
    """A problem of a file."""

    number: int  # of its line, from 1
    prompt: str
    answer: str
    where: str  # path:line


def problem_files(task: TaskConfig) -> list[str]:
    """Return the paths of the files that a task's problems are in."""
    problems = task
    if isinstance(task, ReActTask | ProgramTask):
        problems = task.problems
    if not isinstance(problems, JsonlTask):
        return []
    return [path for path in (problems.path, problems.held_out_path) if path is not None]


def read_task(task: JsonlTask, section: str = "task") -> tuple[list[ProblemRow], list[ProblemRow]]:
    """Return the rows to train on and the held-out rows.

    section: path of these settings in a recipe. Raises UsageError for a line that is no problem.
    """
    rows = read_rows(task.path, f"{section}.path")
    if task.held_out_path is not None:
        held_out = read_rows(task.held_out_path, f"{section}.held_out_path")
    else:
        if len(rows) <= task.held_out:
            raise UsageError(
                f"{section}.held_out: {task.held_out} lines are held out, but {task.path} has "
                f"{len(rows)}, which leaves none to train on; lower {section}.held_out, give "
                f"{section}.held_out_path, or add lines"
            )
        rows, held_out = rows[: -task.held_out], rows[-task.held_out :]
    _check_disjoint(rows, held_out)
    return rows, held_out


def check_held_out(
    task: JsonlTask, needed: int, held_out: int, lines: int, section: str = "task"
) -> None:
    """Raise UsageError if an evaluation needs more problems than are held out.

    held_out: held-out rows. lines: rows of the training file, held-out ones included.
    """
    if needed <= held_out:
        return
    if task.held_out_path is not None:
        source = f"{task.held_out_path} ({section}.held_out_path) has {held_out}"
        more = f"add lines to {task.held_out_path}"
    else:
        source = f"{held_out} lines of {task.path} are held out ({section}.held_out)"
        more = f"set {section}.held_out={needed}"
        if lines <= needed:
            more = (
                f"hold out more: {task.path} has {lines} lines, and some must be left to train on"
            )
    raise UsageError(
        f"eval.problems: {needed} are asked for, but {source}; set eval.problems={held_out}, or "
        f"{more}"
    )


def read_rows(path: str, field: str) -> list[ProblemRow]:
    """Return the file's rows in order. Raises UsageError for a line that is no problem."""
    return [
        _row(path, number, line) for number, line in enumerate(read_lines(path, field), start=1)
    ]


def read_prompts(path: str) -> list[str]:
    """Return the file's prompts in order.

    If the first line starts with a brace, every line is a JSON object, else a text.
    """
    lines = read_lines(path, "--prompts")
    if not lines[0].lstrip().startswith(b"{"):
        return [
            _decoded(path, number, line)
            for number, line in enumerate(lines, start=1)
            if line.strip()
        ]
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            where = f"{path}:{number}"
            prompts.append(text_field(parse_line(where, line), "prompt", where))
    return prompts


def read_lines(path: str, field: str) -> list[bytes]:
    """Return the file's lines without blank ones at its end, at least one."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(
            f"{field}: {path} is not a file; give the path of a JSONL file of prompts and answers"
        )
    data = file.read_bytes()
    if data.startswith(b"PAR1"):
        raise UsageError(
            f"{field}: {path} is Parquet; write JSON lines of it: pandas.read_parquet(FILE)"
            ".to_json('prompts.jsonl', orient='records', lines=True)"
        )
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UsageError(
            f'{field}: {path} is empty; it needs lines of {{"prompt": "...", "answer": "..."}}'
        )
    return lines


def _row(path: str, number: int, line: bytes) -> ProblemRow:
    where = f"{path}:{number}"
    row = parse_line(where, line)
    prompt = text_field(row, "prompt", where)
    answer = text_field(row, "answer", where, numbers=True)
    return ProblemRow(number, prompt, answer, where)


class WrittenFloat(float):
    """A JSON number that is no integer, with its text in the file."""

    text: str

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number


def parse_line(where: str, line: bytes) -> dict[str, object]:
    """Return the JSON object on this line. `where` names it in errors."""
    shown = line[:SHOWN].decode(errors="replace")
    try:
        row = json.loads(line, parse_float=WrittenFloat)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
        ) from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}: not JSON ({error.msg} at column {error.colno}): {shown!r}; every line is "
            "one JSON object"
        ) from None
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        raise UsageError(
            f"{where}: cannot be read ({error}): {shown!r}; fix or remove the line"
        ) from None
    if not isinstance(row, dict):
        raise UsageError(
            f'{where}: {shown!r} is not an object; write {{"prompt": "...", "answer": "..."}}'
        )
    return row


def text_field(row: dict[str, object], field: str, where: str, *, numbers: bool = False) -> str:
    """Return the field's text.

    numbers: accept a number, and return an integer in decimal, any other as the file has it.
    Raises UsageError for a field that is missing, empty, or something else.
    """
    if field not in row:
        has = ", ".join(map(repr, row)) or "nothing"
        raise UsageError(
            f"{where}: field {field!r} is missing (the line has {has}); add it, or rename the field"
        )
    value = row[field]
    if isinstance(value, list) and not numbers:
        value = _only_message(value, f"{where}: field {field!r}")
    if numbers and type(value) is int:
        return str(value)
    if numbers and isinstance(value, WrittenFloat):
        return value.text
    if not isinstance(value, str):
        raise _not_a_text(value, f"{where}: field {field!r}", numbers)
    if not value.strip():
        raise UsageError(
            f"{where}: field {field!r} is empty ({value!r}); fill it in or remove the line"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = value[error.start : error.end]
        raise UsageError(
            f"{where}: field {field!r} has {bad!r} at character {error.start}, half of a surrogate "
            "pair and no character; fix the line"
        ) from None
    return value


def _only_message(messages: list[object], field: str) -> object:
    """Return the content of a chat's one message, which trainers' data sets have for a text.

    Raises UsageError for a list that is something else.
    """
    match messages:
        case [{"role": "user", "content": content}]:
            return content
    roles = [each.get("role") for each in messages if isinstance(each, dict)]
    if len(roles) < len(messages) or not roles:
        raise _not_a_text(messages, field, numbers=False)
    raise UsageError(
        f"{field} is a chat of the roles {', '.join(map(str, roles))[:SHOWN]}; write the text of "
        "one user message, or a list of that message alone"
    )


def _not_a_text(value: object, field: str, numbers: bool) -> UsageError:
    kind = type(value).__name__
    if isinstance(value, float):
        kind = "float"
    wanted = "a string"
    if numbers:
        wanted = "a string or a number"
    return UsageError(f"{field} is {kind} {str(value)[:SHOWN]}, not {wanted}; put it in quotes")


def _check_disjoint(train: list[ProblemRow], held_out: list[ProblemRow]) -> None:
    trained = {row.prompt: row for row in train}
    for row in held_out:
        twin = trained.get(row.prompt)
        if twin is not None:
            raise UsageError(
                f"held-out prompt {row.prompt[:SHOWN]!r} ({row.where}) is trained on as well "
                f"({twin.where}); remove one of the two lines"
            )


def _decoded(path: str, number: int, line: bytes) -> str:
    try:
        return line.decode().rstrip("\r")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}:{number}: not UTF-8 ({error.reason} at byte {error.start}); save the file as "
            "UTF-8"
        ) from None
