"""Episodes of several turns, whatever is played: turns, replies, budgets and time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from onepolicy.config import EpisodeTask, RowPolicy
from onepolicy.envs.multiturn.chat_template import Opening
from onepolicy.envs.multiturn.render import check_known, check_length, decode, unknown_characters
from onepolicy.envs.multiturn.tool_dialogue import Dialogue
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.interfaces import EpisodeError, Problem, SampleFn
from onepolicy.types import FinishReason, Sample


class Problems(Protocol):
    def train_problem(self, index: int) -> Problem: ...

    def held_out(self, count: int) -> list[Problem]: ...

    def start_up_problems(self) -> Iterable[Problem]:
        """Problems whose length and characters are checked before the run starts; as many as that is cheap for."""
        ...


class InTurns:
    """An environment whose episodes have several turns. A subclass brings `play`."""

    dialogue: Dialogue

    def __init__(
        self,
        config: EpisodeTask,
        problems: Problems,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        rows: RowPolicy = "as-sampled",
    ) -> None:
        """max_len: tokens of a path. rows: whose route stays where two forwards fed the same token."""
        self.limits, self.problems, self.tokenizer, self.max_len, self.rows = (
            config,
            problems,
            tokenizer,
            max_len,
            rows,
        )

    async def play(self, problem: Problem, episode: Episode) -> float:
        """The reward of the episode, which is over then."""
        raise NotImplementedError

    def opening(self, problem: Problem) -> Opening:
        return problem.prompt

    def train_problem(self, index: int) -> Problem:
        return self.problems.train_problem(index)

    def held_out(self, count: int) -> list[Problem]:
        return self.problems.held_out(count)

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Before a run: the first turn of a problem fits, and the tokenizer knows its characters."""
        for problem in self.problems.start_up_problems():
            ids = self.dialogue.start(self.opening(problem))
            check_known(self.tokenizer, ids, problem, problem.prompt)
            check_length(ids, max_tokens, max_len, problem)

    async def episode(
        self, problem: Problem, sample: SampleFn, temperature: float
    ) -> tuple[Sample, ...]:
        """An episode that its time ends earns 0."""
        played = Episode(self, problem, sample)
        try:
            async with asyncio.timeout(self.limits.seconds) as clock:
                reward = await self.play(problem, played)
        except TimeoutError:
            if not clock.expired():  # an engine's own, not this episode's
                raise
            reward, played.finish = 0.0, "time"
        if not played.began:
            why = (
                "after its prompt" if played.finish == "length" else f"in {self.limits.seconds:g} s"
            )
            raise EpisodeError(f"not one turn was sampled {why}")
        if not math.isfinite(reward):
            raise EpisodeError(f"its reward is {reward}")
        return played.samples(reward, temperature)


class Episode:
    """One episode on its way. `path` is what the next turn is sampled after."""

    def __init__(self, env: InTurns, problem: Problem, sample: SampleFn) -> None:
        self.env, self._sample = env, sample
        self._opening = env.opening(problem)
        self.path = Trajectory(env.dialogue.start(self._opening), rows=env.rows)
        self.finish: FinishReason = "stop"
        self.events: list[str] = []
        self._left: list[Trajectory] = []  # histories that were rewritten
        self._turns: list[str] = []
        self._replies: list[list[str]] = []

    @property
    def began(self) -> bool:
        return self.path.turns > 0

    @property
    def spent(self) -> bool:
        """No turn is left."""
        return len(self._turns) == self.env.limits.max_turns

    async def turn(self) -> str | None:
        """The text of the next turn; None if there is none or it was cut (`finish` says why): the episode is over."""
        room = self._room()
        if self.spent or room < 1:
            self.finish = "turns" if self.spent else "length"
            return None
        completion = await self._sample(
            self.path.tokens, max_tokens=room, routes_from=self.path.next_route
        )
        self.path.sampled(completion)
        self.finish = completion.finish
        if completion.finish != "stop":
            return None
        text = decode(self.env.tokenizer, completion.token_ids.tolist())
        self._turns.append(text)
        return text

    def reply(self, replies: list[str]) -> None:
        """Append the replies to the last turn; a history that does not go on as it was becomes a path of its own."""
        self._replies.append(replies)
        self.events += [
            "unknown" for reply in replies if unknown_characters(self.env.tokenizer, reply)
        ]
        tokens = self.path.tokens
        following = self.env.dialogue.following(tokens, self._opening, self._turns, self._replies)
        if following[: len(tokens)] == tokens:
            self.path.observe(following[len(tokens) :])
        else:
            self._left.append(self.path)
            self.path = self.path.rewritten(following)

    def _room(self) -> int:
        room = self.env.max_len - len(self.path.tokens)
        if self.env.limits.max_tokens is not None:
            sampled = sum(path.sampled_tokens for path in (*self._left, self.path))
            room = min(room, self.env.limits.max_tokens - sampled)
        return room

    def samples(self, reward: float, temperature: float) -> tuple[Sample, ...]:
        """Every sampled token is trained on once: in the history it was sampled after."""
        paths = [path for path in (*self._left, self.path) if path.sampled_tokens]
        last = len(paths) - 1
        return tuple(
            path.sample(
                reward=reward,
                temperature=temperature,
                finish=self.finish,
                events=tuple(self.events) if i == last else (),
            )
            for i, path in enumerate(paths)
        )
