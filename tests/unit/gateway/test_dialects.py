"""Dialects as pure translations: one conversation in three forms, bodies, streams, errors."""

import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onepolicy.gateway.dialects import anthropic, chat, responses
from onepolicy.gateway.dialects.common import Reply
from onepolicy.gateway.messages import Call, Message, Request, RequestError
from support.examples import examples

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
LOOK = {"name": "look", "description": "Look."}
CALLS = (Call("a", "look", '{"q": "x"}'), Call("b", "look", '{"q": "y"}'))
CONVERSATION = (
    Message("system", "be brief"),
    Message("user", "one\ntwo"),
    Message("assistant", "so", "hm", CALLS),
    Message("tool", "1", call_id="a"),
    Message("tool", "2", call_id="b"),
    Message("user", "go on"),
)
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
FUNCTION_CALLS = [
    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
    for c in CALLS
]
BODIES = {
    chat: {
        "model": "m",
        "max_tokens": 7,
        "stop": "END",
        "temperature": 0.5,
        "tool_choice": "required",
        "tools": [{"type": "function", "function": LOOK | {"parameters": SCHEMA, "strict": True}}],
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": PARTS},
            {
                "role": "assistant",
                "content": "so",
                "reasoning_content": "hm",
                "tool_calls": FUNCTION_CALLS,
            },
            {"role": "tool", "content": "1", "tool_call_id": "a"},
            {"role": "tool", "content": [{"type": "text", "text": "2"}], "tool_call_id": "b"},
            {"role": "user", "content": "go on"},
        ],
    },
    anthropic: {
        "model": "m",
        "max_tokens": 7,
        "stop_sequences": ["END"],
        "temperature": 0.5,
        "tool_choice": {"type": "any"},
        "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        "tools": [LOOK | {"input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "w"}],
        "messages": [
            {"role": "user", "content": PARTS},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "a", "name": "look", "input": {"q": "x"}},
                    {"type": "tool_use", "id": "b", "name": "look", "input": {"q": "y"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "b",
                        "content": [{"type": "text", "text": "2"}],
                    },
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
    },
    responses: {
        "model": "m",
        "max_output_tokens": 7,
        "temperature": 0.5,
        "tool_choice": "required",
        "instructions": "be brief",
        "tools": [
            LOOK | {"type": "function", "parameters": SCHEMA, "strict": True},
            {"type": "web_search"},
        ],
        "input": [
            {"role": "user", "content": [part | {"type": "input_text"} for part in PARTS]},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "so"}],
            },
            {"type": "function_call", "call_id": "a", "name": "look", "arguments": '{"q": "x"}'},
            {"type": "function_call", "call_id": "b", "name": "look", "arguments": '{"q": "y"}'},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": "2"},
            {"role": "user", "content": "go on"},
        ],
    },
}
DIALECTS = list(BODIES)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_one_conversation_in_three_forms(dialect):
    question = dialect.read(BODIES[dialect])
    tool = {"type": "function", "function": LOOK | {"parameters": SCHEMA}}
    choice = "any" if dialect is anthropic else "required"
    assert question.request == Request(
        CONVERSATION,
        (tool,),
        7,
        () if dialect is responses else ("END",),
        (("temperature", 0.5), ("tool_choice", choice)),
    )
    assert (question.model, question.stream) == ("m", False)


BRIEF = {
    chat: {"messages": [{"role": "user", "content": "x"}]},
    anthropic: {"messages": [{"role": "user", "content": "x"}]},
    responses: {"input": "x"},
}
JSON = {"type": "json_schema", "schema": {}}


@pytest.mark.parametrize(
    ("dialect", "body", "given"),
    [
        (chat, {"response_format": JSON}, ("response_format", "json_schema")),
        (chat, {"parallel_tool_calls": False}, ("parallel_tool_calls", False)),
        (responses, {"parallel_tool_calls": False}, ("parallel_tool_calls", False)),
        (responses, {"text": {"format": JSON}}, ("text.format", "json_schema")),
        (responses, {"reasoning": {"effort": "low"}}, ("reasoning.effort", "low")),
        (anthropic, {"thinking": {"type": "adaptive"}}, ("thinking", "adaptive")),
        (anthropic, {"output_config": {"effort": "low"}}, ("output_config.effort", "low")),
        (anthropic, {"output_config": {"format": JSON}}, ("output_config.format", JSON)),
        (
            anthropic,
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            ("disable_parallel_tool_use", True),
        ),
    ],
)
def test_what_a_client_asks_of_sampling_is_noted(dialect, body, given):
    assert dialect.read(BRIEF[dialect] | body).request.sampling == (given,)


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (chat, {"response_format": {"type": "text"}, "parallel_tool_calls": True}),
        (chat, {"tool_choice": "auto"}),
        (responses, {"text": {"format": {"type": "text"}}, "parallel_tool_calls": True}),
        (responses, {"text": {}, "reasoning": {"effort": None, "summary": "auto"}}),
        (anthropic, {"thinking": {"type": "disabled"}, "output_config": {"effort": None}}),
        (anthropic, {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}),
    ],
)
def test_what_a_client_asks_by_default_is_not_noted(dialect, body):
    assert dialect.read(BRIEF[dialect] | body).request.sampling == ()


