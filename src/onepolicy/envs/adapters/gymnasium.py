"""gymnasium environments as text: the policy reads observations and calls `act` for every step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Unpack

import numpy as np
from transformers import PreTrainedTokenizerBase

from onepolicy.config import GymnasiumTask, UsageError
from onepolicy.envs.adapters.seeded import Game, SeededEnvironment, Step, is_repeatable
from onepolicy.envs.multiturn.dialogue import ParsedTurn
from onepolicy.envs.multiturn.episode import PathOptions
from onepolicy.envs.multiturn.tool_formats import tool_format
from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS

MOST_NUMBERS = 64
"""Numbers of an array that is written out. A larger array is a picture and not a text."""
COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[(?:\d;)?[34]([0-7])(?:;\d)?m(.*?)\x1b\[0m", re.DOTALL)
TRIAL_SEEDS, TRIAL_STEPS = 4, 12
"""Number and length of the episodes that are compared before a run."""


class TextFormError(ValueError):
    """The error of a value or space without a text form, or of a text that is no action."""


def describe_value(value: Any) -> str:
    """Return an observation as text: numbers in order, parts with their names, text as it is.

    Raises TextFormError if it has no such form.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return "; ".join(f"{name}: {describe_value(part)}" for name, part in value.items())
    if isinstance(value, tuple):
        return ", ".join(map(describe_value, value))
    array = np.asarray(value)
    if array.size > MOST_NUMBERS or array.dtype.kind not in "biuf":
        raise TextFormError(f"an observation of shape {array.shape}")
    return ", ".join(f"{number:.4g}" for number in array.ravel().tolist())


def describe_ansi(screen: str) -> str:
    """Return terminal text without control codes; a coloured part becomes `[red:S]`."""
    named = COLOURED.sub(lambda found: f"[{COLOURS[int(found[1])]}:{found[2]}]", screen)
    return re.sub(r"\x1b\[[\d;]*m", "", named).strip("\n")


def describe_actions(space: Any, names: Sequence[str]) -> str:
    """Return the space's actions in words. Raises TextFormError if they are no numbers or text."""
    from gymnasium import spaces

    if names:
        return ", ".join(names)
    if isinstance(space, spaces.Discrete):
        return f"a number from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        return f"a text of {space.min_length} to {space.max_length} characters"
    if space.shape is None or np.prod(space.shape) > MOST_NUMBERS:
        raise TextFormError(f"a {type(space).__name__}")
    return f"{np.prod(space.shape)} numbers separated by commas"


def parse_action(space: Any, text: str, names: Sequence[str]) -> Any:
    """Return the action that a text stands for. Raises TextFormError if there is none.

    names: the actions of a Discrete space, in order. Their numbers are accepted too.
    """
    text = text.strip()
    if text.lower() in names:
        return space.start + names.index(text.lower())
    action: Any = text
    if space.dtype.kind != "U":
        action = _parse_numbers(space, text)
    if action is None or not space.contains(action):
        raise TextFormError(f"no action {text[:40]!r}; there is {describe_actions(space, names)}")
    return action


def _parse_numbers(space: Any, text: str) -> Any:
    """Return the array of comma-separated numbers in the space's shape and dtype, or None."""
    try:
        numbers = np.array([float(part) for part in text.split(",")]).reshape(space.shape)
    except (ValueError, OverflowError):
        return None
    whole = space.dtype.kind == "f" or np.array_equal(numbers, np.trunc(numbers))
    if not (whole and np.isfinite(numbers).all()):
        return None
    return numbers.astype(space.dtype)[()]


@dataclass(frozen=True, slots=True)
class ToyText:
    """Texts for an environment of toy_text. actions: their names, in order."""

    actions: tuple[str, ...]
    rules: str
    describe: Callable[[Any, Any], str]
    """(environment without its wrappers, observation) -> text."""


def _describe_cell(state: int, columns: int) -> str:
    row, column = divmod(int(state), columns)
    return f"row {row}, column {column}"


def _describe_taxi(env: Any, state: Any) -> str:
    row, column, passenger, destination = env.decode(int(state))
    location = ("at R", "at G", "at Y", "at B", "in the taxi")[passenger]
    return (
        f"taxi at row {row}, column {column}; passenger {location}; destination "
        f"{'RGYB'[destination]}"
    )


def _describe_blackjack(_: Any, hand: Any) -> str:
    total, shown, ace = (int(part) for part in hand)
    usable = " with a usable ace" * ace
    return f"your sum {total}{usable}; the dealer shows {shown}"


