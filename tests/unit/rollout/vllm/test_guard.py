"""Answers of a vLLM server before a request reaches vLLM: access rules, and requests that could end
the engine."""

import asyncio
import json
from itertools import product

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
from onepolicy.rollout.vllm.worker import WorkerExtension

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
    guard; ask.started() returns another guard's."""

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

            if path not in (GENERATE, WORKERS):
                chunks[:] = [body]
            scope = {"type": kind, "path": path, "headers": list(headers)}
            if kind == "http":
                scope["method"] = method
            asyncio.run(guarding(scope, receive, send))
            text = b"".join(message.get("body", b"") for message in sent).decode()
            return (sent[0]["status"] if sent else None), text

        ask.app, ask.started = app, started
        return ask

    return started()


def test_every_path_but_health_needs_the_token(ask):
    for path in (*ENDPOINTS, "/update_weights", "/health/../pause", "/metrics"):
        for headers in ((), (WRONG,), (RIGHT, WRONG), ((b"authorization", b"Bearer \xff"),)):
            assert ask(path, headers)[0] == 401
    assert ask("/metrics", (WRONG,), method="GET")[0] == 401
    for headers in ((), (WRONG,)):
        assert ask("/v1/realtime", headers, kind="websocket") == (None, "")
    assert ask.app.seen == []
    assert ask("/health", (), method="GET")[0] == 200
    assert ask("", kind="lifespan")[0] is None
    for path in ENDPOINTS - {GENERATE, WORKERS}:
        assert ask(path)[0] == 200
    assert ask("/version", method="GET")[0] == 200
    assert len(ask.app.seen) == 3 + len(ENDPOINTS - {GENERATE, WORKERS})


def test_other_endpoints_of_vllm_are_not_there(ask):
    others = ("/v1/completions", "/generate", "/update_weights", "/sleep", GENERATE + "/")
    assert [ask(path)[0] for path in others] == [404] * 5
    assert ask(POSTED, method="DELETE")[0] == 404
    assert ask.app.seen == []


def test_no_browser_is_answered(ask, subtests):
    """The guard refuses the preflight, a request that needs none, one with the token, and
    /health."""
    asked = [("OPTIONS", WORKERS), ("POST", POSTED), ("GET", "/version"), ("GET", "/health")]
    for origin in (b"http://evil.example", b"null", b"", b"http://127.0.0.1:8000"):
        for (method, path), token in product(asked, [(), (RIGHT,)]):
            with subtests.test(origin=origin, method=method, path=path, token=bool(token)):
                assert ask(path, (*token, (b"origin", origin)), method=method)[0] == 403
                assert ask.app.seen == []


LOCAL = ("127.0.0.1:8000", "127.0.0.1", "LOCALHOST.:9999", "[::1]:8000")  # the third forwarded
ELSEWHERE = (
    *("rebind.evil.example", "rebind.evil.example:8000", "127.0.0.1.evil.example", "\xff", ""),
    *("localhost.evil.example:8000", "10.1.2.3:8000"),
)
HOSTS = [  # what the server listens on, who is answered, who is not
    ((), LOCAL, ELSEWHERE),
    (("10.1.2.3", "node-1"), ("10.1.2.3:8000", "Node-1"), ("10.1.2.4",)),
    (("fd00::5",), ("[fd00:0:0::5]:8000",), ()),
    (("0.0.0.0",), ("10.9.8.7:8000",), ("rebind.evil.example",)),  # no address can be rebound
]


def test_requests_name_the_server(ask, subtests):
    for hosts, answered, refused in HOSTS:
        for host, status in [*((h, 200) for h in answered), *((h, 403) for h in refused)]:
            with subtests.test(hosts=hosts, host=host):
                fresh, given = ask.started(*hosts), (b"host", host.encode("latin-1"))
                assert fresh(POSTED, (RIGHT, given))[0] == status
                assert fresh("/health", (given,), method="GET")[0] == status
                twice = (RIGHT, given, (b"host", b"rebind.evil.example"))
                assert fresh(POSTED, twice)[0] == 403
                assert len(fresh.app.seen) == 2 * (status == 200)


def generate(token_ids):
    return json.dumps({"token_ids": token_ids, "sampling_params": {}}).encode()


OUTSIDE = [10**6, 32, -1, 2**70, "5", "1000000", True, 1.0, 1e6, None, [3]]
BODIES = [b"", b"[1]", b'"token_ids"', b"\xff\xfe", b"{" * 5000, b"[" * 100000, b'{"method": []}']


def test_ids_outside_the_vocabulary_and_malformed_bodies_do_not_reach_the_engine(ask, subtests):
    for ids in (*([each] for each in OUTSIDE), [3, -1], [], None, "31"):
        with subtests.test(ids=ids):
            status, told = ask(GENERATE, body=generate(ids))
            assert (status, "token_ids" in told, ask.app.seen) == (400, True, [])
    for body in BODIES:
        with subtests.test(body=body[:20]):
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


GOOD, BAD = {"problem": None}, {"problem": "the bytes of 'a' are not"}
FAILED_LOADS = [
    ("onepolicy_load", 500, {"error": {"message": "no such file"}}),
    ("onepolicy_receive", 200, {"results": [GOOD, BAD]}),
    ("onepolicy_load_files", 200, {"results": [{"difference": "1 tensors are missing"}]}),
    ("onepolicy_load", 500, "?"),
    ("onepolicy_load", 200, ["what?"]),
]


@pytest.mark.parametrize(("method", "status", "reply"), FAILED_LOADS)
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


def test_workers_take_calls_of_our_methods_only(ask):
    """vLLM's own `shutdown` ends the engine, `save_sharded_state` writes files."""
    own = {name for name in vars(WorkerExtension) if name.startswith("onepolicy_")}
    for method in ("shutdown", "save_sharded_state", "__init__", "reload_weights", "onepolicy_x"):
        status, told = ask(WORKERS, body=call(method))
        assert (status, "not a worker method of onepolicy" in told, ask.app.seen) == (404, True, [])
    for method in own:
        assert ask(WORKERS, body=call(method))[0] == 200


def test_a_load_that_never_answers_leaves_nothing_to_sample_from(ask, monkeypatch):
    async def broken(self, scope, receive, send):
        raise ConnectionError

    monkeypatch.setattr(App, "__call__", broken)
    with pytest.raises(ConnectionError):
        ask(WORKERS, body=call("onepolicy_load"))
    assert ask(GENERATE, body=generate([3]))[0] == 409
