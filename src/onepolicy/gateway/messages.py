"""Requests and turns in one form, which every dialect is translated to and from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from onepolicy.envs.multiturn.call_format import finite_json
from onepolicy.errors import UsageError

Role = Literal["system", "user", "assistant", "tool"]
Tool = Mapping[str, Any]
"""An OpenAI function: {"type": "function", "function": {"name", "description", "parameters"}}."""


class RequestError(UsageError):
    """A request that the gateway cannot serve.

    status: of HTTP. code: a word for programs, such as `context_length_exceeded`.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. arguments: JSON of an object, as it was written."""

    id: str
    name: str
    arguments: str

    def values(self) -> Any:
        """Return the arguments, or their text if that is not JSON."""
        try:
            return finite_json(self.arguments)
        except (ValueError, RecursionError):
            return self.arguments


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a conversation."""

    role: Role
    text: str = ""
    thought: str = ""  # of the assistant, before its text
    calls: tuple[Call, ...] = ()  # of the assistant, after its text
    call_id: str = ""  # of a tool: the call that this is the reply to


@dataclass(frozen=True, slots=True)
class Request:
    """A request for the next turn of a conversation."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: tuple[tuple[str, Any], ...] = ()  # settings that the client gave, in vain

    @property
    def last_assistant(self) -> int:
        """Number of messages up to the last one of the assistant, 0 if there is none."""
        roles = [message.role for message in self.messages]
        return max((i + 1 for i, role in enumerate(roles) if role == "assistant"), default=0)


def join_calls(
    messages: Sequence[Message], served: Mapping[str, tuple[str, ...]]
) -> tuple[Message, ...]:
    """Return the messages with the calls of each turn in one message, and their replies behind it.

    Some programs send the reply to a call right behind it, before the turn's next call. served: id
    of a call -> ids of all calls of its turn, in their order.
    """
    joined, at = list[Message](), 0
    while at < len(messages):
        turn, replies, after = messages[at], list[Message](), at + 1
        whole = served.get(turn.calls[0].id, ()) if turn.calls else ()
        calls = list(turn.calls)
        while after < len(messages) and len(whole) > len(turn.calls):
            each = messages[after]
            if each.role == "tool" and each.call_id in whole:
                replies.append(each)
            elif _goes_on(calls, each, whole):
                calls += each.calls
            else:
                break
            after += 1
        if _ids(calls) == whole:
            joined += [replace(turn, calls=tuple(calls)), *replies]
            at = after
        else:
            joined.append(turn)
            at += 1
    return tuple(joined)


def _ids(*calls: Iterable[Call]) -> tuple[str, ...]:
    return tuple(call.id for part in calls for call in part)


def _goes_on(calls: Sequence[Call], message: Message, whole: tuple[str, ...]) -> bool:
    """Return whether a message is the next calls of a turn and nothing else."""
    if message.text or message.thought or not message.calls:
        return False
    return _ids(calls, message.calls) == whole[: len(calls) + len(message.calls)]


def message_key(message: Message) -> bytes:
    """Return a digest of a message's meaning.

    Left out: thoughts, white space around the text, how the JSON of arguments is written, and the
    ids in the calls, because some clients change these without saying anything else.
    """
    written = [_sorted_json(_with_whole_numbers(call.values())) for call in message.calls]
    calls = [(call.name, each) for call, each in zip(message.calls, written, strict=True)]
    return _digest(message.role, message.text.strip(), repr(calls), message.call_id)


def tools_key(tools: Iterable[Tool]) -> bytes:
    """Return a digest of the tools in their order."""
    return _digest("tools", *map(_sorted_json, tools))


def chain_key(before: bytes, message: Message) -> bytes:
    """Return a digest of the conversation with this digest and the next message."""
    return hashlib.blake2b(before + message_key(message), digest_size=16).digest()


def _digest(*texts: str) -> bytes:
    data = json.dumps(texts).encode()
    return hashlib.blake2b(data, digest_size=16).digest()


def _with_whole_numbers(value: Any) -> Any:
    """Return JSON with whole floats as integers: programs in JavaScript write 5.0 as 5."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _with_whole_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(inner) for inner in value]
    return value


def _sorted_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
