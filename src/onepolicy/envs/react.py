"""Episodes with tools: think, call a tool, read its reply, and so on until an answer, or turns, tokens or time end."""

from __future__ import annotations

import asyncio

from transformers import PreTrainedTokenizerBase

from onepolicy.config import ReActTask, RowPolicy
from onepolicy.envs.dialogue import ChatReAct, Dialogue, PlainReAct, Turn
from onepolicy.envs.render import check_known, check_length, decode
from onepolicy.envs.single_turn import Task
from onepolicy.envs.tools import build_tools
from onepolicy.envs.trajectory import Trajectory
from onepolicy.interfaces import EpisodeError, Problem, SampleFn
from onepolicy.types import Finish, Sample


class ReAct:
    def __init__(
        self,
        config: ReActTask,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        rows: RowPolicy = "as-sampled",
    ) -> None:
        """max_len: tokens of a path. rows: whose route stays where two forwards fed the same token."""
        self.config, self.task, self.tokenizer, self.max_len, self.rows = config, task, tokenizer, max_len, rows
        self.tools = build_tools(config.tools)
        self.dialogue: Dialogue
        if tokenizer.chat_template is None:
            self.dialogue = PlainReAct(tokenizer, self.tools, config.instructions)
        else:
            fork = config.history == "fork"
            self.dialogue = ChatReAct(tokenizer, self.tools, config.instructions, fork=fork)

    def train_problem(self, index: int) -> Problem:
        return self.task.train_problem(index)

    def held_out(self, count: int) -> list[Problem]:
        return self.task.held_out(count)

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Before a run: the first turn of a problem fits, and the tokenizer knows its characters."""
        for problem in self.task.start_up_problems():
            ids = self.dialogue.start(problem.prompt)
            check_known(self.tokenizer, ids, problem, problem.prompt)
            check_length(ids, max_tokens, max_len, problem)

    async def episode(self, problem: Problem, sample: SampleFn, temperature: float) -> tuple[Sample, ...]:
        """Only an answer in a turn that ended by itself is graded; every other end earns 0."""
        played = Episode(self, problem, sample)
        try:
            async with asyncio.timeout(self.config.seconds) as clock:
                answer = await played.run()
        except TimeoutError:
            if not clock.expired():  # an engine's own, not this episode's
                raise
            answer, played.finish = None, "time"
        if not played.began:
            raise EpisodeError(f"not one turn was sampled in {self.config.seconds:g} s")
        reward = 0.0 if answer is None else float(self.task.grade(problem, answer))
        return played.samples(reward, temperature)


class Episode:
    """One episode on its way. `path` is what the next turn is sampled after."""

    def __init__(self, env: ReAct, problem: Problem, sample: SampleFn) -> None:
        self.env, self.problem, self._sample = env, problem, sample
        self.path = Trajectory(env.dialogue.start(problem.prompt), rows=env.rows)
        self.finish: Finish = "stop"
        self.events: list[str] = []
        self._left: list[Trajectory] = []  # histories that were rewritten
        self._turns: list[str] = []
        self._replies: list[list[str]] = []

    async def run(self) -> str | None:
        """The answer's text; None if the episode ended without one (`finish` says why)."""
        while True:
            turn = await self._turn()
            if turn is None or turn.answer is not None:
                return None if turn is None else turn.answer
            if len(self._turns) == self.env.config.max_turns:
                self.finish = "turns"
                return None
            self._replies.append(await self._answers(turn))
            self._continue()

    @property
    def began(self) -> bool:
        return self.path.turns > 0

    async def _turn(self) -> Turn | None:
        room = self._room()
        if room < 1:
            self.finish = "length"
            return None
        completion = await self._sample(self.path.tokens, max_tokens=room, routes_from=self.path.next_route)
        self.path.sampled(completion)
        self.finish = completion.finish
        if completion.finish != "stop":
            return None
        text = decode(self.env.tokenizer, completion.token_ids.tolist())
        self._turns.append(text)
        return self.env.dialogue.parse(text)

    def _room(self) -> int:
        room = self.env.max_len - len(self.path.tokens)
        if self.env.config.max_tokens is not None:
            sampled = sum(path.sampled_tokens for path in (*self._left, self.path))
            room = min(room, self.env.config.max_tokens - sampled)
        return room

    async def _answers(self, turn: Turn) -> list[str]:
        if turn.malformed:
            self.events.append("malformed")
            return [f"error: {turn.malformed}"]
        return [self._cut(await self._called(call.tool, call.text)) for call in turn.calls]

    async def _called(self, name: str, text: str) -> str:
        tool = self.env.tools.get(name)
        if tool is None:
            self.events.append("malformed")
            return f"error: no tool {name[:40]}; there is {', '.join(self.env.tools)}"
        reply = await tool.call(text)
        self.events.append(f"{name}_error" if reply.startswith("error: ") else name)
        return reply

    def _cut(self, reply: str) -> str:
        most = self.env.config.reply_chars
        return reply if len(reply) <= most else f"{reply[:most]}... ({len(reply) - most} more characters)"

    def _continue(self) -> None:
        """Append the replies; a history that does not go on as it was becomes a path of its own."""
        tokens = self.path.tokens
        following = self.env.dialogue.following(tokens, self.problem.prompt, self._turns, self._replies)
        if following[: len(tokens)] == tokens:
            self.path.observe(following[len(tokens) :])
        else:
            self._left.append(self.path)
            self.path = self.path.rewritten(following)

    def samples(self, reward: float, temperature: float) -> tuple[Sample, ...]:
        """Every sampled token is trained on once: in the history it was sampled after."""
        paths = [path for path in (*self._left, self.path) if path.sampled_tokens]
        last = len(paths) - 1
        return tuple(
            path.sample(
                reward=reward,
                temperature=temperature,
                finish=self.finish,
                events=tuple(self.events) if i == last else (),
            )
            for i, path in enumerate(paths)
        )
