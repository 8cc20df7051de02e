"""Worked episodes of problems whose answer a calculator finds, for warm-up.

A mistake is a guess: in place of the next call, the episode ends with a random number of the
answer's length. Reinforcement learning can remove it by calling the tool.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import numpy as np

from onepolicy.config import CalculatorTool, GymTask, ReActTask, UsageError
from onepolicy.envs.multiturn.tool_formats import describe_tools, format_observations
from onepolicy.envs.tasks.reasoning_gym import ReasoningGym
from onepolicy.envs.tasks.seeding import hash_key, seeded_rng
from onepolicy.envs.tools import build_tools
from onepolicy.envs.tools.calculator import calculate
from onepolicy.interfaces import Problem

LISTED_NUMBER_FUNCTIONS = ("gcd", "lcm")
"""Data sets that list numbers and ask for this function of them."""
EXPRESSION = re.compile(r"[-(\s]*\d[\d\s.+*/()-]*")


def warmup_examples(task: ReActTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, ...]]:
    """Yield episodes without end, as texts: prompt, turn, observation, turn, ...

    Turns have no end token. mistakes: probability of a guess in place of each call.
    """
    calculator = next((tool for tool in task.tools if isinstance(tool, CalculatorTool)), None)
    if calculator is None or not isinstance(task.problems, GymTask):
        raise UsageError(
            "task.tools: episodes to warm up on can be written for reasoning-gym data sets and a "
            "calculator only; add one, or train a model that knows how to use tools"
        )
    instructions = task.instructions
    if instructions is None:
        instructions = describe_tools(build_tools(task.tools))
    gym = ReasoningGym(task.problems, "task.problems")
    start, index = hash_key("react warm-up", seed) % 2**31, 0
    while True:
        rng = seeded_rng("react warm-up", task.problems.seed, seed, index)
        problem = gym.train_problem(start + index)
        calls = calculator_calls(problem, task.problems.name, calculator.operations)
        if len(calls) >= task.max_turns:
            raise UsageError(
                f"task.max_turns: {task.max_turns} turns cannot hold the {len(calls)} calls and "
                f"the answer of {problem.prompt[:60]!r}; raise it, or narrow task.problems.params"
            )
        made = int(np.argmax([*(rng.random(len(calls)) < mistakes), True]))  # calls before a guess
        texts = [f"{instructions}{problem.prompt}\n"]
        for call in calls[:made]:
            value = calculate(call, operations=calculator.operations)
            texts += [f"Action: calculator[{call}]", format_observations([value])]
        answer = problem.answer
        if made < len(calls):
            answer = _random_wrong_number(problem.answer, rng)
        yield (*texts, f"Answer: {answer}")
        index += 1


def calculator_calls(problem: Problem, name: str, operations: int | None) -> list[str]:
    """Return the calculator inputs that lead to the answer, at most `operations` operations each.

    Raises UsageError if none is known. name: the data set.
    """
    if name in LISTED_NUMBER_FUNCTIONS:
        numbers = re.findall(r"\d+", problem.prompt)
        expression = f"{name}({', '.join(numbers)})"
    else:
        expression = max(EXPRESSION.findall(problem.prompt), key=len, default="").strip(" .\n")
    value = calculate(expression)
    if value != problem.answer:
        raise UsageError(
            f"task.problems: no calculator input for {problem.prompt[:80]!r} is known "
            f"({expression!r} gives {value}, not {problem.answer}); take a data set that asks for "
            "the value of an expression, a gcd or an lcm"
        )
    if operations is None:
        return [expression]
    return _single_operation_calls(expression)


def _single_operation_calls(expression: str) -> list[str]:
    """Return calls of one operation each, innermost first: `2 + 3 * 4` -> `3 * 4`, `2 + 12`."""
    tree = ast.parse(expression, mode="eval")
    calls: list[str] = []
    while True:
        step = _InnermostOperation()
        step.visit(tree)
        if step.found is None:
            return calls
        calls.append(step.found)


class _InnermostOperation(ast.NodeTransformer):
    """A transformer that replaces the first operation on plain numbers by its value.

    found: that operation.
    """

    found: str | None = None

    def visit(self, node: ast.AST) -> ast.AST:
        if self.found is not None:
            return node
        operations = [each for each in ast.walk(node) if isinstance(each, ast.BinOp | ast.Call)]
        if operations != [node]:
            return self.generic_visit(node)
        self.found = ast.unparse(node)
        value = calculate(self.found)
        if "/" in value or value.startswith("error: "):
            raise UsageError(
                f"task.tools: one calculator operation at a time leads to {self.found} = {value}, "
                "not a number to go on with; leave operations out, or take a data set whose "
                "divisions come out"
            )
        return ast.parse(value, mode="eval").body


def _random_wrong_number(answer: str, rng: np.random.Generator) -> str:
    """Return the answer with random digits, which is not the answer."""
    characters = list(answer)
    positions = [i for i, character in enumerate(answer) if character.isdigit()]
    while True:
        draws = rng.integers(10, size=len(positions)).tolist()
        for i, digit in zip(positions, draws, strict=True):
            characters[i] = str(digit)
        guess = "".join(characters)
        if guess != answer:
            return guess
