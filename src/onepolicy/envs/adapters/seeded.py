"""Games that a seed defines: the same problem is the same episode for every sibling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from onepolicy.config import GymnasiumTask, TextArenaTask, UsageError
from onepolicy.envs.multiturn.dialogue import ParsedTurn, TurnFormat
from onepolicy.envs.multiturn.episode import Episode, MultiTurnEnvironment, PathOptions
from onepolicy.envs.tasks.seeding import hash_key
from onepolicy.errors import LIBRARY_ERRORS
from onepolicy.interfaces import EpisodeError, Problem

NUM_STARTUP_PROBLEMS = 16
Step = tuple[str, float, bool]
"""(text, reward, whether the episode is over)."""


class Game(ABC):
    """A game in words. Its steps run in the event loop, so they must be quick."""

    errors: tuple[type[Exception], ...] = LIBRARY_ERRORS
    """Errors of the game's package, which end the episode and not the run."""

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def reset(self, seed: int) -> str:
        """Start an episode and return its first text."""

    @abstractmethod
    def step(self, move: Any) -> Step: ...

    @abstractmethod
    def take_turn(self, turn: ParsedTurn, events: list[str]) -> tuple[list[str], float, bool]:
        """Play a turn and append its events. Returns (replies, reward, whether it is over)."""

    @abstractmethod
    def trial_moves(self, seed: int) -> Iterable[Any]:
        """Return moves of the episodes that are compared before a run, after `reset`."""


class SeededProblems:
    """Problems with a seed in `entry["seed"]`, a function of (key, id) alone.

    Training ids count up from 0, held-out ids down from -1. Small environments may start alike for
    different seeds.
    """

    def __init__(self, key: tuple[object, ...], make_prompt: Callable[[int], str]) -> None:
        """Store the settings. make_prompt: seed -> prompt of the episode."""
        self._key, self._make_prompt = key, make_prompt

    def train_problem(self, index: int) -> Problem:
        seed = hash_key(*self._key, index) % 2**31
        return Problem(index, self._make_prompt(seed), "", {"seed": seed})

    def held_out(self, count: int) -> list[Problem]:
        return [self.train_problem(-1 - i) for i in range(count)]

    def start_up_problems(self) -> Iterable[Problem]:
        return [self.train_problem(index) for index in range(NUM_STARTUP_PROBLEMS)]


class SeededEnvironment(MultiTurnEnvironment):
    """One game, played from many seeds."""

    def __init__(
        self,
        config: GymnasiumTask | TextArenaTask,
        name: str,
        game: Game,
        tokenizer: PreTrainedTokenizerBase,
        turns: TurnFormat,
        **path: Unpack[PathOptions],
    ) -> None:
        """Store the settings. game: tells the first texts; episodes are played in others."""
        problems = SeededProblems((config.kind, name, config.seed), game.reset)
        super().__init__(config, problems, tokenizer, turns, **path)
        self.config, self._name, self._game = config, name, game
        self._idle_games: list[Game] = []

    async def play_episode(self, problem: Problem, episode: Episode) -> float:
        """Return the scaled sum of rewards of an episode that the game ended; otherwise 0."""
        assert problem.entry is not None
        if not self._idle_games:
            self._idle_games.append(type(self._game)(self.config))
        game = self._idle_games.pop()
        try:
            with self._as_episode_error():
                game.reset(problem.entry["seed"])
            return await self._play_turns(game, episode)
        finally:
            self._idle_games.append(game)

    async def _play_turns(self, game: Game, episode: Episode) -> float:
        total = 0.0
        while (text := await episode.sample_turn()) is not None:
            with self._as_episode_error():
                replies, reward, over = game.take_turn(self.turns.parse_turn(text), episode.events)
            total += reward
            if over:
                return scale_return(total, self.config.returns)
            episode.add_replies(replies)
        return 0.0

    @contextmanager
    def _as_episode_error(self) -> Iterator[None]:
        try:
            yield
        except self._game.errors as error:
            raise EpisodeError(f"{self._name} failed: {error!r}") from error


def is_repeatable(game: Game, seeds: int) -> bool:
    """Return whether equal seeds and moves give equal episodes, in one game and in another."""
    other = type(game)(game.config)
    return all(
        _play_trial(game, seed) == _play_trial(other, seed) == _play_trial(game, seed)
        for seed in range(seeds)
    )


def chance_error(setting: str, name: str) -> UsageError:
    """Return the error for a game that is not repeatable."""
    return UsageError(
        f"{setting}: two episodes of {name} from one seed with the same moves differ, so the "
        "siblings of a group would not play one problem; take another, or parameters that leave "
        "all chance to the seed"
    )


def _play_trial(game: Game, seed: int) -> list[object]:
    seen: list[object] = [game.reset(seed)]
    for move in game.trial_moves(seed):
        step = game.step(move)
        seen.append(step)
        if step[2]:
            break
    return seen


def scale_return(value: float, returns: tuple[float, float]) -> float:
    """Return the reward of a return: returns[0] maps to 0, returns[1] to 1, clipped to [0, 1]."""
    low, high = returns
    return min(max((value - low) / (high - low), 0.0), 1.0)
