"""reasoning-gym data sets by name: that library writes the questions and scores the answers.

The answer is the whole response, stripped, or what stands between the last `<answer>` and `</answer>` if the response
uses these marks. Training and held-out questions are kept apart by the hash of their text (keyed.split_of), so however
many problems are drawn, none is on both sides.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import difflib
import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from onepolicy.config import GymTask, UsageError
from onepolicy.envs.tasks.seeding import Split, digest, rng_of, split_of
from onepolicy.envs.warmup.noise import garbled
from onepolicy.interfaces import Problem

NAMES = frozenset(
    (
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
        "sinh",
        "cosh",
        "tanh",
        "exp",
        "log",
        "sqrt",
        "Abs",
        "pi",
    )
)
LEAVES = (ast.Expression, ast.Constant, ast.Load, ast.operator, ast.unaryop)
LARGEST_EXPONENT = 64
HIGHEST_TOWER = 2
PLAIN = re.compile(r"[\w\s,.-]*")


def harmless(answer: str) -> bool:
    """True if evaluating `answer` could at most do quick arithmetic or build a list.

    No attributes, subscripts or names but one letter and elementary functions; no exponent above 64, no more than two
    powers inside each other, no factorials (sympy reads `!` as one), no arithmetic on lists or strings.
    """
    if "!" in answer:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return PLAIN.fullmatch(answer) is not None  # words and numbers: evaluating them only fails
    nodes = list(ast.walk(tree))
    arithmetic = any(isinstance(node, ast.BinOp) for node in nodes)
    return _tower(tree) <= HIGHEST_TOWER and all(_allowed(node, arithmetic) for node in nodes)


def _allowed(node: ast.AST, arithmetic: bool) -> bool:
    match node:
        case ast.Name(id=name):
            return len(name) == 1 or name in NAMES
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in NAMES
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return _small(exponent)
        case ast.BinOp(op=op):
            return not isinstance(op, ast.LShift | ast.RShift | ast.MatMult)
        case ast.Constant(value=str() | bytes()) | ast.List() | ast.Tuple():
            return not arithmetic
    return isinstance(node, (*LEAVES, ast.UnaryOp))


def _small(exponent: ast.expr) -> bool:
    match exponent:
        case ast.Constant(value=int() | float() as value):
            return value <= LARGEST_EXPONENT
        case ast.UnaryOp(operand=operand):
            return _small(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Div(), left=left, right=right):
            return _small(left) and _small(right)
        case ast.Name():
            return True  # a symbol
    return False


def _tower(node: ast.AST) -> int:
    """Powers inside powers, counted along the deepest path."""
    below = max((_tower(child) for child in ast.iter_child_nodes(node)), default=0)
    return below + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))


CHUNK = 1024  # entries per generator: some hold a table as long as themselves
STRIDE = 7  # candidates per training problem before it shares some with the next one; prime, as templates may cycle
TRIES = 1000
# Their graders evaluate the response as Python or sympy source.
EVALUATED = frozenset(
    (
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    )
)
# Their questions depend on the iteration order of Python sets.
HASH_ORDERED = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
# What a generator or grader of the library may raise on a parameter or response its author did not think of.
LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)


class Gym:
    """Training ids count up from 0, held-out ids down from -1. Problem i never depends on which were drawn before."""

    def __init__(self, config: GymTask, section: str = "task") -> None:
        """section: where these settings stand in a recipe."""
        self.config, self.section = config, section
        _check_config(config, section)
        self._datasets: dict[tuple[Split, int], Any] = {}  # the last generator of each split
        self._held_out: list[Problem] = []
        try:
            self._entry("train", 0)
        except LIBRARY_ERRORS as error:
            raise UsageError(
                f"{self.section}.params: reasoning-gym refuses {config.params!r} for {config.name}: "
                f"{str(error) or type(error).__name__}; see the parameters' limits in its documentation"
            ) from error

    def train_problem(self, index: int) -> Problem:
        for attempt in range(TRIES):
            entry = self._entry("train", index * STRIDE + attempt)
            if split_of(entry["question"]) == "train":
                return _problem(index, entry)
        raise UsageError(
            f"{self.section}.params: {self.config.name} with {self.config.params!r} has too few different questions: "
            f"all of {TRIES} drawn are held out; widen the parameters"
        )

    def held_out(self, count: int) -> list[Problem]:
        """All different. Generated once."""
        if count > len(self._held_out):
            self._held_out = list(self._find_held_out(count))
        return self._held_out[:count]

    def grade(self, asked: Problem, response: str) -> float:
        answer = extract(response)
        if self.config.name in EVALUATED and answer != asked.answer and not harmless(answer):
            return 0.0
        try:
            return float(self._dataset("train", 0).score_answer(answer, asked.entry))
        except LIBRARY_ERRORS:  # the response is not of the form the library's grader reads
            return 0.0

    def reference(self, asked: Problem) -> str | None:
        return None  # most data sets accept several forms

    def start_up_problems(self) -> Iterable[Problem]:
        return [self.train_problem(index) for index in range(16)]

    def texts(self) -> Iterator[str]:
        """Questions and answers of a first look at the data set."""
        for index in range(64):
            problem = self.train_problem(index)
            yield problem.prompt + problem.answer

    def _find_held_out(self, count: int) -> Iterator[Problem]:
        seen: set[str] = set()
        limit = TRIES + 20 * count
        for index in range(limit):
            entry = self._entry("held_out", index)
            if split_of(entry["question"]) == "held_out" and entry["question"] not in seen:
                seen.add(entry["question"])
                yield _problem(-len(seen), entry)
                if len(seen) == count:
                    return
        raise UsageError(
            f"eval.problems: {count} are asked for, but {self.config.name} with {self.config.params!r} gave only "
            f"{len(seen)} different held-out questions in {limit}; lower eval.problems or widen {self.section}.params"
        )

    def _entry(self, split: Split, candidate: int) -> dict[str, Any]:
        chunk, place = divmod(candidate, CHUNK)
        return self._dataset(split, chunk)[place]

    def _dataset(self, split: Split, chunk: int) -> Any:
        import reasoning_gym

        if (split, chunk) not in self._datasets:
            seed = digest("gym", self.config.seed, split, chunk) % 2**31
            kept = {
                key: value
                for key, value in self._datasets.items()
                if key[0] != split or key[1] == 0
            }
            params = copy.deepcopy(self.config.params)
            dataset = reasoning_gym.create_dataset(
                self.config.name, seed=seed, size=CHUNK, **params
            )
            self._datasets = {**kept, (split, chunk): dataset}
        return self._datasets[split, chunk]


def extract(response: str) -> str:
    _, marked, rest = response.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if marked else response.strip()


def warmup_examples(task: GymTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (question, plain answer) pairs of training problems, `mistakes` of the answers' characters garbled."""
    problems, index = Gym(task), 0
    start = digest("gym warm-up", seed) % 2**31
    while True:
        rng = rng_of("gym warm-up", task.seed, seed, index)
        problem = problems.train_problem(start + index)
        if (problem.entry or {})["answer"] is None:
            raise UsageError(
                f"task.name: {task.name} gives no reference answers (it only scores them), so there is nothing to warm "
                "up on; choose another data set"
            )
        yield problem.prompt, garbled(problem.answer, rng, mistakes)
        index += 1


