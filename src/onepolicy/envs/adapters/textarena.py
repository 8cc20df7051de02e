"""Single-player games of textarena: the policy's turn is its move, the game's text is the reply."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Unpack

import numpy as np
from transformers import PreTrainedTokenizerBase

from onepolicy.config import TextArenaTask, UsageError
from onepolicy.config.spelling import did_you_mean
from onepolicy.envs.adapters import seeded
from onepolicy.envs.multiturn.dialogue import ParsedTurn, TurnFormat
from onepolicy.envs.multiturn.episode import PathOptions
from onepolicy.errors import LIBRARY_ERRORS

TRIAL_SEEDS, TRIAL_MOVES = 2, ("[1]", "[up]", "[A B]", "[1 2 3 4]", "hello")
"""Number and moves of the games that are compared before a run."""


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
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        other, self._state = self._state, (random.getstate(), np.random.get_state())
        random.setstate(other[0])
        np.random.set_state(other[1])


class TextArenaGame(seeded.Game):
    """One game at a time, without textarena's wrappers, which show the whole history every turn."""

    def __init__(self, config: TextArenaTask) -> None:
        import textarena

        super().__init__(config)
        self._random = GlobalRandomState(0)
        with self._random.installed():
            self.env: Any = textarena.make(f"{config.game}-raw", **config.params)

    def reset(self, seed: int) -> str:
        self._random = GlobalRandomState(seed)
        with self._random.installed():
            self.env.reset(num_players=1, seed=seed)
        return self.config.instructions + self._new_messages()

    def step(self, move: str) -> seeded.Step:
        with self._random.installed():
            over, _ = self.env.step(move)
        text, reward = self._new_messages(), 0.0
        if over:
            reward = float(self.env.close()[0][0])
        return text, reward, bool(over)

    def trial_moves(self, seed: int) -> tuple[str, ...]:
        return TRIAL_MOVES

    def take_turn(self, turn: ParsedTurn, events: list[str]) -> tuple[list[str], float, bool]:
        events.append("move")
        assert turn.answer is not None, "chat calls no tools"
        reply, reward, over = self.step(turn.answer)
        return [reply], reward, over

    def _new_messages(self) -> str:
        """Return the messages since the last call without the player's own moves."""
        from textarena import ObservationType

        _, messages = self.env.get_observation()
        return "\n\n".join(
            str(text).strip() for _, text, kind in messages if kind != ObservationType.PLAYER_ACTION
        )


def build(
    config: TextArenaTask, tokenizer: PreTrainedTokenizerBase, **path: Unpack[PathOptions]
) -> seeded.SeededEnvironment:
    """Build one game of textarena, played from many seeds."""
    game = build_checked_game(config)
    return seeded.SeededEnvironment(config, config.game, game, tokenizer, TurnFormat(), **path)


def build_checked_game(config: TextArenaTask) -> TextArenaGame:
    """Build a game and check it.

    Raises UsageError if one player cannot play the game, or if it differs for the same seed.
    """
    _check_name(config)
    from textarena import SinglePlayerState

    try:
        game = TextArenaGame(config)
        game.reset(0)
        single = isinstance(game.env.state, SinglePlayerState)
        repeatable = single and seeded.is_repeatable(game, TRIAL_SEEDS)
    except (*LIBRARY_ERRORS, ImportError, OSError) as error:
        raise UsageError(
            f"task.game: {config.game} with {config.params!r} cannot be played by one player here: "
            f"{_first_line(error)}"
        ) from error
    if not single:
        raise UsageError(f"task.game: {config.game} is for several players; take a game for one")
    if not repeatable:
        raise seeded.chance_error("task.game", config.game)
    return game


def _check_name(config: TextArenaTask) -> None:
    """Raise UsageError unless textarena is installed and has the game."""
    if find_spec("textarena") is None:
        raise UsageError("task.kind: textarena is not installed; pip install 'textarena>=0.7.4'")
    from textarena.envs.registration import ENV_REGISTRY

    names = {name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")}
    if config.game not in names:
        hint = did_you_mean(config.game, sorted(names)) or "; e.g. GuessTheNumber-v0"
        raise UsageError(f"task.game: textarena has no game {config.game!r}{hint}")


def _first_line(error: Exception) -> str:
    """Return the first line of an error's text that has a letter."""
    lines = (line.strip() for line in str(error).splitlines())
    return next(filter(re.compile("[a-z]").search, lines), repr(error))
