"""The conformance kit: our gateway passes all of it, and planted faults are named."""

import asyncio
import contextlib
import dataclasses
import re
import threading

import httpx2
import pytest

pytest.importorskip("uvicorn", reason="make test-gateway installs it")
import uvicorn

from onepolicy.cli import main
from onepolicy.envs.multiturn.trajectory import Trajectory
from onepolicy.gateway import history, server, session
from onepolicy.gateway.conformance.client import Client
from onepolicy.gateway.conformance.command import UNSEEN, check_gateway, print_outcomes
from onepolicy.gateway.conformance.transcripts import load_transcripts
from onepolicy.gateway.dialects import anthropic, chat, responses
from onepolicy.gateway.history import History
from onepolicy.gateway.turns import Reason
from support.gateway_app import App

pytestmark = pytest.mark.gateway
CALL = '<call>\n{"name": "look", "arguments": {"q": "x"}}\n</call>'
TEXTS = [f"<think>\nhm {i}\n</think>\n\nserved answer {i} {CALL}{CALL}" for i in range(7)]


def check(app, key=None):
    """Return the outcomes by the transcripts' names."""

    async def run():
        async with app.client() as http:
            return await check_gateway(Client(http, "http://gateway", key or app.secret, "policy"))

    return {outcome.transcript.name: outcome for outcome in asyncio.run(run())}


def test_our_gateway_passes_all_of_it():
    outcomes = check(App(*TEXTS))
    assert {o.transcript.name: (o.check, o.why) for o in outcomes.values() if o.check} == {}
    assert not any(outcome.left_out for outcome in outcomes.values())
    assert all(outcome.sees_tree for outcome in outcomes.values())
    assert len(outcomes) == len(load_transcripts())


def test_the_shapes_of_every_dialect_and_every_reason_are_there():
    transcripts = load_transcripts()
    assert {each.path for each in transcripts} == {"chat/completions", "messages", "responses"}
    every = [each for transcript in transcripts for each in transcript.expect]
    every = [one for each in every for one in (each if isinstance(each, list) else [each])]
    named = {one.get("reason") for one in every} | {
        f for one in every for f in one.get("facts", ())
    }
    ours = {Reason.NO_VALUES, Reason.NO_ROUTES, Reason.UNKNOWN_VERSION}
    ours |= {Reason.UNKNOWN_CHARACTERS, Reason.UNKNOWN_TOKENS}
    assert named - {None} == {str(reason) for reason in set(Reason) - ours}  # no client does ours


def rendered_again(patch):
    """A gateway that renders the history, and says that it goes on from its turns."""
    plan = History.plan

    def plan_falsely(self, request):
        made = plan(self, request)
        if made.parent is None:
            return made
        tokens = self.renderer.encode_prompt(request.messages, request.tools)
        return dataclasses.replace(made, tokens=tokens, routes_from=0)

    patch.setattr(History, "plan", plan_falsely)
    patch.setattr(History, "_path_for", lambda self, plan, family: Trajectory(plan.tokens))


def sampled_twice(patch):
    answer = session.Session.answer
    patch.setattr(session.Session, "answer", lambda self, asked, *key, **how: answer(self, asked))


def stream_of(dialect, change):
    def plant(patch):
        write = dialect.write_stream
        patch.setattr(dialect, "write_stream", lambda *given: change(list(write(*given))))

    return plant


def body_for_a_stream(patch):
    def read(body):
        return dataclasses.replace(original(body), stream=False)

    original = chat.read
    patch.setattr(chat, "read", read)


def wrong_usage(patch):
    usage = chat._usage
    patch.setattr(chat, "_usage", lambda reply: usage(dataclasses.replace(reply, prompt_tokens=7)))


def other_error(patch):
    patch.setattr(anthropic, "write_error", lambda error: {"detail": str(error)})


def title_is_trained_on(patch):
    patch.setattr(History, "is_auxiliary", lambda self, root: False)


def reasons_mixed_up(patch):
    patch.setattr(history, "find_break", lambda *given: (Reason.COMPACTION, None))


def thoughts_are_forgotten(patch):
    patch.setattr(History, "_accepts_thoughts", lambda self, sent, served: not sent.thought)


def no_limit(patch):
    for dialect in (chat, anthropic, responses):
        patch.setattr(dialect, "take_limit", lambda body, name: None)


def miscounted(patch):
    patch.setattr(anthropic, "write_count", lambda tokens: {"input_tokens": tokens + 1})


def never_cut(patch):
    reply = server._reply_of
    patch.setattr(
        server, "_reply_of", lambda *given: dataclasses.replace(reply(*given), finish="stop")
    )


def no_parallel_calls(patch):
    def write_call(call):
        return original(dataclasses.replace(call, id="same"))

    original = chat._write_call
    patch.setattr(chat, "_write_call", write_call)