def reply(finish="calls", message=CONVERSATION[2], stop=None):
    return Reply("r1", "m", 9, message, finish, stop, 30, 5)


PLAIN = Message("assistant", "yes")
REPLIES = [
    reply(),
    reply("stop", PLAIN),
    reply("length", PLAIN),
    reply("stop", PLAIN, "END"),
    reply("stop", Message("assistant")),
    reply("calls", Message("assistant", calls=CALLS)),
]


def events_of(dialect, made, body=None):
    question = dialect.read(BODIES[dialect] | {"stream": True} | (body or {}))
    text = "".join(dialect.write_stream(made, question))
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *name, data = block.split("\n")
        assert data.startswith("data: ")
        if data != "data: [DONE]":
            events.append(json.loads(data[6:]))
        if name:
            assert name == [f"event: {events[-1]['type']}"]
    assert text.endswith("data: [DONE]\n\n") == (dialect is chat)
    return events


@pytest.mark.parametrize("made", REPLIES)
def test_chat(made):
    body = chat.write(made)
    message = body["choices"][0]["message"]
    (again,) = chat.read({"messages": [message]}).request.messages
    assert again == made.message
    *chunks, last = events_of(chat, made, {"stream_options": {"include_usage": True}})
    assert (last["choices"], last["usage"]) == ([], body["usage"])
    assert body["usage"]["total_tokens"] == 35
    whole = {"content": ""}
    for chunk in chunks:
        delta = chunk["choices"][0]["delta"]
        whole["content"] += delta.pop("content", "")
        whole |= delta
    for i, call in enumerate(whole.get("tool_calls", ())):
        assert call.pop("index") == i
    assert whole["content"] == made.message.text
    assert whole.get("tool_calls") == message.get("tool_calls")
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [None] * (len(chunks) - 1) + [body["choices"][0]["finish_reason"]]
    assert finishes[-1] == {"calls": "tool_calls"}.get(made.finish, made.finish)
    assert "usage" not in events_of(chat, made)[-1]


@pytest.mark.parametrize("made", REPLIES)
def test_anthropic(made):
    body = anthropic.write(made)
    (again,) = anthropic.read({"messages": [body]}).request.messages
    assert again == made.message
    start, *middle, end, stop = events_of(anthropic, made)
    assert (start["type"], stop) == ("message_start", {"type": "message_stop"})
    blocks = []
    for each in middle:
        kind = each["type"].removeprefix("content_block_")
        if kind == "start":
            assert each["index"] == len(blocks)
            blocks.append(dict(each["content_block"]))
        elif kind == "delta":
            field = {"input_json_delta": "input"}.get(each["delta"]["type"])
            (value,) = (v for k, v in each["delta"].items() if k != "type")
            if field:
                blocks[each["index"]][field] = json.loads(value)
            else:
                field = each["delta"]["type"].removesuffix("_delta")
                blocks[each["index"]][field] += value
    rebuilt = start["message"] | end["delta"] | {"content": blocks}
    rebuilt["usage"] = rebuilt["usage"] | end["usage"]
    assert rebuilt == body
    expected = {"calls": "tool_use", "length": "max_tokens"}.get(made.finish, "end_turn")
    if made.stop:
        expected = "stop_sequence"
    assert (body["stop_reason"], body["stop_sequence"]) == (expected, made.stop)


@pytest.mark.parametrize("made", REPLIES)
def test_responses(made):
    body = responses.write(made)
    (again,) = responses.read({"input": body["output"]}).request.messages
    assert again == made.message
    events = events_of(responses, made)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert events[-1]["response"] == body
    status = "incomplete" if made.finish == "length" else "completed"
    assert (events[-1]["type"], body["status"]) == (f"response.{status}", status)
    done = [each["item"] for each in events if each["type"] == "response.output_item.done"]
    assert done == body["output"]
    deltas = [each["delta"] for each in events if each["type"].endswith(".delta")]
    texts = [made.message.thought] * bool(made.message.thought)
    texts += [made.message.text] * bool(made.message.text or not made.message.calls)
    assert deltas == texts + [call.arguments for call in made.message.calls]


