"""Episodes with tools: think, call a tool, read its reply, and so on until an answer, or turns, tokens or time end."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from onepolicy.config import ReActTask, RowPolicy, UsageError
from onepolicy.envs.multiturn.episode import Episode, InTurns
from onepolicy.envs.multiturn.render import ASCII, unknown_characters
from onepolicy.envs.multiturn.tool_dialogue import CallDialogue, Turn, build_calls
from onepolicy.envs.tasks.single_turn import Task
from onepolicy.envs.tools import build_tools
from onepolicy.interfaces import MetricsSource, Problem


class ReAct(InTurns):
    dialogue: CallDialogue

    def __init__(
        self,
        config: ReActTask,
        task: Task,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_len: int,
        rows: RowPolicy = "as-sampled",
    ) -> None:
        super().__init__(config, task, tokenizer, max_len=max_len, rows=rows)
        self.config, self.task = config, task
        self.tools = build_tools(config.tools)
        self.dialogue = build_calls(
            tokenizer, self.tools, config.instructions, fork=config.history == "fork"
        )

    def check(self, *, max_tokens: int, max_len: int) -> None:
        """Before a run: what every episode of several turns needs, and that the tokenizer knows what the tools say."""
        super().check(max_tokens=max_tokens, max_len=max_len)
        for name, tool in self.tools.items():
            for text in (ASCII, *tool.sources()):
                if unknown := unknown_characters(self.tokenizer, text):
                    raise UsageError(
                        f"task.tools: replies of {name} have characters the tokenizer does not know and would feed as "
                        f"{self.tokenizer.unk_token}: {unknown[:40]!r}; use a policy made for this task (make-policy "
                        "with the same tools), another model.path, or other texts"
                    )

    def take_metrics(self) -> dict[str, float]:
        """Of the task's grader, since the last call."""
        return self.task.take_metrics() if isinstance(self.task, MetricsSource) else {}

    async def play(self, problem: Problem, episode: Episode) -> float:
        """Only an answer in a turn that ended by itself is graded; every other end earns 0."""
        while (text := await episode.turn()) is not None:
            turn = self.dialogue.parse(text)
            if turn.answer is not None:
                return float(self.task.grade(problem, turn.answer))
            if episode.spent:  # nobody would read the replies
                episode.finish = "turns"
                break
            episode.reply(await self._answers(turn, episode.events))
        return 0.0

    async def _answers(self, turn: Turn, events: list[str]) -> list[str]:
        if turn.malformed:
            events.append("malformed")
            return [f"error: {turn.malformed}"]
        return [self._cut(await self._called(call.tool, call.text, events)) for call in turn.calls]

    async def _called(self, name: str, text: str, events: list[str]) -> str:
        tool = self.tools.get(name)
        if tool is None:
            events.append("malformed")
            return f"error: no tool {name[:40]}; there is {', '.join(self.tools)}"
        reply = await tool.call(text)
        events.append(f"{name}_error" if reply.startswith("error: ") else name)
        return reply

    def _cut(self, reply: str) -> str:
        most = self.config.reply_chars
        return (
            reply
            if len(reply) <= most
            else f"{reply[:most]}... ({len(reply) - most} more characters)"
        )
