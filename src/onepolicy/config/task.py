"""Problems to train on, single-turn and in episodes, and prompts to measure on."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from onepolicy.config.base import (
    LARGEST_FLOAT,
    LARGEST_INT,
    Count,
    Frozen,
    LargeCount,
    PositiveFloat,
    Seed,
    SmallCount,
    Tokens,
)


class ChainTask(Frozen):
    """Chained single-digit arithmetic mod 10 with worked solutions, the tiny policy's own task."""

    kind: Literal["chain"] = "chain"
    """Chained single-digit arithmetic mod 10, which the tiny policy is warmed up on."""
    ops: SmallCount = 12
    """Operations per problem."""
    seed: Seed = 0
    """Seed of problems, their order or episodes."""


class GymTask(Frozen):
    """A reasoning-gym data set, generated and graded by that library."""

    kind: Literal["gym"] = "gym"
    """A reasoning-gym data set, generated and graded by that library."""
    name: str
    """Name of the data set, e.g. `chain_sum`."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the data set or environment."""
    seed: Seed = 0
    """Seed of problems, their order or episodes."""
    threshold: float = Field(1.0, gt=0, le=1)
    """Least reward that counts as solved in accuracy."""


class JsonlTask(Frozen):
    """Lines of {"prompt": ..., "answer": ...}. docs/training.md has an example."""

    kind: Literal["jsonl"] = "jsonl"
    """Lines of {"prompt": ..., "answer": ...}; the answer is a string or a number
    (docs/training.md)."""
    path: str
    """JSONL file of problems."""
    held_out_path: str | None = None
    """JSONL file of evaluation problems. Unset: the last `held_out` lines of `path`."""
    held_out: LargeCount = 64
    """Last lines of `path`, evaluated on and not trained on, without held_out_path."""
    grader: Literal["exact", "math"] = "exact"
    """exact: compare the answer after the last `answer_prefix` as a string. math: math-verify."""
    answer_prefix: str = ""
    """Text before the answer in a response, e.g. `####`. Empty: the whole response is the
    answer."""
    seed: Seed = 0
    """Seed of problems, their order or episodes."""

    @model_validator(mode="after")
    def _check_held_out(self) -> Self:
        if self.held_out_path is not None and "held_out" in self.model_fields_set:
            raise ValueError(
                f"task.held_out: {self.held_out} lines would be held out, but task.held_out_path = "
                f"{self.held_out_path} has the held-out problems; leave one of the two out"
            )
        return self

    @model_serializer(mode="wrap")
    def _effective(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        settings: dict[str, Any] = dump(self)
        if self.held_out_path is not None:
            settings.pop("held_out", None)  # or the stored settings would set it
        return settings


class PromptsTask(Frozen):
    """Prompts without answers, for `onepolicy measure`. They cannot be trained on."""

    kind: Literal["prompts"] = "prompts"
    """Prompts without answers, for `onepolicy measure`. They cannot be trained on."""
    path: str
    """File of lines of text, or of {"prompt": ..., "answer": ...}. Answers are not read."""


class CalculatorTool(Frozen):
    """Exact arithmetic on an expression."""

    kind: Literal["calculator"] = "calculator"
    """Exact arithmetic on an expression."""
    operations: Count | None = None
    """Most operations of one call. Unset: any number."""


class PythonTool(Frozen):
    """Python in a bubblewrap sandbox: no network, no files but a scratch folder in memory."""

    kind: Literal["python"] = "python"
    """Python in a bubblewrap sandbox: no network, no files but a scratch folder in memory."""
    seconds: PositiveFloat = 5.0
    """Wall time of a call, and CPU time of each of its processes [s]."""
    memory_mib: int = Field(256, ge=64, le=LARGEST_INT)
    """Address space of each process [MiB]."""
    output_chars: Count = 2000
    """Longest output of a call [characters]. The rest is cut."""


class SearchTool(Frozen):
    """BM25 retrieval over a local corpus."""

    kind: Literal["search"] = "search"
    """BM25 retrieval over a local corpus."""
    corpus: str
    """JSONL file with one {"text": ...} per passage."""
    passages: SmallCount = 3
    """Passages that a call returns."""


ToolConfig = Annotated[CalculatorTool | PythonTool | SearchTool, Field(discriminator="kind")]


class EpisodeTask(Frozen):
    """Settings that every kind with episodes of several turns has."""

    max_turns: SmallCount = 8
    """Most model turns of an episode, which earns 0 if it is not over by then."""
    max_tokens: Tokens | None = None
    """Most sampled tokens of an episode. Unset: the context. rollout.sampling.max_tokens limits a
    turn."""
    seconds: PositiveFloat | None = None
    """Wall time of an episode [s], which earns 0 if it is not over by then. Unset: none. With a
    limit no run repeats to the bit."""


class DialogueTask(EpisodeTask):
    """Settings of episodes whose turns and replies are written here."""

    history: Literal["fail", "fork"] = "fail"
    """If the chat template rewrites earlier turns: refuse to start, or make each rewritten history
    a sample."""


class ReActTask(DialogueTask):
    """Problems of another task, played in turns: think, call a tool, read its reply, answer."""

    kind: Literal["react"] = "react"
    """Problems of another task, played in turns: think, call a tool, read its reply, answer."""
    problems: Annotated[GymTask | JsonlTask, Field(discriminator="kind")]
    """Task whose problems are played."""
    tools: tuple[ToolConfig, ...] = Field(min_length=1)
    """Tools that the policy may call."""
    reply_chars: Count = 1000
    """Longest reply of a tool [characters]. The rest is cut, before the last line."""
    instructions: str | None = None
    """Text before the problem. Unset: what there is to do, unless the chat template says so."""

    @property
    def threshold(self) -> float:
        """Least reward that counts as solved, as for the problems themselves."""
        return getattr(self.problems, "threshold", 1.0)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        kinds = [tool.kind for tool in self.tools]
        repeated = next((kind for kind in kinds if kinds.count(kind) > 1), None)
        if repeated is not None:
            raise ValueError(
                f"task.tools: {repeated} is there {kinds.count(repeated)} times; name each tool "
                "once"
            )
        return self


class GymnasiumTask(DialogueTask):
    """A gymnasium environment whose observations and actions can be written as text."""

    kind: Literal["gymnasium"] = "gymnasium"
    """A gymnasium environment, one step a turn, with observations and actions written as text."""
    id: str
    """Name in gymnasium's registry, e.g. `FrozenLake-v1`."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the data set or environment."""
    returns: tuple[float, float]
    """Returns (sums of rewards) that earn 0 and 1, linear between, cut beyond."""
    observation: Literal["words", "ansi"] = "words"
    """words: toy_text's observations decoded, others as numbers. ansi: the environment's
    drawing."""
    actions: tuple[str, ...] | None = None
    """Names of a Discrete space's actions, in order. Unset: toy_text's own, else the numbers."""
    instructions: str | None = None
    """Text before the problem. Unset: what there is to do, unless the chat template says so."""
    seed: Seed = 0
    """Seed of problems, their order or episodes."""
    threshold: float = Field(1.0, gt=0, le=1)
    """Least reward that counts as solved in accuracy."""

    @model_validator(mode="after")
    def _check_environment(self) -> Self:
        _check_returns(self.returns)
        names = [name.strip().lower() for name in self.actions or ()]
        if len(set(names)) < len(names) or "" in names:
            raise ValueError(
                f"task.actions: {list(self.actions or ())} are not different names; name each "
                "action once"
            )
        if "render_mode" in self.params:
            raise ValueError(
                f"task.params.render_mode: {self.params['render_mode']!r} cannot be set here; "
                "leave it out, or set task.observation=ansi for the environment's drawing"
            )
        return self


class TextArenaTask(DialogueTask):
    """A game of textarena for one player. A turn of the policy is its move, in the game's words."""

    kind: Literal["textarena"] = "textarena"
    """A game of textarena for one player. A turn of the policy is its move, in the game's words."""
    game: str
    """Name in textarena's registry, e.g. `GuessTheNumber-v0`. Played without textarena's
    wrappers."""
    params: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the data set or environment."""
    returns: tuple[float, float] = (0.0, 1.0)
    """Results that earn 0 and 1, linear between, cut beyond. A lost game has its share of
    completion."""
    instructions: str = ""
    """Text before the game's own rules."""
    seed: Seed = 0
    """Seed of problems, their order or episodes."""
    threshold: float = Field(1.0, gt=0, le=1)
    """Least reward that counts as solved in accuracy."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        _check_returns(self.returns)
        return self


class VerifiersTask(DialogueTask):
    """An environment of verifiers (0.4) with one agent. It asks for turns and scores them."""

    kind: Literal["verifiers"] = "verifiers"
    """An environment of verifiers (0.4) whose one agent chats. It asks for turns and scores
    them."""
    env: dict[str, JsonValue]
    """verifiers' own settings, e.g. `{ taskset = { id = "textarena", game = "Wordle-v0" } }`."""
    returns: tuple[float, float] | None = None
    """Weighted sums of rewards that earn 0 and 1, linear between, cut beyond. Unset: the sum is the
    reward."""
    seed: Seed = 0
    """Seed of problems, their order or episodes."""
    threshold: float = Field(1.0, gt=0, le=LARGEST_FLOAT)
    """Least reward that counts as solved in accuracy."""

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.returns is not None:
            _check_returns(self.returns)
        return self


GATEWAY_VARIABLES = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
)
"""Variables by which clients find a server. A program's are those of its episode."""


