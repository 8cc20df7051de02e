"""Answers of a vLLM server before a request reaches vLLM: access rules, and requests that could end
the engine."""

import asyncio
import json

import pytest

from onepolicy.rollout.vllm import guard
from onepolicy.rollout.vllm.guard import (
    ENDPOINTS,
    GENERATE,
    HOSTS_VARIABLE,
    TOKEN_VARIABLE,
    VOCAB_VARIABLE,
    WORKERS,
    Guard,
)

RIGHT, WRONG = (b"authorization", b"Bearer s3cret"), (b"authorization", b"Bearer s3crit")
POSTED = "/resume"


class App:
    """The application behind the guard. It reads the body and answers with `reply`."""

    def __init__(self):
        self.seen, self.reply, self.status = [], {"results": [None]}, 200

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            self.seen.append(scope["type"])
            return
        self.seen.append((await receive())["body"])
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        body = json.dumps(self.reply).encode()
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        await send({"type": "http.response.body", "body": body[3:]})


@pytest.fixture
def ask(monkeypatch):
    """Return ask(path, headers, body=...) -> (status, text of the answer). ask.app is behind the
    guard."""

    def started(*hosts):
        monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
        monkeypatch.setenv(HOSTS_VARIABLE, json.dumps(hosts))
        monkeypatch.setenv(VOCAB_VARIABLE, "32")
        app = App()
        guarding = Guard(app)

        def ask(path, headers=(RIGHT,), body=b"{}", kind="http", method="POST"):
            sent, chunks = [], [body[: len(body) // 2], body[len(body) // 2 :]]

            async def receive():
                chunk = chunks.pop(0)
                return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

            async def send(message):
                sent.append(message)

            if isinstance(body, bytes) and path not in (GENERATE, WORKERS):
                chunks[:] = [body]
            scope = {"type": kind, "path": path, "headers": list(headers)} | (
                {"method": method} if kind == "http" else {}
            )
            asyncio.run(guarding(scope, receive, send))
            return (sent[0]["status"] if sent else None), b"".join(
                m.get("body", b"") for m in sent
            ).decode()

        ask.app, ask.started = app, started
        return ask

    return started()


def test_every_path_but_health_needs_the_token(ask):
    for path in (*ENDPOINTS, "/update_weights", "/health/../pause", "/metrics"):
        for headers in ((), (WRONG,), (RIGHT, WRONG), ((b"authorization", b"Bearer \xff"),)):
            assert ask(path, headers)[0] == 401
    assert ask("/metrics", (WRONG,), method="GET")[0] == 401
    assert (
        ask("/v1/realtime", (), kind="websocket")
        == ask("/v1/realtime", (WRONG,), kind="websocket")
        == (None, "")
    )
    assert ask.app.seen == []
    assert ask("/health", (), method="GET")[0] == 200
    assert ask("", kind="lifespan")[0] is None
    for path in ENDPOINTS - {GENERATE, WORKERS}:
        assert ask(path)[0] == 200
    assert ask("/version", method="GET")[0] == 200
    assert len(ask.app.seen) == 3 + len(ENDPOINTS - {GENERATE, WORKERS})


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/generate", "/update_weights", "/sleep", GENERATE + "/"]
)
def test_other_endpoints_of_vllm_are_not_there(ask, path):
    assert ask(path)[0] == 404
    assert ask(POSTED, method="DELETE")[0] == 404
    assert ask.app.seen == []


@pytest.mark.parametrize("origin", [b"http://evil.example", b"null", b"", b"http://127.0.0.1:8000"])
def test_no_browser_is_answered(ask, origin):
    """The guard refuses the preflight, a request that needs none, one with the token, and
    /health."""
    for method, path in (
        ("OPTIONS", WORKERS),
        ("POST", POSTED),
        ("GET", "/version"),
        ("GET", "/health"),
    ):
        for headers in (((b"origin", origin),), (RIGHT, (b"origin", origin))):
            assert ask(path, headers, method=method)[0] == 403
    assert ask.app.seen == []


@pytest.mark.parametrize(
    ("hosts", "host", "answered"),
    [
        ((), "127.0.0.1:8000", True),
        ((), "127.0.0.1", True),
        ((), "LOCALHOST.:9999", True),  # forwarded
        ((), "[::1]:8000", True),
        ((), "rebind.evil.example", False),
        ((), "rebind.evil.example:8000", False),
        ((), "127.0.0.1.evil.example", False),
        ((), "localhost.evil.example:8000", False),
        ((), "10.1.2.3:8000", False),
        ((), "", False),
        ((), "\xff", False),
        (("10.1.2.3", "node-1"), "10.1.2.3:8000", True),
        (("10.1.2.3", "node-1"), "Node-1", True),
        (("10.1.2.3", "node-1"), "10.1.2.4", False),
        (("fd00::5",), "[fd00:0:0::5]:8000", True),
        (("0.0.0.0",), "10.9.8.7:8000", True),  # an address cannot be rebound
        (("0.0.0.0",), "rebind.evil.example", False),
    ],
)
def test_requests_name_the_server(ask, hosts, host, answered):
    ask = ask.started(*hosts)
    given = (b"host", host.encode("latin-1"))
    expected = 200 if answered else 403
    assert ask(POSTED, (RIGHT, given))[0] == ask("/health", (given,), method="GET")[0] == expected
    assert ask(POSTED, (RIGHT, given, (b"host", b"rebind.evil.example")))[0] == 403
    assert len(ask.app.seen) == 2 * answered


def generate(token_ids):
    return json.dumps({"token_ids": token_ids, "sampling_params": {}}).encode()


@pytest.mark.parametrize(
    "ids",
    [
        [10**6],
        [32],
        [3, -1],
        [2**70],
        ["5"],
        ["1000000"],
        [True],
        [1.0],
        [1e6],
        [None],
        [[3]],
        [],
        None,
        "31",
    ],
)
def test_ids_outside_the_vocabulary_do_not_reach_the_engine(ask, ids):
    status, told = ask(GENERATE, body=generate(ids))
    assert (status, "token_ids" in told, ask.app.seen) == (400, True, [])


@pytest.mark.parametrize(
    "body",
    [b"", b"[1]", b'"token_ids"', b"\xff\xfe", b"{" * 5000, b"[" * 100000, b'{"method": []}'],
)
def test_malformed_bodies_do_not_reach_the_engine(ask, body):
    assert ask(GENERATE, body=body)[0] == ask(WORKERS, body=body)[0] == 400
    assert ask.app.seen == []


def test_a_request_arrives_as_it_was_sent(ask, monkeypatch):
    body = generate([0, 31])
    assert ask(GENERATE, body=body) == (200, '{"results": [null]}')
    assert ask.app.seen == [body]
    monkeypatch.setattr(guard, "MAX_BODY_BYTES", len(body) - 1)
    assert ask(GENERATE, body=body)[0] == 413
    assert ask.app.seen == [body]


def call(method):
    return json.dumps({"method": method, "args": []}).encode()


@pytest.mark.parametrize(
    ("method", "status", "reply"),
    [
        ("onepolicy_load", 500, {"error": {"message": "no such file"}}),
        (
            "onepolicy_receive",
            200,
            {"results": [{"problem": None}, {"problem": "the bytes of 'a' are not"}]},
        ),
        ("onepolicy_load_files", 200, {"results": [{"difference": "1 tensors are missing"}]}),
        ("reload_weights", 500, "?"),
        ("onepolicy_load", 200, ["what?"]),
    ],
)
def test_after_a_failed_load_nothing_is_sampled_until_one_succeeds(ask, method, status, reply):
    ask.app.status, ask.app.reply = status, reply
    assert ask(WORKERS, body=call(method)) == (status, json.dumps(reply))
    ask.app.status, ask.app.reply = 200, {"results": [None]}
    assert ask(WORKERS, body=call("onepolicy_describe"))[0] == ask(POSTED)[0] == 200
    seen = len(ask.app.seen)
    refused, told = ask(GENERATE, body=generate([3]))
    assert (refused, "no complete set of weights" in told, method in told) == (409, True, True)
    assert len(ask.app.seen) == seen
    ask.app.reply = {"results": [{"problem": None}]}
    assert ask(WORKERS, body=call("onepolicy_receive"))[0] == 200
    assert ask(GENERATE, body=generate([3]))[0] == 200


def test_a_load_that_never_answers_leaves_nothing_to_sample_from(ask, monkeypatch):
    async def broken(self, scope, receive, send):
        raise ConnectionError

    monkeypatch.setattr(App, "__call__", broken)
    with pytest.raises(ConnectionError):
        ask(WORKERS, body=call("onepolicy_load"))
    assert ask(GENERATE, body=generate([3]))[0] == 409
