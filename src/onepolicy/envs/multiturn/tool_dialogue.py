"""How an episode with tools is written in tokens: what opens it, what a turn says, what stands between two turns."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.chat_template import THOUGHT_END, ChatTurns, Message, Opening, Replies
from onepolicy.envs.multiturn.render import decode, encode
from onepolicy.envs.tools import ToolSpec, schema


@dataclass(frozen=True, slots=True)
class Call:
    tool: str
    text: str  # its argument


@dataclass(frozen=True, slots=True)
class Turn:
    """What a turn asks for. Neither calls nor an answer: `malformed` says what is wrong with it."""

    calls: tuple[Call, ...] = ()
    answer: str | None = None
    malformed: str = ""


class Dialogue(Protocol):
    def start(self, opening: Opening) -> list[int]:
        """The prompt of the first turn."""
        ...

    def following(
        self, path: list[int], opening: Opening, turns: Sequence[str], replies: Sequence[Replies]
    ) -> list[int]:
        """The prompt of the next turn, after `path`. turns: the text of every turn so far, replies: to each of them."""
        ...


class CallDialogue(Dialogue, Protocol):
    def parse(self, text: str) -> Turn: ...


class PlainReAct:
    """For models without a chat template: `Action: tool[input]` or `Answer: ...` ends a turn, the tool's reply follows
    as `Observation: ...` (ReAct, arXiv:2210.03629)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Mapping[str, ToolSpec],
        instructions: str | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.opening = explained(tools) if instructions is None else instructions

    def start(self, opening: Opening) -> list[int]:
        assert isinstance(opening, str), "a question"
        return encode(self.tokenizer, self.opening) + encode(
            self.tokenizer, f"{opening}\n", outside=True
        )

    def following(
        self, path: list[int], opening: Opening, turns: Sequence[str], replies: Sequence[Replies]
    ) -> list[int]:
        return path + encode(self.tokenizer, observation(replies[-1]), outside=True)

    def parse(self, text: str) -> Turn:
        found = list(re.finditer(r"^(Action|Answer):[ \t]*", text, re.MULTILINE))
        if not found:
            return Turn(malformed="end with a line `Action: tool[input]` or `Answer: ...`")
        last = found[-1]
        rest = text[last.end() :].strip()
        if last[1] == "Answer":
            return Turn(answer=rest)
        call = re.fullmatch(r"(\w+)\[(.*)\]", rest, re.DOTALL)
        if call is None:
            return Turn(malformed="an action is written `Action: tool[input]`")
        return Turn(calls=(Call(call[1], call[2]),))


def observation(replies: Replies) -> str:
    return "\n" + "".join(f"Observation: {reply}\n" for reply in replies)


def explained(tools: Mapping[str, ToolSpec]) -> str:
    """Instructions for a model that has none of its own."""
    lines = [f"{tool.name}[{tool.argument}]: {tool.description}" for tool in tools.values()]
    return (
        "Answer the question in turns. End a turn with a line `Action: tool[input]` to use a tool, whose reply you "
        "then see as an observation, or with a line `Answer: ...`.\nTools:\n"
        + "\n".join(lines)
        + "\n\nQuestion: "
    )


# Stand-ins, found again in what a template makes of them.
NAME, ARGUMENT, VALUE = "nameoftool", "nameofargument", "valueofargument"


