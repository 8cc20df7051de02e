"""Data sets of reasoning-gym by name: the library writes the questions and scores the answers.

The answer is the whole response, stripped, or the text between the last `<answer>` and `</answer>`
if the response has these tags. The hash of a question's text decides its split
(seeding.split_of_text), so no question is in both splits, however many problems are drawn.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import logging
import os
import re
import threading
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

from onepolicy import bounded
from onepolicy.bounded import GIB, Limits
from onepolicy.config import GymTask, UsageError
from onepolicy.config.spelling import did_you_mean
from onepolicy.envs.counts import SKIPPED, TIMEOUTS, Counts
from onepolicy.envs.tasks.seeding import Split, hash_key, seeded_rng, split_of_text
from onepolicy.envs.warmup.noise import add_character_noise
from onepolicy.errors import LIBRARY_ERRORS
from onepolicy.interfaces import Problem

ALLOWED_NAMES = frozenset(
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
        "ln",
        "sqrt",
        "Abs",
        "pi",
    )
)
ALLOWED_NODES = (ast.Expression, ast.Constant, ast.Load, ast.operator, ast.unaryop)
MAX_EXPONENT = 64
MAX_NESTED_POWERS = 2
LONGEST_ANSWER = 10_000  # characters, several times the longest correct one
PLAIN_WORDS = re.compile(r"[\w\s,.-]*")


def safe_to_evaluate(answer: str) -> bool:
    """Return whether evaluating `answer` can at most do arithmetic or build a list.

    Names are single letters and elementary functions. Attributes, subscripts, exponents above 64,
    more than two nested powers, factorials (sympy reads `!` as one) and arithmetic on lists or
    strings are refused. What is left may still take for ever, as sin(exp(exp(60))).
    """
    if "!" in answer or len(answer) > LONGEST_ANSWER:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Evaluating words and numbers only fails.
        return PLAIN_WORDS.fullmatch(answer) is not None
    nodes = list(ast.walk(tree))
    arithmetic = any(isinstance(node, ast.BinOp) for node in nodes)
    if _nested_powers(tree) > MAX_NESTED_POWERS:
        return False
    return all(_is_allowed(node, arithmetic) for node in nodes)


def _is_allowed(node: ast.AST, arithmetic: bool) -> bool:
    match node:
        case ast.Name(id=name):
            return len(name) == 1 or name in ALLOWED_NAMES
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in ALLOWED_NAMES
        case ast.BinOp(left=ast.Name(id="E"), op=ast.Pow()):
            return True  # as exp(), which no exponent makes larger
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return _is_small_exponent(exponent)
        case ast.BinOp(op=op):
            return not isinstance(op, ast.LShift | ast.RShift | ast.MatMult)
        case ast.Constant(value=str() | bytes()) | ast.List() | ast.Tuple():
            return not arithmetic
    return isinstance(node, (*ALLOWED_NODES, ast.UnaryOp))


def _is_small_exponent(exponent: ast.expr) -> bool:
    match exponent:
        case ast.Constant(value=int() | float() as value):
            return value <= MAX_EXPONENT
        case ast.UnaryOp(operand=operand):
            return _is_small_exponent(operand)
        case ast.BinOp(op=ast.Add() | ast.Sub() | ast.Div(), left=left, right=right):
            return _is_small_exponent(left) and _is_small_exponent(right)
        case ast.Name():
            return True  # a symbol
    return False


def _nested_powers(node: ast.AST) -> int:
    """Return the largest number of powers inside each other."""
    below = max((_nested_powers(child) for child in ast.iter_child_nodes(node)), default=0)
    return below + (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow))


CHUNK = 1024  # entries per generator; some generators hold a table as long as themselves
STRIDE = 7
"""Candidates per training problem before it shares some with the next problem.

