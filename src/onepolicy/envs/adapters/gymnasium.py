"""gymnasium environments as text: the policy reads observations and calls `act` for every step."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from onepolicy.config import GymnasiumTask, UsageError
from onepolicy.envs.adapters import gymnasium_text as words
from onepolicy.envs.adapters import seeded
from onepolicy.envs.multiturn.dialogue import ParsedTurn
from onepolicy.envs.multiturn.episode import PathOptions
from onepolicy.envs.multiturn.tool_formats import tool_format
from onepolicy.errors import LIBRARY_ERRORS

TRIAL_SEEDS, TRIAL_STEPS = 4, 12
"""Number and length of the episodes that are compared before a run."""


class TextEnvironment(seeded.Game):
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
        self.toy: dict[str, Any] = words.toy_text().get(type(self.env.unwrapped).__name__, {})
        names = config.actions or self.toy.get("actions", ())
        self.names = tuple(name.strip().lower() for name in names)

    def act_tool(self) -> words.ActTool:
        actions = words.describe_actions(self.space, self.names)
        return words.ActTool(f"Take one step in the environment. An action is {actions}.")

    def instructions(self, *, plain: bool) -> str:
        """Return the text before the first observation. plain: without a chat template."""
        if self.config.instructions is not None:
            return self.config.instructions
        rules = self.toy.get("rules", f"You are in the environment {self.config.id}.")
        usage = "Call act in every turn."
        if plain:
            act = self.act_tool()
            usage = f"End every turn with a line `Action: act[action]`. {act.description}"
        return f"{rules}\n{usage}\n\n"

    def reset(self, seed: int) -> str:
        return self._describe(self.env.reset(seed=seed)[0])

    def step(self, move: Any) -> seeded.Step:
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
            event, reply, reward, over = self._act(call.tool, call.text)
            events.append(event)
            replies.append(reply)
            total += reward
            if over:
                break
        return replies, total, over

    def _act(self, tool: str, text: str) -> tuple[str, str, float, bool]:
        """Take the step that a call asks for. Returns (event, reply, reward, over)."""
        if tool != "act":
            return "malformed", f"error: no tool {tool[:40]}; there is act", 0.0, False
        try:
            action = words.parse_action(self.space, text, self.names)
        except words.TextFormError as error:
            return "act_error", f"error: {error}", 0.0, False
        return "act", *self.step(action)

    def _describe(self, observation: Any) -> str:
        if self.config.observation == "ansi":
            return words.describe_ansi(self.env.render())
        if self.toy:
            return words.describe_toy(self.env.unwrapped, observation, self.toy)
        return words.describe_value(observation)


def build(
    config: GymnasiumTask, tokenizer: PreTrainedTokenizerBase, **path: Unpack[PathOptions]
) -> seeded.SeededEnvironment:
    """Build one gymnasium environment, played from many seeds."""
    env = build_checked_environment(config)
    instructions = env.instructions(plain=tokenizer.chat_template is None)
    turns = tool_format(tokenizer, {"act": env.act_tool()}, instructions)
    return seeded.SeededEnvironment(config, config.id, env, tokenizer, turns, **path)


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
        words.describe_actions(env.space, env.names)
        repeatable = seeded.is_repeatable(env, TRIAL_SEEDS)
    except words.TextFormError as error:
        raise UsageError(
            f"task.id: {config.id} observes {env.env.observation_space} and is acted on by "
            f"{env.space}; {error} has no form in words here"
        ) from error
    except env.errors as error:
        raise UsageError(f"task.id: {config.id} fails in its first steps: {error!r}") from error
    if not repeatable:
        raise seeded.chance_error("task.id", config.id)
    return env
