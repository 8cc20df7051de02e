"""The parts that all dialects have: a request that was read, a reply, and JSON that is checked."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from onepolicy.gateway.messages import Call, Message, Request, RequestError, Tool

Body = dict[str, Any]
T = TypeVar("T")
SERVER_TOOLS = (
    *("web_search", "web_fetch", "code_execution", "file_search", "code_interpreter"),
    *("image_generation", "mcp", "tool_search_tool"),
)
"""Beginnings of the types of tools that a provider's servers run."""
MOST_STOPS = 64
"""Stop texts of a request. Each is looked for in every turn."""


@dataclass(frozen=True, slots=True)
class Question:
    """A request as a client sent it."""

    request: Request
    model: str
    stream: bool = False
    stream_usage: bool = True  # the stream ends with the usage


@dataclass(frozen=True, slots=True)
class Reply:
    """A turn as it is sent to a client."""

    id: str  # of the turn, unique
    model: str
    created: int  # seconds since 1970
    message: Message
    finish: Literal["stop", "length", "calls"]
    stop: str | None  # the client's stop text that ended the turn
    prompt_tokens: int
    tokens: int


class Dialect(Protocol):
    """A dialect: a module of this package."""

    PING: str

    def read(self, body: Body) -> Question:
        """Return the request in a body. Raises RequestError with the field that is wrong."""
        ...

    def write(self, reply: Reply) -> Body:
        """Return the body of a reply."""
        ...

    def write_stream(self, reply: Reply, question: Question) -> Iterator[str]:
        """Yield the events of a reply: a legal stream that says the same as the body."""
        ...

    def write_error(self, error: RequestError) -> Body:
        """Return the body of an error."""
        ...

    def write_stream_error(self, error: RequestError) -> str:
        """Return the event of an error after the stream has begun."""
        ...


def take(body: Mapping[str, Any], name: str, kind: type[T], path: str = "") -> T | None:
    """Return a field, None if it is missing or null. Raises RequestError for another type."""
    value = body.get(name)
    if value is None:
        return None
    is_number = isinstance(value, bool) and kind is not bool
    if not isinstance(value, kind) or is_number:
        raise RequestError(f"{path}{name}: {type(value).__name__} given, expected {kind.__name__}")
    return value


def need(body: Mapping[str, Any], name: str, kind: type[T], path: str = "") -> T:
    """Return a field. Raises RequestError if it is missing."""
    value = take(body, name, kind, path)
    if value is None:
        raise RequestError(f"{path}{name}: is missing")
    return value


def take_limit(body: Mapping[str, Any], name: str) -> int | None:
    """Return a number of tokens, at least 1."""
    value = take(body, name, int)
    if value is not None and value < 1:
        raise RequestError(f"{name}: {value} given, expected at least 1")
    return value


def items(values: Sequence[Any], path: str) -> Iterable[tuple[str, Body]]:
    """Yield the objects of a list, each with its path."""
    for i, value in enumerate(values):
        if not isinstance(value, dict):
            raise RequestError(f"{path}[{i}]: {type(value).__name__} given, expected an object")
        yield f"{path}[{i}].", value


def read_texts(body: Mapping[str, Any], name: str, path: str, types: Sequence[str]) -> str:
    """Return the text of a content: a string, or parts of these types, a line each."""
    content = body.get(name)
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for part_path, part in items(need(body, name, list, path), path + name):
        if part.get("type") not in types:
            raise RequestError(
                f"{part_path}type: {part.get('type')!r} is not text, the only thing that is read "
                "here"
            )
        parts.append(need(part, "text", str, part_path))
    return "\n".join(parts)


def read_function(body: Mapping[str, Any], path: str, parameters: str) -> Tool:
    """Return a tool. parameters: the field of its JSON schema."""
    function: Body = {"name": need(body, "name", str, path)}
    description = take(body, "description", str, path)
    if description is not None:
        function["description"] = description
    function["parameters"] = take(body, parameters, dict, path) or {"type": "object"}
    return {"type": "function", "function": function}


def is_function(tool: Body, path: str, types: Sequence[str | None]) -> bool:
    """Return whether a tool is a function, of one of these types, and not one of SERVER_TOOLS.

    Raises RequestError for any other: the program runs it, and the policy would not be told of it.
    """
    kind = tool.get("type")
    if kind in types:
        return True
    if not str(kind).startswith(SERVER_TOOLS):
        raise RequestError(f"{path}type: {kind!r}, the program's tools are functions here")
    return False


def read_sampling(body: Mapping[str, Any], names: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Return the settings of sampling that a client gave: the gateway has its own."""
    return tuple((name, body[name]) for name in names if body.get(name) is not None)


def read_stop(body: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the client's stop texts."""
    value = body.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise RequestError(f"{name}: expected a text or a list of texts")
    if len(value) > MOST_STOPS:
        raise RequestError(f"{name}: {len(value)} texts given, {MOST_STOPS} may be")
    return tuple(each for each in value if each)


def arguments_of(call: Call) -> Any:
    """Return a served call's arguments as JSON."""
    return json.loads(call.arguments)


def wire_json(data: Any) -> str:
    """Return JSON in ASCII: a text may hold half a surrogate pair, which UTF-8 cannot write."""
    return json.dumps(data, allow_nan=False)


def event(data: Any, name: str | None = None) -> str:
    """Return one event of a stream."""
    text = f"data: {wire_json(data)}\n\n"
    if name is None:
        return text
    return f"event: {name}\n{text}"
