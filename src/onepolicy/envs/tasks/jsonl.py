"""Problems from a file: one JSON object {"prompt": str, "answer": str or number} per line; further fields are not read.

Every line is checked before the run starts. Held-out problems are the last `held_out` lines, or a file of their own;
a held-out prompt that is also a training prompt is an error, so an evaluation never measures memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onepolicy.config import JsonlTask, PromptsTask, UsageError
from onepolicy.config.problems import SHOWN, Row, check_held_out, read_prompts, read_task
from onepolicy.envs.tasks.grading import MathGrader, exact
from onepolicy.envs.tasks.seeding import rng_of
from onepolicy.envs.warmup.noise import garbled
from onepolicy.interfaces import Problem


class Prompts:
    """Problem i is line i of the file, blank lines left out; after the last one they start again."""

    def __init__(self, config: PromptsTask, section: str = "task") -> None:
        """section: where these settings stand in a recipe."""
        self.config, self.section = config, section
        self.prompts = read_prompts(config.path)

    def train_problem(self, index: int) -> Problem:
        return Problem(index, self.prompts[index % len(self.prompts)], "")

    def held_out(self, count: int) -> list[Problem]:
        raise UsageError(
            "task.kind: prompts have no answers to evaluate against; give a task with answers"
        )

    def grade(self, asked: Problem, response: str) -> float:
        return 0.0

    def reference(self, asked: Problem) -> str | None:
        return None

    def start_up_problems(self) -> Iterable[Problem]:
        return [Problem(i, prompt, "") for i, prompt in enumerate(self.prompts)]


class Jsonl:
    """Training ids count up from 0 over the epochs (so that the same line twice in a step is two problems), held-out
    ids down from -1; `entry["source"]` is path:line."""

    def __init__(self, config: JsonlTask, section: str = "task") -> None:
        """section: where these settings stand in a recipe."""
        self.config, self.section = config, section
        train, held_out = read_task(config, section)
        self._train, self._held_out = [list(map(_problem, rows)) for rows in (train, held_out)]
        self._math = MathGrader() if config.grader == "math" else None
        self._epoch: tuple[int, list[int]] = (-1, [])

    def train_problem(self, index: int) -> Problem:
        epoch, place = divmod(index, len(self._train))
        line = self._train[self._order(epoch)[place]]
        return Problem(index, line.prompt, line.answer, line.entry)

    def held_out(self, count: int) -> list[Problem]:
        lines = len(self._train) + len(self._held_out)
        check_held_out(self.config, count, len(self._held_out), lines, self.section)
        return [
            Problem(-1 - i, p.prompt, p.answer, p.entry)
            for i, p in enumerate(self._held_out[:count])
        ]

    def grade(self, asked: Problem, response: str) -> float:
        if self._math is None:
            return exact(response, asked.answer, self.config.answer_prefix)
        return self._math.grade(response, asked.answer, self.config.answer_prefix)

    def take_metrics(self) -> dict[str, float]:
        """Of the grader, since the last call."""
        return {} if self._math is None else self._math.take_metrics()

    def reference(self, asked: Problem) -> str | None:
        return (
            f"{self.config.answer_prefix}{asked.answer}" if self.config.grader == "exact" else None
        )

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


def _problem(row: Row) -> Problem:
    return Problem(row.number, row.prompt, row.answer, {"source": row.where})


def warmup_examples(task: JsonlTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Endless (prompt, answer with its prefix) pairs of training lines, `mistakes` of their characters garbled."""
    problems, index = Jsonl(task), 0
    while True:
        rng = rng_of("jsonl warm-up", task.seed, seed, index)
        problem = problems.train_problem(index)
        yield problem.prompt, f"{task.answer_prefix}{garbled(problem.answer, rng, mistakes)}"
        index += 1
