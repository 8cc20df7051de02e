"""How an episode with tools is written in tokens: what opens it, what stands between two turns, what a turn says.

Nothing that was sampled is ever tokenised again. Text from outside (questions, replies of tools) is tokenised with
special tokens split into plain text, so no reply can end a turn or open another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.envs.render import decode
from onepolicy.envs.tools import Tool, schema

Message = dict[str, Any]
Replies = Sequence[str]  # to the calls of one turn


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
    def start(self, question: str) -> list[int]:
        """The prompt of the first turn."""
        ...

    def following(self, path: list[int], question: str, turns: Sequence[str], replies: Sequence[Replies]) -> list[int]:
        """The prompt of the next turn, after `path`. turns: the text of every turn so far, replies: to each of them."""
        ...

    def parse(self, text: str) -> Turn: ...


class PlainReAct:
    """For models without a chat template: `Action: tool[input]` or `Answer: ...` ends a turn, the tool's reply follows
    as `Observation: ...` (ReAct, arXiv:2210.03629)."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: dict[str, Tool], instructions: str | None) -> None:
        self.tokenizer = tokenizer
        self.opening = explained(tools) if instructions is None else instructions

    def start(self, question: str) -> list[int]:
        return encode(self.tokenizer, self.opening) + encode(self.tokenizer, f"{question}\n", outside=True)

    def following(self, path: list[int], question: str, turns: Sequence[str], replies: Sequence[Replies]) -> list[int]:
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


def explained(tools: dict[str, Tool]) -> str:
    """Instructions for a model that has none of its own."""
    lines = [f"{tool.name}[{tool.argument}]: {tool.description}" for tool in tools.values()]
    return (
        "Answer the question in turns. End a turn with a line `Action: tool[input]` to use a tool, whose reply you "
        "then see as an observation, or with a line `Answer: ...`.\nTools:\n" + "\n".join(lines) + "\n\nQuestion: "
    )


# Stand-ins, found again in what a template makes of them.
NAME, ARGUMENT, VALUE, QUESTION, REPLY = (
    "nameoftool",
    "nameofargument",
    "valueofargument",
    "textofquestion",
    "textofreply",
)
THOUGHT_END = "</think>"
THOUGHT = f"<think>\nathought\n{THOUGHT_END}\n\n"


