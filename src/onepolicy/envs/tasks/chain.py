"""The quickstart task: chained single-digit arithmetic modulo 10, worked step by step.

The prompt `7*3+5-9=` is evaluated from left to right. Its worked response is
`7*3=1;1+5=6;6-9=7;#7`. Every operation takes six characters, so a response has 6 * ops + 2 of them.
The reward is 1 if the number after the last `#` is right.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from onepolicy.config import ChainTask
from onepolicy.envs.tasks.seeding import Split, seeded_rng, split_of_text
from onepolicy.envs.tasks.single_turn import grade_exact
from onepolicy.interfaces import Problem

ALPHABET = "0123456789+-*=;#"
OPERATORS = "+-*"


class Chain:
    """Problems of the task. Training ids count up from 0, held-out ids down from -1."""

    def __init__(self, config: ChainTask, section: str = "task") -> None:
        """Store the settings. section: their place in the recipe."""
        self.config, self.section = config, section

    def train_problem(self, index: int) -> Problem:
        return make_problem(self.config, index, "train")

    def held_out(self, count: int) -> list[Problem]:
        return [make_problem(self.config, index, "held_out") for index in range(count)]

    def grade(self, problem: Problem, response: str) -> float:
        return grade_exact(response, problem.answer, "#")

    def reference_response(self, problem: Problem) -> str | None:
        return solution(problem.prompt)

    def start_up_problems(self) -> Iterable[Problem]:
        return [self.train_problem(0)]  # all have the same length


def make_problem(task: ChainTask, index: int, split: Split) -> Problem:
    """Make problem `index` of a split.

    With very few operations problems repeat within a split: with one, 300 prompts exist.
    """
    prompt = draw_prompt(seeded_rng("chain", task.seed, split, index), task.ops, split)
    problem_id = index
    if split == "held_out":
        problem_id = -1 - index
    return Problem(problem_id, prompt, solution(prompt)[-1])


def solution(prompt: str) -> str:
    """Return the worked response to a prompt."""
    return work_out(prompt, mistakes={})


def draw_prompt(rng: np.random.Generator, ops: int, split: Split) -> str:
    """Draw prompts until one is of the split.

    This takes 4/3 draws (train) or 4 draws (held-out) on average.
    """
    while True:
        digits = rng.integers(10, size=ops + 1).tolist()
        operators = rng.integers(len(OPERATORS), size=ops).tolist()
        steps = [f"{OPERATORS[o]}{d}" for o, d in zip(operators, digits[1:], strict=True)]
        prompt = f"{digits[0]}{''.join(steps)}="
        if split_of_text(prompt) == split:
            return prompt


def parse(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """Return the first digit and the steps: `7*3+5=` -> 7, [("*", 3), ("+", 5)]."""
    body = prompt.removesuffix("=")
    return int(body[0]), [(body[i], int(body[i + 1])) for i in range(1, len(body), 2)]


def work_out(prompt: str, mistakes: dict[int, int]) -> str:
    """Return the worked response. mistakes: step -> digit that replaces its result."""
    value, steps = parse(prompt)
    parts = []
    for i, (operator, digit) in enumerate(steps):
        result = mistakes.get(i, _apply(operator, value, digit))
        parts.append(f"{value}{operator}{digit}={result};")
        value = result
    return f"{''.join(parts)}#{value}"


def _apply(operator: str, left: int, right: int) -> int:
    match operator:
        case "+":
            return (left + right) % 10
        case "-":
            return (left - right) % 10
        case "*":
            return (left * right) % 10
    raise AssertionError(f"no operator {operator!r} in a chain prompt")