TOY_TEXT = {
    "FrozenLakeEnv": ToyText(
        ("left", "down", "right", "up"),
        "Walk over the frozen lake from the start S to the goal G. F is ice; a hole H ends the "
        "walk. Rows count from the top, columns from the left, both from 0.",
        lambda env, state: _describe_cell(state, env.desc.shape[1]),
    ),
    "CliffWalkingEnv": ToyText(
        ("up", "right", "down", "left"),
        "Walk over a grid of 4 rows and 12 columns from row 3, column 0 to row 3, column 11 in few "
        "steps. The cells of row 3 between them are a cliff: stepping there costs 100 and leads "
        "back to the start.",
        lambda env, state: _describe_cell(state, env.shape[1]),
    ),
    "TaxiEnv": ToyText(
        ("south", "north", "east", "west", "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick them up, drive to their destination and drop them "
        "off, in few steps. The grid has 5 rows and 5 columns. R is at row 0, column 0; G at row "
        "0, column 4; Y at row 4, column 0; B at row 4, column 3. Walls stand between some "
        "columns.",
        _describe_taxi,
    ),
    "BlackjackEnv": ToyText(
        ("stick", "hit"),
        "Play a hand of blackjack against the dealer: hit for another card, stick to end. The "
        "higher sum wins, more than 21 loses.",
        _describe_blackjack,
    ),
}
"""Class of an environment without its wrappers -> its texts."""


@dataclass
class ActTool:
    """The tool that takes one step."""

    description: str
    name: str = "act"
    argument: str = "action"


class TextEnvironment(Game):
    """One environment with its observations and actions as text, as a game."""

    def __init__(self, config: GymnasiumTask) -> None:
        """Make the environment. Raises UsageError if gymnasium cannot."""
        import gymnasium

        super().__init__(config)
        self.errors = (gymnasium.error.Error, *LIBRARY_ERRORS)
        params: dict[str, Any] = {**config.params}
        if config.observation == "ansi":
            params["render_mode"] = "ansi"
        try:
            self.env: Any = gymnasium.make(config.id, **params)
        except (*self.errors, ImportError) as error:
            raise UsageError(
                f"task.id: gymnasium cannot make {config.id!r} with {config.params!r}: {error}"
            ) from error
        self.space: Any = self.env.action_space
        self.toy = TOY_TEXT.get(type(self.env.unwrapped).__name__)
        self.names = config.actions or ()
        if self.toy and not self.names:
            self.names = self.toy.actions
        self.names = tuple(name.lower() for name in self.names)

    def act_tool(self) -> ActTool:
        actions = describe_actions(self.space, self.names)
        return ActTool(f"Take one step in the environment. An action is {actions}.")

    def instructions(self, *, plain: bool) -> str:
        """Return the text before the first observation. plain: without a chat template."""
        if self.config.instructions is not None:
            return self.config.instructions
        rules, usage = f"You are in the environment {self.config.id}.", "Call act in every turn."
        if self.toy:
            rules = self.toy.rules
        if plain:
            act = self.act_tool()
            usage = f"End every turn with a line `Action: act[action]`. {act.description}"
        return f"{rules}\n{usage}\n\n"

    def reset(self, seed: int) -> str:
        return self._describe(self.env.reset(seed=seed)[0])

    def step(self, move: Any) -> Step:
        observation, reward, ended, cut, _ = self.env.step(move)
        return self._describe(observation), float(reward), bool(ended or cut)

    def trial_moves(self, seed: int) -> Iterator[Any]:
        self.space.seed(seed)
        return (self.space.sample() for _ in range(TRIAL_STEPS))

    def take_turn(self, turn: ParsedTurn, events: list[str]) -> tuple[list[str], float, bool]:
        if not turn.calls:
            events.append("malformed")
            problem = turn.malformed or "there is nothing to answer; call act"
            return [f"error: {problem}"], 0.0, False
        replies, total, over = [], 0.0, False
        for call in turn.calls:
            if over:
                break
            event, reply = "malformed", f"error: no tool {call.tool[:40]}; there is act"
            if call.tool == "act":
                event, reply, reward, over = self._act(call.text)
                total += reward
            events.append(event)
            replies.append(reply)
        return replies, total, over

    def _act(self, text: str) -> tuple[str, str, float, bool]:
        """Take the step that a text asks for. Returns (event, reply, reward, over)."""
        try:
            action = parse_action(self.space, text, self.names)
        except TextFormError as error:
            return "act_error", f"error: {error}", 0.0, False
        return "act", *self.step(action)

    def _describe(self, observation: Any) -> str:
        if self.config.observation == "ansi":
            return describe_ansi(self.env.render())
        if self.toy is not None:
            return self.toy.describe(self.env.unwrapped, observation)
        return describe_value(observation)


class Gymnasium(SeededEnvironment):
    """One gymnasium environment, played from many seeds."""

    def __init__(
        self,
        config: GymnasiumTask,
        tokenizer: PreTrainedTokenizerBase,
        **path: Unpack[PathOptions],
    ) -> None:
        env = build_checked_environment(config)
        instructions = env.instructions(plain=tokenizer.chat_template is None)
        turns = tool_format(tokenizer, {"act": env.act_tool()}, instructions)
        super().__init__(config, config.id, env, tokenizer, turns, **path)


def build_checked_environment(config: GymnasiumTask) -> TextEnvironment:
    """Build an environment and check it.

    Raises UsageError if it has no text form, or if it differs for the same seed.
    """
    if find_spec("gymnasium") is None:
        raise UsageError("task.kind: gymnasium is not installed; pip install 'onepolicy[envs]'")
    from gymnasium.spaces import Discrete

    env = TextEnvironment(config)
    named, space = config.actions, env.space
    if named is not None and not (isinstance(space, Discrete) and len(named) == space.n):
        raise UsageError(
            f"task.actions: {len(named)} names, but {config.id} takes {space}; name every action "
            "of a Discrete space, or leave them out"
        )
    modes = env.env.metadata.get("render_modes", [])
    if config.observation == "ansi" and "ansi" not in modes:
        raise UsageError(
            f"task.observation: {config.id} has no ansi form, only {', '.join(modes)}; use words"
        )
    try:
        describe_actions(env.space, env.names)
        repeatable = is_repeatable(env, TextEnvironment(config), range(TRIAL_SEEDS))
    except TextFormError as error:
        raise UsageError(
            f"task.id: {config.id} observes {env.env.observation_space} and is acted on by "
            f"{env.space}; {error} has no form in words here"
        ) from error
    except env.errors as error:
        raise UsageError(f"task.id: {config.id} fails in its first steps: {error!r}") from error
    if not repeatable:
        raise UsageError(
            f"task.id: two episodes of {config.id} from one seed with the same actions differ, so "
            "the siblings of a group would not play one problem; choose parameters that leave all "
            "chance to reset(seed)"
        )
    return env