class ChatReAct:
    """The tokenizer's chat template with tools. How it writes a call is read off a call it renders itself."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: dict[str, Tool], instructions: str | None, *, fork: bool
    ) -> None:
        """fork: render the whole history for every turn, as the template wants it; else only what is new."""
        self.tokenizer, self.tools, self.fork = tokenizer, tools, fork
        self.instructions = instructions or ""
        self._schemas: list[Any] = [schema(tool) for tool in tools.values()]
        self._user = {"role": "user", "content": QUESTION}
        self._opening = self._render([self._user], prompt=True)
        if QUESTION not in self._opening or any(tool.name not in self._opening for tool in tools.values()):
            raise UsageError(
                "task.tools: the tokenizer's chat template does not print tools; use a model whose template does, or "
                "a tokenizer without a template (plain ReAct)"
            )
        called = self._until_end([self._user, _called()])
        before = self._opening if called.startswith(self._opening) else self._render([self._user])
        self._open, self._close, self._keys = _call_format(called[len(before) : -len(self._eos)])
        self._check_marks()
        self._between: dict[int, list[str]] = {}  # number of replies -> the texts around them
        self._check_history()

    def start(self, question: str) -> list[int]:
        return self._encoded(self._opening, [QUESTION], [self.instructions + question])

    def following(self, path: list[int], question: str, turns: Sequence[str], replies: Sequence[Replies]) -> list[int]:
        if self.fork:
            return self._whole(question, turns, replies)
        texts = self._texts_between(len(replies[-1]))
        return path + self._joined(texts, replies[-1])

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
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):  # also numbers of 5,000 digits
            return f'a call is written as JSON: {{"{name}": ..., "{arguments}": {{...}}}}'
        if tool is not None and (set(given) != {tool.argument} or not isinstance(values[0], str)):
            return f'{tool.name} takes one argument, the string "{tool.argument}"'
        return Call(_characters(made[name]), _characters(values[0]) if values else "")

    def _texts_between(self, count: int) -> list[str]:
        """What the template writes before, between and after `count` replies, up to the next turn."""
        if count not in self._between:
            # with a thought: a template may write an empty one while the turn is the last, and no longer after it
            turn, replies = [self._user, _called(THOUGHT)], [_replied(i) for i in range(count)]
            ended, text = self._until_end(turn), self._render([*turn, *replies], prompt=True)
            assert text.startswith(ended), "_check_history refuses such a template"
            self._between[count] = _split(text[len(ended) :], [reply["content"] for reply in replies])
        return self._between[count]

    def _whole(self, question: str, turns: Sequence[str], replies: Sequence[Replies]) -> list[int]:
        messages, marks, values = [self._user], [QUESTION], [self.instructions + question]
        for turn, answered in zip(turns, replies, strict=True):
            messages.append({"role": "assistant", "content": turn})
            for reply in answered:
                messages.append(_replied(len(marks)))
                marks.append(messages[-1]["content"])
                values.append(reply)
        return self._encoded(self._render(messages, prompt=True), marks, values)

    def _check_marks(self) -> None:
        """A turn's text is read without special tokens; calls marked by one would all be taken for answers."""
        for mark in (self._open, self._close):
            if mark not in decode(self.tokenizer, encode(self.tokenizer, mark)):
                raise UsageError(
                    f"task.tools: the chat template marks a tool call by the special token {mark!r}, which is not part "
                    "of a turn's text; use a template that marks calls by text"
                )

    def _check_history(self) -> None:
        one = [self._user, _called(THOUGHT)]
        sampled = self._until_end(one)
        before = self._render([*one, _replied(0)], prompt=True)
        after = self._render([*one, _replied(0), _called(THOUGHT), _replied(1)], prompt=True)
        kept = sampled.startswith(self._opening) and before.startswith(sampled) and after.startswith(before)
        rewritten = not kept or THOUGHT.split()[1] not in sampled
        if rewritten and not self.fork:
            raise UsageError(
                "task.history: the chat template renders earlier turns anew once there are later ones (it drops their "
                "thoughts, for instance); set task.history=fork to train on every rewritten history as a sample of its "
                "own, or use a template that keeps them"
            )
        if self.fork and not rewritten:
            raise UsageError(
                "task.history: fork has no effect, the chat template keeps earlier turns as they were; leave it out"
            )

    def _until_end(self, messages: Sequence[Message]) -> str:
        """The text up to the token that ends its last turn."""
        text = self._render(messages)
        before, ended, _ = text.rpartition(self._eos)
        if not ended:
            raise UsageError(f"task.tools: the chat template does not end a turn with the tokenizer's {self._eos!r}")
        return before + ended

    @property
    def _eos(self) -> str:
        return str(self.tokenizer.eos_token)

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        text = self.tokenizer.apply_chat_template(
            list(messages), tools=self._schemas, add_generation_prompt=prompt, tokenize=False
        )
        assert isinstance(text, str)
        return text

    def _encoded(self, text: str, marks: Sequence[str], values: Sequence[str]) -> list[int]:
        return self._joined(_split(text, marks), values)

    def _joined(self, texts: Sequence[str], values: Sequence[str]) -> list[int]:
        ids = encode(self.tokenizer, texts[0])
        for value, text in zip(values, texts[1:], strict=True):
            ids += encode(self.tokenizer, value, outside=True) + encode(self.tokenizer, text)
        return ids


def _called(content: str = "") -> Message:
    function = {"name": NAME, "arguments": {ARGUMENT: VALUE}}
    calls = [{"type": "function", "id": "callid000", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _characters(value: object) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer and no process takes."""
    return str(value).encode(errors="replace").decode()


def _replied(index: int) -> Message:
    return {"role": "tool", "name": NAME, "tool_call_id": "callid000", "content": f"{REPLY}{index}x"}


def _split(text: str, marks: Sequence[str]) -> list[str]:
    texts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise UsageError("task.tools: the chat template leaves out a question or a tool's reply; use another one")
        texts.append(before)
    return [*texts, text]


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


def encode(tokenizer: PreTrainedTokenizerBase, text: str, *, outside: bool = False) -> list[int]:
    """outside: text we did not write, in which special tokens are plain characters."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=outside)
    return ids
