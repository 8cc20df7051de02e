"""Episodes with tools: the policy calls tools and reads their replies until it gives an answer.

An episode also ends when its turns, tokens or time run out.
"""

from __future__ import annotations

from typing import Unpack

from transformers import PreTrainedTokenizerBase

from onepolicy.config import ReActTask, UsageError
from onepolicy.envs.multiturn.dialogue import ParsedTurn
from onepolicy.envs.multiturn.episode import (
    Episode,
    MultiTurnEnvironment,
    PathOptions,
    grade_beside,
)
from onepolicy.envs.multiturn.prompt_checks import ASCII, unknown_characters
from onepolicy.envs.multiturn.tool_formats import tool_format
from onepolicy.envs.tasks.single_turn import Task
from onepolicy.envs.tools import build_tools
from onepolicy.interfaces import MetricsSource, Problem


class ReAct(MultiTurnEnvironment):
    """Problems of another task, solved with tools."""

    def __init__(
        self,
        config: ReActTask,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        **path: Unpack[PathOptions],
    ) -> None:
        self.config, self.task = config, task
        self.tools = build_tools(config.tools)
        self._timed = "python" in self.tools or config.seconds is not None
        turns = tool_format(tokenizer, self.tools, config.instructions)
        super().__init__(config, task, tokenizer, turns, **path)

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Check prompts as in every environment, and the characters of the tools' replies.

        Raises UsageError.
        """
        super().check(max_tokens=max_tokens, max_len=max_len)
        for name, tool in self.tools.items():
            for text in (ASCII, *tool.reply_texts()):
                unknown = unknown_characters(self.tokenizer, text)
                if unknown:
                    raise UsageError(
                        f"task.tools: replies of {name} have characters the tokenizer does not "
                        f"know and would feed as {self.tokenizer.unk_token}: {unknown[:40]!r}; use "
                        "a policy made for this task (make-policy with the same tools), another "
                        "model.path, or other texts"
                    )

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics of the task's grader since the last call."""
        if isinstance(self.task, MetricsSource):
            return self.task.take_metrics()
        return {}

    async def play_episode(self, problem: Problem, episode: Episode) -> float:
        """Play the episode and grade its answer.

        Only an answer in a turn that ended by itself is graded. Every other end earns 0.
        """
        while (text := await episode.sample_turn()) is not None:
            turn = self.turns.parse_turn(text)
            if turn.answer is not None:
                if not self._timed:
                    return float(self.task.grade(problem, turn.answer))
                if episode.clock is not None:
                    episode.clock.reschedule(None)  # the answer came in time
                return await grade_beside(self.task.grade, problem, turn.answer)
            if episode.out_of_turns:  # no later turn could read the replies
                episode.finish = "turns"
                break
            episode.add_replies(await self._replies_to(turn, episode.events))
        return 0.0

    async def _replies_to(self, turn: ParsedTurn, events: list[str]) -> list[str]:
        if turn.malformed:
            events.append("malformed")
            return [f"error: {turn.malformed}"]
        replies = [await self._call_tool(call.tool, call.text, events) for call in turn.calls]
        return [self._truncate_reply(reply) for reply in replies]

    async def _call_tool(self, name: str, text: str, events: list[str]) -> str:
        tool = self.tools.get(name)
        if tool is None:
            events.append("malformed")
            return f"error: no tool {name[:40]}; there is {', '.join(self.tools)}"
        reply = await tool.call(text)
        if reply.rpartition("\n")[2].startswith("error: "):
            events.append(f"{name}_error")
        else:
            events.append(name)
        return reply

    def _truncate_reply(self, reply: str) -> str:
        limit = self.config.reply_chars
        if len(reply) <= limit:
            return reply
        # the last line says what failed
        before, _, last = reply.rpartition("\n")
        last = last[-limit // 2 :] if before else ""
        cut = f"{reply[: limit - len(last)]}... ({len(reply) - limit} more characters)"
        return f"{cut}\n{last}".rstrip("\n")
