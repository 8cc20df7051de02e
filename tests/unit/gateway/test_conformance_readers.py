"""The kit's readers of other gateways: an answer is read, or it is illegal; nothing else comes."""

import copy
import json
import re

import pytest

from onepolicy.gateway.conformance.answers import Answer, Illegal, read_events
from onepolicy.gateway.conformance.transcripts import READERS, load_transcripts
from support.paths import ROOT

OTHERS = (None, 1, -1, True, "x", [], [1], [None], {}, {"x": 1})
FUNCTION = {"name": "look", "arguments": "{}"}
CALL = {"id": "c", "type": "function", "function": FUNCTION}
CHUNK = {"object": "chat.completion.chunk", "id": "i"}
SAID = {"type": "message", "id": "m", "role": "assistant"} | {
    "content": [{"type": "output_text", "text": "hi"}]
}
THOUGHT = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "hm"}]}
CALLED = {"type": "function_call", "id": "f", "call_id": "c", **FUNCTION}
RESPONSE = {
    "object": "response",
    "id": "i",
    "status": "completed",
    "output": [THOUGHT, SAID, CALLED],
    "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
}
MESSAGE = {
    "type": "message",
    "id": "i",
    "role": "assistant",
    "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "text", "text": "hi"},
        {"type": "tool_use", "id": "c", "name": "look", "input": {}},
    ],
    "stop_reason": "tool_use",
    "usage": {"input_tokens": 3, "output_tokens": 2},
}
BODIES = {
    "chat/completions": {
        "object": "chat.completion",
        "id": "i",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "hi",
                    "reasoning_content": "hm",
                    "tool_calls": [CALL],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    },
    "messages": MESSAGE,
    "responses": RESPONSE,
}
ITEM = {"output_index": 0}
BLOCK = {"index": 0}
STREAMS = {
    "chat/completions": [
        CHUNK
        | {
            "choices": [
                {
                    "index": 0,
                    "delta": {
                        "role": "assistant",
                        "content": "hi",
                        "tool_calls": [{"index": 0, **CALL}],
                    },
                    "finish_reason": None,
                }
            ]
        },
        CHUNK | {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        CHUNK | {"choices": [], "usage": BODIES["chat/completions"]["usage"]},
    ],
    "messages": [
        {"type": "message_start", "message": MESSAGE | {"content": [], "stop_reason": None}},
        {"type": "content_block_start", **BLOCK, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", **BLOCK, "delta": {"type": "text_delta", "text": "hi"}},
        {"type": "content_block_stop", **BLOCK},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE["usage"]},
        {"type": "message_stop"},
    ],
    "responses": [
        {"type": "response.created", "response": {}},
        {"type": "response.output_item.added", **ITEM, "item": {}},
        {"type": "response.output_text.delta", **ITEM, "delta": "hi"},
        {"type": "response.output_text.done", **ITEM, "text": "hi"},
        {"type": "response.output_item.done", **ITEM, "item": SAID},
        {"type": "response.completed", "response": RESPONSE | {"output": [SAID]}},
    ],
}


def changed(value):
    """Yield the value with every part of it left out, or replaced by another kind."""
    yield from OTHERS
    if not isinstance(value, dict | list):
        return
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        without = copy.copy(value)
        del without[key]
        yield without
        for other in changed(value[key]):
            made = copy.copy(value)
            made[key] = other
            yield made


def written(path, steps):
    """A stream of these events, as it is sent."""
    if path == "responses":
        steps = [
            {"sequence_number": number, **step} if isinstance(step, dict) else step
            for number, step in enumerate(steps)
        ]
    lines = []
    for step in steps:
        name = f"event: {step['type']}\n" if path == "messages" and "type" in dict(step) else ""
        lines.append(f"{name}data: {json.dumps(step)}\n\n")
    return "".join(lines) + "data: [DONE]\n\n" * (path == "chat/completions")


def outcome_of(read):
    try:
        return read()
    except Illegal:
        return None


@pytest.mark.parametrize("path", READERS)
def test_a_body_is_read_or_illegal(path):
    reader = READERS[path]
    assert isinstance(reader.read(BODIES[path]), Answer)
    outcomes = [outcome_of(lambda body=body: reader.read(body)) for body in changed(BODIES[path])]
    assert None in outcomes
    assert all(each is None or isinstance(each, Answer) for each in outcomes)


@pytest.mark.parametrize("path", READERS)
def test_a_stream_is_read_or_illegal(path):
    reader, asked = READERS[path], {"stream_options": {"include_usage": True}}

    def read(steps):
        return reader.read_stream(read_events(written(path, steps)), asked)

    assert read(STREAMS[path]).text == "hi"
    several = (each for each in changed(STREAMS[path]) if isinstance(each, list))
    steps = [each for each in several if all(isinstance(step, dict) for step in each)]
    outcomes = [outcome_of(lambda each=each: read(each)) for each in steps]
    assert None in outcomes
    assert all(each is None or isinstance(each, Answer) for each in outcomes)


@pytest.mark.parametrize("path", READERS)
def test_an_error_is_in_its_shape_or_illegal(path):
    error = {"type": "error", "error": {"type": "t", "message": "m"}}
    READERS[path].check_error(error)
    outcomes = [outcome_of(lambda e=e: READERS[path].check_error(e) or "fits") for e in OTHERS]
    assert outcomes == [None] * len(OTHERS)


def test_the_results_of_other_servers_are_of_the_transcripts_that_the_kit_sends():
    """Each server's numbers add up, and the page names the most tokens that are asked for."""
    page = (ROOT / "docs/gateway.md").read_text(encoding="utf-8")
    told = " ".join(page.partition("The same command ")[2].partition("\n\n")[0].split())
    vllm = re.search(r"(\d+) pass, (\d+) fail .*?(\d+) are left out", told)
    litellm = re.search(r"before that server: (\d+), (\d+) and (\d+)", told)
    transcripts = load_transcripts()
    for found in (vllm, litellm):
        assert sum(map(int, found.groups())) == len(transcripts)
    bodies = [request.get("body", {}) for each in transcripts for request in each.requests]
    limits = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    most = max(body.get(name, 0) for body in bodies for name in limits)
    assert f"now for {most:,})" in told
