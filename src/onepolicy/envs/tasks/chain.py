"""The quickstart task: chained single-digit arithmetic modulo 10, worked step by step.

Prompt `7*3+5-9=`, evaluated from left to right; worked response `7*3=1;1+5=6;6-9=7;#7`. Every operation takes six
characters, so a response has 6 * ops + 2 of them. The reward is 1 if the number after the last `#` is right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from onepolicy.config import ChainTask
from onepolicy.envs.tasks.grading import exact
from onepolicy.envs.tasks.seeding import Split, rng_of, split_of
from onepolicy.interfaces import Problem

ALPHABET = "0123456789+-*=;#"
OPERATORS = "+-*"


class Chain:
    """The task as the environment plays it. Training ids count up from 0, held-out ids down from -1."""

    def __init__(self, config: ChainTask, section: str = "task") -> None:
        """section: where these settings stand in a recipe."""
        self.config, self.section = config, section

    def train_problem(self, index: int) -> Problem:
        return problem(self.config, index, "train")

    def held_out(self, count: int) -> list[Problem]:
        return [problem(self.config, index, "held_out") for index in range(count)]

    def grade(self, asked: Problem, response: str) -> float:
        return exact(response, asked.answer, "#")

    def reference(self, asked: Problem) -> str | None:
        return solution(asked.prompt)

    def start_up_problems(self) -> Iterable[Problem]:
        return [self.train_problem(0)]  # all have the same length


def problem(task: ChainTask, index: int, split: Split) -> Problem:
    """Problem `index` of a split. With very few operations (1: 300 prompts exist) problems repeat within a split."""
    prompt = _prompt(rng_of("chain", task.seed, split, index), task.ops, split)
    return Problem(index if split == "train" else -1 - index, prompt, solution(prompt)[-1])


def solution(prompt: str) -> str:
    return _worked(prompt, mistakes=None)


def corrupted_solution(prompt: str, rng: np.random.Generator, rate: float) -> str:
    """Each step's result is, with probability `rate`, a uniformly random digit, and the chain goes on from it.

    One digit in ten is right by chance, so a solution of k operations is free of mistakes with probability
    (1 - 0.9 rate)^k. A policy warmed up on these errs at that rate when sampled at temperature 1.
    """
    count = len(_parse(prompt)[1])
    planted = rng.random(count) < rate
    digits = rng.integers(10, size=count)
    return _worked(prompt, [int(d) if p else None for p, d in zip(planted, digits, strict=True)])


def warmup_examples(task: ChainTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, response) pairs of 1 or 2 to `task.ops` operations; no prompt of the held-out split."""
    index = 0
    while True:
        rng = rng_of("chain warm-up", task.seed, seed, index)
        ops = int(rng.integers(min(2, task.ops), task.ops + 1))
        prompt = _prompt(rng, ops, "train")
        yield prompt, corrupted_solution(prompt, rng, mistakes)
        index += 1


def _prompt(rng: np.random.Generator, ops: int, split: Split) -> str:
    while True:  # rejection: ends with probability 1, after 4/3 draws (train) or 4 draws (held-out) on average
        digits = rng.integers(10, size=ops + 1).tolist()
        operators = rng.integers(len(OPERATORS), size=ops).tolist()
        steps = [f"{OPERATORS[o]}{d}" for o, d in zip(operators, digits[1:], strict=True)]
        prompt = f"{digits[0]}{''.join(steps)}="
        if split_of(prompt) == split:
            return prompt


def _parse(prompt: str) -> tuple[int, list[tuple[str, int]]]:
    """`7*3+5=` -> 7, [("*", 3), ("+", 5)]."""
    body = prompt.removesuffix("=")
    return int(body[0]), [(body[i], int(body[i + 1])) for i in range(1, len(body), 2)]


def _worked(prompt: str, mistakes: list[int | None] | None) -> str:
    """The worked response; where `mistakes` has a digit it stands in for that step's result."""
    value, steps = _parse(prompt)
    parts = []
    for i, (operator, digit) in enumerate(steps):
        result = _apply(operator, value, digit)
        if mistakes is not None and (mistake := mistakes[i]) is not None:
            result = mistake
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
