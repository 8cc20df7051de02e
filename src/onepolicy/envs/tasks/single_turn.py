"""One question, one response, one reward: the environment every verifiable task is played in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.render import (
    TooLong,
    check_known,
    check_length,
    decode,
    render,
    source,
)
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import MetricsSource, Problem, SampleFn
from onepolicy.types import Sample


class Task(Protocol):
    """What a task brings; the environment does the rest."""

    def train_problem(self, index: int) -> Problem: ...

    def held_out(self, count: int) -> list[Problem]: ...

    def grade(self, asked: Problem, response: str) -> float:
        """Reward of a finished response's text, in [0, 1]."""
        ...

    def reference(self, asked: Problem) -> str | None:
        """The shortest response that earns the full reward, where the task knows it."""
        ...

    def start_up_problems(self) -> Iterable[Problem]:
        """Problems whose length and characters are checked before the run starts; as many as that is cheap for."""
        ...


class SingleTurn:
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
        """A response that did not end by itself (cut at max_tokens, aborted) earns 0 in every task: a cut text is not
        an answer, and rewarding one teaches the policy not to stop."""
        path = Trajectory(render(self.tokenizer, problem.prompt))
        completion = await sample(path.tokens)
        path.sampled(completion)
        text = decode(self.tokenizer, completion.token_ids.tolist())
        reward = float(self.task.grade(problem, text)) if completion.finish == "stop" else 0.0
        return (path.sample(reward=reward, temperature=temperature),)

    def take_metrics(self) -> dict[str, float]:
        """Of the task's grader, since the last call."""
        return self.task.take_metrics() if isinstance(self.task, MetricsSource) else {}

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Before a run: prompts fit, the tokenizer knows their characters, and a right response fits in max_tokens."""
        for problem in self.task.start_up_problems():
            prompt_ids = render(self.tokenizer, problem.prompt)
            if not prompt_ids:
                raise UsageError(
                    f"problem {problem.id}{source(problem)}: the tokenizer makes no tokens of {problem.prompt[:60]!r}; "
                    "mend the prompt, or the tokenizer of model.path"
                )
            check_known(self.tokenizer, prompt_ids, problem, problem.prompt)
            check_length(prompt_ids, max_tokens, max_len, problem)
            reference = self.task.reference(problem)
            if reference is None:
                continue
            ids = self.tokenizer.encode(reference, add_special_tokens=False)
            check_known(self.tokenizer, ids, problem, reference)
            if len(ids) + 1 > max_tokens:
                raise TooLong(
                    f"problem {problem.id}{source(problem)}: the right response, {reference[:60]!r} and the end token, "
                    f"has {len(ids) + 1} tokens, but {max_tokens} are sampled at most, so its reward would always be 0",
                    "raise rollout.sampling.max_tokens (or eval.max_tokens)",
                )
