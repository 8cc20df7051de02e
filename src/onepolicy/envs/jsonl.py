"""Problems from a file: one JSON object {"prompt": str, "answer": str or number} per line; further fields are not read.

Every line is checked before the run starts. Held-out problems are the last `held_out` lines, or a file of their own;
a held-out prompt that is also a training prompt is an error, so an evaluation never measures memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from onepolicy.config import JsonlTask, UsageError
from onepolicy.envs.garble import garbled
from onepolicy.envs.grade import MathGrader, exact
from onepolicy.envs.keyed import rng_of
from onepolicy.envs.render import source
from onepolicy.interfaces import Problem

SHOWN = 60  # characters of a bad value in a message


class Jsonl:
    """Training ids count up from 0 over the epochs (so that the same line twice in a step is two problems), held-out
    ids down from -1; `entry["source"]` is path:line."""

    def __init__(self, config: JsonlTask, section: str = "task") -> None:
        """section: where these settings stand in a recipe."""
        self.config, self.section = config, section
        lines = read_problems(config.path, f"{section}.path")
        if config.held_out_path is not None:
            self._train, self._held_out = lines, read_problems(config.held_out_path, f"{section}.held_out_path")
        else:
            if len(lines) <= config.held_out:
                raise UsageError(
                    f"{section}.held_out: {config.held_out} lines are held out, but {config.path} has {len(lines)}, "
                    f"which leaves none to train on; lower {section}.held_out, give {section}.held_out_path, or "
                    "add lines"
                )
            self._train, self._held_out = lines[: -config.held_out], lines[-config.held_out :]
        _check_disjoint(self._train, self._held_out)
        self._math = MathGrader() if config.grader == "math" else None
        self._epoch: tuple[int, list[int]] = (-1, [])

    def train_problem(self, index: int) -> Problem:
        epoch, place = divmod(index, len(self._train))
        line = self._train[self._order(epoch)[place]]
        return Problem(index, line.prompt, line.answer, line.entry)

    def held_out(self, count: int) -> list[Problem]:
        if count > len(self._held_out):
            raise UsageError(self._too_few(count))
        return [Problem(-1 - i, p.prompt, p.answer, p.entry) for i, p in enumerate(self._held_out[:count])]

    def _too_few(self, count: int) -> str:
        """Why `count` problems cannot be evaluated on, and which of the two settings to change."""
        held_out, lines = len(self._held_out), len(self._train) + len(self._held_out)
        if self.config.held_out_path is not None:
            source = f"{self.config.held_out_path} ({self.section}.held_out_path) has {held_out}"
            more = f"add lines to {self.config.held_out_path}"
        else:
            source = f"{held_out} lines of {self.config.path} are held out ({self.section}.held_out)"
            more = f"set {self.section}.held_out={count}"
            if lines <= count:
                more = f"hold out more: {self.config.path} has {lines} lines, and some must be left to train on"
        return f"eval.problems: {count} are asked for, but {source}; set eval.problems={held_out}, or {more}"

    def grade(self, asked: Problem, response: str) -> float:
        if self._math is None:
            return exact(response, asked.answer, self.config.answer_prefix)
        return self._math.grade(response, asked.answer, self.config.answer_prefix)

    def take_metrics(self) -> dict[str, float]:
        """Of the grader, since the last call."""
        return {} if self._math is None else self._math.take_metrics()

    def reference(self, asked: Problem) -> str | None:
        return f"{self.config.answer_prefix}{asked.answer}" if self.config.grader == "exact" else None

    def start_up_problems(self) -> Iterable[Problem]:
        """Every line; with the math grader each answer is also read once, as an unreadable one can never be matched."""
        for problem in [*self._train, *self._held_out]:
            if self._math is not None and not self._math.readable(problem.answer):
                raise UsageError(
                    f"{(problem.entry or {})['source']}: math-verify finds no expression in answer "
                    f"{problem.answer[:SHOWN]!r}; mend the line or set {self.section}.grader=exact"
                )
            yield problem

    def texts(self) -> Iterator[str]:
        for problem in [*self._train, *self._held_out]:
            yield problem.prompt + problem.answer

    def _order(self, epoch: int) -> list[int]:
        """The epoch's permutation of the training lines, a function of (seed, epoch) alone; the last one is kept."""
        if self._epoch[0] != epoch:
            shuffled = rng_of("jsonl", self.config.seed, epoch).permutation(len(self._train))
            self._epoch = (epoch, shuffled.tolist())
        return self._epoch[1]


