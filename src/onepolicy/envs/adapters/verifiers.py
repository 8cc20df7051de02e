"""verifiers environments (its 0.4 interface, `verifiers.v1`): the environment drives the episode, our engine the turns.

An environment there is a program over agents: `Env.run(task, agents)` asks an agent for turns and answers as its user.
It gets ours instead of one that talks to a server (verifiers_agent.py), so what is sampled is trained on as it was
sampled. No harness, sandbox, tool server or model endpoint of verifiers is started; what needs one is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

from transformers import PreTrainedTokenizerBase

from onepolicy.config import RowPolicy, UsageError, VerifiersTask
from onepolicy.envs.adapters.seeded import START_UP, scaled
from onepolicy.envs.multiturn.chat_dialogue import build_talk, said
from onepolicy.envs.multiturn.chat_template import THOUGHT_END, Opening
from onepolicy.envs.multiturn.episode import Episode, InTurns
from onepolicy.envs.tasks.reasoning_gym import LIBRARY_ERRORS, TRIES
from onepolicy.envs.tasks.seeding import Split, rng_of, split_of
from onepolicy.interfaces import EpisodeError, Problem

ROLES = ("system", "user", "assistant")


def opening_of(task: Any) -> list[tuple[str, str]]:
    """(role, text) of a task's system prompt and prompt. UsageError if they are no text."""
    data = task.data
    if data.prompt is None:
        raise UsageError(
            f"task.env: task {data.idx} has no prompt; environments whose user speaks first are not played"
        )
    opening = [] if data.system_prompt is None else [("system", data.system_prompt)]
    if isinstance(data.prompt, str):
        return [*opening, ("user", data.prompt)]
    for message in data.prompt:
        if (
            message.role not in ROLES
            or not isinstance(message.content, str)
            or getattr(message, "tool_calls", None)
        ):
            raise UsageError(
                f"task.env: the prompt of task {data.idx} has more than text (pictures or tools)"
            )
        opening.append((message.role, message.content))
    return opening


class Player:
    """Stands in for verifiers' Agent in `Env.run`: `run` is one turn, `interaction` as many as are asked for.

    Turns come from our episode, token ids in and out; the trace holds their texts. `cut`: a turn or the episode ended
    at one of our limits. `failure`: an error of our engine, not of the environment.
    """

    trainable = True

    def __init__(
        self, spec: Any, seat: str, task: Any, episode: Episode, closed: Callable[[Any], None]
    ) -> None:
        """closed: gets the trace of the exchange once it is scored."""
        self.config, self._seat, self._task, self._episode, self._closed = (
            spec,
            seat,
            task,
            episode,
            closed,
        )
        self._taken = False
        self.cut = False
        self.failure: BaseException | None = None

    async def run(self, task: Any, **where: Any) -> Any:
        async with self.interaction(task, **where) as exchange:
            await exchange.turn()
            exchange.trace.stop("agent_completed")
        return exchange.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **where: Any) -> AsyncIterator[Exchange]:
        if self._taken:
            raise UsageError(
                f"task.env: the environment plays its agent {self._seat} more than once an episode"
            )
        if where or opening_of(task) != opening_of(self._task):
            raise UsageError(
                f"task.env: the environment hands its agent {self._seat} "
                f"{', '.join(where) if where else 'another prompt than the task has'}; that is not played"
            )
        self._taken = True
        exchange = Exchange(self, self._episode, new_trace(task, self.config, self._seat))
        await _hook(task.setup, exchange.trace)
        yield exchange
        exchange.trace.stop("user_closed")
        if not self.cut:
            await _hook(task.finalize, exchange.trace)
            await task.score(exchange.trace)
        exchange.trace.ok = True
        self._closed(exchange.trace)


