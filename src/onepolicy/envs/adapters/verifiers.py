"""Environments of verifiers (its 0.4 interface, `verifiers.v1`), with turns from our engine.

A verifiers environment is a program over agents: `Env.run(task, agents)` asks an agent for turns
and answers as its user. Here the agent is a `PolicyAgent`, which samples from our engine instead of
a server, so the sampled tokens are the tokens that are trained on. No harness, sandbox, tool server
or model endpoint of verifiers is started. An environment that needs one of these is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Unpack

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError, VerifiersTask
from onepolicy.envs.adapters.seeded import NUM_STARTUP_PROBLEMS, scale_return
from onepolicy.envs.adapters.verifiers_checks import (
    check_task_supported,
    load_single_agent_env,
)
from onepolicy.envs.multiturn.dialogue import InitialPrompt, TurnFormat
from onepolicy.envs.multiturn.episode import Episode, MultiTurnEnvironment, PathOptions
from onepolicy.envs.tasks.reasoning_gym import MAX_TRIES
from onepolicy.envs.tasks.seeding import Split, seeded_rng, split_of_text
from onepolicy.errors import LIBRARY_ERRORS
from onepolicy.interfaces import EpisodeError, Problem

ROLES = ("system", "user", "assistant")


def initial_messages(task: Any) -> list[tuple[str, str]]:
    """Return (role, text) of a task's system prompt and prompt.

    Raises UsageError if there is no prompt or a message is not plain text.
    """
    data = task.data
    if data.prompt is None:
        raise UsageError(
            f"task.env: task {data.idx} has no prompt; environments whose user speaks first are "
            "not played"
        )
    messages = []
    if data.system_prompt is not None:
        messages.append(("system", data.system_prompt))
    if isinstance(data.prompt, str):
        return [*messages, ("user", data.prompt)]
    for message in data.prompt:
        plain = message.role in ROLES and isinstance(message.content, str)
        if not plain or getattr(message, "tool_calls", None):
            raise UsageError(
                f"task.env: the prompt of task {data.idx} has more than text (pictures or tools)"
            )
        messages.append((message.role, message.content))
    return messages


class PolicyAgent:
    """A stand-in for verifiers' Agent in `Env.run`, which samples its turns from our episode.

    `run` is one turn; `interaction` has as many as the environment asks for. The episode takes and
    returns token ids, and the trace holds the texts. truncated: a turn or the episode ended at one
    of our limits. engine_error: an error of our engine, not of the environment.
    """

    trainable = True

    def __init__(
        self,
        config: Any,
        agent_name: str,
        task: Any,
        episode: Episode,
        on_scored: Callable[[Any], None],
    ) -> None:
        """Store the settings. on_scored: called with the trace once it is scored."""
        self.config = config
        self._agent_name = agent_name
        self._task = task
        self._episode = episode
        self._on_scored = on_scored
        self._played = False
        self.truncated = False
        self.engine_error: BaseException | None = None

    async def run(self, task: Any, **options: Any) -> Any:
        """Play one turn and return its trace."""
        async with self.interaction(task, **options) as interaction:
            await interaction.turn()
            interaction.trace.stop("agent_completed")
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **options: Any) -> AsyncIterator[PolicyInteraction]:
        """Open the interaction, and score its trace at the end. Raises UsageError."""
        self._check_supported(task, options)
        self._played = True
        trace = new_trace(task, self.config, self._agent_name)
        await _call_hook(task.setup, trace)
        yield PolicyInteraction(self, self._episode, trace)
        trace.stop("user_closed")
        if not self.truncated:
            await _call_hook(task.finalize, trace)
            await task.score(trace)
        trace.ok = True
        self._on_scored(trace)

    def _check_supported(self, task: Any, options: dict[str, Any]) -> None:
        """Raise UsageError for a second interaction, options, or another prompt than the task's."""
        if self._played:
            raise UsageError(
                f"task.env: the environment plays its agent {self._agent_name} more than once an "
                "episode"
            )
        changes = ", ".join(options)
        if not changes and initial_messages(task) != initial_messages(self._task):
            changes = "another prompt than the task has"
        if changes:
            raise UsageError(
                f"task.env: the environment gives its agent {self._agent_name} {changes}; that is "
                "not played"
            )