def read_problems(path: str, field: str) -> list[Problem]:
    """The file's lines in order, `id` the line number. Any line that is not a problem raises."""
    return [_problem(path, number, line) for number, line in enumerate(read_lines(path, field), start=1)]


def read_lines(path: str, field: str) -> list[bytes]:
    """The file's lines, without blank ones at its end; at least one."""
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{field}: {path} is not a file; give the path of a JSONL file of prompts and answers")
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise UsageError(f'{field}: {path} is empty; it needs lines of {{"prompt": "...", "answer": "..."}}')
    return lines


def _problem(path: str, number: int, line: bytes) -> Problem:
    where = f"{path}:{number}"
    row = parse_line(where, line)
    prompt, answer = text_field(row, "prompt", where), text_field(row, "answer", where, numbers=True)
    return Problem(number, prompt, answer, {"source": where})


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
        raise UsageError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise UsageError(
            f"{where}: not JSON ({error.msg} at column {error.colno}): {shown!r}; every line is one JSON object"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; brackets as deep
        raise UsageError(f"{where}: cannot be read ({error}): {shown!r}; mend or remove the line") from None
    if not isinstance(row, dict):
        raise UsageError(f'{where}: {shown!r} is not an object; write {{"prompt": "...", "answer": "..."}}')
    return row


def text_field(row: dict[str, object], field: str, where: str, *, numbers: bool = False) -> str:
    """The field's text. numbers: of a number its text too, an integer in decimal and any other as it is written."""
    if field not in row:
        has = ", ".join(map(repr, row)) or "nothing"
        raise UsageError(f"{where}: field {field!r} is missing (the line has {has}); add it, or rename the field")
    value = row[field]
    if numbers and type(value) is int:
        return str(value)
    if numbers and isinstance(value, WrittenFloat):
        return value.text
    if not isinstance(value, str):
        kind = "float" if isinstance(value, float) else type(value).__name__
        wanted = "a string or a number" if numbers else "a string"
        raise UsageError(f"{where}: field {field!r} is {kind} {str(value)[:SHOWN]}, not {wanted}; put it in quotes")
    if not value.strip():
        raise UsageError(f"{where}: field {field!r} is empty ({value!r}); fill it in or remove the line")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        bad = value[error.start : error.end]
        raise UsageError(
            f"{where}: field {field!r} has {bad!r} at character {error.start}, half of a surrogate pair and no "
            "character; mend the line"
        ) from None
    return value


def _check_disjoint(train: list[Problem], held_out: list[Problem]) -> None:
    trained = {problem.prompt: problem for problem in train}
    for problem in held_out:
        if (twin := trained.get(problem.prompt)) is not None:
            raise UsageError(
                f"held-out prompt {problem.prompt[:SHOWN]!r}{source(problem)} is trained on as well{source(twin)}; "
                "remove one of the two lines"
            )


def warmup_examples(task: JsonlTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer with its prefix) pairs of training lines, `mistakes` of their characters garbled."""
    problems, index = Jsonl(task), 0
    while True:
        rng = rng_of("jsonl warm-up", task.seed, seed, index)
        problem = problems.train_problem(index)
        yield problem.prompt, f"{task.answer_prefix}{garbled(problem.answer, rng, mistakes)}"
        index += 1