class Exchange:
    """Stands in for verifiers' Interaction."""

    def __init__(self, player: Player, episode: Episode, trace: Any) -> None:
        from verifiers.v1.session import RolloutLimits

        self._player, self._episode, self.trace = player, episode, trace
        names = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
        self._limits = RolloutLimits(**{name: getattr(player.config, name) for name in names})

    async def turn(self, message: Any = None) -> Any:
        """One turn of the policy, after the user's `message` (none before the first). A segment without messages says
        that there is none left."""
        import verifiers.v1 as vf

        opens = not self.trace.num_turns
        if opens != (message is None):
            raise UsageError(
                "task.env: the task's prompt opens the exchange, and every later turn needs a message"
            )
        if self.trace.is_completed or await self._stopped():
            return vf.Segment(messages=[], terminated=True)
        if opens:
            self._read(opening_of(self.trace.task))
        else:
            texts = _texts(message)
            self._episode.reply(["\n\n".join(texts)])
            self._read([("user", text) for text in texts])
        before = len(self._episode.path.tokens)
        try:
            text = await self._episode.turn()
        except BaseException as error:
            self._player.failure = error
            raise
        if text is None:
            self._player.cut = True
            self.trace.stop(f"max_{self._episode.finish}")
            return vf.Segment(messages=[], terminated=True)
        spoken = self._spoke(text, before, len(self._episode.path.tokens))
        return vf.Segment(messages=[spoken])

    async def send(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "task.env: the environment sends its agent messages in the middle of a turn; that is not played"
        )

    steer = send

    async def _stopped(self) -> bool:
        """verifiers' own limits and stop hooks, in its order: before a turn."""
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        condition = self._limits.reached(self.trace)
        for stop in self._player._task.hooks("stop") if condition is None else ():
            if await call_hook(stop, {vf.Trace: self.trace}):
                condition = stop.__name__
                break
        if condition is not None:
            self.trace.stop(condition)
        return condition is not None

    def _read(self, messages: Sequence[tuple[str, str]]) -> None:
        import verifiers.v1 as vf

        kinds = {
            "system": vf.SystemMessage,
            "user": vf.UserMessage,
            "assistant": vf.AssistantMessage,
        }
        for role, text in messages:
            self._append(kinds[role](content=text), sampled=False)

    def _spoke(self, text: str, before: int, after: int) -> Any:
        """before, after: tokens of the path without and with the turn."""
        import verifiers.v1 as vf

        thought = text.rpartition(THOUGHT_END)[0].replace("<think>", "").strip()
        message = vf.AssistantMessage(content=said(text), reasoning_content=thought or None)
        node = self._append(message, sampled=True)
        usage = vf.Usage(prompt_tokens=before, completion_tokens=after - before)
        self.trace.calls.append(vf.ModelCall(node=node, finish_reason="stop", usage=usage))
        return message

    def _append(self, message: Any, *, sampled: bool) -> int:
        import verifiers.v1 as vf

        nodes = self.trace.nodes
        nodes.append(
            vf.MessageNode(
                parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled
            )
        )
        return len(nodes) - 1


def new_trace(task: Any, spec: Any, seat: str) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=spec, name=seat),
    )


async def _hook(hook: Callable[..., Any], trace: Any) -> None:
    """setup and finalize, without a runtime (those that need one are refused at the start)."""
    from verifiers.v1.utils.decorators import invoke

    await invoke(hook, {"trace": trace, "runtime": None})


def _texts(message: Any) -> Sequence[str]:
    """The texts of a user's turn."""
    if isinstance(message, str):
        return [message]
    texts = []
    for each in message:
        role, text = (
            (each["role"], each["content"]) if isinstance(each, dict) else (each.role, each.content)
        )
        if role != "user" or not isinstance(text, str):
            raise UsageError(
                f"task.env: the environment answers with a message of {role} that is no user's text"
            )
        texts.append(text)
    return texts


