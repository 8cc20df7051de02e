"""Worked episodes for the warm-up of a small policy: problems whose answer a calculator finds.

A planted mistake is a guess: where the next call belongs the episode ends with a random number of the answer's length.
Reinforcement learning can remove it by calling the tool.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from onepolicy.config import CalculatorTool, GymTask, ReActTask, UsageError
from onepolicy.envs.multiturn.tool_dialogue import explained, observation
from onepolicy.envs.tasks.reasoning_gym import Gym
from onepolicy.envs.tasks.seeding import digest, rng_of
from onepolicy.envs.tools import build_tools
from onepolicy.envs.tools.calculator import calculate
from onepolicy.interfaces import Problem

FUNCTIONS = ("gcd", "lcm")  # data sets that list numbers and ask for this function of them
EXPRESSION = re.compile(r"[-(\s]*\d[\d\s.+*/()-]*")


def warmup_examples(task: ReActTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, ...]]:
    """Endless episodes as texts: prompt, turn, observation, turn, ... A turn's end token is left out."""
    calculator = next((tool for tool in task.tools if isinstance(tool, CalculatorTool)), None)
    if calculator is None or not isinstance(task.problems, GymTask):
        raise UsageError(
            "task.tools: episodes to warm up on can be written for reasoning-gym data sets and a calculator only; add "
            "one, or train a model that knows how to use tools"
        )
    opening = explained(build_tools(task.tools)) if task.instructions is None else task.instructions
    gym, start, index = (
        Gym(task.problems, "task.problems"),
        digest("react warm-up", seed) % 2**31,
        0,
    )
    while True:
        rng = rng_of("react warm-up", task.problems.seed, seed, index)
        problem = gym.train_problem(start + index)
        calls = calls_of(problem, task.problems.name, calculator.operations)
        if len(calls) >= task.max_turns:
            raise UsageError(
                f"task.max_turns: {task.max_turns} turns cannot hold the {len(calls)} calls and the answer of "
                f"{problem.prompt[:60]!r}; raise it, or narrow task.problems.params"
            )
        made = int(
            np.argmax([*(rng.random(len(calls)) < mistakes), True])
        )  # calls before a guess, or all
        texts = [f"{opening}{problem.prompt}\n"]
        for call in calls[:made]:
            texts += [
                f"Action: calculator[{call}]",
                observation([calculate(call, operations=calculator.operations)]),
            ]
        answer = problem.answer if made == len(calls) else _guess(problem.answer, rng)
        yield (*texts, f"Answer: {answer}")
        index += 1


def calls_of(problem: Problem, name: str, operations: int | None) -> list[str]:
    """The calculator inputs that lead to the answer, at most `operations` operations each."""
    if name in FUNCTIONS:
        numbers = re.findall(r"\d+", problem.prompt)
        expression = f"{name}({', '.join(numbers)})"
    else:
        expression = max(EXPRESSION.findall(problem.prompt), key=len, default="").strip(" .\n")
    value = calculate(expression)
    if value != problem.answer:
        raise UsageError(
            f"task.problems: no calculator input for {problem.prompt[:80]!r} is known ({expression!r} gives {value}, "
            f"not {problem.answer}); take a data set that asks for the value of an expression, a gcd or an lcm"
        )
    return [expression] if operations is None else _one_by_one(expression)


def _one_by_one(expression: str) -> list[str]:
    """One operation a call, innermost first, results put in place: `2 + 3 * 4` -> `3 * 4`, `2 + 12`."""
    tree, calls = ast.parse(expression, mode="eval"), []
    while (step := _Innermost()).visit(tree) and step.found is not None:
        calls.append(step.found)
    return calls


class _Innermost(ast.NodeTransformer):
    """Replaces the first operation on two numbers by its value."""

    found: str | None = None

    def visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, ast.BinOp | ast.Call) or any(
            isinstance(below, ast.BinOp | ast.Call) for below in ast.walk(node) if below is not node
        ):
            return self.generic_visit(node) if self.found is None else node
        if self.found is not None:
            return node
        self.found = ast.unparse(node)
        value = calculate(self.found)
        if "/" in value or value.startswith("error: "):
            raise UsageError(
                f"task.tools: one calculator operation at a time leads to {self.found} = {value}, not a number to go "
                "on with; leave operations out, or take a data set whose divisions come out"
            )
        return ast.parse(value, mode="eval").body


def _guess(answer: str, rng: np.random.Generator) -> str:
    """A number as long as the answer; not the answer."""
    digits = [c for c in answer if c.isdigit()]
    while True:
        drawn = iter(rng.integers(10, size=len(digits)).tolist())
        guess = "".join(str(next(drawn)) if c.isdigit() else c for c in answer)
        if guess != answer:
            return guess
