"""OpenAI responses. Nothing is stored: a client sends its whole input again, as agents do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from onepolicy.gateway.dialects import chat
from onepolicy.gateway.dialects.common import (
    Body,
    Question,
    Reply,
    event,
    is_function,
    items,
    need,
    read_function,
    read_texts,
    take,
    take_limit,
)
from onepolicy.gateway.messages import Call, Message, Request, RequestError, Tool

PING = chat.PING
LOGPROBS = "message.output_text.logprobs"
IN_NAMESPACE = "::"
"""Between the name of a namespace and that of a tool in it, as the policy sees and calls it."""
write_error = chat.write_error


def read(body: Body) -> Question:
    """Return the request in a body. Raises RequestError with the field that is wrong."""
    for name in ("previous_response_id", "conversation", "prompt"):
        if body.get(name) is not None:
            raise RequestError(f"{name}: nothing is stored here; send the whole input")
    included = take(body, "include", list) or []
    if take(body, "top_logprobs", int) or LOGPROBS in included:
        raise RequestError(
            f"top_logprobs, {LOGPROBS}: are recorded here and not sent; leave them out"
        )
    if take(body, "background", bool):
        raise RequestError("background: answers come at once or as a stream; leave it out")
    messages = []
    instructions = take(body, "instructions", str)
    if instructions:
        messages.append(Message("system", instructions))
    given = body.get("input")
    if isinstance(given, str):
        messages.append(Message("user", given))
    else:
        messages += _read_items(need(body, "input", list))
    limit = take_limit(body, "max_output_tokens")
    request = Request(tuple(messages), _read_tools(body), limit, (), _read_overridden(body))
    return Question(request, take(body, "model", str) or "", bool(take(body, "stream", bool)))


def write(reply: Reply) -> Body:
    """Return the body of a reply."""
    status, details = "completed", None
    if reply.finish == "length":
        status, details = "incomplete", {"reason": "max_output_tokens"}
    return _response(reply, status) | {
        "output": _output(reply),
        "incomplete_details": details,
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": reply.tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": reply.prompt_tokens + reply.tokens,
        },
    }


def write_stream(reply: Reply, question: Question) -> Iterator[str]:
    """Yield the events of a reply, numbered."""
    for number, each in enumerate(_events(reply)):
        yield event(each | {"sequence_number": number}, each["type"])


def write_stream_error(error: RequestError) -> str:
    """Return the event of an error after the stream has begun."""
    body: Body = {"type": "error", "code": error.code, "message": str(error), "param": None}
    return event(body | {"sequence_number": 0}, "error")


def _read_overridden(body: Body) -> tuple[tuple[str, Any], ...]:
    """Return the settings of sampling that a client gave."""
    given = list(chat.read_overridden(body))
    form = take(take(body, "text", dict) or {}, "format", dict, "text.") or {}
    if form.get("type") not in (None, "text"):
        given.append(("text.format", form["type"]))
    effort = (take(body, "reasoning", dict) or {}).get("effort")
    if effort is not None:
        given.append(("reasoning.effort", effort))
    return tuple(given)


def _read_tools(body: Body) -> tuple[Tool, ...]:
    """Return the tools that the program runs. Those that OpenAI runs are left out."""
    return tuple(
        read_function(tool, path, "parameters")
        for path, tool in _flat_tools(take(body, "tools", list) or [])
        if is_function(tool, path, ("function",))
    )


def _flat_tools(given: list[Any]) -> Iterator[tuple[str, Body]]:
    """Yield all tools, those in namespaces (codex has some) under the names of both."""
    for path, tool in items(given, "tools"):
        if tool.get("type") != "namespace":
            yield path, tool
            continue
        before = need(tool, "name", str, path) + IN_NAMESPACE
        for inner_path, inner in items(need(tool, "tools", list, path), f"{path}tools"):
            yield inner_path, inner | {"name": before + need(inner, "name", str, inner_path)}


def _read_items(given: list[Any]) -> list[Message]:
    """Return the messages. Reasoning, text and calls that follow each other are one turn."""
    messages: list[Message] = []
    turn: list[Message] = []  # the parts of the turn that is being read
    for path, item in items(given, "input"):
        part = _read_item(item, path)
        if part.role == "assistant":
            turn.append(part)
            continue
        messages += _join_turn(turn)
        turn = []
        messages.append(part)
    return messages + _join_turn(turn)


def _join_turn(parts: list[Message]) -> list[Message]:
    if not parts:
        return []
    text = "\n".join(part.text for part in parts if part.text)
    thought = "\n".join(part.thought for part in parts if part.thought)
    calls = [call for part in parts for call in part.calls]
    return [Message("assistant", text, thought, tuple(calls))]


def _read_item(item: Body, path: str) -> Message:
    kind = item.get("type", "message")
    if kind == "message":
        name = need(item, "role", str, path)
        if name not in chat.ROLES or name == "tool":
            raise RequestError(f"{path}role: {name!r} is not system, developer, user or assistant")
        return Message(chat.ROLES[name], read_texts(item, "content", path, chat.TEXT))
    if kind == "function_call":
        number, name = need(item, "call_id", str, path), need(item, "name", str, path)
        namespace = take(item, "namespace", str, path)
        if namespace is not None:
            name = namespace + IN_NAMESPACE + name
        call = Call(number, name, take(item, "arguments", str, path) or "{}")
        return Message("assistant", calls=(call,))
    if kind == "function_call_output":
        text = read_texts(item, "output", path, chat.TEXT)
        return Message("tool", text, call_id=need(item, "call_id", str, path))
    if kind == "reasoning":
        return Message("assistant", thought=read_texts(item, "content", path, ("reasoning_text",)))
    raise RequestError(f"{path}type: {kind!r} is not known here")


def _output(reply: Reply) -> list[Body]:
    message = reply.message
    output: list[Body] = []
    if message.thought:
        content = [{"type": "reasoning_text", "text": message.thought}]
        output.append(
            {"id": f"rs_{reply.id}", "type": "reasoning", "summary": [], "content": content}
        )
    if message.text or not message.calls:
        item: Body = {"id": f"msg_{reply.id}", "type": "message", "role": "assistant"}
        output.append(item | {"status": "completed", "content": [_text_part(message.text)]})
    for call in message.calls:
        item = {"id": f"fc_{reply.id}_{call.id}", "type": "function_call", "call_id": call.id}
        namespace, found, name = call.name.partition(IN_NAMESPACE)
        if found:
            item["namespace"] = namespace
        else:
            name = call.name
        item |= {"name": name, "arguments": call.arguments, "status": "completed"}
        output.append(item)
    return output


def _events(reply: Reply) -> Iterator[Body]:
    begun = _response(reply, "in_progress")
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(_output(reply)):
        place = {"output_index": index, "item_id": item["id"]}
        added = {"type": "response.output_item.added", "output_index": index}
        if item["type"] == "function_call":
            yield added | {"item": item | {"arguments": "", "status": "in_progress"}}
            kind = "response.function_call_arguments"
            yield place | {"type": f"{kind}.delta", "delta": item["arguments"]}
            done = {"type": f"{kind}.done", "arguments": item["arguments"], "name": item["name"]}
            yield place | done
        else:
            empty: Body = {"content": []}
            if item["type"] == "message":
                empty["status"] = "in_progress"
            yield added | {"item": item | empty}
            yield from _part_events(item["content"][0], place | {"content_index": 0})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    body = write(reply)
    yield {"type": f"response.{body['status']}", "response": body}


def _part_events(part: Body, place: Body) -> Iterator[Body]:
    """Yield the events of a message's text, or of the text of a reasoning."""
    text = part["text"]
    yield place | {"type": "response.content_part.added", "part": part | {"text": ""}}
    if part["type"] == "reasoning_text":
        yield place | {"type": "response.reasoning_text.delta", "delta": text}
        yield place | {"type": "response.reasoning_text.done", "text": text}
    else:
        yield place | {"type": "response.output_text.delta", "delta": text, "logprobs": []}
        yield place | {"type": "response.output_text.done", "text": text, "logprobs": []}
    yield place | {"type": "response.content_part.done", "part": part}


def _text_part(text: str) -> Body:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(reply: Reply, status: str) -> Body:
    return {
        "id": f"resp_{reply.id}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "model": reply.model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "temperature": None,
        "top_p": None,
        "store": False,
        "usage": None,
    }
