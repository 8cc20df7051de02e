"""Single-player games of textarena: the policy's turn is its move, the game's text is the reply."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from onepolicy.config import DuplicateRoutes, TextArenaTask, UsageError
from onepolicy.envs.adapters.seeded import SeededProblems, as_episode_error, scale_return
from onepolicy.envs.multiturn.chat_dialogue import build_chat_dialogue, strip_thoughts
from onepolicy.envs.multiturn.episode import Episode, MultiTurnEnvironment
from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS
from onepolicy.interfaces import Problem

TRIAL_MOVES = ("[1]", "[up]", "[A B]", "[1 2 3 4]", "hello")
"""Moves of the two games that are compared before a run."""


class GlobalRandomState:
    """An episode's own stream of Python's and numpy's global random numbers.

    The episode sees only the numbers that follow from its seed, even if other code draws global
    random numbers in between. Other code never sees the episode's numbers.
    """

    def __init__(self, seed: int) -> None:
        self._state = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make global random numbers come from this stream. Do not await inside."""
        outer = random.getstate(), np.random.get_state()
        self._set_global(self._state)
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            self._set_global(outer)

    @staticmethod
    def _set_global(state: tuple) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])


class TextArenaGame:
    """One game at a time, without textarena's wrappers, which show the whole history every turn."""

    def __init__(self, config: TextArenaTask) -> None:
        import textarena

        self.config = config
        self._random = GlobalRandomState(0)
        with self._random.installed():
            self.env: Any = textarena.make(f"{config.game}-raw", **config.params)

    def reset(self, seed: int) -> str:
        """Start a game and return its first text."""
        self._random = GlobalRandomState(seed)
        with self._random.installed():
            self.env.reset(num_players=1, seed=seed)
        return self._new_messages()

    def step(self, move: str) -> tuple[str, bool]:
        """Make a move. Returns (the game's text, whether the game is over)."""
        with self._random.installed():
            over, _ = self.env.step(move)
        return self._new_messages(), bool(over)

    @property
    def result(self) -> float:
        return float(self.env.close()[0][0])

    def _new_messages(self) -> str:
        """Return the messages since the last call without the player's own moves."""
        from textarena import ObservationType

        _, messages = self.env.get_observation()
        return "\n\n".join(
            str(text).strip() for _, text, kind in messages if kind != ObservationType.PLAYER_ACTION
        )


class TextArena(MultiTurnEnvironment):
    """One game of textarena, played from many seeds."""

    def __init__(
        self,
        config: TextArenaTask,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        duplicate_routes: DuplicateRoutes = "as-sampled",
    ) -> None:
        self.config = config
        game = build_checked_game(config)
        problems = SeededProblems(
            ("textarena", config.game, config.seed),
            lambda seed: config.instructions + game.reset(seed),
        )
        super().__init__(
            config, problems, tokenizer, max_len=max_len, duplicate_routes=duplicate_routes
        )
        self.dialogue = build_chat_dialogue(tokenizer, fork=config.history == "fork")
        self._idle_games: list[TextArenaGame] = []

    async def play_episode(self, problem: Problem, episode: Episode) -> float:
        """Return the scaled result of a game that was played to its end; otherwise 0."""
        assert problem.entry is not None
        if not self._idle_games:
            self._idle_games.append(TextArenaGame(self.config))
        game = self._idle_games.pop()
        try:
            with as_episode_error(self.config.game):
                game.reset(problem.entry["seed"])
            return await self._play_turns(game, episode)
        finally:
            self._idle_games.append(game)

    async def _play_turns(self, game: TextArenaGame, episode: Episode) -> float:
        text = await episode.sample_turn()
        while text is not None:
            episode.events.append("move")
            with as_episode_error(self.config.game):
                reply, over = game.step(strip_thoughts(text))
            if over:
                return scale_return(game.result, self.config.returns)
            episode.add_replies([reply])
            text = await episode.sample_turn()
        return 0.0


def build_checked_game(config: TextArenaTask) -> TextArenaGame:
    """Build a game and check it.

    Raises UsageError if one player cannot play the game, or if it differs for the same seed.
    """
    _check_name(config)
    from textarena import SinglePlayerState

    try:
        game = TextArenaGame(config)
        game.reset(0)
        if not isinstance(game.env.state, SinglePlayerState):
            raise UsageError(
                f"task.game: {config.game} is for several players; take a game for one"
            )
        other = TextArenaGame(config)
        repeatable = _play_trial(game, 1) == _play_trial(other, 1)
        repeatable = repeatable and _play_trial(game, 2) == _play_trial(game, 2)
    except UsageError:
        raise
    except (*LIBRARY_ERRORS, ImportError, OSError) as error:
        raise UsageError(
            f"task.game: {config.game} with {config.params!r} cannot be played by one player here: "
            f"{_first_line(error)}"
        ) from error
    if not repeatable:
        raise UsageError(
            f"task.game: two games of {config.game} from one seed with the same moves differ, so "
            "the siblings of a group would not play one problem; take another game"
        )
    return game


def _check_name(config: TextArenaTask) -> None:
    """Raise UsageError unless textarena is installed and has the game."""
    if find_spec("textarena") is None:
        raise UsageError("task.kind: textarena is not installed; pip install 'textarena>=0.7.4'")
    from textarena.envs.registration import ENV_REGISTRY

    names = {name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")}
    if config.game not in names:
        close = difflib.get_close_matches(config.game, names, n=3)
        hint = "e.g. GuessTheNumber-v0"
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        raise UsageError(f"task.game: textarena has no game {config.game!r}; {hint}")


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text that has a letter."""
    for line in str(error).splitlines():
        if re.search("[a-z]", line):
            return line.strip()
    return repr(error)


def _play_trial(game: TextArenaGame, seed: int) -> list[object]:
    """Return the texts and the result of a game with TRIAL_MOVES."""
    seen: list[object] = [game.reset(seed)]
    for move in TRIAL_MOVES:
        reply, over = game.step(move)
        seen.append(reply)
        if over:
            return [*seen, game.result]
    return seen
