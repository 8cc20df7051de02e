"""gymnasium environments in words: the policy reads the observation and acts by calling `act`, one step a call."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from onepolicy.config import GymnasiumTask, RowPolicy, UsageError
from onepolicy.envs.adapters.seeded import Seeded, failing, scaled
from onepolicy.envs.multiturn.episode import Episode, InTurns
from onepolicy.envs.multiturn.tool_dialogue import CallDialogue, Turn, build_calls
from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS
from onepolicy.interfaces import Problem

LARGEST_BOX = 64  # numbers; a larger array is a picture, not a text


class NoText(ValueError):
    """The space has no form in words, or the text is not of the space. The message says what would be."""


def check_observation(space: Any) -> None:
    """NoText if `describe` cannot write its values."""
    from gymnasium import spaces

    match space:
        case spaces.Tuple():
            for part in space.spaces:
                check_observation(part)
        case spaces.Dict():
            for part in space.spaces.values():
                check_observation(part)
        case spaces.Box() if np.prod(space.shape) > LARGEST_BOX:
            raise NoText(f"a Box of shape {space.shape}")
        case (
            spaces.Discrete()
            | spaces.MultiDiscrete()
            | spaces.MultiBinary()
            | spaces.Box()
            | spaces.Text()
        ):
            pass
        case _:
            raise NoText(f"a {type(space).__name__}")


def describe(space: Any, value: Any) -> str:
    """Numbers in the space's order, parts of a Dict with their names; a Text as it is."""
    from gymnasium import spaces

    match space:
        case spaces.Tuple():
            return ", ".join(
                describe(part, each) for part, each in zip(space.spaces, value, strict=True)
            )
        case spaces.Dict():
            return "; ".join(
                f"{name}: {describe(part, value[name])}" for name, part in space.spaces.items()
            )
        case spaces.Text():
            return str(value)
        case _:
            return ", ".join(f"{number:.4g}" for number in np.asarray(value).ravel().tolist())


def expected(space: Any, names: Sequence[str]) -> str:
    """What an action is, for the policy. NoText if `parse` cannot read actions of the space."""
    from gymnasium import spaces

    match space:
        case spaces.Discrete():
            return (
                ", ".join(names)
                if names
                else f"a number from {space.start} to {space.start + space.n - 1}"
            )
        case spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box() if (
            np.prod(space.shape) <= LARGEST_BOX
        ):
            return f"{np.prod(space.shape)} numbers separated by commas"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters"
        case _:
            raise NoText(f"a {type(space).__name__}")


def parse(space: Any, text: str, names: Sequence[str]) -> Any:
    """The action. names: of a Discrete space's actions, in order; its numbers are read too. NoText if it is none."""
    from gymnasium import spaces

    text = text.strip()
    action: Any
    if isinstance(space, spaces.Text):
        action = text
    elif isinstance(space, spaces.Discrete) and text.lower() in names:
        action = space.start + names.index(text.lower())
    else:
        try:
            numbers = [float(part) for part in text.split(",")]
            shaped = np.array(numbers).reshape(space.shape)
            if not isinstance(space, spaces.Box) and not np.array_equal(shaped, np.trunc(shaped)):
                raise ValueError("whole numbers only")
        except (ValueError, OverflowError):
            raise NoText(f"no action {text[:40]!r}; there is {expected(space, names)}") from None
        action = shaped.astype(space.dtype)[()] if np.isfinite(shaped).all() else None
    if action is None or not space.contains(action):
        raise NoText(f"no action {text[:40]!r}; there is {expected(space, names)}")
    return action


COMPASS = ("south", "north", "east", "west")
PLACES = ("R", "G", "Y", "B")


@dataclass(frozen=True, slots=True)
class Known:
    actions: tuple[str, ...]
    rules: str
    describe: Callable[[Any, Any], str]  # of (the environment without its wrappers, an observation)


def _cell(env: Any, state: Any) -> str:
    row, column = divmod(int(state), env.desc.shape[1])
    return f"row {row}, column {column}"


def _cliff(env: Any, state: Any) -> str:
    row, column = divmod(int(state), env.shape[1])
    return f"row {row}, column {column}"


