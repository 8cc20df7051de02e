"""gymnasium environments in words: the policy reads the observation and acts by calling `act`, one step a call."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.config import GymnasiumTask, RowPolicy, UsageError
from onepolicy.envs.adapters.seeded import Seeded, failing, scaled
from onepolicy.envs.adapters.spaces import NoText, check_observation, describe, expected, parse
from onepolicy.envs.adapters.toy_text import known
from onepolicy.envs.dialogue import CallDialogue, Turn, build_calls
from onepolicy.envs.episode import Episode, InTurns
from onepolicy.envs.gym import LIBRARY_ERRORS
from onepolicy.interfaces import Problem

COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[(?:\d;)?[34]([0-7])(?:;\d)?m(.*?)\x1b\[0m", re.DOTALL)
TRIED_SEEDS, TRIED_STEPS = 4, 12  # of the episodes a run compares before it starts


class World:
    """One environment and how it is put into words. Steps run in the event loop: they must be quick."""

    def __init__(self, config: GymnasiumTask) -> None:
        import gymnasium

        self.config = config
        self.errors: tuple[type[Exception], ...] = (gymnasium.error.Error, *LIBRARY_ERRORS)
        drawn: dict[str, Any] = {"render_mode": "ansi"} if config.observation == "ansi" else {}
        try:
            self.env: Any = gymnasium.make(config.id, **drawn, **config.params)
        except (*self.errors, ImportError) as error:
            raise UsageError(f"task.id: gymnasium cannot make {config.id!r} with {config.params!r}: {error}") from error
        self.known = known(self.env)
        names = config.actions or (self.known.actions if self.known else ())
        self.names = tuple(name.lower() for name in names)
        self.space: Any = self.env.action_space

    def reset(self, seed: int) -> str:
        return self._words(self.env.reset(seed=seed)[0])

    def step(self, action: Any) -> tuple[str, float, bool]:
        """(observation, reward, whether it is over)."""
        observation, reward, ended, cut, _ = self.env.step(action)
        return self._words(observation), float(reward), bool(ended or cut)

    def parse(self, text: str) -> Any:
        return parse(self.space, text, self.names)

    def _words(self, observation: Any) -> str:
        if self.config.observation == "ansi":
            return in_words(self.env.render())
        if self.known is not None:
            return self.known.describe(self.env.unwrapped, observation)
        return describe(self.env.observation_space, observation)


def in_words(screen: str) -> str:
    """Text for a terminal without its control codes: a coloured part becomes `[red:S]`."""
    named = COLOURED.sub(lambda found: f"[{COLOURS[int(found[1])]}:{found[2]}]", screen)
    return re.sub(r"\x1b\[[\d;]*m", "", named).strip("\n")


class Gymnasium(InTurns):
    dialogue: CallDialogue

    def __init__(
        self,
        config: GymnasiumTask,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        rows: RowPolicy = "as-sampled",
    ) -> None:
        self.config = config
        world = checked_world(config)
        problems = Seeded(("gymnasium", config.id, config.seed), world.reset)
        super().__init__(config, problems, tokenizer, max_len=max_len, rows=rows)
        self._idle: list[World] = []
        act = act_tool(world)
        plain = tokenizer.chat_template is None
        self.dialogue = build_calls(
            tokenizer, {act.name: act}, instructions(world, act, plain=plain), fork=config.history == "fork"
        )

    async def play(self, problem: Problem, episode: Episode) -> float:
        """The scaled return of an episode that the environment ended; every other end earns 0."""
        assert problem.entry is not None
        world = self._idle.pop() if self._idle else World(self.config)
        total, over = 0.0, False
        try:
            with failing(self.config.id, world.errors):
                world.reset(problem.entry["seed"])
            while not over and (text := await episode.turn()) is not None:
                replies, reward, over = self._acted(world, self.dialogue.parse(text), episode.events)
                total += reward
                if not over:
                    episode.reply(replies)
        finally:
            self._idle.append(world)
        return scaled(total, self.config.returns) if over else 0.0

    def _acted(self, world: World, turn: Turn, events: list[str]) -> tuple[list[str], float, bool]:
        """Take the steps of a turn: (replies, reward of all, whether it is over)."""
        if not turn.calls:
            events.append("malformed")
            return [f"error: {turn.malformed or 'there is nothing to answer; call act'}"], 0.0, False
        replies, total, over = [], 0.0, False
        for call in turn.calls:
            if call.tool != "act":
                events.append("malformed")
                replies.append(f"error: no tool {call.tool[:40]}; there is act")
                continue
            try:
                action = world.parse(call.text)
            except NoText as error:
                events.append("act_error")
                replies.append(f"error: {error}")
                continue
            events.append("act")
            with failing(self.config.id, world.errors):
                seen, reward, over = world.step(action)
            replies.append(seen)
            total += reward
            if over:
                break
        return replies, total, over


@dataclass
class Act:
    description: str
    name: str = "act"
    argument: str = "action"


def act_tool(world: World) -> Act:
    return Act(f"Take one step in the environment. An action is {expected(world.space, world.names)}.")


def instructions(world: World, act: Act, *, plain: bool) -> str:
    """What stands before the first observation."""
    given = world.config.instructions
    if given is not None:
        return given
    rules = world.known.rules if world.known else f"You are in the environment {world.config.id}."
    how = f"End every turn with a line `Action: act[action]`. {act.description}" if plain else "Call act in every turn."
    return f"{rules}\n{how}\n\n"


def checked_world(config: GymnasiumTask) -> World:
    """UsageError if the environment cannot be played in words or is not the same for the same seed."""
    if find_spec("gymnasium") is None:
        raise UsageError("task.kind: gymnasium is not installed; pip install 'onepolicy[envs]'")
    world = World(config)
    spaces = (("observes", world.env.observation_space), ("is acted on by", world.space))
    try:
        if config.observation == "words":
            check_observation(world.env.observation_space)
        expected(world.space, world.names)
    except NoText as error:
        found = " and ".join(f"{verb} {space}" for verb, space in spaces)
        raise UsageError(f"task.id: {config.id} {found}; {error} has no form in words here") from error
    _check_actions(config, world)
    modes = world.env.metadata.get("render_modes", [])
    if config.observation == "ansi" and "ansi" not in modes:
        raise UsageError(f"task.observation: {config.id} has no ansi form, only {', '.join(modes)}; use words")
    try:
        other, seeds = World(config), range(TRIED_SEEDS)
        alike = all(_tried(world, seed) == _tried(other, seed) == _tried(world, seed) for seed in seeds)
    except world.errors as error:
        raise UsageError(f"task.id: {config.id} fails in its first steps: {error!r}") from error
    if not alike:
        raise UsageError(
            f"task.id: two episodes of {config.id} from one seed with the same actions differ, so the siblings of a "
            "group would not play one problem; choose parameters that leave all chance to reset(seed)"
        )
    return world


def _check_actions(config: GymnasiumTask, world: World) -> None:
    from gymnasium.spaces import Discrete

    if config.actions is None:
        return
    if not isinstance(world.space, Discrete):
        raise UsageError(f"task.actions: names have no effect, because {config.id} takes {world.space}; leave them out")
    if len(config.actions) != world.space.n:
        raise UsageError(f"task.actions: {len(config.actions)} names, but {config.id} has {world.space.n} actions")


def _tried(world: World, seed: int) -> list[object]:
    """What a short episode of sampled actions shows and earns."""
    world.space.seed(seed)
    seen: list[object] = [world.reset(seed)]
    for _ in range(TRIED_STEPS):
        seen.append(world.step(world.space.sample()))
        if seen[-1][2]:  # type: ignore[index]
            break
    return seen
