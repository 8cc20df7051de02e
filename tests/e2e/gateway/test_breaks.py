"""The twelve breaks of a recorded conversation, planted: each is named in the trace by its reason.

Over HTTP, in OpenAI's chat dialect, to the line that is written when the episode ends.
"""

import dataclasses
import json

import pytest

from onepolicy.gateway.traces import EPISODES, TraceWriter
from onepolicy.gateway.turns import Reason
from support.gateway_app import App

pytestmark = pytest.mark.gateway

SYSTEM = {"role": "system", "content": "be brief"}
USER = {"role": "user", "content": "question"}
AGAIN = {"role": "user", "content": "go on"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = '<call>\n{"name": "look", "arguments": {"q": "x"}}\n</call>'
TEXT = f"<think>\nhm\n</think>\n\nserved answer {CALL}"
RENAMED = {"type": "function", "function": {"name": "seek", "parameters": {"type": "object"}}}


def change(message, **fields):
    return message | fields


def as_text(message):
    """The same characters, with the call in them as text."""
    return {
        "role": "assistant",
        "content": f"{message['content']} {CALL}",
        "reasoning_content": message["reasoning_content"],
    }


def without_thought(message):
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def without_values(completion):
    return dataclasses.replace(completion, logp=completion.logp * float("nan"))


def without_routes(completion):
    return dataclasses.replace(completion, routing=None)


def newer(completion):
    return dataclasses.replace(completion, version=completion.version + 1)


def replies(message):
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": "found"}
        for call in message["tool_calls"]
    ]


def went_on(message, **fields):
    return {"messages": [SYSTEM, USER, message, *replies(message)], "tools": [TOOL]} | fields


CLIENT = {
    Reason.RETOKENISED: lambda m: {
        "messages": [SYSTEM, USER, as_text(m), AGAIN],
        "tools": [TOOL],
    },
    Reason.THOUGHTS_DROPPED: lambda m: went_on(without_thought(m)),
    Reason.SYSTEM_CHANGED: lambda m: went_on(
        m, messages=[change(SYSTEM, content="be long"), USER, m, *replies(m)]
    ),
    Reason.TOOLS_CHANGED: lambda m: went_on(m, tools=[TOOL, RENAMED]),
    Reason.COMPACTION: lambda m: {
        "messages": [SYSTEM, change(USER, content=f"Before: {m['content']}. Go on.")],
        "tools": [TOOL],
    },
    Reason.TRUNCATED_TURN: lambda m: {
        "messages": [SYSTEM, USER, {"role": "assistant", "content": "served"}, AGAIN],
        "tools": [TOOL],
    },
    Reason.UNKNOWN_ASSISTANT: lambda m: {
        "messages": [SYSTEM, USER, {"role": "assistant", "content": "never said"}, AGAIN],
        "tools": [TOOL],
    },
    Reason.RETRY_SIBLING: lambda m: {"messages": [SYSTEM, USER], "tools": [TOOL]},
    Reason.SAMPLING_OVERRIDDEN: lambda m: went_on(m, temperature=0.1),
}
"""Reasons, and the second request that gives them; it gets the first one's answer."""
ENGINE = {
    Reason.NO_VALUES: without_values,
    Reason.NO_ROUTES: without_routes,
    Reason.UNKNOWN_VERSION: newer,
}
"""Reasons, and a change of the second answer that gives them."""
ROOTS = {*CLIENT} - {Reason.RETRY_SIBLING, Reason.SAMPLING_OVERRIDDEN}
"""Reasons that begin a path."""


def line_of(tmp_path, reason):
    """The line of the trace of an episode in which this break was planted."""
    app = App(TEXT)
    spoil = ENGINE.get(reason, lambda completion: completion)
    app.engine.after = lambda number, done: spoil(done) if number == 1 else done
    history = app.episodes.find(app.key).history
    history.thoughts, history.expects_routes = "as-sent", True
    writer = TraceWriter(tmp_path / "out")

    def send(body):
        answer = app.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]

    first = send({"messages": [SYSTEM, USER], "tools": [TOOL]})
    send(CLIENT.get(reason, went_on)(first))
    ended = writer.write("a", history, scored=None, reward=1.0)
    (line,) = (tmp_path / "out" / EPISODES).read_text().splitlines()
    assert json.loads(line) == ended
    return ended


@pytest.mark.parametrize("reason", [*CLIENT, *ENGINE])
def test_a_planted_break_is_named_and_no_other(tmp_path, reason):
    line = line_of(tmp_path, reason)
    assert {name for name in map(str, Reason) if line["counts"].get(name)} == {str(reason)}
    assert [each["reason"] for each in line["breaks"]] == [str(reason)] * (reason in ROOTS)
    assert line["counts"]["roots"] == 1 + (reason in ROOTS)


def test_a_conversation_without_a_break_names_none(tmp_path):
    line = line_of(tmp_path, None)
    assert not any(line["counts"].get(str(reason)) for reason in Reason)
    assert not line["breaks"]
    assert line["counts"]["roots"] == 1


def test_all_twelve_are_planted():
    others = {Reason.LENGTH_CAPPED, Reason.UNKNOWN_CHARACTERS, Reason.UNKNOWN_TOKENS}  # no breaks
    assert {*CLIENT, *ENGINE} | others == set(Reason)
    assert len({*CLIENT, *ENGINE}) == 12
