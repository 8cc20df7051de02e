"""Answers in OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onepolicy.gateway.conformance.answers import (
    Answer,
    Body,
    Call,
    Event,
    Illegal,
    Reader,
    want,
    want_calls,
    want_equal,
    want_or,
)


class Chat(Reader):
    path = "chat/completions"

    def read(self, body: Any) -> Answer:
        want_equal(want(body, "object", str), "chat.completion", "object")
        (choice,) = _choices(body, 1, 1)
        message = want(choice, "message", dict, "choices[0].")
        want_equal(message.get("role"), "assistant", "role")
        text = want_or(message, "content", str, "message.")
        calls = []
        for call in want_or(message, "tool_calls", list, "message."):
            want_equal(want(call, "type", str, "tool_calls[]."), "function", "type of a call")
            function = want(call, "function", dict, "tool_calls[].")
            arguments = want(function, "arguments", str, "function.")
            name = want(function, "name", str, "function.")
            calls.append(Call(want(call, "id", str, "tool_calls[]."), name, arguments))
        finish = want(choice, "finish_reason", str, "choices[0].")
        thought = _thought(message)
        answer = _answer(body, text, thought, want_calls(calls), finish)
        _add_usage(answer, want(body, "usage", dict))
        return answer

    def read_stream(self, events: Sequence[Event], asked: Mapping[str, Any]) -> Answer:
        want_equal(events[-1].data, "[DONE]", "the stream ends with")
        options = asked.get("stream_options", {})
        chunks = [event.data for event in events[:-1]]
        _check_chunks(chunks)
        usages = [usage for usage in (want_or(chunk, "usage", dict) for chunk in chunks) if usage]
        if options.get("include_usage") and not usages:
            raise Illegal("the stream has no usage, which was asked for")
        choices = [choice for chunk in chunks for choice in _choices(chunk, 0, 1)]
        if not choices:
            raise Illegal("the stream has no choice")
        deltas = [want(choice, "delta", dict, "choices[0].") for choice in choices]
        ends = [choice.get("finish_reason") for choice in choices]
        if [end for end in ends if end is not None] != [ends[-1]]:
            raise Illegal(f"finish_reason is not in the last choice alone: {ends}")
        want_equal(deltas[0].get("role"), "assistant", "role of the first delta")
        text = "".join(want_or(delta, "content", str, "delta.") for delta in deltas)
        thought = "".join(map(_thought, deltas))
        answer = _answer(chunks[0], text, thought, _join_calls(deltas), ends[-1])
        if usages:
            _add_usage(answer, usages[-1])
        return answer

    def write_replies(self, answer: Answer, text: str) -> list[Body]:
        return [{"role": "tool", "tool_call_id": call.id, "content": text} for call in answer.calls]


def _answer(body: Body, text: str, thought: str, calls: list[Call], finish: Any) -> Answer:
    if finish not in ("stop", "length", "tool_calls"):
        raise Illegal(f"finish_reason is {finish!r}")
    want_equal(finish == "tool_calls", bool(calls), "finish_reason tool_calls, and calls")
    message: Body = {"role": "assistant", "content": text}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["content"] = text or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    name = want(body, "id", str)
    return Answer(name, text, thought, calls, finish == "length", -1, -1, [message])


def _choices(body: Any, least: int, most: int) -> list[Body]:
    choices = want(body, "choices", list)
    if not least <= len(choices) <= most:
        raise Illegal(f"there are {len(choices)} choices")
    for choice in choices:
        want_equal(want(choice, "index", int, "choices[]."), 0, "index of the choice")
    return choices


def _check_chunks(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        want_equal(want(chunk, "object", str), "chat.completion.chunk", "object of a chunk")
        want_equal(want(chunk, "id", str), chunks[0]["id"], "id of a chunk")


def _join_calls(deltas: Sequence[Body]) -> list[Call]:
    """Return the calls of a stream, each begun by its id and name and put together by its index."""
    calls: list[Call] = []
    for delta in deltas:
        for part in want_or(delta, "tool_calls", list, "delta."):
            index = want(part, "index", int, "tool_calls[].")
            function = want(part, "function", dict, "tool_calls[].")
            arguments = want_or(function, "arguments", str, "function.")
            if index == len(calls):
                name = want(function, "name", str, "function.")
                calls.append(Call(want(part, "id", str, "tool_calls[]."), name, arguments))
            elif calls and index == len(calls) - 1:
                calls[-1] = Call(calls[-1].id, calls[-1].name, calls[-1].arguments + arguments)
            else:
                raise Illegal(f"call {index} follows {len(calls)} calls")
    return want_calls(calls)


def _thought(message: Body) -> str:
    for name in ("reasoning_content", "reasoning"):
        thought = want_or(message, name, str)
        if thought:
            return str(thought)
    return ""


def _add_usage(answer: Answer, usage: Body) -> None:
    answer.prompt_tokens = want(usage, "prompt_tokens", int, "usage.")
    answer.tokens = want(usage, "completion_tokens", int, "usage.")
    total = want(usage, "total_tokens", int, "usage.")
    want_equal(total, answer.prompt_tokens + answer.tokens, "usage.total_tokens and its parts")
