"""Problems from a file: one JSON object {"prompt": str, "answer": str or number} per line.

Further fields are ignored. Every line is checked before the run starts. Held-out problems are the
last `held_out` lines, or a file of their own. A held-out prompt that is also a training prompt is
an error, so an evaluation never measures memorised answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onepolicy.config import JsonlTask, PromptsTask, UsageError
from onepolicy.config.problems import SHOWN, ProblemRow, check_held_out, read_prompts, read_task
from onepolicy.envs.tasks.math_grader import MathGrader
from onepolicy.envs.tasks.seeding import seeded_rng
from onepolicy.envs.tasks.single_turn import grade_exact
from onepolicy.envs.warmup.noise import add_character_noise
from onepolicy.interfaces import Problem


class Prompts:
    """Prompts without answers, for measurements.

    Problem i is line i of the file without blank lines. After the last line the first follows
    again.
    """

    def __init__(self, config: PromptsTask, section: str = "task") -> None:
        """Read the prompts. section: the settings' place in the recipe."""
        self.config, self.section = config, section
        self.prompts = read_prompts(config.path)

    def train_problem(self, index: int) -> Problem:
        return Problem(index, self.prompts[index % len(self.prompts)], "")

    def held_out(self, count: int) -> list[Problem]:
        raise UsageError(
            "task.kind: prompts have no answers to evaluate against; give a task with answers"
        )

    def grade(self, problem: Problem, response: str) -> float:
        return 0.0

    def reference_response(self, problem: Problem) -> str | None:
        return None

    def start_up_problems(self) -> Iterable[Problem]:
        return [Problem(i, prompt, "") for i, prompt in enumerate(self.prompts)]


class Jsonl:
    """Problems with answers, shuffled anew in every epoch.

    Training ids count up from 0 over all epochs, so the same line twice in a step is two problems.
    Held-out ids count down from -1. `entry["source"]` is path:line.
    """

    def __init__(self, config: JsonlTask, section: str = "task") -> None:
        """Read the problems. section: the settings' place in the recipe."""
        self.config, self.section = config, section
        train, held_out = read_task(config, section)
        self._train = [_make_problem(row) for row in train]
        self._held_out = [_make_problem(row) for row in held_out]
        self._math: MathGrader | None = None
        if config.grader == "math":
            self._math = MathGrader()
        self._cached_epoch: tuple[int, list[int]] = (-1, [])

    def train_problem(self, index: int) -> Problem:
        epoch, position = divmod(index, len(self._train))
        line = self._train[self._epoch_order(epoch)[position]]
        return Problem(index, line.prompt, line.answer, line.entry)

    def held_out(self, count: int) -> list[Problem]:
        lines = len(self._train) + len(self._held_out)
        check_held_out(self.config, count, len(self._held_out), lines, self.section)
        return [
            Problem(-1 - i, p.prompt, p.answer, p.entry)
            for i, p in enumerate(self._held_out[:count])
        ]

    def grade(self, problem: Problem, response: str) -> float:
        if self._math is None:
            return grade_exact(response, problem.answer, self.config.answer_prefix)
        return self._math.grade(response, problem.answer, self.config.answer_prefix)

    def take_metrics(self) -> dict[str, float]:
        """Return the grader's metrics since the last call."""
        if self._math is None:
            return {}
        return self._math.take_metrics()

    def reference_response(self, problem: Problem) -> str | None:
        if self.config.grader == "exact":
            return f"{self.config.answer_prefix}{problem.answer}"
        return None

    def start_up_problems(self) -> Iterable[Problem]:
        """Yield every line.

        Raise UsageError for an answer that no response could match: one that the math grader cannot
        parse, or one with the prefix in it.
        """
        for problem in [*self._train, *self._held_out]:
            reference = self.reference_response(problem)
            if reference is not None and not self.grade(problem, reference):
                raise UsageError(
                    f"{(problem.entry or {})['source']}: answer {problem.answer[:SHOWN]!r} has "
                    f"{self.section}.answer_prefix in it, {self.config.answer_prefix!r}, and the "
                    "text after the last one is graded; choose a prefix that no answer has"
                )
            if self._math is not None and not self._math.can_parse_answer(problem.answer):
                raise UsageError(
                    f"{(problem.entry or {})['source']}: math-verify finds no expression in answer "
                    f"{problem.answer[:SHOWN]!r}; fix the line or set {self.section}.grader=exact"
                )
            yield problem

    def problem_texts(self) -> Iterator[str]:
        """Yield the text of every problem and its answer."""
        for problem in [*self._train, *self._held_out]:
            yield problem.prompt + problem.answer

    def _epoch_order(self, epoch: int) -> list[int]:
        """Return the epoch's permutation of the training lines, a function of (seed, epoch) alone.

        The last permutation is cached.
        """
        if self._cached_epoch[0] != epoch:
            shuffled = seeded_rng("jsonl", self.config.seed, epoch).permutation(len(self._train))
            self._cached_epoch = (epoch, shuffled.tolist())
        return self._cached_epoch[1]


def _make_problem(row: ProblemRow) -> Problem:
    return Problem(row.number, row.prompt, row.answer, {"source": row.where})


def warmup_examples(task: JsonlTask, *, mistakes: float, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (prompt, answer with its prefix) pairs of training lines without end.

    mistakes: probability of a wrong character in an answer.
    """
    problems, index = Jsonl(task), 0
    while True:
        rng = seeded_rng("jsonl warm-up", task.seed, seed, index)
        problem = problems.train_problem(index)
        answer = add_character_noise(problem.answer, rng, mistakes)
        yield problem.prompt, f"{task.answer_prefix}{answer}"
        index += 1
