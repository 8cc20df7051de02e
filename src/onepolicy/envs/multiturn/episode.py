"""Episodes of several turns, for every kind of environment: turns, replies, budgets and time."""

from __future__ import annotations

import asyncio
import contextvars
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NotRequired, Protocol, TypedDict, Unpack

from transformers import PreTrainedTokenizerBase

from onepolicy.config import DialogueTask, DuplicateRoutes
from onepolicy.envs.multiturn.dialogue import Dialogue, InitialPrompt, TurnFormat
from onepolicy.envs.multiturn.prompt_checks import (
    check_characters,
    check_prompt_length,
    unknown_characters,
)
from onepolicy.envs.multiturn.tokenization import decode_tokens
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import EpisodeError, Problem, SampleFn
from onepolicy.types import FinishReason, Sample

GRADERS = ThreadPoolExecutor(1, "onepolicy-grader")
"""Graders take turns anyway, and the event loop's own threads have other work to do."""


class ProblemSource(Protocol):
    """A source of training and evaluation problems."""

    def train_problem(self, index: int) -> Problem: ...

    def held_out(self, count: int) -> list[Problem]: ...

    def start_up_problems(self) -> Iterable[Problem]:
        """Return the problems to check for length and characters before a run, if cheap all."""
        ...


class PathOptions(TypedDict):
    """Options of every environment. max_len: tokens of a path."""

    max_len: int
    duplicate_routes: NotRequired[DuplicateRoutes]  # see `RouteBuffer.merge`


async def grade_beside(grade: Callable[..., float], *asked: Any) -> float:
    """Return a grader's reward, computed in a thread.

    It may take seconds, and tools of other episodes have limits. It counts for this episode's step.
    """
    run = contextvars.copy_context().run
    return float(await asyncio.get_running_loop().run_in_executor(GRADERS, run, grade, *asked))


class MultiTurnEnvironment(ABC):
    """An environment whose episodes have several turns. A subclass implements `play_episode`."""

    def __init__(
        self,
        config: DialogueTask,
        problems: ProblemSource,
        tokenizer: PreTrainedTokenizerBase,
        turns: TurnFormat,
        **path: Unpack[PathOptions],
    ) -> None:
        """Store the settings. turns: how turns and replies are written and read."""
        self.limits = config
        self.problems = problems
        self.tokenizer = tokenizer
        self.turns = turns
        self.dialogue = Dialogue(tokenizer, turns, fork=config.history == "fork")
        self.max_len = path["max_len"]
        self.duplicate_routes: DuplicateRoutes = path.get("duplicate_routes", "as-sampled")

    @abstractmethod
    async def play_episode(self, problem: Problem, episode: Episode) -> float:
        """Play the episode to its end and return its reward."""

    def initial_prompt(self, problem: Problem) -> InitialPrompt:
        return problem.prompt

    def train_problem(self, index: int) -> Problem:
        return self.problems.train_problem(index)

    def held_out(self, count: int) -> list[Problem]:
        return self.problems.held_out(count)

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Check before a run that first prompts fit and that the tokenizer knows their characters.

        Raises UsageError.
        """
        for problem in self.problems.start_up_problems():
            ids = self.dialogue.encode_first_prompt(self.initial_prompt(problem))
            check_characters(self.tokenizer, ids, problem, problem.prompt)
            check_prompt_length(ids, max_tokens, max_len, problem)

    async def episode(
        self, problem: Problem, sample: SampleFn, temperature: float
    ) -> tuple[Sample, ...]:
        """Play one episode and return its samples. An episode that runs out of time earns 0.

        Raises EpisodeError if no turn was sampled or the reward is not finite.
        """
        played = Episode(self, problem, sample)
        try:
            async with asyncio.timeout(self.limits.seconds) as clock:
                played.clock = clock
                reward = await self.play_episode(problem, played)
        except TimeoutError:
            if not clock.expired():  # raised by the engine, not by this episode's time limit
                raise
            reward, played.finish = 0.0, "time"
        if not played.has_turns:
            if played.finish == "length":
                limit = "after its prompt"
            else:
                limit = f"in {self.limits.seconds:g} s"
            raise EpisodeError(f"not one turn was sampled {limit}")
        if not math.isfinite(reward):
            raise EpisodeError(f"its reward is {reward}")
        return played.to_samples(reward, temperature)


class Episode:
    """One running episode. The next turn is sampled after `path`."""

    def __init__(self, env: MultiTurnEnvironment, problem: Problem, sample: SampleFn) -> None:
        self.env, self._sample = env, sample
        self._initial_prompt = env.initial_prompt(problem)
        prompt_ids = env.dialogue.encode_first_prompt(self._initial_prompt)
        self.path = Trajectory(prompt_ids, duplicate_routes=env.duplicate_routes)
        self.finish: FinishReason = "stop"
        self.clock: asyncio.Timeout | None = None  # of task.seconds
        self.events: list[str] = []
        self._old_paths: list[Trajectory] = []  # histories before a rewrite
        self._turns: list[str] = []
        self._replies: list[list[str]] = []

    @property
    def has_turns(self) -> bool:
        return self.path.turns > 0

    @property
    def out_of_turns(self) -> bool:
        return len(self._turns) == self.env.limits.max_turns

    async def sample_turn(self) -> str | None:
        """Sample the next turn and return its text, or None if the episode is over.

        The episode is over if no turn or token is left or if the turn was cut. `finish` says which.
        """
        max_tokens = self._remaining_tokens()
        if self.out_of_turns:
            self.finish = "turns"
            return None
        if max_tokens < 1:
            self.finish = "length"
            return None
        completion = await self._sample(
            self.path.tokens, max_tokens=max_tokens, routes_from=self.path.first_missing_route
        )
        self.path.append_completion(completion)
        self.finish = completion.finish
        if completion.finish != "stop":
            return None
        text = decode_tokens(self.env.tokenizer, completion.token_ids.tolist())
        self._turns.append(text)
        return text

    def add_replies(self, replies: list[str]) -> None:
        """Append the replies to the last turn.

        If the template rewrites the history, the rewritten history becomes a path of its own.
        """
        self._replies.append(replies)
        self.events += [
            "unknown" for reply in replies if unknown_characters(self.env.tokenizer, reply)
        ]
        tokens = self.path.tokens
        next_prompt = self.env.dialogue.encode_next_prompt(
            tokens, self._initial_prompt, self._turns, self._replies
        )
        if next_prompt[: len(tokens)] == tokens:
            self.path.append_observation(next_prompt[len(tokens) :])
        else:
            self._old_paths.append(self.path)
            self.path = self.path.rewrite_history(next_prompt)

    def _remaining_tokens(self) -> int:
        """Return how many tokens the next turn may have."""
        remaining = self.env.max_len - len(self.path.tokens)
        if self.env.limits.max_tokens is not None:
            sampled = sum(path.sampled_tokens for path in (*self._old_paths, self.path))
            remaining = min(remaining, self.env.limits.max_tokens - sampled)
        return remaining

    def to_samples(self, reward: float, temperature: float) -> tuple[Sample, ...]:
        """Return one sample of every path with sampled tokens; the last one carries the events.

        Every sampled token is trained on once, in the history that it was sampled after.
        """
        paths = [path for path in (*self._old_paths, self.path) if path.sampled_tokens]
        events: tuple[str, ...] = ()
        samples = []
        for path in paths:
            if path is paths[-1]:
                events = tuple(self.events)
            samples.append(
                path.to_sample(
                    reward=reward, temperature=temperature, finish=self.finish, events=events
                )
            )
        return tuple(samples)
