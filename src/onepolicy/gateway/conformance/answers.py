"""Answers of a gateway as a client reads them: strictly, in each dialect, as a body or a stream.

Written against the dialects and not against our own writer, so that a fault of that is seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]


class Illegal(Exception):
    """An answer that a client cannot read, and why."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. arguments: JSON, as it was sent."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class Answer:
    """An answer in a form that all dialects have.

    turn: the form in which the client sends it back: messages of chat and messages, items of
    responses. cut: it ended at the limit of tokens.
    """

    id: str
    text: str
    thought: str
    calls: list[Call]
    cut: bool
    prompt_tokens: int
    tokens: int
    turn: list[Body] = field(default_factory=list)


class Reader:
    """A dialect. The base class has their common part."""

    path: str

    def read(self, body: Any) -> Answer:
        """Return the answer in a body. Raises Illegal."""
        raise NotImplementedError

    def read_stream(self, events: Sequence[Event], asked: Mapping[str, Any]) -> Answer:
        """Return the answer of a stream's events. asked: the request's body. Raises Illegal."""
        raise NotImplementedError

    def write_replies(self, answer: Answer, text: str) -> list[Body]:
        """Return the messages that reply to an answer's calls."""
        raise NotImplementedError

    def write_turn(self, text: str) -> list[Body]:
        """Return an assistant's turn of text alone."""
        return [{"role": "assistant", "content": text}]

    def check_error(self, body: Any) -> None:
        """Raise Illegal unless this is an error in the dialect's own shape."""
        error = want(body, "error", dict)
        want(error, "message", str, "error.")
        want(error, "type", str, "error.")


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a stream. name: "" without one. data: JSON, or text that is none."""

    name: str
    data: Any


def read_events(content: str) -> list[Event]:
    """Return the events of a stream, without comments. Raises Illegal."""
    events = []
    for block in content.replace("\r\n", "\n").split("\n\n"):
        name, data = "", []
        for line in block.split("\n"):
            key, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if key == "event":
                name = value
            elif key == "data":
                data.append(value)
            elif key not in ("", "id", "retry"):
                raise Illegal(f"a line of the stream is {line[:60]!r}, which is no field of one")
        if not data:
            continue
        text = "\n".join(data)
        try:
            events.append(Event(name, json.loads(text)))
        except (ValueError, RecursionError):
            events.append(Event(name, text))
    if not events:
        raise Illegal("the stream has no event")
    return events


def want(body: Any, name: str, kind: type | tuple[type, ...], path: str = "") -> Any:
    """Return a field of a type. Raises Illegal."""
    if not isinstance(body, dict):
        raise Illegal(f"{path or 'the answer'} is no object but {type(body).__name__}")
    value = body.get(name)
    is_wrong_number = isinstance(value, bool) and kind is int
    if not isinstance(value, kind) or is_wrong_number:
        raise Illegal(f"{path}{name} is {value!r:.60}")
    return value


def want_or(body: Any, name: str, kind: type, path: str = "") -> Any:
    """Return a field of a type; an empty one if it is null or not there. Raises Illegal."""
    if want(body, name, (kind, type(None)), path) is None:
        return kind()
    return body[name]


def want_equal(one: Any, other: Any, what: str) -> None:
    """Raise Illegal unless two values are equal."""
    if one != other:
        raise Illegal(f"{what}: {one!r:.80} and {other!r:.80}")


def want_calls(calls: Iterable[Call]) -> list[Call]:
    """Return calls whose ids differ and whose arguments are objects. Raises Illegal."""
    calls = list(calls)
    if len({call.id for call in calls}) < len(calls):
        raise Illegal("two calls have the same id")
    for call in calls:
        try:
            arguments = json.loads(call.arguments)
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise Illegal(f"arguments of {call.name}: {call.arguments[:60]!r} is no JSON object")
    return calls
