"""gymnasium environments as text: the policy reads observations and calls `act` for every step."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from onepolicy.config import DuplicateRoutes, GymnasiumTask, UsageError
from onepolicy.envs.adapters.seeded import SeededProblems, as_episode_error, scale_return
from onepolicy.envs.multiturn.episode import Episode, MultiTurnEnvironment
from onepolicy.envs.multiturn.tool_dialogue import ParsedTurn, ToolDialogue, build_tool_dialogue
from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS
from onepolicy.interfaces import Problem

MAX_BOX_NUMBERS = 64
"""Numbers in a Box that are written out. A larger array is a picture and not a text."""


class TextFormError(ValueError):
    """The error of a space without a text form, or of a text outside the space.

    Its message names the space, or the texts that the space accepts.
    """


def check_observation_space(space: Any) -> None:
    """Raise TextFormError if `describe_value` cannot write the space's values."""
    from gymnasium import spaces

    match space:
        case spaces.Tuple():
            for part in space.spaces:
                check_observation_space(part)
        case spaces.Dict():
            for part in space.spaces.values():
                check_observation_space(part)
        case spaces.Box() if np.prod(space.shape) > MAX_BOX_NUMBERS:
            raise TextFormError(f"a Box of shape {space.shape}")
        case (
            spaces.Discrete()
            | spaces.MultiDiscrete()
            | spaces.MultiBinary()
            | spaces.Box()
            | spaces.Text()
        ):
            pass
        case _:
            raise TextFormError(f"a {type(space).__name__}")


def describe_value(space: Any, value: Any) -> str:
    """Return a value of the space as text.

    Numbers keep the space's order, parts of a Dict have their names, and a Text is not changed.
    """
    from gymnasium import spaces

    match space:
        case spaces.Tuple():
            parts = zip(space.spaces, value, strict=True)
            return ", ".join(describe_value(part, each) for part, each in parts)
        case spaces.Dict():
            named = space.spaces.items()
            return "; ".join(f"{name}: {describe_value(part, value[name])}" for name, part in named)
        case spaces.Text():
            return str(value)
        case _:
            return ", ".join(f"{number:.4g}" for number in np.asarray(value).ravel().tolist())


def describe_actions(space: Any, names: Sequence[str]) -> str:
    """Return a description of the space's actions, for the policy.

    Raises TextFormError if `parse_action` cannot read actions of the space.
    """
    from gymnasium import spaces

    match space:
        case spaces.Discrete() if names:
            return ", ".join(names)
        case spaces.Discrete():
            return f"a number from {space.start} to {space.start + space.n - 1}"
        case spaces.MultiDiscrete() | spaces.MultiBinary() | spaces.Box() if (
            np.prod(space.shape) <= MAX_BOX_NUMBERS
        ):
            return f"{np.prod(space.shape)} numbers separated by commas"
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} characters"
        case _:
            raise TextFormError(f"a {type(space).__name__}")


def parse_action(space: Any, text: str, names: Sequence[str]) -> Any:
    """Return the action that a text stands for. Raises TextFormError if there is none.

    names: the actions of a Discrete space, in order. Their numbers are accepted too.
    """
    from gymnasium import spaces

    text = text.strip()
    action: Any
    if isinstance(space, spaces.Text):
        action = text
    elif isinstance(space, spaces.Discrete) and text.lower() in names:
        action = space.start + names.index(text.lower())
    else:
        action = _parse_numbers(space, text)
    if action is None or not space.contains(action):
        raise TextFormError(f"no action {text[:40]!r}; there is {describe_actions(space, names)}")
    return action


def _parse_numbers(space: Any, text: str) -> Any:
    """Return the array of comma-separated numbers in the space's shape and dtype, or None."""
    from gymnasium import spaces

    try:
        numbers = np.array([float(part) for part in text.split(",")]).reshape(space.shape)
    except (ValueError, OverflowError):
        return None
    if not np.isfinite(numbers).all():
        return None
    if not isinstance(space, spaces.Box) and not np.array_equal(numbers, np.trunc(numbers)):
        return None
    return numbers.astype(space.dtype)[()]