PLANTED = {
    "history rendered again": (rendered_again, "tools_chat", "history"),
    "a retry sampled twice": (sampled_twice, "retry_chat", "retry"),
    "a retry by its key": (sampled_twice, "retry_key", "retry"),
    "no [DONE]": (stream_of(chat, lambda events: events[:-1]), "title_first", "stream"),
    "no end of a block": (
        stream_of(anthropic, lambda events: [e for e in events if "block_stop" not in e]),
        *("tools_messages", "stream"),
    ),
    "no beginning": (stream_of(anthropic, lambda events: events[1:]), "limit_messages", "stream"),
    "events in another order": (
        stream_of(responses, lambda events: [*events[1:], events[0]]),
        *("tools_responses", "stream"),
    ),
    "a line that is none": (
        stream_of(chat, lambda events: ["hello\n\n", *events]),
        *("parallel_chat", "stream"),
    ),
    "a body for a stream": (body_for_a_stream, "parallel_chat", "stream"),
    "calls with one id": (no_parallel_calls, "parallel_chat", "stream"),
    "another usage": (wrong_usage, "unknown_turn", "usage"),
    "another error": (other_error, "errors_messages", "error"),
    "a title that is trained on": (title_is_trained_on, "title_first", "tree"),
    "another reason": (reasons_mixed_up, "truncated_turn", "reason"),
    "a sub-agent is a break": (reasons_mixed_up, "sub_agent", "reason"),
    "thoughts are forgotten": (thoughts_are_forgotten, "thoughts_kept_messages", "tree"),
    "no limit of a turn": (no_limit, "limit_responses", "limit"),
    "another end of a turn": (never_cut, "limit_chat", "answer"),
    "another count": (miscounted, "count_tokens", "usage"),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_fault_is_named(monkeypatch, planted):
    plant, transcript, expected = PLANTED[planted]
    app = App(*TEXTS)
    plant(monkeypatch)
    outcome = check(app)[transcript]
    assert (outcome.check, outcome.left_out) == (expected, False), outcome.why


def test_an_episode_that_cannot_be_ended_is_named():
    app = App(*TEXTS)
    app.fail = True
    assert {outcome.check for outcome in check(app).values()} == {"end"}


def test_an_engine_without_values_is_named():
    app = App(*TEXTS)
    app.engine.after = lambda number, done: dataclasses.replace(done, logp=done.logp * float("nan"))
    assert {outcome.check for outcome in check(app).values()} == {"", "values"}


class Foreign(App):
    """A gateway of somebody else: it has one key, says nothing of itself and shows no tree."""

    def __init__(self, *texts):
        super().__init__(*texts)
        ours = self.asgi

        async def app(scope, receive, send):
            if scope["path"] == "/" or "episodes" in scope["path"]:
                scope = scope | {"path": "/none"}
            await ours(scope, receive, send)

        self.asgi = app


def test_of_another_gateway_what_is_seen_from_outside_is_checked(monkeypatch, capsys):
    app = Foreign(*TEXTS)
    outcomes = check(app, app.key)
    assert not any(outcome.check or outcome.left_out for outcome in outcomes.values())
    print_outcomes(list(outcomes.values()))
    printed = capsys.readouterr().out
    assert UNSEEN in printed.replace("\n", " ")
    assert f"{len(outcomes)} pass, 0 fail, 0 left out" in printed
    app = Foreign(*TEXTS)
    thought = chat._usage
    monkeypatch.setattr(  # it renders a history anew, and leaves much of it out
        chat, "_usage", lambda reply: thought(dataclasses.replace(reply, prompt_tokens=9))
    )
    outcome = check(app, app.key)["tools_chat"]
    assert (outcome.check, "what was sampled has been changed" in outcome.why) == ("history", True)


def test_what_a_model_does_not_do_is_left_out():
    outcomes = check(App("yes"))
    left_out = {name: outcome.why for name, outcome in outcomes.items() if outcome.left_out}
    assert left_out["parallel_chat"].startswith("the model: it called fewer than two tools")
    assert left_out["thoughts_dropped"] == "the model: it wrote no thought (request 0)"
    assert left_out["truncated_turn"].startswith("the model: it wrote fewer than 8 characters")
    assert left_out["siblings"].startswith("the model: it answered the same twice")
    assert not any(outcome.check for outcome in outcomes.values())
    assert not outcomes["title_first"].left_out


@contextlib.contextmanager
def served(app):
    """Serve on a port of this machine, and give its address."""
    made = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=made.run)
    thread.start()
    try:
        while not made.started:
            assert thread.is_alive()
        (listener,) = made.servers[0].sockets
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        made.should_exit = True
        thread.join()


def test_the_command_says_by_its_status_whether_all_is_well(monkeypatch, capsys):
    app = App(*TEXTS)
    monkeypatch.setenv("KIT_TEST_SECRET", app.secret)
    with served(app.asgi) as url:
        words = ["gateway", "--conformance", url, "--key-env", "KIT_TEST_SECRET"]
        assert main(words) == 0
        assert " 0 fail, 0 left out" in capsys.readouterr().out
        sampled_twice(monkeypatch)
        assert main(words) == 1
        assert "4 fail" in capsys.readouterr().out
        assert main(words[:3]) == 2
        assert "name the variable that holds it by --key-env" in capsys.readouterr().err
        monkeypatch.setenv("KIT_TEST_SECRET", "another")
        assert main(words) == 2
        assert "the gateway gives no key for this secret" in capsys.readouterr().err
    assert main(words) == 2
    assert "no answer from" in capsys.readouterr().err


def test_a_gateway_that_hangs_ends_the_command_in_its_seconds(capsys):
    async def app(scope, receive, send):
        if scope["method"] == "POST":
            while (await receive())["type"] != "http.disconnect":
                pass
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    with served(app) as url:
        assert main(["gateway", "--conformance", url, "--seconds", "4"]) == 1
    counts = r"0 pass, [1-9]\d* fail, 0 left out, [1-9]\d* not run"
    assert re.search(counts, capsys.readouterr().out)


def test_a_session_in_the_path_has_the_name_of_the_transcript():
    asked = []

    async def app(scope, receive, send):
        asked.append(scope["path"])
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def run():
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport) as http:
            return await check_gateway(Client(http, "http://gateway/s/{session}", None, "m"))

    outcomes = asyncio.run(run())
    assert {outcome.check for outcome in outcomes} == {"answer", "error"}
    (path,) = {path for path in asked if path.endswith("-branches/v1/messages")}
    assert path.startswith("/s/conformance-")