def _taxi(env: Any, state: Any) -> str:
    row, column, passenger, destination = env.decode(int(state))
    where = "in the taxi" if passenger == len(PLACES) else f"at {PLACES[passenger]}"
    return (
        f"taxi at row {row}, column {column}; passenger {where}; destination {PLACES[destination]}"
    )


def _blackjack(env: Any, hand: Any) -> str:
    total, shown, ace = (int(part) for part in hand)
    return f"your sum {total}{' with a usable ace' if ace else ''}; the dealer shows {shown}"


LAKE = Known(
    ("left", "down", "right", "up"),
    "Walk over the frozen lake from the start S to the goal G. F is ice; a hole H ends the walk. Rows count from the "
    "top, columns from the left, both from 0.",
    _cell,
)
CLIFF = Known(
    ("up", "right", "down", "left"),
    "Walk over a grid of 4 rows and 12 columns from row 3, column 0 to row 3, column 11 in few steps. The cells of "
    "row 3 between them are a cliff: stepping there costs 100 and leads back to the start.",
    _cliff,
)
KNOWN = {
    "FrozenLakeEnv": LAKE,
    "CliffWalkingEnv": CLIFF,
    "TaxiEnv": Known(
        (*COMPASS, "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick them up, drive to their destination and drop them off, in few steps. "
        "The grid has 5 rows and 5 columns. R is at row 0, column 0; G at row 0, column 4; Y at row 4, column 0; B at "
        "row 4, column 3. Walls stand between some columns.",
        _taxi,
    ),
    "BlackjackEnv": Known(
        ("stick", "hit"),
        "Play a hand of blackjack against the dealer: hit for another card, stick to end. The higher sum wins, more "
        "than 21 loses.",
        _blackjack,
    ),
}


def known(env: Any) -> Known | None:
    """By the class of the environment without its wrappers."""
    return KNOWN.get(type(env.unwrapped).__name__)


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
            raise UsageError(
                f"task.id: gymnasium cannot make {config.id!r} with {config.params!r}: {error}"
            ) from error
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
            tokenizer,
            {act.name: act},
            instructions(world, act, plain=plain),
            fork=config.history == "fork",
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
                replies, reward, over = self._acted(
                    world, self.dialogue.parse(text), episode.events
                )
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
            return (
                [f"error: {turn.malformed or 'there is nothing to answer; call act'}"],
                0.0,
                False,
            )
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
    return Act(
        f"Take one step in the environment. An action is {expected(world.space, world.names)}."
    )


def instructions(world: World, act: Act, *, plain: bool) -> str:
    """What stands before the first observation."""
    given = world.config.instructions
    if given is not None:
        return given
    rules = world.known.rules if world.known else f"You are in the environment {world.config.id}."
    how = (
        f"End every turn with a line `Action: act[action]`. {act.description}"
        if plain
        else "Call act in every turn."
    )
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
        raise UsageError(
            f"task.id: {config.id} {found}; {error} has no form in words here"
        ) from error
    _check_actions(config, world)
    modes = world.env.metadata.get("render_modes", [])
    if config.observation == "ansi" and "ansi" not in modes:
        raise UsageError(
            f"task.observation: {config.id} has no ansi form, only {', '.join(modes)}; use words"
        )
    try:
        other, seeds = World(config), range(TRIED_SEEDS)
        alike = all(
            _tried(world, seed) == _tried(other, seed) == _tried(world, seed) for seed in seeds
        )
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
        raise UsageError(
            f"task.actions: names have no effect, because {config.id} takes {world.space}; leave them out"
        )
    if len(config.actions) != world.space.n:
        raise UsageError(
            f"task.actions: {len(config.actions)} names, but {config.id} has {world.space.n} actions"
        )


def _tried(world: World, seed: int) -> list[object]:
    """What a short episode of sampled actions shows and earns."""
    world.space.seed(seed)
    seen: list[object] = [world.reset(seed)]
    for _ in range(TRIED_STEPS):
        seen.append(world.step(world.space.sample()))
        if seen[-1][2]:  # type: ignore[index]
            break
    return seen
