"""What is trained on: the quickstart task, a reasoning-gym data set by name, a JSONL file; or prompts to measure on."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from onepolicy.config.base import LARGEST, MOST, Amount, Count, Few, Frozen, Many, Seed, Tokens


class ChainTask(Frozen):
    """Chained single-digit arithmetic mod 10 with worked solutions; the tiny policy is warmed up on it."""

    kind: Literal["chain"] = "chain"
    ops: Few = 12
    """Operations per problem."""
    seed: Seed = 0


class GymTask(Frozen):
    """A reasoning-gym data set, generated and graded by that library."""

    kind: Literal["gym"] = "gym"
    name: str
    """Data set name, e.g. `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the data set's own config."""
    seed: Seed = 0
    threshold: float = Field(1.0, gt=0, le=1)
    """Scores below this count as 0 in accuracy; the reward is the score itself."""


class JsonlTask(Frozen):
    """Lines of {"prompt": ..., "answer": ...}; the answer is a string or a number. docs/tasks.md has an example."""

    kind: Literal["jsonl"] = "jsonl"
    path: str
    held_out_path: str | None = None
    """Evaluation problems; unset: the last `held_out` lines of `path`, which are then not trained on."""
    held_out: Many = 64
    grader: Literal["exact", "math"] = "exact"
    """`exact`: the answer after the last `answer_prefix`, compared as a string; `math`: math-verify."""
    answer_prefix: str = ""
    """Text before the answer in a response, e.g. `####`; empty: the whole response is the answer."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _settings_take_effect(self) -> Self:
        if self.held_out_path is not None and "held_out" in self.model_fields_set:
            raise ValueError(
                f"task.held_out: {self.held_out} has no effect with task.held_out_path={self.held_out_path}, whose "
                "lines are all held out; leave one of the two out"
            )
        return self

    @model_serializer(mode="wrap")
    def _effective(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        settings: dict[str, Any] = dump(self)
        if self.held_out_path is not None:
            settings.pop("held_out", None)  # or the stored settings would set it
        return settings


class PromptsTask(Frozen):
    """Prompts without answers, for `onepolicy measure`: nothing is graded, so there is nothing to train on."""

    kind: Literal["prompts"] = "prompts"
    path: str
    """Lines of text, or of {"prompt": ..., "answer": ...}; an answer is not needed and not read."""


class CalculatorTool(Frozen):
    """Exact arithmetic on an expression."""

    kind: Literal["calculator"] = "calculator"
    operations: Count | None = None
    """Most operations of one call; unset: any number."""


class PythonTool(Frozen):
    """Python in a bubblewrap sandbox: no network, no files but a scratch folder in memory."""

    kind: Literal["python"] = "python"
    seconds: Amount = 5.0
    """Wall time, and CPU time of each process."""
    memory_mib: int = Field(256, ge=64, le=MOST)
    """Address space of each process."""
    output_chars: Count = 2000


class SearchTool(Frozen):
    """BM25 retrieval over a local corpus."""

    kind: Literal["search"] = "search"
    corpus: str
    """JSONL file, one {"text": ...} per passage."""
    passages: Few = 3
    """Passages returned by a call."""


ToolConfig = Annotated[CalculatorTool | PythonTool | SearchTool, Field(discriminator="kind")]


class EpisodeTask(Frozen):
    """What every kind with episodes of several turns has."""

    max_turns: Few = 8
    """Model turns of an episode; one that is not over after that many earns 0."""
    max_tokens: Tokens | None = None
    """Sampled tokens of an episode, all turns together; unset: no limit but the context. One turn is limited by
    rollout.sampling.max_tokens."""
    seconds: Amount | None = None
    """Wall time of an episode; one that is not over by then earns 0. A run with it cannot be repeated to the bit."""
    history: Literal["fail", "fork"] = "fail"
    """A chat template that renders earlier turns anew once there are later ones: `fail` refuses it at start-up; `fork`
    makes a sample of its own of every rewritten history."""


class ReActTask(EpisodeTask):
    """Problems of another task, played in turns: think, call a tool, read its reply, answer."""

    kind: Literal["react"] = "react"
    problems: Annotated[GymTask | JsonlTask, Field(discriminator="kind")]
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    reply_chars: Count = 1000
    """Longest reply of a tool; the rest is cut."""
    instructions: str | None = None
    """Text before every question; unset: the tools and how to call them, where the chat template does not say so."""

    @property
    def threshold(self) -> float:
        """Rewards from here on count as solved, as for the problems themselves."""
        return getattr(self.problems, "threshold", 1.0)

    @model_validator(mode="after")
    def _each_tool_once(self) -> Self:
        kinds = [tool.kind for tool in self.tools]
        twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if twice is not None:
            raise ValueError(
                f"task.tools: {twice} is there {kinds.count(twice)} times; name each tool once"
            )
        return self


class GymnasiumTask(EpisodeTask):
    """A gymnasium environment whose observations and actions can be written as text, one step a turn."""

    kind: Literal["gymnasium"] = "gymnasium"
    id: str
    """Its name in gymnasium's registry, e.g. `FrozenLake-v1`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of gymnasium.make."""
    returns: tuple[float, float]
    """The returns (sums of an episode's rewards) that earn 0 and 1; linear between them, cut beyond them."""
    observation: Literal["words", "ansi"] = "words"
    """`words`: toy_text's observations decoded, others as their numbers; `ansi`: what the environment draws."""
    actions: tuple[str, ...] | None = None
    """Names of a Discrete space's actions, in order; unset: toy_text's own, else the numbers."""
    instructions: str | None = None
    """Text before the first observation; unset: the rules where they are known, and how to act."""
    seed: Seed = 0
    threshold: float = Field(1.0, gt=0, le=1)
    """Rewards from here on count as solved."""

    @model_validator(mode="after")
    def _settings_make_sense(self) -> Self:
        _check_returns(self.returns)
        names = [name.strip().lower() for name in self.actions or ()]
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(
                f"task.actions: {list(self.actions or ())} are not different names; name each action once"
            )
        if "render_mode" in self.params:
            raise ValueError(
                f"task.params.render_mode: {self.params['render_mode']!r} cannot be set here; leave it out, or set "
                "task.observation=ansi for what the environment draws"
            )
        return self


class TextArenaTask(EpisodeTask):
    """A game of textarena for one player. A turn of the policy is its move, in the game's own words."""

    kind: Literal["textarena"] = "textarena"
    game: str
    """Its name in textarena's registry, e.g. `GuessTheNumber-v0`; played without textarena's wrappers."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of textarena.make."""
    returns: tuple[float, float] = (0.0, 1.0)
    """The results that earn 0 and 1; linear between them, cut beyond them. A lost game of one player is worth what the
    game calls its share of completion."""
    instructions: str = ""
    """Text before the game's own rules."""
    seed: Seed = 0
    threshold: float = Field(1.0, gt=0, le=1)
    """Rewards from here on count as solved."""

    @model_validator(mode="after")
    def _returns_rise(self) -> Self:
        _check_returns(self.returns)
        return self


class VerifiersTask(EpisodeTask):
    """An environment of verifiers (0.4) whose one agent chats: it asks for turns and scores the episode."""

    kind: Literal["verifiers"] = "verifiers"
    env: dict[str, Any]
    """verifiers' own settings of an environment, e.g. `{ taskset = { id = "textarena", game = "Wordle-v0" } }`."""
    returns: tuple[float, float] | None = None
    """The weighted sums of rewards that earn 0 and 1, as elsewhere; unset: the sum is the reward."""
    seed: Seed = 0
    threshold: float = Field(1.0, gt=0, le=LARGEST)
    """Rewards from here on count as solved."""

    @model_validator(mode="after")
    def _returns_rise(self) -> Self:
        if self.returns is not None:
            _check_returns(self.returns)
        return self


def _check_returns(returns: tuple[float, float]) -> None:
    low, high = returns
    if low >= high:
        raise ValueError(
            f"task.returns: {low:g} is not below {high:g}; give (return worth 0, return worth 1)"
        )


TaskConfig = Annotated[
    ChainTask
    | GymTask
    | JsonlTask
    | PromptsTask
    | ReActTask
    | GymnasiumTask
    | TextArenaTask
    | VerifiersTask,
    Field(discriminator="kind"),
]