class ChatReAct(ChatTurns):
    """The tokenizer's chat template with tools. How it writes a call is read off a call it renders itself."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Mapping[str, ToolSpec],
        instructions: str | None,
        *,
        fork: bool,
    ) -> None:
        super().__init__(tokenizer, fork=fork)
        self.tools, self.instructions = tools, instructions or ""
        self.schemas = [schema(tool) for tool in tools.values()]
        opening = self._render([self._user], prompt=True)
        if any(tool.name not in opening for tool in tools.values()):
            raise UsageError(
                "task.tools: the tokenizer's chat template does not print tools; use a model whose template does, or "
                "a tokenizer without a template (plain ReAct)"
            )
        called = self._until_end([self._user, self.turn_message("")])
        before = opening if called.startswith(opening) else self._render([self._user])
        self._open, self._close, self._keys = _call_format(
            called[len(before) : -len(str(tokenizer.eos_token))]
        )
        self._check_marks()
        self._check_history()

    def turn_message(self, content: str) -> Message:
        function = {"name": NAME, "arguments": {ARGUMENT: VALUE}}
        calls = [{"type": "function", "id": "callid000", "function": function}]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def reply_message(self, content: str) -> Message:
        return {"role": "tool", "name": NAME, "tool_call_id": "callid000", "content": content}

    def parse(self, text: str) -> Turn:
        """Calls and the answer stand after the thoughts; what is weighed in a thought is neither."""
        text = text.rpartition(THOUGHT_END)[2]
        if self._open:
            close = re.escape(self._close) if self._close else r"\Z"
            written = re.findall(f"{re.escape(self._open)}(.*?){close}", text, re.DOTALL)
        else:
            written = [text] if text.strip().startswith("{") else []
        if not written and self._open and self._open in text:
            return Turn(malformed=f"a call ends with {self._close}")
        calls = [self._call(each) for each in written]
        if wrong := next((call for call in calls if isinstance(call, str)), None):
            return Turn(malformed=wrong)
        if calls:
            return Turn(calls=tuple(call for call in calls if isinstance(call, Call)))
        return Turn(answer=text.strip())

    def _call(self, written: str) -> Call | str:
        """The call, or what is wrong with it."""
        name, arguments = self._keys
        try:
            made = json.loads(written)
            given = made[arguments]
            given = json.loads(given) if isinstance(given, str) else given
            tool = self.tools.get(made[name])
            values = list(given.values())
        except (
            ValueError,
            RecursionError,
            KeyError,
            TypeError,
            AttributeError,
        ):  # also numbers of 5,000 digits
            return f'a call is written as JSON: {{"{name}": ..., "{arguments}": {{...}}}}'
        if tool is not None and (set(given) != {tool.argument} or not isinstance(values[0], str)):
            return f'{tool.name} takes one argument, the string "{tool.argument}"'
        return Call(_characters(made[name]), _characters(values[0]) if values else "")

    def _check_marks(self) -> None:
        """A turn's text is read without special tokens; calls marked by one would all be taken for answers."""
        for mark in (self._open, self._close):
            if mark not in decode(self.tokenizer, encode(self.tokenizer, mark)):
                raise UsageError(
                    f"task.tools: the chat template marks a tool call by the special token {mark!r}, which is not part "
                    "of a turn's text; use a template that marks calls by text"
                )


def _characters(value: object) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer and no process takes."""
    return str(value).encode(errors="replace").decode()


def _call_format(turn: str) -> tuple[str, str, tuple[str, str]]:
    """(what opens a call, what closes it, the JSON keys of its name and arguments), from a call the template wrote."""
    turn = turn.rpartition(THOUGHT_END)[2]  # a template may write an empty thought
    for brace in re.finditer(r"\{", turn):
        try:
            made, end = json.JSONDecoder().raw_decode(turn, brace.start())
        except json.JSONDecodeError:
            continue
        name = next((key for key, value in made.items() if value == NAME), None)
        arguments = next((key for key, value in made.items() if ARGUMENT in str(value)), None)
        listed = turn[: brace.start()].rstrip().endswith("[")
        if name is not None and arguments is not None and not listed:
            before, after = turn[: brace.start()].split(), turn[end:].split()
            return before[-1] if before else "", after[0] if after else "", (name, arguments)
    raise UsageError(
        "task.tools: the chat template does not write a tool call as one JSON object with a name and arguments, the "
        "only form read here; use another template"
    )


def build_calls(
    tokenizer: PreTrainedTokenizerBase,
    tools: Mapping[str, ToolSpec],
    instructions: str | None,
    *,
    fork: bool,
) -> CallDialogue:
    """In the form of the tokenizer's chat template, or plain ReAct where it has none."""
    if tokenizer.chat_template is None:
        return PlainReAct(tokenizer, tools, instructions)
    return ChatReAct(tokenizer, tools, instructions, fork=fork)