It is prime, because templates may cycle.
"""
MAX_TRIES = 1000
EVALUATING_GRADERS = frozenset(
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
"""Data sets whose graders evaluate the response as Python or sympy source: in a child process."""
COSTLY_GRADERS = frozenset(("coin_flip", "propositional_logic", "rubiks_cube", "rush_hour"))
"""Those that do as many moves, digits or cases as the response says: in a child process, too."""
ANY_ANSWER = frozenset(("game_of_life_halting",))
"""Data sets whose graders give 1 to any text."""
NAN = re.compile(r"(?<![a-z])nan(?![a-z])", re.IGNORECASE)
"""A number that several graders find equal to every other."""
LOG = logging.getLogger(__name__)
GRADING = Limits(memory=GIB // 2, seconds=5)
"""Of a response, which takes milliseconds."""
MAX_STOPPED = 8
"""Responses of one step that may pass these limits: each costs them and the start of a child."""
HASH_ORDERED = frozenset(
    ("isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder")
)
"""Data sets whose questions depend on the iteration order of Python sets."""


class ReasoningGym:
    """Problems of one data set.

    Training ids count up from 0, held-out ids down from -1. Problem i never depends on the problems
    drawn before it.
    """

    def __init__(self, config: GymTask, section: str = "task") -> None:
        """Check the settings. section: their place in the recipe. Raises UsageError."""
        self.config, self.section = config, section
        _check_config(config, section)
        self._datasets: dict[tuple[Split, int], Any] = {}  # the last generator of each split
        self._held_out: list[Problem] = []
        self._counts = Counts()  # of responses since the last take_metrics
        self._asking, self._drawing = threading.Lock(), threading.Lock()
        try:
            self._entry("train", 0)
        except LIBRARY_ERRORS as error:
            raise UsageError(
                f"{self.section}.params: reasoning-gym refuses {config.params!r} for "
                f"{config.name}: {str(error) or type(error).__name__}; see the parameters' limits "
                "in its documentation"
            ) from error

    def train_problem(self, index: int) -> Problem:
        for attempt in range(MAX_TRIES):
            entry = self._entry("train", index * STRIDE + attempt)
            if split_of_text(entry["question"]) == "train":
                return _make_problem(index, entry)
        raise UsageError(
            f"{self.section}.params: {self.config.name} with {self.config.params!r} has too few "
            f"different questions: all of {MAX_TRIES} drawn are held out; widen the parameters"
        )

    def held_out(self, count: int) -> list[Problem]:
        """Return the first `count` held-out problems, all different. They are generated once."""
        if count > len(self._held_out):
            self._held_out = list(self._find_held_out(count))
        return self._held_out[:count]

    def grade(self, problem: Problem, response: str) -> float:
        answer = extract_tagged_answer(response)
        if answer != problem.answer:
            name = self.config.name
            if NAN.search(answer) or (name in EVALUATING_GRADERS and not safe_to_evaluate(answer)):
                return 0.0
            if name in EVALUATING_GRADERS | COSTLY_GRADERS:
                return self._in_child(problem, answer)
        try:
            return float(self._dataset("train", 0).score_answer(answer, problem.entry))
        except LIBRARY_ERRORS:  # the response is not of the form the library's grader reads
            return 0.0

    def _in_child(self, problem: Problem, answer: str) -> float:
        """Return the score that the library gives in a child process, 0 past the limits."""
        question = {
            "name": self.config.name,
            "params": self.config.params,
            "entry": problem.entry,
            "answer": answer,
        }
        with self._asking:
            if self._counts.here[TIMEOUTS] >= MAX_STOPPED:
                self._count_skipped()
                return 0.0
            try:
                reply = bounded.ask("onepolicy.gym_scores:score", question, GRADING)
            except bounded.StoppedError:
                self._counts.here[TIMEOUTS] += 1
                return 0.0
        return float(reply.info["score"])

    def _count_skipped(self) -> None:
        counts = self._counts.here
        if not counts[SKIPPED]:
            LOG.warning(
                "%d responses took the grader of %s longer than %g s each or ended it; the other "
                "responses earn 0 unread unless they are the reference itself, up to the end of "
                "the step or the evaluation (rollout/grader_skipped counts them)",
                counts[TIMEOUTS],
                self.config.name,
                GRADING.seconds,
            )
        counts[SKIPPED] += 1

    def take_metrics(self) -> dict[str, float]:
        """Return the counts since the last call and reset them."""
        return {name: count for name, count in self._counts.take().items() if count}

    def reference_response(self, problem: Problem) -> str | None:
        return None  # most data sets accept several forms

    def start_up_problems(self) -> Iterable[Problem]:
        return [self.train_problem(index) for index in range(16)]

    def problem_texts(self) -> Iterator[str]:
        """Yield questions and answers of the first training problems."""
        for index in range(64):
            problem = self.train_problem(index)
            yield problem.prompt + problem.answer

    def _find_held_out(self, count: int) -> Iterator[Problem]:
        seen: set[str] = set()
        limit = MAX_TRIES + 20 * count
        for index in range(limit):
            entry = self._entry("held_out", index)
            if split_of_text(entry["question"]) == "held_out" and entry["question"] not in seen:
                seen.add(entry["question"])
                yield _make_problem(-len(seen), entry)
                if len(seen) == count:
                    return
        raise UsageError(
            f"eval.problems: {count} are asked for, but {self.config.name} with "
            f"{self.config.params!r} gave only {len(seen)} different held-out questions in "
            f"{limit}; lower eval.problems or widen {self.section}.params"
        )

    def _entry(self, split: Split, candidate: int) -> dict[str, Any]:
        chunk, position = divmod(candidate, CHUNK)
        return self._dataset(split, chunk)[position]

    def _dataset(self, split: Split, chunk: int) -> Any:
        import reasoning_gym

        with self._drawing:
            if (split, chunk) not in self._datasets:
                seed = hash_key("gym", self.config.seed, split, chunk) % 2**31
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


def extract_tagged_answer(response: str) -> str:
    _, tag, rest = response.rpartition("<answer>")
    if not tag:
        return response.strip()
    return rest.partition("</answer>")[0].strip()


def warmup_examples(task: GymTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (question, plain answer) pairs of training problems without end.

    mistakes: probability of a wrong character in an answer.
    """
    problems, index = ReasoningGym(task), 0
    start = hash_key("gym warm-up", seed) % 2**31
    while True:
        rng = seeded_rng("gym warm-up", task.seed, seed, index)
        problem = problems.train_problem(start + index)
        if (problem.entry or {})["answer"] is None:
            raise UsageError(
                f"task.name: {task.name} gives no reference answers (it only scores them), so "
                "there is nothing to warm up on; choose another data set"
            )
        yield problem.prompt, add_character_noise(problem.answer, rng, mistakes)
        index += 1


