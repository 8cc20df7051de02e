"""Formats of turns with tools: ReAct's lines, and the calls of a chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.dialogue import (
    EXAMPLE_QUESTION,
    THOUGHT_END,
    ChatTemplate,
    Message,
    ParsedTurn,
    Replies,
    ToolCall,
    TurnFormat,
)
from onepolicy.envs.multiturn.tokenization import decode_tokens, encode_text
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


# Placeholders are rendered in place of a call's parts, then found again in the rendered template.
NAME_PLACEHOLDER = "nameoftool"
ARGUMENT_PLACEHOLDER = "nameofargument"
VALUE_PLACEHOLDER = "valueofargument"
CALL_ID = "callid000"


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
        call = self._render_example_call(ChatTemplate(tokenizer, self.schemas))
        self._call_start, self._call_end, self._call_keys = _find_call_format(call)
        self._check_call_markers(tokenizer)

    def _render_example_call(self, template: ChatTemplate) -> str:
        """Return the template's text of a turn with a call. Raises UsageError without tools."""
        prompt = template.render([EXAMPLE_QUESTION], prompt=True)
        if any(tool.name not in prompt for tool in self.tools.values()):
            raise UsageError(
                "task.tools: the tokenizer's chat template does not print tools; use a model whose "
                "template does, or a tokenizer without a template (plain ReAct)"
            )
        rendered = template.render_to_turn_end([EXAMPLE_QUESTION, self.turn_message("")])
        if not rendered.startswith(prompt):
            prompt = template.render([EXAMPLE_QUESTION])
        return rendered[len(prompt) : -len(str(template.tokenizer.eos_token))]

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
        text = text.rpartition(THOUGHT_END)[2]
        texts = self._find_calls(text)
        if not texts and self._call_start and self._call_start in text:
            return ParsedTurn(malformed=f"a call ends with {self._call_end}")
        calls = []
        for each in texts:
            call = self._parse_call(each)
            if isinstance(call, str):
                return ParsedTurn(malformed=call)
            calls.append(call)
        if calls:
            return ParsedTurn(calls=tuple(calls))
        return ParsedTurn(answer=text.strip())

    def _find_calls(self, text: str) -> list[str]:
        """Return the text between the markers of every call."""
        if not self._call_start:
            if text.strip().startswith("{"):
                return [text]
            return []
        end = r"\Z"
        if self._call_end:
            end = re.escape(self._call_end)
        return re.findall(f"{re.escape(self._call_start)}(.*?){end}", text, re.DOTALL)

    def _parse_call(self, text: str) -> ToolCall | str:
        """Return the call, or the error of a malformed call."""
        name, arguments = self._call_keys
        try:
            written = json.loads(text)
            given = written[arguments]
            if isinstance(given, str):
                given = json.loads(given)
            tool = self.tools.get(written[name])
            values = list(given.values())
        # ValueError: also a number of 5,000 digits
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return f'a call is written as JSON: {{"{name}": ..., "{arguments}": {{...}}}}'
        if tool is not None and (set(given) != {tool.argument} or not isinstance(values[0], str)):
            return f'{tool.name} takes one argument, the string "{tool.argument}"'
        argument = ""
        if values:
            argument = _replace_surrogates(values[0])
        return ToolCall(_replace_surrogates(written[name]), argument)

    def _check_call_markers(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UsageError if a special token marks calls.

        A turn's text has no special tokens, so such calls would all be read as answers.
        """
        for marker in (self._call_start, self._call_end):
            if marker not in decode_tokens(tokenizer, encode_text(tokenizer, marker)):
                raise UsageError(
                    f"task.tools: the chat template marks a tool call by the special token "
                    f"{marker!r}, which is not part of a turn's text; use a template that marks "
                    "calls by text"
                )


def _replace_surrogates(value: object) -> str:
    """Return the value as text without lone surrogates, which JSON allows and UTF-8 does not."""
    return str(value).encode(errors="replace").decode()


def _find_call_format(turn: str) -> tuple[str, str, tuple[str, str]]:
    """Return the format of calls from a turn with an example call that the template rendered.

    The format is (the word before a call, the word after it, the JSON keys of name and arguments).
    Raises UsageError if the call is not one JSON object.
    """
    turn = turn.rpartition(THOUGHT_END)[2]  # a template may write an empty thought
    for brace in re.finditer(r"\{", turn):
        try:
            written, end = json.JSONDecoder().raw_decode(turn, brace.start())
        except json.JSONDecodeError:
            continue
        name = next((key for key, value in written.items() if value == NAME_PLACEHOLDER), None)
        arguments = next(
            (key for key, value in written.items() if ARGUMENT_PLACEHOLDER in str(value)), None
        )
        listed = turn[: brace.start()].rstrip().endswith("[")
        if name is not None and arguments is not None and not listed:
            before, after = turn[: brace.start()].split(), turn[end:].split()
            return "".join(before[-1:]), "".join(after[:1]), (name, arguments)
    raise UsageError(
        "task.tools: the chat template does not write a tool call as one JSON object with a name "
        "and arguments, the only form read here; use another template"
    )


def tool_format(
    tokenizer: PreTrainedTokenizerBase, tools: Mapping[str, ToolSpec], instructions: str | None
) -> TurnFormat:
    """Return the calls of the tokenizer's chat template, or ReAct's lines if it has none."""
    if tokenizer.chat_template is None:
        return ReActFormat(tools, instructions)
    return TemplateCallFormat(tokenizer, tools, instructions)
