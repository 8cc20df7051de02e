"""OpenAI chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onepolicy.gateway.dialects.common import (
    Body,
    Question,
    Reply,
    event,
    items,
    need,
    read_function,
    read_sampling,
    read_stop,
    read_texts,
    take,
    take_limit,
)
from onepolicy.gateway.messages import Call, Message, Request, RequestError, Role

PING = ": ping\n\n"
ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEXT = ("text", "input_text", "output_text")
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "seed", "reasoning_effort"),
)
FINISH = {"stop": "stop", "length": "length", "calls": "tool_calls"}
ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def read(body: Body) -> Question:
    """Return the request in a body. Raises RequestError with the field that is wrong."""
    if (take(body, "n", int) or 1) > 1:
        raise RequestError("n: one answer a request is sampled; send several requests")
    if take(body, "logprobs", bool):
        raise RequestError("logprobs: are recorded here and not sent; leave it out")
    if body.get("functions"):
        raise RequestError("functions: is the old form of tools; send tools")
    tools = []
    for path, tool in items(take(body, "tools", list) or [], "tools"):
        if tool.get("type") != "function":
            raise RequestError(f"{path}type: {tool.get('type')!r}, only functions are known here")
        function = need(tool, "function", dict, path)
        tools.append(read_function(function, f"{path}function.", "parameters"))
    messages = [
        _read_message(message, path)
        for path, message in items(need(body, "messages", list), "messages")
    ]
    options = take(body, "stream_options", dict) or {}
    limit = take_limit(body, "max_completion_tokens") or take_limit(body, "max_tokens")
    request = Request(
        tuple(messages), tuple(tools), limit, read_stop(body, "stop"), read_overridden(body)
    )
    return Question(
        request,
        take(body, "model", str) or "",
        bool(take(body, "stream", bool)),
        bool(take(options, "include_usage", bool, "stream_options.")),
    )


def read_overridden(body: Body) -> tuple[tuple[str, Any], ...]:
    """Return the settings of sampling that a client gave, in both dialects of OpenAI."""
    given = list(read_sampling(body, SAMPLING))
    if body.get("tool_choice") not in (None, "auto"):
        given.append(("tool_choice", body["tool_choice"]))
    if take(body, "parallel_tool_calls", bool) is False:
        given.append(("parallel_tool_calls", False))
    form = take(body, "response_format", dict) or {}
    if form.get("type") not in (None, "text"):
        given.append(("response_format", form["type"]))
    return tuple(given)


def write(reply: Reply) -> Body:
    """Return the body of a reply."""
    message: Body = {"role": "assistant", "content": reply.message.text, "refusal": None}
    if reply.message.thought:
        message["reasoning_content"] = reply.message.thought
    if reply.message.calls:
        message["content"] = reply.message.text or None
        message["tool_calls"] = [_write_call(call) for call in reply.message.calls]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": FINISH[reply.finish],
    }
    return _envelope(reply, "chat.completion", [choice]) | {"usage": _usage(reply)}


def write_stream(reply: Reply, question: Question) -> Iterator[str]:
    """Yield the events of a reply. All calls come in one event, with their indices."""
    message = reply.message
    deltas: list[Body] = [{"role": "assistant", "content": ""}]
    if message.thought:
        deltas.append({"reasoning_content": message.thought})
    if message.text:
        deltas.append({"content": message.text})
    if message.calls:
        calls = [{"index": i} | _write_call(call) for i, call in enumerate(message.calls)]
        deltas.append({"tool_calls": calls})
    for delta in deltas:
        yield _chunk(reply, [_choice(delta, None)])
    yield _chunk(reply, [_choice({}, FINISH[reply.finish])])
    if question.stream_usage:
        yield _chunk(reply, [], usage=_usage(reply))
    yield "data: [DONE]\n\n"


def write_error(error: RequestError) -> Body:
    """Return the body of an error."""
    kind = "invalid_request_error"
    if error.status >= 500:
        kind = "server_error"
    kind = ERROR_TYPES.get(error.status, kind)
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def write_stream_error(error: RequestError) -> str:
    """Return the event of an error after the stream has begun."""
    return event(write_error(error))


def _read_message(body: Body, path: str) -> Message:
    name = need(body, "role", str, path)
    if name not in ROLES:
        raise RequestError(f"{path}role: {name!r} is not one of {', '.join(ROLES)}")
    role, text = ROLES[name], read_texts(body, "content", path, TEXT)
    if role == "tool":
        return Message(role, text, call_id=need(body, "tool_call_id", str, path))
    if role != "assistant":
        return Message(role, text)
    thought = take(body, "reasoning_content", str, path) or take(body, "reasoning", str, path)
    calls = []
    for call_path, call in items(take(body, "tool_calls", list, path) or [], f"{path}tool_calls"):
        function = need(call, "function", dict, call_path)
        calls.append(
            Call(
                need(call, "id", str, call_path),
                need(function, "name", str, f"{call_path}function."),
                take(function, "arguments", str, f"{call_path}function.") or "{}",
            )
        )
    return Message(role, text, thought or "", tuple(calls))


def _write_call(call: Call) -> Body:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _usage(reply: Reply) -> Body:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.tokens,
        "total_tokens": reply.prompt_tokens + reply.tokens,
    }


def _envelope(reply: Reply, kind: str, choices: list[Body]) -> Body:
    return {
        "id": f"chatcmpl-{reply.id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }


def _choice(delta: Body, finish: str | None) -> Body:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}


def _chunk(reply: Reply, choices: list[Body], usage: Body | None = None) -> str:
    chunk = _envelope(reply, "chat.completion.chunk", choices)
    if usage is not None:
        chunk["usage"] = usage
    return event(chunk)
