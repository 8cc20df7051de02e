"""textarena's games for one player: the policy's turn is the move as it stands, what the game says is the reply."""

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

from onepolicy.config import RowPolicy, TextArenaTask, UsageError
from onepolicy.envs.adapters.seeded import Seeded, failing, scaled
from onepolicy.envs.multiturn.chat_dialogue import build_talk, said
from onepolicy.envs.multiturn.episode import Episode, InTurns
from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS
from onepolicy.interfaces import Problem


class GlobalRandom:
    """An episode's own stream of Python's and numpy's global random numbers: whatever else draws from them in between,
    the episode sees the numbers that follow from its seed, and nobody else sees those."""

    def __init__(self, seed: int) -> None:
        self._state = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
        )

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Until it is left, global random numbers are this stream's. Nothing may be awaited inside."""
        outer = random.getstate(), np.random.get_state()
        self._put(self._state)
        try:
            yield
        finally:
            self._state = random.getstate(), np.random.get_state()
            self._put(outer)

    @staticmethod
    def _put(state: tuple) -> None:
        random.setstate(state[0])
        np.random.set_state(state[1])


TRIED = (
    "[1]",
    "[up]",
    "[A B]",
    "[1 2 3 4]",
    "hello",
)  # moves of the two games a run compares before it starts


class Match:
    """One game at a time, without textarena's wrappers, which show the whole history every turn."""

    def __init__(self, config: TextArenaTask) -> None:
        import textarena

        self.config = config
        self._random = GlobalRandom(0)
        with self._random.drawn():
            self.env: Any = textarena.make(f"{config.game}-raw", **config.params)

    def reset(self, seed: int) -> str:
        self._random = GlobalRandom(seed)
        with self._random.drawn():
            self.env.reset(num_players=1, seed=seed)
        return self._news()

    def step(self, move: str) -> tuple[str, bool]:
        """(what the game says to it, whether it is over)."""
        with self._random.drawn():
            over, _ = self.env.step(move)
        return self._news(), bool(over)

    @property
    def result(self) -> float:
        return float(self.env.close()[0][0])

    def _news(self) -> str:
        """What was said since the last look, but for the player's own moves."""
        from textarena import ObservationType

        _, messages = self.env.get_observation()
        return "\n\n".join(
            str(text).strip() for _, text, kind in messages if kind != ObservationType.PLAYER_ACTION
        )


class TextArena(InTurns):
    def __init__(
        self,
        config: TextArenaTask,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        rows: RowPolicy = "as-sampled",
    ) -> None:
        self.config = config
        match = checked_match(config)
        problems = Seeded(
            ("textarena", config.game, config.seed),
            lambda seed: config.instructions + match.reset(seed),
        )
        super().__init__(config, problems, tokenizer, max_len=max_len, rows=rows)
        self.dialogue = build_talk(tokenizer, fork=config.history == "fork")
        self._idle: list[Match] = []

    async def play(self, problem: Problem, episode: Episode) -> float:
        """The scaled result of a game that was played to its end; every other end earns 0."""
        assert problem.entry is not None
        match = self._idle.pop() if self._idle else Match(self.config)
        try:
            with failing(self.config.game):
                match.reset(problem.entry["seed"])
            while (text := await episode.turn()) is not None:
                episode.events.append("move")
                with failing(self.config.game):
                    seen, over = match.step(said(text))
                    result = match.result if over else 0.0
                if over:
                    return scaled(result, self.config.returns)
                episode.reply([seen])
            return 0.0
        finally:
            self._idle.append(match)


def checked_match(config: TextArenaTask) -> Match:
    """UsageError if the game cannot be played alone here, or is not the same for the same seed."""
    if find_spec("textarena") is None:
        raise UsageError("task.kind: textarena is not installed; pip install 'textarena>=0.7.4'")
    from textarena import SinglePlayerState
    from textarena.envs.registration import ENV_REGISTRY

    names = {name.removesuffix("-raw") for name in ENV_REGISTRY if name.endswith("-raw")}
    if config.game not in names:
        close = difflib.get_close_matches(config.game, names, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "e.g. GuessTheNumber-v0"
        raise UsageError(f"task.game: textarena has no game {config.game!r}; {hint}")
    try:
        match = Match(config)
        match.reset(0)
        if not isinstance(match.env.state, SinglePlayerState):
            raise UsageError(
                f"task.game: {config.game} is for several players; take a game for one"
            )
        alike = _tried(match, 1) == _tried(Match(config), 1) and _tried(match, 2) == _tried(
            match, 2
        )
    except UsageError:
        raise
    except (*LIBRARY_ERRORS, ImportError, OSError) as error:
        reason = next(
            (line.strip() for line in str(error).splitlines() if re.search("[a-z]", line)),
            repr(error),
        )
        raise UsageError(
            f"task.game: {config.game} with {config.params!r} cannot be played by one player here: {reason}"
        ) from error
    if not alike:
        raise UsageError(
            f"task.game: two games of {config.game} from one seed with the same moves differ, so the siblings of a "
            "group would not play one problem; take another game"
        )
    return match


def _tried(match: Match, seed: int) -> list[object]:
    seen: list[object] = [match.reset(seed)]
    for move in TRIED:
        said_back, over = match.step(move)
        seen.append(said_back)
        if over:
            return [*seen, match.result]
    return seen
