"""Anthropic messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from onepolicy.gateway.dialects.common import (
    Body,
    Question,
    Reply,
    arguments_of,
    event,
    is_function,
    items,
    need,
    read_function,
    read_sampling,
    read_stop,
    read_texts,
    take,
    take_limit,
)
from onepolicy.gateway.messages import Call, Message, Request, RequestError, Tool

PING = event({"type": "ping"}, "ping")
SAMPLING = ("temperature", "top_p", "top_k")
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def read(body: Body) -> Question:
    """Return the request in a body. Raises RequestError with the field that is wrong."""
    messages = []
    system = read_texts(body, "system", "", ("text",))
    if system:
        messages.append(Message("system", system))
    for path, message in items(need(body, "messages", list), "messages"):
        role = need(message, "role", str, path)
        if role == "system":
            messages.append(Message("system", read_texts(message, "content", path, ("text",))))
        elif role == "user":
            messages += _read_user(message, path)
        elif role == "assistant":
            messages.append(_read_turn(message, path))
        else:
            raise RequestError(f"{path}role: {role!r} is not user, assistant or system")
    request = Request(
        tuple(messages),
        _read_tools(body),
        take_limit(body, "max_tokens"),
        read_stop(body, "stop_sequences"),
        _read_overridden(body),
    )
    return Question(request, take(body, "model", str) or "", bool(take(body, "stream", bool)))


def write(reply: Reply) -> Body:
    """Return the body of a reply."""
    finish, sequence = _finish_of(reply)
    return {
        "id": f"msg_{reply.id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": _blocks(reply),
        "stop_reason": finish,
        "stop_sequence": sequence,
        "usage": _usage(reply, reply.tokens),
    }


def write_count(tokens: int) -> Body:
    """Return the body of an answer to count_tokens."""
    return {"input_tokens": tokens}


def write_stream(reply: Reply, question: Question) -> Iterator[str]:
    """Yield the events of a reply."""
    body = write(reply)
    start = body | {"content": [], "stop_reason": None, "stop_sequence": None}
    start["usage"] = _usage(reply, 1)
    yield _event({"type": "message_start", "message": start})
    for index, block in enumerate(body["content"]):
        empty, deltas = _opened(block)
        yield _event({"type": "content_block_start", "index": index, "content_block": empty})
        for delta in deltas:
            yield _event({"type": "content_block_delta", "index": index, "delta": delta})
        yield _event({"type": "content_block_stop", "index": index})
    end = {"stop_reason": body["stop_reason"], "stop_sequence": body["stop_sequence"]}
    yield _event({"type": "message_delta", "delta": end, "usage": {"output_tokens": reply.tokens}})
    yield _event({"type": "message_stop"})


def write_error(error: RequestError) -> Body:
    """Return the body of an error."""
    kind = "invalid_request_error"
    if error.status >= 500:
        kind = "api_error"
    kind = ERROR_TYPES.get(error.status, kind)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def write_stream_error(error: RequestError) -> str:
    """Return the event of an error after the stream has begun."""
    return _event(write_error(error))


def _read_overridden(body: Body) -> tuple[tuple[str, Any], ...]:
    """Return the settings of sampling that a client gave."""
    given = list(read_sampling(body, SAMPLING))
    choice = take(body, "tool_choice", dict) or {}
    if choice.get("type") not in (None, "auto"):
        given.append(("tool_choice", choice["type"]))
    if choice.get("disable_parallel_tool_use"):
        given.append(("disable_parallel_tool_use", True))
    thinking = take(body, "thinking", dict) or {}
    if thinking.get("type") not in (None, "disabled"):
        given.append(("thinking", thinking["type"]))
    output = take(body, "output_config", dict) or {}
    given += [(f"output_config.{name}", each) for name, each in output.items() if each is not None]
    return tuple(given)


def _read_tools(body: Body) -> tuple[Tool, ...]:
    """Return the tools that the program runs. Those that Anthropic runs are left out."""
    return tuple(
        read_function(tool, path, "input_schema")
        for path, tool in items(take(body, "tools", list) or [], "tools")
        if is_function(tool, path, (None, "custom"))
    )


def _read_user(body: Body, path: str) -> list[Message]:
    """Return a user's message: replies of tools, and texts between them as one message each."""
    if not isinstance(body.get("content"), list):
        return [Message("user", read_texts(body, "content", path, ("text",)))]
    messages: list[Message] = []
    texts: list[str] = []
    for block_path, block in items(body["content"], f"{path}content"):
        kind = block.get("type")
        if kind == "text":
            texts.append(need(block, "text", str, block_path))
        elif kind == "tool_result":
            if texts:
                messages.append(Message("user", "\n".join(texts)))
                texts = []
            text = read_texts(block, "content", block_path, ("text",))
            call_id = need(block, "tool_use_id", str, block_path)
            messages.append(Message("tool", text, call_id=call_id))
        else:
            raise RequestError(f"{block_path}type: {kind!r} is neither text nor tool_result")
    if texts or not messages:
        messages.append(Message("user", "\n".join(texts)))
    return messages


def _read_turn(body: Body, path: str) -> Message:
    if not isinstance(body.get("content"), list):
        return Message("assistant", read_texts(body, "content", path, ("text",)))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Call] = []
    for block_path, block in items(body["content"], f"{path}content"):
        kind = block.get("type")
        if kind == "text":
            texts.append(need(block, "text", str, block_path))
        elif kind == "thinking":
            thoughts.append(need(block, "thinking", str, block_path))
        elif kind == "tool_use":
            calls.append(
                Call(
                    need(block, "id", str, block_path),
                    need(block, "name", str, block_path),
                    json.dumps(take(block, "input", dict, block_path) or {}),
                )
            )
        elif kind != "redacted_thinking":
            raise RequestError(f"{block_path}type: {kind!r} is no block of an assistant")
    return Message("assistant", "\n".join(texts), "\n".join(thoughts), tuple(calls))


def _blocks(reply: Reply) -> list[Body]:
    message = reply.message
    blocks: list[Body] = []
    if message.thought:
        blocks.append({"type": "thinking", "thinking": message.thought, "signature": reply.id})
    if message.text or not message.calls:
        blocks.append({"type": "text", "text": message.text})
    for call in message.calls:
        block = {"type": "tool_use", "id": call.id, "name": call.name}
        blocks.append(block | {"input": arguments_of(call)})
    return blocks


def _opened(block: Body) -> tuple[Body, list[Body]]:
    """Return a block as its stream begins, and the deltas that fill it."""
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return block | {"thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return block | {"text": ""}, [{"type": "text_delta", "text": block["text"]}]
    written = json.dumps(block["input"])
    return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": written}]


def _finish_of(reply: Reply) -> tuple[str, str | None]:
    if reply.finish == "calls":
        return "tool_use", None
    if reply.stop is not None:
        return "stop_sequence", reply.stop
    if reply.finish == "length":
        return "max_tokens", None
    return "end_turn", None


def _usage(reply: Reply, tokens: int) -> Body:
    return {
        "input_tokens": reply.prompt_tokens,
        "output_tokens": tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(data: Body) -> str:
    return event(data, data["type"])