USER = {"role": "user", "content": "x"}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("dialect", "body", "match"),
    [
        (chat, {}, "^messages: is missing"),
        (chat, {"messages": ["x"]}, r"^messages\[0\]: str given"),
        (chat, {"messages": [{"role": "user", "content": IMAGE}]}, r"^messages\[0\].content\[0\]"),
        (chat, {"messages": [{"role": "critic"}]}, r"^messages\[0\].role: 'critic'"),
        (chat, {"messages": [{"role": "tool"}]}, r"^messages\[0\].tool_call_id: is missing"),
        (chat, {"messages": [USER], "n": 2}, "^n: one answer"),
        (chat, {"messages": [USER], "logprobs": True}, "^logprobs"),
        (chat, {"messages": [USER], "max_tokens": 0}, "^max_tokens: 0 given"),
        (chat, {"messages": [USER], "max_tokens": True}, "^max_tokens: bool given"),
        (chat, {"messages": [USER], "stop": [1]}, "^stop"),
        (chat, {"messages": [USER], "stop": ["x"] * 65}, "^stop: 65 texts given"),
        (chat, {"messages": [USER], "tools": [{"type": "custom"}]}, r"^tools\[0\].type"),
        (anthropic, {"messages": [{"role": "user", "content": IMAGE}]}, "'image_url' is neither"),
        (anthropic, {"messages": [{"role": "tool"}]}, "'tool' is not user"),
        (anthropic, {"messages": [USER], "tools": [{}]}, r"^tools\[0\].name: is missing"),
        (responses, {"input": 3}, "^input: int given"),
        (responses, {"input": "x", "previous_response_id": "r"}, "^previous_response_id"),
        (responses, {"input": [{"type": "item_reference"}]}, r"^input\[0\].type"),
        (responses, {"input": "x", "background": True}, "^background"),
        (responses, {"input": "x", "top_logprobs": 2}, "^top_logprobs"),
        (responses, {"input": "x", "include": ["message.output_text.logprobs"]}, "^top_logprobs"),
        (chat, {"messages": [USER], "functions": [LOOK]}, "^functions: is the old form"),
    ],
)
def test_what_cannot_be_read_is_named(dialect, body, match):
    with pytest.raises(RequestError, match=match):
        dialect.read(body)


def with_tool(dialect, kind):
    return BODIES[dialect] | {"tools": [{"type": kind, "name": "x"}]}


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        *((anthropic, kind) for kind in ("bash_20250124", "text_editor_20250728")),
        *((anthropic, kind) for kind in ("computer_20250124", "memory_20250818")),
        *((responses, kind) for kind in ("custom", "local_shell", "shell", "apply_patch", None)),
    ],
)
def test_a_tool_that_the_program_runs_is_never_left_out_in_silence(dialect, kind):
    with pytest.raises(RequestError, match=rf"^tools\[0\].type: {kind!r}, the program's"):
        dialect.read(with_tool(dialect, kind))


@pytest.mark.parametrize(
    ("dialect", "kind"),
    [
        *((anthropic, kind) for kind in ("web_fetch_20250910", "code_execution_20250825")),
        *((anthropic, kind) for kind in ("mcp_toolset", "tool_search_tool_bm25_20251119")),
        *((responses, kind) for kind in ("web_search_preview", "file_search", "mcp")),
        *((responses, kind) for kind in ("code_interpreter", "image_generation")),
    ],
)
def test_a_tool_that_the_provider_runs_is_left_out(dialect, kind):
    assert dialect.read(with_tool(dialect, kind)).request.tools == ()


def test_tools_in_a_namespace_are_offered_and_called_by_both_names():
    tool = LOOK | {"type": "function", "parameters": SCHEMA}
    spoken = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [tool]}
    body = {"input": "x", "tools": [tool, spoken]}
    names = [each["function"]["name"] for each in responses.read(body).request.tools]
    assert names == ["look", "agents::look"]
    made = reply("calls", Message("assistant", calls=(Call("a", "agents::look", "{}"),)))
    (item,) = responses.write(made)["output"]
    assert (item["namespace"], item["name"]) == ("agents", "look")
    assert item in [event.get("item") for event in events_of(responses, made)]
    assert responses.read({"input": [item]}).request.messages == (made.message,)
    spoken["tools"] = [{"type": "custom", "name": "x"}]
    with pytest.raises(RequestError, match=r"^tools\[1\].tools\[0\].type: 'custom'"):
        responses.read(body)


VALUES = st.sampled_from([None, True, -1, 2.5, "x", "", [], {}, [[]], [{}], {"type": []}, ["x"]])


def places(value, path=()):
    """Yield the path of every value in a body."""
    yield path
    if isinstance(value, dict | list):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


@examples(150)
@given(st.sampled_from(DIALECTS), st.randoms(use_true_random=False), VALUES)
def test_a_body_is_read_or_refused(dialect, random, value):
    """No body of a client ends in another error than RequestError."""
    body = copy.deepcopy(BODIES[dialect] | {"stream": True, "stream_options": {}})
    *path, last = random.choice([place for place in places(body) if place])
    inner = body
    for key in path:
        inner = inner[key]
    inner[last] = value
    try:
        question = dialect.read(body)
    except RequestError:
        return
    assert all(isinstance(message.text, str) for message in question.request.messages)
    json.dumps([question.request.tools, question.request.sampling])


def test_errors_have_each_dialects_shape():
    error = RequestError("no", status=401, code="invalid_api_key")
    kind = "authentication_error"
    for dialect in (chat, responses):
        assert dialect.write_error(error)["error"] == {
            "message": "no",
            "type": kind,
            "param": None,
            "code": "invalid_api_key",
        }
    assert anthropic.write_error(error) == {
        "type": "error",
        "error": {"type": kind, "message": "no"},
    }
    assert '"type": "api_error"' in anthropic.write_stream_error(RequestError("x", status=500))
    assert '"type": "server_error"' in chat.write_stream_error(RequestError("x", status=500))
