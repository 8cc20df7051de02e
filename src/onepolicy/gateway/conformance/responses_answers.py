"""Answers in OpenAI's responses."""

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
)

ENDS = ("response.completed", "response.incomplete")
DELTAS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
}
"""Events that come as deltas, and the field of the one that ends them."""


class Responses(Reader):
    path = "responses"

    def read(self, body: Any) -> Answer:
        want_equal(want(body, "object", str), "response", "object")
        status = want(body, "status", str)
        if status not in ("completed", "incomplete"):
            raise Illegal(f"status is {status!r}")
        texts, thoughts, calls = [], [], []
        for item in want(body, "output", list):
            kind = want(item, "type", str, "output[].")
            want(item, "id", str, "output[].")
            if kind == "message":
                want_equal(item.get("role"), "assistant", "role of a message")
                texts += _texts(item, "output_text")
            elif kind == "reasoning":
                thoughts += _texts(item, "reasoning_text")
            elif kind == "function_call":
                name, written = (want(item, key, str, "output[].") for key in ("name", "arguments"))
                calls.append(Call(want(item, "call_id", str, "output[]."), name, written))
            else:
                raise Illegal(f"output[].type is {kind!r}")
        usage = want(body, "usage", dict)
        prompt, new = (want(usage, f"{side}_tokens", int, "usage.") for side in ("input", "output"))
        want_equal(usage.get("total_tokens"), prompt + new, "usage.total_tokens and its parts")
        return Answer(
            want(body, "id", str),
            "".join(texts),
            "".join(thoughts),
            want_calls(calls),
            status == "incomplete",
            prompt,
            new,
            body["output"],
        )

    def read_stream(self, events: Sequence[Event], asked: Mapping[str, Any]) -> Answer:
        steps = [event.data for event in events if event.data != "[DONE]"]
        if not steps:
            raise Illegal("the stream has no event")
        for number, step in enumerate(steps):
            want_equal(want(step, "sequence_number", int), number, "sequence_number, expected")
            want(step, "type", str)
        want_equal(steps[0]["type"], "response.created", "the stream begins with")
        if steps[-1]["type"] not in ENDS:
            raise Illegal(f"the stream ends with {steps[-1]['type']}")
        body = want(steps[-1], "response", dict, "the last event's ")
        done = _join_items(steps[1:-1])
        want_equal(done, body.get("output"), "output of the stream's items and of its end")
        return self.read(body)

    def write_replies(self, answer: Answer, text: str) -> list[Body]:
        return [
            {"type": "function_call_output", "call_id": call.id, "output": text}
            for call in answer.calls
        ]


def _texts(item: Body, kind: str) -> list[str]:
    parts = want(item, "content", list, "output[].")
    for part in parts:
        want_equal(want(part, "type", str, "content[]."), kind, "type of a content")
    return [want(part, "text", str, "content[].") for part in parts]


def _join_items(steps: Sequence[Body]) -> list[Body]:
    """Return the items of a stream, whose deltas add up to the ends of their events."""
    items: list[Body] = []
    is_open, told = False, ""
    for step in steps:
        kind = step["type"]
        if kind == "response.in_progress":
            continue
        index = want(step, "output_index", int)
        opens = kind == "response.output_item.added"
        want_equal(index, len(items), f"output_index of {kind}, expected")
        if opens == is_open:
            raise Illegal(f"{kind} of item {index} while it is {'open' if opens else 'not begun'}")
        stem, _, last = kind.rpartition(".")
        if opens:
            is_open = True
        elif kind == "response.output_item.done":
            items.append(want(step, "item", dict))
            is_open, told = False, ""
        elif stem in DELTAS and last == "delta":
            told += want(step, "delta", str)
        elif stem in DELTAS and last == "done":
            want_equal(told, want(step, DELTAS[stem], str), f"deltas and end of {stem}")
            told = ""
    if is_open:
        raise Illegal("the last item is not ended")
    return items
