"""The agent a verifiers environment plays with: its turns are ours, its trace is what the environment's scores read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.chat_dialogue import said
from onepolicy.envs.multiturn.chat_template import THOUGHT_END
from onepolicy.envs.multiturn.episode import Episode

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
        if message.role not in ROLES or not isinstance(message.content, str) or getattr(message, "tool_calls", None):
            raise UsageError(f"task.env: the prompt of task {data.idx} has more than text (pictures or tools)")
        opening.append((message.role, message.content))
    return opening


class Player:
    """Stands in for verifiers' Agent in `Env.run`: `run` is one turn, `interaction` as many as are asked for.

    Turns come from our episode, token ids in and out; the trace holds their texts. `cut`: a turn or the episode ended
    at one of our limits. `failure`: an error of our engine, not of the environment.
    """

    trainable = True

    def __init__(self, spec: Any, seat: str, task: Any, episode: Episode, closed: Callable[[Any], None]) -> None:
        """closed: gets the trace of the exchange once it is scored."""
        self.config, self._seat, self._task, self._episode, self._closed = spec, seat, task, episode, closed
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
            raise UsageError(f"task.env: the environment plays its agent {self._seat} more than once an episode")
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
            raise UsageError("task.env: the task's prompt opens the exchange, and every later turn needs a message")
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

        kinds = {"system": vf.SystemMessage, "user": vf.UserMessage, "assistant": vf.AssistantMessage}
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
        nodes.append(vf.MessageNode(parent=len(nodes) - 1 if nodes else None, message=message, sampled=sampled))
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
        role, text = (each["role"], each["content"]) if isinstance(each, dict) else (each.role, each.content)
        if role != "user" or not isinstance(text, str):
            raise UsageError(f"task.env: the environment answers with a message of {role} that is no user's text")
        texts.append(text)
    return texts
