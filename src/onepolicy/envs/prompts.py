"""Prompts to sample from, without answers: one a line of a text file, or of JSON objects with a field `prompt`."""

from __future__ import annotations

from collections.abc import Iterable

from onepolicy.config import PromptsTask, UsageError
from onepolicy.config.problems import read_prompts
from onepolicy.interfaces import Problem


class Prompts:
    """Problem i is line i of the file, blank lines left out; after the last one they start again."""

    def __init__(self, config: PromptsTask) -> None:
        self.config = config
        self.prompts = read_prompts(config.path)

    def train_problem(self, index: int) -> Problem:
        return Problem(index, self.prompts[index % len(self.prompts)], "")

    def held_out(self, count: int) -> list[Problem]:
        raise UsageError("task.kind: prompts have no answers to evaluate against; give a task with answers")

    def grade(self, asked: Problem, response: str) -> float:
        return 0.0

    def reference(self, asked: Problem) -> str | None:
        return None

    def start_up_problems(self) -> Iterable[Problem]:
        return [Problem(i, prompt, "") for i, prompt in enumerate(self.prompts)]