COMPASS = ("south", "north", "east", "west")
STOPS = ("R", "G", "Y", "B")


@dataclass(frozen=True, slots=True)
class KnownEnvironment:
    """Texts for an environment of gymnasium. actions: their names, in order."""

    actions: tuple[str, ...]
    rules: str
    describe_observation: Callable[[Any, Any], str]
    """(environment without its wrappers, observation) -> text."""


def _describe_lake(env: Any, state: Any) -> str:
    row, column = divmod(int(state), env.desc.shape[1])
    return f"row {row}, column {column}"


def _describe_cliff(env: Any, state: Any) -> str:
    row, column = divmod(int(state), env.shape[1])
    return f"row {row}, column {column}"


def _describe_taxi(env: Any, state: Any) -> str:
    row, column, passenger, destination = env.decode(int(state))
    location = "in the taxi"
    if passenger < len(STOPS):
        location = f"at {STOPS[passenger]}"
    return (
        f"taxi at row {row}, column {column}; passenger {location}; destination "
        f"{STOPS[destination]}"
    )


def _describe_blackjack(env: Any, hand: Any) -> str:
    total, shown, ace = (int(part) for part in hand)
    total_text = f"your sum {total}"
    if ace:
        total_text += " with a usable ace"
    return f"{total_text}; the dealer shows {shown}"


LAKE = KnownEnvironment(
    ("left", "down", "right", "up"),
    "Walk over the frozen lake from the start S to the goal G. F is ice; a hole H ends the walk. "
    "Rows count from the top, columns from the left, both from 0.",
    _describe_lake,
)
CLIFF = KnownEnvironment(
    ("up", "right", "down", "left"),
    "Walk over a grid of 4 rows and 12 columns from row 3, column 0 to row 3, column 11 in few "
    "steps. The cells of row 3 between them are a cliff: stepping there costs 100 and leads back "
    "to the start.",
    _describe_cliff,
)
KNOWN_ENVIRONMENTS = {
    "FrozenLakeEnv": LAKE,
    "CliffWalkingEnv": CLIFF,
    "TaxiEnv": KnownEnvironment(
        (*COMPASS, "pickup", "dropoff"),
        "Drive the taxi to the passenger, pick them up, drive to their destination and drop them "
        "off, in few steps. The grid has 5 rows and 5 columns. R is at row 0, column 0; G at row "
        "0, column 4; Y at row 4, column 0; B at row 4, column 3. Walls stand between some "
        "columns.",
        _describe_taxi,
    ),
    "BlackjackEnv": KnownEnvironment(
        ("stick", "hit"),
        "Play a hand of blackjack against the dealer: hit for another card, stick to end. The "
        "higher sum wins, more than 21 loses.",
        _describe_blackjack,
    ),
}


def find_known(env: Any) -> KnownEnvironment | None:
    """Return the texts for an environment, by its class without wrappers."""
    return KNOWN_ENVIRONMENTS.get(type(env.unwrapped).__name__)


COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
COLOURED = re.compile(r"\x1b\[(?:\d;)?[34]([0-7])(?:;\d)?m(.*?)\x1b\[0m", re.DOTALL)
TRIAL_SEEDS, TRIAL_STEPS = 4, 12
"""Number and length of the episodes that are compared before a run."""