class PolicyInteraction:
    """A stand-in for verifiers' Interaction."""

    def __init__(self, agent: PolicyAgent, episode: Episode, trace: Any) -> None:
        from verifiers.v1.session import RolloutLimits

        self._agent, self._episode, self.trace = agent, episode, trace
        names = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens")
        self._limits = RolloutLimits(**{name: getattr(agent.config, name) for name in names})

    async def turn(self, message: Any = None) -> Any:
        """Sample one turn, after the user's `message` (None before the first turn).

        Returns a segment without messages if no turn is left.
        """
        import verifiers.v1 as vf

        first = not self.trace.num_turns
        if first != (message is None):
            raise UsageError(
                "task.env: the task's prompt opens the exchange, and every later turn needs a "
                "message"
            )
        if self.trace.is_completed or await self._check_stop():
            return vf.Segment(messages=[], terminated=True)
        if first:
            self._record_messages(initial_messages(self.trace.task))
        else:
            texts = _user_texts(message)
            self._episode.add_replies(["\n\n".join(texts)])
            self._record_messages([("user", text) for text in texts])
        before = len(self._episode.path.tokens)
        text = await self._sample_turn()
        if text is None:
            self._agent.truncated = True
            self.trace.stop(f"max_{self._episode.finish}")
            return vf.Segment(messages=[], terminated=True)
        answer = self._record_turn(text, before, len(self._episode.path.tokens))
        return vf.Segment(messages=[answer])

    async def _sample_turn(self) -> str | None:
        """Sample a turn and remember an error, which the environment may catch."""
        try:
            return await self._episode.sample_turn()
        except BaseException as error:
            self._agent.engine_error = error
            raise

    async def send(self, *_: Any, **__: Any) -> Any:
        raise UsageError(
            "task.env: the environment sends its agent messages in the middle of a turn; that is "
            "not played"
        )

    steer = send

    async def _check_stop(self) -> bool:
        """Check verifiers' own limits, then its stop hooks; return whether one ends the episode."""
        import verifiers.v1 as vf
        from verifiers.v1.session import call_hook

        condition = self._limits.reached(self.trace)
        if condition is None:
            for hook in self._agent._task.hooks("stop"):
                if await call_hook(hook, {vf.Trace: self.trace}):
                    condition = hook.__name__
                    break
        if condition is not None:
            self.trace.stop(condition)
        return condition is not None

    def _record_messages(self, messages: Sequence[tuple[str, str]]) -> None:
        import verifiers.v1 as vf

        kinds = {
            "system": vf.SystemMessage,
            "user": vf.UserMessage,
            "assistant": vf.AssistantMessage,
        }
        for role, text in messages:
            self._append_message(kinds[role](content=text), sampled=False)

    def _record_turn(self, text: str, before: int, after: int) -> Any:
        """Append a turn to the trace and return its message.

        before, after: tokens of the path without and with the turn.
        """
        import verifiers.v1 as vf

        thought, said = self._episode.env.turns.split_thoughts(text)
        message = vf.AssistantMessage(content=said, reasoning_content=thought or None)
        node = self._append_message(message, sampled=True)
        usage = vf.Usage(prompt_tokens=before, completion_tokens=after - before)
        self.trace.calls.append(vf.ModelCall(node=node, finish_reason="stop", usage=usage))
        return message

    def _append_message(self, message: Any, *, sampled: bool) -> int:
        """Append a message to the trace and return its index."""
        import verifiers.v1 as vf

        nodes = self.trace.nodes
        parent = None
        if nodes:
            parent = len(nodes) - 1
        nodes.append(vf.MessageNode(parent=parent, message=message, sampled=sampled))
        return len(nodes) - 1


def new_trace(task: Any, config: Any, agent_name: str) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    return vf.Trace(
        task=_trace_task(task),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=config, name=agent_name),
    )


def _trace_task(task: Any) -> Any:
    import verifiers.v1 as vf

    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


async def _call_hook(hook: Callable[..., Any], trace: Any) -> None:
    """Call setup or finalize without a runtime. `check_task_supported` refuses others."""
    from verifiers.v1.utils.decorators import invoke

    await invoke(hook, {"trace": trace, "runtime": None})


def _user_texts(message: Any) -> Sequence[str]:
    """Return the texts of a user's turn. Raises UsageError for any other message."""
    if isinstance(message, str):
        return [message]
    texts = []
    for each in message:
        if isinstance(each, dict):
            role, text = each["role"], each["content"]
        else:
            role, text = each.role, each.content
        if role != "user" or not isinstance(text, str):
            raise UsageError(
                f"task.env: the environment answers with a message of {role} that is no user's text"
            )
        texts.append(text)
    return texts