def _make_problem(problem_id: int, entry: dict[str, Any]) -> Problem:
    answer = ""
    if entry["answer"] is not None:
        answer = str(entry["answer"])
    return Problem(problem_id, entry["question"], answer, entry)


def _check_config(config: GymTask, section: str) -> None:
    if find_spec("reasoning_gym") is None:
        raise UsageError(
            f"{section}.kind: gym needs reasoning-gym, which is not installed; pip install "
            "onepolicy[envs]"
        )
    from reasoning_gym.factory import DATASETS

    if config.name in ANY_ANSWER:
        raise UsageError(
            f"{section}.name: reasoning-gym's grader of {config.name} gives 1 to any text; choose "
            "another data set"
        )
    names = sorted(DATASETS.keys() - {"composite", *ANY_ANSWER})
    if config.name not in names:
        hint = did_you_mean(config.name, names) or f"; it has {', '.join(names)}"
        raise UsageError(
            f"{section}.name: reasoning-gym has no single data set {config.name!r}{hint}"
        )
    if config.name in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UsageError(
            f"{section}.name: the questions of {config.name} depend on Python's string hashes, "
            "which change from process to process, so a resumed run would see others; set "
            "PYTHONHASHSEED=0 in the environment"
        )
    fields = dataclasses.fields(DATASETS[config.name][1])
    _check_params(config, {field.name for field in fields} - {"seed", "size"}, section)


def _check_params(config: GymTask, known: set[str], section: str) -> None:
    """Raise UsageError for a parameter that cannot be set here or that the data set lacks."""
    fixed = {
        "seed": f"use {section}.seed",
        "size": "leave it out: problems are drawn without end",
    }
    for name, value in config.params.items():
        if name in fixed:
            raise UsageError(
                f"{section}.params.{name}: {value!r} cannot be set here; {fixed[name]}"
            )
        if name not in known:
            raise UsageError(
                f"{section}.params.{name}: {config.name} has no such parameter (value {value!r}); "
                f"it has {', '.join(sorted(known))}"
            )