class TextEnvironment:
    """One environment with its observations and actions as text.

    Steps run in the event loop, so they must be quick.
    """

    def __init__(self, config: GymnasiumTask) -> None:
        """Make the environment. Raises UsageError if gymnasium cannot."""
        import gymnasium

        self.config = config
        self.errors: tuple[type[Exception], ...] = (gymnasium.error.Error, *LIBRARY_ERRORS)
        params: dict[str, Any] = {**config.params}
        if config.observation == "ansi":
            params["render_mode"] = "ansi"
        try:
            self.env: Any = gymnasium.make(config.id, **params)
        except (*self.errors, ImportError) as error:
            raise UsageError(
                f"task.id: gymnasium cannot make {config.id!r} with {config.params!r}: {error}"
            ) from error
        self.known = find_known(self.env)
        names = config.actions or ()
        if not names and self.known:
            names = self.known.actions
        self.names = tuple(name.lower() for name in names)
        self.space: Any = self.env.action_space

    def reset(self, seed: int) -> str:
        """Start an episode and return its first observation."""
        return self._describe_observation(self.env.reset(seed=seed)[0])

    def step(self, action: Any) -> tuple[str, float, bool]:
        """Take a step. Returns (observation, reward, whether the episode is over)."""
        observation, reward, ended, cut, _ = self.env.step(action)
        return self._describe_observation(observation), float(reward), bool(ended or cut)

    def parse_action(self, text: str) -> Any:
        return parse_action(self.space, text, self.names)

    def _describe_observation(self, observation: Any) -> str:
        if self.config.observation == "ansi":
            return describe_ansi(self.env.render())
        if self.known is not None:
            return self.known.describe_observation(self.env.unwrapped, observation)
        return describe_value(self.env.observation_space, observation)


def describe_ansi(screen: str) -> str:
    """Return terminal text without control codes; a coloured part becomes `[red:S]`."""
    named = COLOURED.sub(lambda found: f"[{COLOURS[int(found[1])]}:{found[2]}]", screen)
    return re.sub(r"\x1b\[[\d;]*m", "", named).strip("\n")


class Gymnasium(MultiTurnEnvironment):
    """One gymnasium environment, played from many seeds."""

    dialogue: ToolDialogue

    def __init__(
        self,
        config: GymnasiumTask,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        duplicate_routes: DuplicateRoutes = "as-sampled",
    ) -> None:
        self.config = config
        env = build_checked_environment(config)
        problems = SeededProblems(("gymnasium", config.id, config.seed), env.reset)
        super().__init__(
            config, problems, tokenizer, max_len=max_len, duplicate_routes=duplicate_routes
        )
        self._idle_environments: list[TextEnvironment] = []
        act = build_act_tool(env)
        instructions = build_instructions(env, act, plain=tokenizer.chat_template is None)
        self.dialogue = build_tool_dialogue(
            tokenizer, {act.name: act}, instructions, fork=config.history == "fork"
        )

    async def play_episode(self, problem: Problem, episode: Episode) -> float:
        """Return the scaled return of an episode that the environment ended; otherwise 0."""
        assert problem.entry is not None
        if not self._idle_environments:
            self._idle_environments.append(TextEnvironment(self.config))
        env = self._idle_environments.pop()
        try:
            with as_episode_error(self.config.id, env.errors):
                env.reset(problem.entry["seed"])
            return await self._play_turns(env, episode)
        finally:
            self._idle_environments.append(env)

    async def _play_turns(self, env: TextEnvironment, episode: Episode) -> float:
        total = 0.0
        text = await episode.sample_turn()
        while text is not None:
            turn = self.dialogue.parse_turn(text)
            replies, reward, over = self._take_steps(env, turn, episode.events)
            total += reward
            if over:
                return scale_return(total, self.config.returns)
            episode.add_replies(replies)
            text = await episode.sample_turn()
        return 0.0

    def _take_steps(
        self, env: TextEnvironment, turn: ParsedTurn, events: list[str]
    ) -> tuple[list[str], float, bool]:
        """Take the steps of a turn. Returns (replies, sum of rewards, whether it is over)."""
        if not turn.calls:
            events.append("malformed")
            problem = turn.malformed or "there is nothing to answer; call act"
            return [f"error: {problem}"], 0.0, False
        replies, total, over = [], 0.0, False
        for call in turn.calls:
            if call.tool != "act":
                events.append("malformed")
                replies.append(f"error: no tool {call.tool[:40]}; there is act")
                continue
            try:
                action = env.parse_action(call.text)
            except TextFormError as error:
                events.append("act_error")
                replies.append(f"error: {error}")
                continue
            events.append("act")
            with as_episode_error(self.config.id, env.errors):
                observation, reward, over = env.step(action)
            replies.append(observation)
            total += reward
            if over:
                break
        return replies, total, over