class Verifiers(MultiTurnEnvironment):
    """One environment of verifiers with one agent."""

    def __init__(
        self,
        config: VerifiersTask,
        tokenizer: PreTrainedTokenizerBase,
        **path: Unpack[PathOptions],
    ) -> None:
        self.config = config
        self.env, self.agent_name = load_single_agent_env(config)
        tasks = TasksetProblems(self.env.taskset, config.seed)
        super().__init__(config, tasks, tokenizer, TurnFormat(), **path)

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Check tasks, then prompts as in every environment. Raises UsageError."""
        for problem in self.problems.start_up_problems():
            check_task_supported((problem.entry or {})["task"])
        super().check(max_tokens=max_tokens, max_len=max_len)

    def initial_prompt(self, problem: Problem) -> InitialPrompt:
        assert problem.entry is not None
        return initial_messages(problem.entry["task"])

    async def play_episode(self, problem: Problem, episode: Episode) -> float:
        """Return the sum of the environment's rewards, or 0 if our limits cut the episode."""
        import verifiers.v1 as vf

        assert problem.entry is not None
        task = problem.entry["task"]
        env_id = self.env.config.env_id
        record: Any = vf.Episode(env=vf.EnvInfo(id=env_id), task=_trace_task(task))
        config = getattr(self.env.config, self.agent_name)
        agent = PolicyAgent(config, self.agent_name, task, episode, record.traces.append)
        agents: Any = vf.Agents(self.env.config, lambda name, config: agent)
        try:
            await self.env.setup(agents)
            await self.env.run(task, agents)
            if isinstance(agent.engine_error, Exception):  # which the environment has caught
                raise agent.engine_error
            if not episode.has_turns:
                raise EpisodeError(f"{env_id} asked its agent for no turn")
            if not agent.truncated:
                await self.env.finalize(task, record)
        except UsageError:
            raise
        except (vf.RolloutError, *LIBRARY_ERRORS, OSError) as error:
            task_of_run = asyncio.current_task()
            assert task_of_run is not None
            # the environment cancels its own turn where it times its agent
            if isinstance(agent.engine_error, Exception) or task_of_run.cancelling():
                raise agent.engine_error or error from None
            raise EpisodeError(f"{env_id} failed: {error!r}") from error
        if agent.truncated:
            return 0.0
        if not record.traces:
            raise EpisodeError(f"{env_id} ended its agent's conversation with an error of its own")
        reward = float(record.traces[0].reward)
        if self.config.returns is not None:
            reward = scale_return(reward, self.config.returns)
        return reward


class TasksetProblems:
    """The tasks of a taskset. One in four is held out, by the hash of its content.

    No content is in both splits. Training ids count up from 0 (over reshuffled epochs if the
    taskset is bounded), held-out ids down from -1.
    """

    def __init__(self, taskset: Any, seed: int) -> None:
        """Draw all tasks of a bounded taskset. Raises UsageError if none is for training."""
        self._seed, self._bounded = seed, bool(taskset.bounded)
        self._splits: dict[Split, list[Any]] = {"train": [], "held_out": []}
        self._undrawn: Iterator[Any] = iter(taskset)
        self._cached_epoch: tuple[int, list[int]] = (-1, [])
        if self._bounded:
            while self._draw_task():
                pass
        if not self._draw_until("train", 1):
            raise UsageError(
                "task.env: none of the taskset's tasks is for training (one in four is held out)"
            )

    def train_problem(self, index: int) -> Problem:
        tasks = self._splits["train"]
        if self._bounded:
            epoch, position = divmod(index, len(tasks))
            return _make_problem(index, tasks[self._epoch_order(epoch)[position]])
        if not self._draw_until("train", index + 1):
            raise UsageError(
                f"task.env: the taskset ended after {len(tasks)} tasks though it says it has no end"
            )
        return _make_problem(index, tasks[index])

    def held_out(self, count: int) -> list[Problem]:
        tasks = self._splits["held_out"]
        if not self._draw_until("held_out", count):
            raise UsageError(
                f"eval.problems: {count} are asked for, but {len(tasks)} of the taskset's tasks "
                "are held out; lower eval.problems"
            )
        return [_make_problem(-1 - i, task) for i, task in enumerate(tasks[:count])]

    def start_up_problems(self) -> Iterable[Problem]:
        """Return the first training problems, or all of them if the taskset is bounded."""
        count = NUM_STARTUP_PROBLEMS
        if self._bounded:
            count = len(self._splits["train"])
        return map(self.train_problem, range(count))

    def _epoch_order(self, epoch: int) -> list[int]:
        """Return the epoch's permutation of the training tasks. The last one is cached."""
        if self._cached_epoch[0] != epoch:
            rng = seeded_rng("verifiers epoch", self._seed, epoch)
            order = rng.permutation(len(self._splits["train"])).tolist()
            self._cached_epoch = (epoch, order)
        return self._cached_epoch[1]

    def _draw_until(self, split: Split, count: int) -> bool:
        """Draw tasks until the split has `count`; return whether it has."""
        for _ in range(MAX_TRIES + 20 * count):
            if len(self._splits[split]) >= count or not self._draw_task():
                break
        return len(self._splits[split]) >= count

    def _draw_task(self) -> bool:
        """Draw the next task; return whether there was one."""
        task = next(self._undrawn, None)
        if task is not None:
            content = task.data.model_dump(mode="json", exclude={"idx", "name", "id"})
            self._splits[split_of_text(repr(sorted(content.items())))].append(task)
        return task is not None


def _make_problem(problem_id: int, task: Any) -> Problem:
    return Problem(problem_id, task.data.prompt_text, "", {"task": task})
