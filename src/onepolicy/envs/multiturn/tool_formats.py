"""Formats of turns with tools: ReAct's lines, and the calls of a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from onepolicy.envs.multiturn.call_format import (
    ARGUMENT_PLACEHOLDER,
    CALL_ID,
    NAME_PLACEHOLDER,
    VALUE_PLACEHOLDER,
    find_call_format,
)
from onepolicy.envs.multiturn.dialogue import (
    ChatTemplate,
    Message,
    ParsedTurn,
    Replies,
    ToolCall,
    TurnFormat,
)
from onepolicy.envs.tools import ToolSpec, function_schema


class ReActFormat(TurnFormat):
    """Lines for models without a chat template (arXiv:2210.03629).

    `Action: tool[input]` or `Answer: ...` ends a turn. The tool's reply follows as
    `Observation: ...`.
    """

    def __init__(self, tools: Mapping[str, ToolSpec], instructions: str | None) -> None:
        """Store the settings. instructions: text before the question; None: describe the tools."""
        if instructions is None:
            instructions = describe_tools(tools)
        self.instructions = instructions

    def reply_lines(self, replies: Replies) -> str:
        return format_observations(replies)

    def parse_turn(self, text: str) -> ParsedTurn:
        found = list(re.finditer(r"^(Action|Answer):[ \t]*", text, re.MULTILINE))
        if not found:
            return ParsedTurn(malformed="end with a line `Action: tool[input]` or `Answer: ...`")
        last = found[-1]
        rest = text[last.end() :].strip()
        if last[1] == "Answer":
            return ParsedTurn(answer=rest)
        call = re.fullmatch(r"(\w+)\[(.*)\]", rest, re.DOTALL)
        if call is None:
            return ParsedTurn(malformed="an action is written `Action: tool[input]`")
        return ParsedTurn(calls=(ToolCall(call[1], call[2]),))


def format_observations(replies: Replies) -> str:
    return "\n" + "".join(f"Observation: {reply}\n" for reply in replies)


def describe_tools(tools: Mapping[str, ToolSpec]) -> str:
    """Return default instructions, which list the tools."""
    lines = [f"{tool.name}[{tool.argument}]: {tool.description}" for tool in tools.values()]
    return (
        "Answer the question in turns. End a turn with a line `Action: tool[input]` to use a tool, "
        "whose reply you then see as an observation, or with a line `Answer: ...`.\nTools:\n"
        + "\n".join(lines)
        + "\n\nQuestion: "
    )


class TemplateCallFormat(TurnFormat):
    """A chat template's own form of a call, derived from an example call that it renders."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Mapping[str, ToolSpec],
        instructions: str | None,
    ) -> None:
        """Find the template's form of a call. Raises UsageError if it cannot be used."""
        self.tools, self.instructions = tools, instructions or ""
        self.schemas = [function_schema(tool) for tool in tools.values()]
        template = ChatTemplate(tokenizer, self.schemas)
        self._calls = find_call_format(template, tools, self.turn_message(""))

    def turn_message(self, content: str) -> Message:
        arguments = {ARGUMENT_PLACEHOLDER: VALUE_PLACEHOLDER}
        function = {"name": NAME_PLACEHOLDER, "arguments": arguments}
        calls = [{"type": "function", "id": CALL_ID, "function": function}]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    def reply_message(self, content: str) -> Message:
        name = NAME_PLACEHOLDER
        return {"role": "tool", "name": name, "tool_call_id": CALL_ID, "content": content}

    def parse_turn(self, text: str) -> ParsedTurn:
        """Return the calls or the answer after the turn's thoughts."""
        _, text = self.split_thoughts(text)
        texts = self._calls.find(text)
        start, end = self._calls.start, self._calls.end
        rest = text
        if texts and end:
            rest = text.rpartition(end)[2]
        if start and start in rest and (end or not texts):
            return ParsedTurn(malformed=f"a call ends with {end}")
        calls = []
        for each in texts:
            call = self._parse_call(each)
            if isinstance(call, str):
                return ParsedTurn(malformed=call)
            calls.append(call)
        if calls:
            return ParsedTurn(calls=tuple(calls))
        return ParsedTurn(answer=text)

    def _parse_call(self, text: str) -> ToolCall | str:
        """Return the call, or the error of a malformed call."""
        written = self._calls.read(text)
        if written is None:
            name, arguments = self._calls.keys
            return f'a call is written as JSON: {{"{name}": ..., "{arguments}": {{...}}}}'
        called, given = written
        tool, values = self.tools.get(called), list(given.values())
        if tool is not None and (set(given) != {tool.argument} or not isinstance(values[0], str)):
            return f'{tool.name} takes one argument, the string "{tool.argument}"'
        argument = ""
        if values:
            argument = _replace_surrogates(values[0])
        return ToolCall(_replace_surrogates(called), argument)


def _replace_surrogates(value: object) -> str:
    """Return the value as text without lone surrogates, which JSON allows and UTF-8 does not."""
    return str(value).encode(errors="replace").decode()


def tool_format(
    tokenizer: PreTrainedTokenizerBase, tools: Mapping[str, ToolSpec], instructions: str | None
) -> TurnFormat:
    """Return the calls of the tokenizer's chat template, or ReAct's lines if it has none."""
    if tokenizer.chat_template is None:
        return ReActFormat(tools, instructions)
    return TemplateCallFormat(tokenizer, tools, instructions)