@dataclass
class ActTool:
    """The tool that takes one step."""

    description: str
    name: str = "act"
    argument: str = "action"


def build_act_tool(env: TextEnvironment) -> ActTool:
    actions = describe_actions(env.space, env.names)
    return ActTool(f"Take one step in the environment. An action is {actions}.")


def build_instructions(env: TextEnvironment, act: ActTool, *, plain: bool) -> str:
    """Return the text before the first observation. plain: for models without a chat template."""
    if env.config.instructions is not None:
        return env.config.instructions
    rules = f"You are in the environment {env.config.id}."
    if env.known:
        rules = env.known.rules
    usage = "Call act in every turn."
    if plain:
        usage = f"End every turn with a line `Action: act[action]`. {act.description}"
    return f"{rules}\n{usage}\n\n"


def build_checked_environment(config: GymnasiumTask) -> TextEnvironment:
    """Build an environment and check it.

    Raises UsageError if it has no text form, or if it differs for the same seed.
    """
    if find_spec("gymnasium") is None:
        raise UsageError("task.kind: gymnasium is not installed; pip install 'onepolicy[envs]'")
    env = TextEnvironment(config)
    _check_spaces(config, env)
    _check_actions(config, env)
    modes = env.env.metadata.get("render_modes", [])
    if config.observation == "ansi" and "ansi" not in modes:
        raise UsageError(
            f"task.observation: {config.id} has no ansi form, only {', '.join(modes)}; use words"
        )
    _check_repeatable(config, env)
    return env


def _check_spaces(config: GymnasiumTask, env: TextEnvironment) -> None:
    try:
        if config.observation == "words":
            check_observation_space(env.env.observation_space)
        describe_actions(env.space, env.names)
    except TextFormError as error:
        raise UsageError(
            f"task.id: {config.id} observes {env.env.observation_space} and is acted on by "
            f"{env.space}; {error} has no form in words here"
        ) from error


def _check_repeatable(config: GymnasiumTask, env: TextEnvironment) -> None:
    """Raise UsageError if equal seeds and actions give different episodes."""
    try:
        other = TextEnvironment(config)
        repeatable = all(
            _play_trial(env, seed) == _play_trial(other, seed) == _play_trial(env, seed)
            for seed in range(TRIAL_SEEDS)
        )
    except env.errors as error:
        raise UsageError(f"task.id: {config.id} fails in its first steps: {error!r}") from error
    if not repeatable:
        raise UsageError(
            f"task.id: two episodes of {config.id} from one seed with the same actions differ, so "
            "the siblings of a group would not play one problem; choose parameters that leave all "
            "chance to reset(seed)"
        )


def _check_actions(config: GymnasiumTask, env: TextEnvironment) -> None:
    from gymnasium.spaces import Discrete

    if config.actions is None:
        return
    if not isinstance(env.space, Discrete):
        raise UsageError(
            f"task.actions: names have no effect, because {config.id} takes {env.space}; leave "
            "them out"
        )
    if len(config.actions) != env.space.n:
        raise UsageError(
            f"task.actions: {len(config.actions)} names, but {config.id} has {env.space.n} actions"
        )


def _play_trial(env: TextEnvironment, seed: int) -> list[object]:
    """Return the observations and rewards of a short episode of sampled actions."""
    env.space.seed(seed)
    seen: list[object] = [env.reset(seed)]
    for _ in range(TRIAL_STEPS):
        observation, reward, over = env.step(env.space.sample())
        seen.append((observation, reward, over))
        if over:
            break
    return seen