class Verifiers(InTurns):
    def __init__(
        self,
        config: VerifiersTask,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        rows: RowPolicy = "as-sampled",
    ) -> None:
        self.config = config
        self.env, self.seat = load(config)
        tasks = Tasks(self.env.taskset, config.seed)
        super().__init__(config, tasks, tokenizer, max_len=max_len, rows=rows)
        self.dialogue = build_talk(tokenizer, fork=config.history == "fork")

    def check(self, *, max_tokens: int, max_len: int) -> None:
        for problem in self.problems.start_up_problems():
            check_task((problem.entry or {})["task"])
        super().check(max_tokens=max_tokens, max_len=max_len)

    def opening(self, problem: Problem) -> Opening:
        assert problem.entry is not None
        return opening_of(problem.entry["task"])

    async def play(self, problem: Problem, episode: Episode) -> float:
        """What the environment's rewards add up to; 0 for an episode that one of our limits cut."""
        import verifiers.v1 as vf

        assert problem.entry is not None
        task = problem.entry["task"]
        spec = getattr(self.env.config, self.seat)
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        record: Any = vf.Episode(env=vf.EnvInfo(id=self.env.config.env_id), task=about)
        player = Player(spec, self.seat, task, episode, record.traces.append)
        agents: Any = vf.Agents(self.env.config, lambda name, config: player)
        try:
            await self.env.setup(agents)
            await self.env.run(task, agents)
            if not episode.began:
                raise EpisodeError(f"{self.env.config.env_id} asked its agent for no turn")
            if not player.cut:
                await self.env.finalize(task, record)
        except UsageError:
            raise
        except (vf.RolloutError, *LIBRARY_ERRORS, OSError) as error:
            if player.failure is not None:
                raise player.failure from None
            raise EpisodeError(f"{self.env.config.env_id} failed: {error!r}") from error
        if player.cut:
            return 0.0
        total = float(record.traces[0].reward)
        return total if self.config.returns is None else scaled(total, self.config.returns)


class Tasks:
    """The tasks of a taskset: one in four is held out, by the hash of its content, so no content is on both sides.

    Training ids count up from 0 (over reshuffled epochs where the taskset ends), held-out ids down from -1.
    """

    def __init__(self, taskset: Any, seed: int) -> None:
        self._seed, self._ends = seed, bool(taskset.bounded)
        self._sides: dict[Split, list[Any]] = {"train": [], "held_out": []}
        self._rest: Iterator[Any] = iter(taskset)
        self._order: tuple[int, list[int]] = (-1, [])  # of the last epoch asked for
        if self._ends:
            while self._draw():
                pass
        if not self._have("train", 1):
            raise UsageError(
                "task.env: none of the taskset's tasks is for training (one in four is held out)"
            )

    def train_problem(self, index: int) -> Problem:
        place, side = index, self._sides["train"]
        if self._ends:
            epoch, place = divmod(index, len(side))
            if self._order[0] != epoch:
                self._order = (
                    epoch,
                    rng_of("verifiers epoch", self._seed, epoch).permutation(len(side)).tolist(),
                )
            place = self._order[1][place]
        elif not self._have("train", index + 1):
            raise UsageError(
                f"task.env: the taskset ended after {len(side)} tasks though it says it has no end"
            )
        return _problem(index, side[place])

    def held_out(self, count: int) -> list[Problem]:
        if not self._have("held_out", count):
            raise UsageError(
                f"eval.problems: {count} are asked for, but {len(self._sides['held_out'])} of the taskset's tasks are "
                "held out; lower eval.problems"
            )
        return [_problem(-1 - i, task) for i, task in enumerate(self._sides["held_out"][:count])]

    def start_up_problems(self) -> Iterable[Problem]:
        """All of those to train on where the taskset ends."""
        return map(self.train_problem, range(len(self._sides["train"]) if self._ends else START_UP))

    def _have(self, side: Split, count: int) -> bool:
        """Draw until that many are on the side."""
        for _ in range(TRIES + 20 * count):
            if len(self._sides[side]) >= count or not self._draw():
                break
        return len(self._sides[side]) >= count

    def _draw(self) -> bool:
        task = next(self._rest, None)
        if task is not None:
            content = task.data.model_dump(mode="json", exclude={"idx", "name", "id"})
            self._sides[split_of(repr(sorted(content.items())))].append(task)
        return task is not None


