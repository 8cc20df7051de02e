"""Answers in Anthropic's messages."""

from __future__ import annotations

import json
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

FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
"""Kinds of a delta, and the field of the block that it goes on."""
OWNERS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "thinking"} | {
    "input_json_delta": "tool_use"
}
"""Kinds of a delta, and the kind of its block."""


class Messages(Reader):
    path = "messages"

    def read(self, body: Any) -> Answer:
        want_equal(want(body, "type", str), "message", "type")
        want_equal(body.get("role"), "assistant", "role")
        blocks = want(body, "content", list)
        texts, thoughts, calls = [], [], []
        for block in blocks:
            kind = want(block, "type", str, "content[].")
            if kind == "text":
                texts.append(want(block, "text", str, "content[]."))
            elif kind == "thinking":
                thoughts.append(want(block, "thinking", str, "content[]."))
                want(block, "signature", str, "content[].")
            elif kind == "tool_use":
                given = want(block, "input", dict, "content[].")
                name = want(block, "name", str, "content[].")
                calls.append(Call(want(block, "id", str, "content[]."), name, json.dumps(given)))
            else:
                raise Illegal(f"content[].type is {kind!r}")
        finish = want(body, "stop_reason", str)
        if finish not in ("end_turn", "max_tokens", "stop_sequence", "tool_use"):
            raise Illegal(f"stop_reason is {finish!r}")
        want_equal(finish == "tool_use", bool(calls), "stop_reason tool_use, and calls")
        usage = want(body, "usage", dict)
        return Answer(
            want(body, "id", str),
            "".join(texts),
            "".join(thoughts),
            want_calls(calls),
            finish == "max_tokens",
            want(usage, "input_tokens", int, "usage."),
            want(usage, "output_tokens", int, "usage."),
            [{"role": "assistant", "content": blocks}],
        )

    def read_stream(self, events: Sequence[Event], asked: Mapping[str, Any]) -> Answer:
        for event in events:
            want_equal(want(event.data, "type", str), event.name, "type and name of an event")
        steps = [event.data for event in events if event.name != "ping"]
        names = [step["type"] for step in steps]
        want_equal(names[:1], ["message_start"], "the stream begins with")
        want_equal(names[-2:], ["message_delta", "message_stop"], "the stream ends with")
        body = dict(want(steps[0], "message", dict, "message_start."))
        want_equal(body.get("content"), [], "content of message_start")
        body["content"] = _join_blocks(steps[1:-2])
        body |= want(steps[-2], "delta", dict, "message_delta.")
        usage = want(steps[-2], "usage", dict, "message_delta.")
        body["usage"] = want(body, "usage", dict) | usage
        return self.read(body)

    def write_replies(self, answer: Answer, text: str) -> list[Body]:
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": text}
            for call in answer.calls
        ]
        if not results:
            return []
        return [{"role": "user", "content": results}]

    def check_error(self, body: Any) -> None:
        want_equal(want(body, "type", str), "error", "type")
        super().check_error(body)


def _join_blocks(steps: Sequence[Body]) -> list[Body]:
    """Return the blocks of a stream: each is begun, filled and ended before the next begins."""
    blocks: list[Body] = []
    written: str | None = None  # JSON of a call's input; None: no block is open
    for step in steps:
        kind, index = step["type"], want(step, "index", int)
        opens = kind == "content_block_start"
        want_equal(index, len(blocks) - (not opens), f"index of {kind}, expected")
        if opens == (written is not None):
            raise Illegal(f"{kind} of block {index} while a block is {'open' if opens else 'over'}")
        if opens:
            blocks.append(dict(want(step, "content_block", dict)))
            written = ""
        elif kind == "content_block_delta":
            written = f"{written}{_add_delta(blocks[-1], want(step, 'delta', dict))}"
        elif kind == "content_block_stop":
            if written:
                try:
                    blocks[-1]["input"] = json.loads(written)
                except (ValueError, RecursionError):
                    raise Illegal(f"input of a call: {written[:60]!r} is no JSON") from None
            written = None
        else:
            raise Illegal(f"{kind} is no event of a block")
    if written is not None:
        raise Illegal("the last block is not ended")
    return blocks


def _add_delta(block: Body, delta: Body) -> str:
    """Add a delta to its block. Return the JSON of one that goes on a call's input."""
    kind = want(delta, "type", str, "delta.")
    want_equal(want(block, "type", str), OWNERS.get(kind), f"block of a {kind}")
    if kind == "input_json_delta":
        return str(want(delta, "partial_json", str, "delta."))
    name = FIELDS[kind]
    block[name] = want_or(block, name, str) + want(delta, name, str, "delta.")
    return ""
