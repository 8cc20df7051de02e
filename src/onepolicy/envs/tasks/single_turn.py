"""Environment for tasks of one question, one response and one reward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from onepolicy.envs.multiturn.prompt_checks import check_prompt, check_reference
from onepolicy.envs.multiturn.tokenization import decode_tokens, encode_prompt
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import MetricsSource, Problem, SampleFn
from onepolicy.types import Sample


class Task(Protocol):
    """A source of problems and the grader of their responses."""

    def train_problem(self, index: int) -> Problem: ...

    def held_out(self, count: int) -> list[Problem]: ...

    def grade(self, problem: Problem, response: str) -> float:
        """Return the reward of a finished response's text, in [0, 1]."""
        ...

    def reference_response(self, problem: Problem) -> str | None:
        """Return the shortest response that earns the full reward, or None if it is unknown."""
        ...

    def start_up_problems(self) -> Iterable[Problem]:
        """Return the problems to check for length and characters before a run, if cheap all."""
        ...


class SingleTurn:
    """An environment that samples one response to a problem and grades it."""

    def __init__(self, task: Task, tokenizer: PreTrainedTokenizerBase) -> None:
        self.task = task
        self.tokenizer = tokenizer

    def train_problem(self, index: int) -> Problem:
        return self.task.train_problem(index)

    def held_out(self, count: int) -> list[Problem]:
        return self.task.held_out(count)

    async def episode(
        self, problem: Problem, sample: SampleFn, temperature: float
    ) -> tuple[Sample, ...]:
        """Sample and grade one response.

        A response that did not end by itself (cut at max_tokens, aborted) earns 0 in every task. A
        cut text is not an answer, and rewarding it teaches the policy not to stop.
        """
        path = Trajectory(encode_prompt(self.tokenizer, problem.prompt))
        completion = await sample(path.tokens)
        path.append_completion(completion)
        text = decode_tokens(self.tokenizer, completion.token_ids.tolist())
        reward = 0.0
        if completion.finish == "stop":
            reward = float(self.task.grade(problem, text))
        return (path.to_sample(reward=reward, temperature=temperature),)

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the task's grader since the last call."""
        if isinstance(self.task, MetricsSource):
            return self.task.take_metrics()
        return {}

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Check before a run that prompts and reference responses can be encoded and fit.

        Raises UsageError.
        """
        for problem in self.task.start_up_problems():
            check_prompt(self.tokenizer, problem, max_tokens, max_len)
            reference = self.task.reference_response(problem)
            if reference is not None:
                check_reference(self.tokenizer, problem, reference, max_tokens)


def extract_answer(response: str, prefix: str) -> str | None:
    """Return the stripped text after the last `prefix`, or None if the response lacks the prefix.

    With an empty prefix, return the whole response, stripped.
    """
    if not prefix:
        return response.strip()
    _, found, rest = response.rpartition(prefix)
    if not found:
        return None
    return rest.strip()


def grade_exact(response: str, answer: str, prefix: str = "") -> float:
    """Return 1 if the response's answer is this string, else 0."""
    return float(extract_answer(response, prefix) == answer.strip())