def _problem(problem_id: int, entry: dict[str, Any]) -> Problem:
    answer = entry["answer"]
    return Problem(problem_id, entry["question"], "" if answer is None else str(answer), entry)


def _check_config(config: GymTask, section: str) -> None:
    if find_spec("reasoning_gym") is None:
        raise UsageError(
            f"{section}.kind: gym needs reasoning-gym, which is not installed; pip install onepolicy[envs]"
        )
    from reasoning_gym.factory import DATASETS

    if config.name not in DATASETS or config.name == "composite":
        close = difflib.get_close_matches(config.name, set(DATASETS) - {"composite"}, n=3)
        hint = (
            f"did you mean {' or '.join(close)}?"
            if close
            else f"it has {', '.join(sorted(DATASETS))}"
        )
        raise UsageError(
            f"{section}.name: reasoning-gym has no single data set {config.name!r}; {hint}"
        )
    if config.name in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UsageError(
            f"{section}.name: the questions of {config.name} depend on Python's string hashes, which change from "
            "process to process, so a resumed run would see others; set PYTHONHASHSEED=0 in the environment"
        )
    known = {field.name for field in dataclasses.fields(DATASETS[config.name][1])} - {
        "seed",
        "size",
    }
    for name, value in config.params.items():
        if name in ("seed", "size"):
            mend = (
                f"use {section}.seed"
                if name == "seed"
                else "leave it out: problems are drawn without end"
            )
            raise UsageError(f"{section}.params.{name}: {value!r} cannot be set here; {mend}")
        if name not in known:
            raise UsageError(
                f"{section}.params.{name}: {config.name} has no such parameter (value {value!r}); it has "
                f"{', '.join(sorted(known))}"
            )
