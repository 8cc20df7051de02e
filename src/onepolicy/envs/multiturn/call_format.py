"""The form in which a chat template writes a call of a tool, read off an example of it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from onepolicy.config import UsageError
from onepolicy.envs.multiturn.dialogue import EXAMPLE_QUESTION, THOUGHT_END, ChatTemplate, Message
from onepolicy.envs.multiturn.tokenization import decode_tokens, encode_text

# Placeholders are rendered in place of a call's parts, then found again in the rendered template.
NAME_PLACEHOLDER = "nameoftool"
ARGUMENT_PLACEHOLDER = "nameofargument"
VALUE_PLACEHOLDER = "valueofargument"
CALL_ID = "callid000"
DEEPEST = 64
"""Levels of the JSON of a call or a request."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A call: one JSON object between two words."""

    start: str  # empty: the whole turn is the call
    end: str  # may be empty
    keys: tuple[str, str]  # of name and arguments

    def find(self, text: str) -> list[str]:
        """Return the text between the markers of every call."""
        if not self.start:
            if text.strip().startswith("{"):
                return [text]
            return []
        found, at = [], text.find(self.start)
        while at >= 0:
            begin = at + len(self.start)
            end = text.find(self.end, begin) if self.end else len(text)
            if end < 0:  # nor has a later call an end
                break
            found.append(text[begin:end])
            at = text.find(self.start, end + len(self.end))
        return found

    def read(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """Return name and arguments of a call, None if it is malformed."""
        name, arguments = self.keys
        try:
            written = finite_json(text)
            given = written[arguments]
            if isinstance(given, str):
                given = finite_json(given)
            called = written[name]
        # ValueError: also a number of 5,000 digits
        except (ValueError, RecursionError, KeyError, TypeError):
            return None
        if not isinstance(given, dict) or isinstance(called, dict | list):
            return None
        return str(called), given


def finite_json(text: str | bytes) -> Any:
    """Return JSON's value.

    Raises ValueError for NaN and infinite numbers, which are no JSON, and for more than DEEPEST
    levels, which code that walks the value by recursion could not take.
    """
    value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [inner for outer in level for inner in _children(outer)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{written} is no number of JSON")
    return value


def find_call_format(template: ChatTemplate, tools: Iterable[str], example: Message) -> CallFormat:
    """Return the template's form of a call. tools: their names. example: a turn with a call.

    Raises UsageError if the template prints no tools, does not write a call as one JSON object, or
    marks it by a special token, which is not part of a turn's text.
    """
    call = _find_in_turn(_render_example(template, tools, example))
    for marker in (call.start, call.end):
        if marker not in decode_tokens(template.tokenizer, encode_text(template.tokenizer, marker)):
            raise UsageError(
                f"task.tools: the chat template marks a tool call by the special token "
                f"{marker!r}, which is not part of a turn's text; use a template that marks "
                "calls by text"
            )
    return call


def _render_example(template: ChatTemplate, tools: Iterable[str], example: Message) -> str:
    """Return the template's text of a turn with a call. Raises UsageError without tools."""
    prompt = template.render([EXAMPLE_QUESTION], prompt=True)
    if any(tool not in prompt for tool in tools):
        raise UsageError(
            "task.tools: the tokenizer's chat template does not print tools; use a model whose "
            "template does, or a tokenizer without a template (plain ReAct)"
        )
    rendered = template.render_to_turn_end([EXAMPLE_QUESTION, example])
    if not rendered.startswith(prompt):
        prompt = template.render([EXAMPLE_QUESTION])
    return rendered[len(prompt) : -len(str(template.tokenizer.eos_token))]


def _find_in_turn(turn: str) -> CallFormat:
    """Return the format of calls from a turn with an example call that the template rendered.

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
            return CallFormat("".join(before[-1:]), "".join(after[:1]), (name, arguments))
    raise UsageError(
        "task.tools: the chat template does not write a tool call as one JSON object with a name "
        "and arguments, the only form read here; use another template"
    )