class ProgramTask(EpisodeTask):
    """A program that talks to a model by an API, started for every episode in a sandbox."""

    kind: Literal["program"] = "program"
    """A program that speaks an API of OpenAI or Anthropic, started in a sandbox for every episode
    (docs/gateway.md)."""
    problems: Annotated[GymTask | JsonlTask, Field(discriminator="kind")]
    """Task whose problems the program gets."""
    command: tuple[str, ...] = Field(min_length=1)
    """Words of the command. `{prompt}` in a word is the problem's prompt; else it is on stdin."""
    folder: str | None = None
    """Folder of the program, read-only at /program. Unset: it lies in /usr or in `readable`."""
    readable: tuple[str, ...] = ()
    """Further folders and files that it sees, read-only, at their own paths. It sees /usr
    always."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables beside the gateway's address and key."""
    reward: Literal["grader", "exit", "file"] = "grader"
    """grader: that of `problems`, on what it prints. exit: 1 for status 0. file: the number in
    result_file. A program that dies or takes too long earns 0."""
    result_file: str | None = None
    """File in its working folder with the answer or number. Unset: what it prints."""
    max_turns: SmallCount = 64
    """Most model turns of an episode, all conversations together; later requests are refused."""
    max_tokens: Tokens | None = None
    """Most sampled tokens of an episode; later requests are refused. Unset: no limit."""
    seconds: PositiveFloat = 600.0
    """Wall time of an episode [s]. A program that still runs then is ended."""
    concurrency: int = Field(16, gt=0, le=2**12)
    """Programs that run at a time."""
    memory_mib: int = Field(4096, ge=64, le=LARGEST_INT)
    """Data memory of each process [MiB]."""
    processes: SmallCount = 64
    """Processes and threads of a program, two of the sandbox included."""
    scratch_mib: int = Field(64, ge=1, le=LARGEST_INT)
    """Its working folder, which is in memory [MiB]."""
    credit: Literal["episode", "main"] = "episode"
    """Turns that the reward trains: of all conversations, or of the first and what it was compacted
    to."""
    thoughts: Literal["keep", "as-sent"] = "keep"
    """A turn that comes back without its thoughts: continue it with them, or begin anew."""
    template: str | None = None
    """File with a chat template. Unset: the tokenizer's."""

    @property
    def threshold(self) -> float:
        """Least reward that counts as solved: the grader's own, else 1."""
        if self.reward == "grader":
            return getattr(self.problems, "threshold", 1.0)
        return 1.0

    @model_validator(mode="after")
    def _check_program(self) -> Self:
        if (self.reward == "file") > (self.result_file is not None):
            raise ValueError(
                "task.result_file: reward = file reads the reward from a file; name the file that "
                "the program writes"
            )
        if self.reward == "exit" and self.result_file is not None:
            raise ValueError(
                f"task.result_file: {self.result_file} is not read with reward = exit; leave it "
                "out, or set task.reward"
            )
        parts = PurePosixPath(self.result_file or "result").parts
        if not parts or self.result_file == "" or parts[0] == "/" or ".." in parts:
            raise ValueError(
                f"task.result_file: {self.result_file!r} is no file in the program's working "
                "folder; give a path that is relative to it"
            )
        taken = next((name for name in GATEWAY_VARIABLES if name in self.env), None)
        if taken is not None:
            raise ValueError(
                f"task.env: {taken} names the gateway of the episode, which is set here; leave it "
                "out"
            )
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
    | VerifiersTask
    | ProgramTask,
    Field(discriminator="kind"),
]