def _problem(problem_id: int, task: Any) -> Problem:
    return Problem(problem_id, task.data.prompt_text, "", {"task": task})


def load(config: VerifiersTask) -> tuple[Any, str]:
    """The environment and the name of its one agent. UsageError if it cannot be played here."""
    if find_spec("verifiers") is None:
        raise UsageError("task.kind: verifiers is not installed; pip install 'verifiers>=0.4,<0.5'")
    if find_spec("verifiers.v1") is None:
        raise UsageError(
            "task.kind: this release of verifiers has no verifiers.v1; pip install 'verifiers>=0.4,<0.5'"
        )
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    try:
        env = load_environment(resolve_env_config(dict(config.env)))
    except (ImportError, *LIBRARY_ERRORS) as error:
        raise UsageError(f"task.env: verifiers cannot load {config.env!r}: {error}") from error
    _check_environment(env)
    return env, _one_seat(env)


def _one_seat(env: Any) -> str:
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id

    seats = agent_config_fields(env.config)
    if len(seats) != 1:
        raise UsageError(
            f"task.env: {env.config.env_id} has {len(seats)} agents, {', '.join(seats)}; one can be trained"
        )
    ((seat, spec),) = seats.items()
    if (
        default_harness_id(env.config.taskset.id) != "bash"
    ):  # what verifiers takes for a taskset that brings none
        raise UsageError(
            f"task.env: {env.config.taskset.id} brings a harness of its own; only plain chat is played"
        )
    for name in ("harness", "runtime", "model", "client", "sampling", "timeout", "retries"):
        if getattr(spec, name) != AgentConfig.model_fields[name].default:
            raise UsageError(
                f"task.env.{seat}.{name}: has no effect, our engine plays the turns; leave it out"
            )
    return seat


def _check_environment(env: Any) -> None:
    import verifiers.v1 as vf

    for name in ("timeout", "retries", "max_concurrent_agents", "interception"):
        if getattr(env.config, name) != vf.EnvConfig.model_fields[name].default:
            raise UsageError(
                f"task.env.{name}: has no effect here; leave it out (task.seconds limits an episode)"
            )
    if type(env).start is not vf.Env.start or env.taskset.toolsets(env.taskset.config):
        raise UsageError(
            f"task.env: {env.config.env_id} starts servers of its own, which are not run here"
        )


def check_task(task: Any) -> None:
    """UsageError if a task needs more than text and its trace."""
    import verifiers.v1 as vf
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    name = type(task).__name__
    needs = [
        (task.NEEDS_CONTAINER or task.data.image is not None, "a container"),
        (bool(task.toolsets(task.config)), "tool servers"),
        (bool(task.data.skills or task.data.artifacts), "skills or artifacts in a runtime"),
        (bool(task.plugged_judges()), "judge models"),
        (bool(discover_decorated(task, "intercept")), "to intercept requests"),
        (
            any(
                hook_boundary(stop, allow_trace=True) is not vf.Trace for stop in task.hooks("stop")
            ),
            "to see requests",
        ),
    ]
    hooks = [*task.hooks("reward"), *task.hooks("metric")]
    hooks += [
        getattr(task, hook)
        for hook in ("setup", "finalize")
        if getattr(type(task), hook) is not getattr(vf.Task, hook)
    ]
    needs += [(_needs_runtime(hook), f"a runtime (in {hook.__name__})") for hook in hooks]
    if found := [what for needed, what in needs if needed]:
        raise UsageError(
            f"task.env: {name} needs {' and '.join(found)}, which is not run here; take a taskset of text"
        )


def _needs_runtime(hook: Any) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty
