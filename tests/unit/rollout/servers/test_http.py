"""The HTTP client of engines: its retries, its refusals, and its error messages."""

import asyncio
import gzip
import json
import threading
import typing
import zlib

import pytest

from onepolicy.config import ServiceUnavailable, TrainingError, UsageError
from onepolicy.rollout.servers import http
from onepolicy.rollout.servers.http import EngineClient, EngineLost, MalformedReply, RequestCounters
from onepolicy.rollout.servers.replies import read_body
from support.http_server import Reply, Server, first
from support.waiting import LIMIT_S, wait_until


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)


def client_of(server, **kwargs):
    return EngineClient(
        server.url, server="the test server", **{"retries": 2, "timeout_s": LIMIT_S} | kwargs
    )


def good(_):
    return {"ok": 1}


def ask(server, **kwargs):
    client = client_of(server, **kwargs)
    return client, asyncio.run(client.post("/do", {"x": [1, 2]}, params={"mode": "abort"}))


def test_a_request_and_its_json_answer_arrive_unchanged(monkeypatch):
    monkeypatch.setenv("ENGINE_TOKEN", "s3cret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with Server(
        {
            "POST /do": good,
            "GET /empty": lambda _: Reply(b""),
            "GET /text": lambda _: Reply(b"OK", content_type="text/plain"),
        }
    ) as server:
        client, reply = ask(server, token_env="ENGINE_TOKEN")
        assert (asyncio.run(client.get("/empty")), asyncio.run(client.get("/text"))) == (None, "OK")
    assert reply == {"ok": 1}
    asked = server.asked[0]
    assert (asked.method, asked.path, asked.params, asked.body) == (
        "POST",
        "/do",
        {"mode": "abort"},
        {"x": [1, 2]},
    )
    assert asked.headers["authorization"] == "Bearer s3cret"
    assert client.take_counters() == RequestCounters(requests=3)
    assert client.take_counters() == RequestCounters()


@pytest.mark.parametrize(
    "bad",
    [
        Reply({"error": "engine"}, 503),
        Reply({"ok": 1}, cut=3),
        Reply(b'{"ok": '),
        Reply(hang_up=True),
        Reply(b"[" * 100_000),
        Reply(b'{"ok": 1, "ok": 2}'),
        Reply(b'{"ok": ' + b"9" * 5000 + b"}"),
        Reply(b'{"ok": "\xff"}'),
        Reply(b"x" * (http.MAX_REPLY_BYTES + 1)),
        Reply(gzip.compress(bytes(http.MAX_REPLY_BYTES + 1)), encoding="gzip"),
        Reply(gzip.compress(b'{"ok": 1}')[:-4], encoding="gzip"),
        Reply(b'{"ok": 1}', encoding="gzip"),
        Reply(b'{"ok": 1}', encoding="br"),
    ],
    ids=[
        *(
            "503",
            "truncated",
            "not JSON",
            "hangs up",
            "deep",
            "a key twice",
            "digits",
            "no UTF-8",
            "too long",
        ),
        *("gzip of too much", "gzip cut short", "no gzip", "another encoding"),
    ],
)
def test_transient_errors_are_retried_up_to_the_bound(bad):
    with Server({"POST /do": first([bad, bad], good)}) as server:
        client, reply = ask(server)
    assert reply == {"ok": 1}
    assert client.take_counters() == RequestCounters(requests=1, retried=2)
    with Server({"POST /do": lambda _: bad}) as server:
        client = client_of(server)
        with pytest.raises(
            TrainingError, match=r"the test server: POST http://127.*/do, 3 times; got .*--resume"
        ):
            asyncio.run(client.post("/do"))
    assert len(server.asked) == 3
    assert client.take_counters() == RequestCounters(requests=1, retried=2, dropped=1)


def test_a_compressed_reply_is_read():
    body = gzip.compress(json.dumps({"ok": "x" * 3_000_000}).encode())  # several pieces
    with Server({"POST /do": lambda _: Reply(body, encoding="gzip")}) as server:
        _, reply = ask(server)
    assert len(reply["ok"]) == 3_000_000


def test_the_time_limit_holds_while_a_reply_is_decompressed():
    class Response:
        headers: typing.ClassVar = {"content-encoding": "gzip"}

        async def aiter_raw(self):
            yield gzip.compress(bytes(2**26))

    async def read():
        async with asyncio.timeout(0):
            await read_body(Response(), 2**40)

    with pytest.raises(TimeoutError):
        asyncio.run(read())


class Gzipped:
    """A response whose body comes in these chunks. `taken` counts them."""

    headers: typing.ClassVar = {"content-encoding": "gzip"}

    def __init__(self, chunks):
        self.chunks, self.taken = chunks, 0

    async def aiter_raw(self):
        for chunk in self.chunks:
            self.taken += 1
            yield chunk


EMPTY_BLOCK = b"\0\0\0\xff\xff"  # of Deflate: stored, of no bytes, not the last one
GZIP_HEADER = gzip.compress(b"")[:10]


@pytest.mark.parametrize(
    ("chunks", "after"),
    [
        ([gzip.compress(b"{}"), *([bytes(2**16)] * 9)], 2),
        ([gzip.compress(b"{}") + b"\0"] * 9, 1),
        ([gzip.compress(b"{}")] * 9, 2),
        ([gzip.compress(b"") * 9] * 9, 1),
        ([*([gzip.compress(b"{}")[n : n + 1] for n in range(22)]), b"", b"\0", b"\0"], 24),
        ([GZIP_HEADER, *([EMPTY_BLOCK * 2**13] * 99)], 3),
        ([GZIP_HEADER[:3] + b"\x08" + GZIP_HEADER[4:], *([b"name" * 2**13] * 99)], 4),
    ],
    ids=[
        *("zeros", "a byte in the same chunk", "members", "members in one chunk", "single bytes"),
        *("empty blocks", "an endless name"),
    ],
)
def test_an_endless_gzip_body_is_refused_at_once(chunks, after):
    response = Gzipped(chunks)
    with pytest.raises(
        MalformedReply, match=r"goes on after its end|a gzip body of more than 100 bytes"
    ):
        asyncio.run(read_body(response, 100))
    assert response.taken == after


def test_a_gzip_body_may_come_in_any_chunks():
    whole = gzip.compress(b"x" * 2_000_000)
    chunks = [whole[n : n + 1] for n in range(len(whole))]
    assert asyncio.run(read_body(Gzipped(chunks), 2_000_000)) == b"x" * 2_000_000
    packed = zlib.compressobj(level=6, wbits=31, strategy=zlib.Z_FIXED)
    high = bytes(range(144, 256)) * 20_000  # each takes 9 bits
    body = packed.compress(high) + packed.flush()
    assert asyncio.run(read_body(Gzipped([body]), len(high))) == high


def test_other_tasks_run_while_a_reply_comes_in_single_bytes():
    class Plain(Gzipped):
        headers: typing.ClassVar = {}

    async def read(response):
        async with asyncio.timeout(0):
            await read_body(response, 100)

    for response in (Plain([b"1"] * 50), Gzipped([GZIP_HEADER[:1]])):
        with pytest.raises(TimeoutError):
            asyncio.run(read(response))


EVIL = "\x1b]0;owned\x07\x1b[2J\r\nonepolicy: all is well\x9b2J\u202e\u2028\x00\x7f"


@pytest.mark.parametrize("status", [503, 403, 307, 200])
@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_a_servers_text_reaches_no_terminal_unescaped(status, kind):
    def parse(reply):
        raise MalformedReply(f"it sent {reply}")

    body = (
        EVIL.encode()
        if kind == "text/plain"
        else json.dumps({"error": EVIL}, ensure_ascii=False).encode()
    )
    with (
        Server({"POST /do": lambda _: Reply(body, status, content_type=kind)}) as server,
        pytest.raises(TrainingError) as error,
    ):
        asyncio.run(client_of(server).post("/do", parse=parse))
    assert str(error.value).isprintable()
    assert "owned" in str(error.value)


@pytest.mark.parametrize(
    "kind", [UsageError, TrainingError, ServiceUnavailable, EngineLost, MalformedReply]
)
def test_an_error_keeps_no_more_than_its_line_breaks(kind):
    text = str(
        kind(f"a problem\nof two lines, it said {EVIL}; f\u00fcr \u4f60\u3000\u597d \U0001f600")
    )
    assert text.replace("\n", "").replace("\u3000", "").isprintable()
    assert "\\x1b]0;owned\\x07" in text
    assert text.endswith("\\u202e\\u2028\\x00\\x7f; f\u00fcr \u4f60\u3000\u597d \U0001f600")
    assert str(kind(text)) == text.replace("\n", "\\n" if kind is MalformedReply else "\n")


def test_a_reply_that_parse_refuses_is_tried_again():
    def parse(reply):
        if "ok" not in reply:
            raise MalformedReply("no `ok` in it")
        return reply["ok"] + 1

    with Server({"GET /do": first([{}], good)}) as server:
        assert asyncio.run(client_of(server).get("/do", parse=parse)) == 2
    with (
        Server({"GET /do": lambda _: {}}) as server,
        pytest.raises(TrainingError, match="a reply that cannot be used: no `ok` in it"),
    ):
        asyncio.run(client_of(server, retries=0).get("/do", parse=parse))


def test_a_refusal_is_an_answer_and_shows_the_servers_reply():
    with (
        Server({}) as server,
        pytest.raises(TrainingError, match=r'got status 404: \{"detail": "Not Found"\}'),
    ):
        ask(server)
    assert len(server.asked) == 1


def test_time_out_is_per_attempt_and_retried():
    held = threading.Event()

    def slow(_):
        held.wait(LIMIT_S)
        return Reply(hang_up=True)

    with Server({"POST /do": first([], slow)}) as server:
        with pytest.raises(TrainingError, match=r"/do, 2 times; got no answer within 0\.\d+ s"):
            ask(server, timeout_s=0.2, retries=1)
        held.set()


def sample(server, timeout_s=0.05):
    client = client_of(server, retries=0, timeout_s=timeout_s)
    return asyncio.run(client.post("/do", {}, tokens=1000))


def test_a_long_answer_is_waited_for_while_the_server_lives():
    asked_twice = threading.Event()
    lives = []

    def health(_):
        lives.append(1)
        if len(lives) == 2:
            asked_twice.set()
        return {}

    def slow(_):
        asked_twice.wait(LIMIT_S)  # longer than the time-out of any other request
        return {"ok": 1}

    with Server({"POST /do": slow, "GET /health": health}) as server:
        assert sample(server, timeout_s=0.5) == {"ok": 1}  # a busy machine has it for /health


@pytest.mark.parametrize("status", [404, 503, 200])
def test_a_server_that_samples_nothing_is_given_up(status, monkeypatch):
    """It does not say that it lives, or it says so and samples less than a token in 0 s."""
    monkeypatch.setattr(http, "SLOWEST_TOKEN_S", 0.0)
    held = threading.Event()

    def hangs(_):
        held.wait(LIMIT_S)
        return Reply(hang_up=True)

    health = {"GET /health": lambda _: Reply({}, status)}
    with Server({"POST /do": hangs} | health) as server:
        with pytest.raises(TrainingError, match=r"/do, 1 times; got no answer within 0.05 s"):
            sample(server)
        held.set()


def test_a_hung_engine_behind_a_healthy_server_costs_its_limit_once(monkeypatch):
    """An answer of 32k tokens may take 2 hours: six attempts of that would be half a day."""
    monkeypatch.setattr(http, "SLOWEST_TOKEN_S", 1e-3)
    held, asked = threading.Event(), []

    def hangs(_):
        asked.append(1)
        held.wait(LIMIT_S)
        return Reply(hang_up=True)

    with Server({"POST /do": hangs, "GET /health": lambda _: {}}) as server:
        client = client_of(server, retries=5, timeout_s=0.5)  # enough for /health
        with pytest.raises(
            TrainingError, match=r"[12] times in 2 s, the limit of all .* though it answers"
        ):
            asyncio.run(client.post("/do", {}, tokens=1000))
        held.set()
    assert len(asked) <= 2


def test_a_stuck_engine_is_not_held_for_the_night():
    """A token of a loaded engine takes up to 30 ms."""
    answer = http._Call("POST", "/generate", 600.0, tokens=32_768)
    assert 6 * 0.03 * answer.tokens < answer.longest_s < 2 * 3600


@pytest.mark.parametrize(
    ("left", "alive", "message"),
    [
        (30.0, False, "no answer within 20 s (rollout.engine.timeout_s)"),
        (9.876, False, "no answer within 9.88 s, the rest of 60 s for all attempts"),
        (
            60.0,
            True,
            "no answer within 40 s (rollout.engine.timeout_s and 0.2 s for each of 100 tokens), "
            "though it answers /health",
        ),
        (
            30.0,
            True,
            "no answer within 30 s, the rest of 60 s for all attempts, though it answers /health",
        ),
    ],
)
def test_an_attempt_that_was_cut_says_how_long_it_ran(left, alive, message):
    call = http._Call("POST", "/generate", 20.0, tokens=100)
    assert http._describe_wait(call, left, alive) == message


def test_a_hung_health_check_is_no_sign_of_life(monkeypatch):
    """The attempt ends while the check is under way."""
    monkeypatch.setattr(http, "SLOWEST_TOKEN_S", 1e-5)
    held = threading.Event()

    def hangs(_):
        held.wait(LIMIT_S)
        return Reply(hang_up=True)

    with Server({"POST /do": hangs, "GET /health": hangs}) as server:
        with pytest.raises(TrainingError, match=r"within 0\.2 s \(rollout.engine.timeout_s\)"):
            asyncio.run(client_of(server, retries=0, timeout_s=0.2).post("/do", {}, tokens=1000))
        held.set()


def test_the_first_problem_is_kept_beside_the_last():
    broken = Reply({"error": "CUDA error"}, 500)
    with Server({"POST /do": first([broken], lambda _: Reply(hang_up=True))}) as server:
        client = client_of(server)
        with pytest.raises(
            EngineLost, match=r"got RemoteProtocolError.*; the first time: status 500: .*CUDA error"
        ):
            asyncio.run(client.post("/do"))
    with Server({"POST /do": lambda _: broken}) as server, pytest.raises(EngineLost) as caught:
        asyncio.run(client_of(server).post("/do"))
    assert str(caught.value).count("CUDA error") == 1


def test_an_absent_server_is_a_usage_error_only_at_the_start():
    with Server({}) as server:
        client = client_of(server, retries=1)

    async def at_start():
        with client.startup_errors():
            await client.get("/health")

    with pytest.raises(
        UsageError,
        match=r"rollout.engine.url: .* GET .*/health, 2 times; got ConnectError.*right url",
    ):
        asyncio.run(at_start())
    with pytest.raises(TrainingError, match="ConnectError"):
        asyncio.run(client.get("/health"))


def test_dropped_requests_are_named_and_a_cancelled_one_hangs_up():
    seen, left = threading.Event(), threading.Event()

    def slow(request):
        seen.set()
        wait_until(request.gone)
        left.set()
        return Reply(hang_up=True)

    async def both(client):
        waiting = asyncio.create_task(client.post("/slow"))
        await asyncio.to_thread(seen.wait, LIMIT_S)
        with pytest.raises(TrainingError, match="1 other requests in flight were dropped"):
            await client.get("/nowhere")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(left.wait, LIMIT_S)

    with Server({"POST /slow": slow}) as server:
        client = client_of(server)
        asyncio.run(both(client))
    assert client.take_counters() == RequestCounters(requests=2, dropped=2)


@pytest.mark.parametrize(
    ("url", "token_env", "message"),
    [
        ("localhost:8000", None, "is not the address of a server"),
        ("http://127.0.0.1:1/?a=b", None, "has a user, a password or a query in it"),
        ("http://me:pw@127.0.0.1:1", None, "has a user, a password or a query in it"),
        ("http://10.1.2.3:8000", None, "on another machine; protect it"),
        ("http://localhost:8000", "NOT_SET_ANYWHERE", "variable NOT_SET_ANYWHERE is not set"),
    ],
)
def test_addresses_that_cannot_work_are_refused(url, token_env, message):
    with pytest.raises(UsageError, match=message) as caught:
        EngineClient(url, token_env=token_env, server="the test server")
    assert "pw@" not in str(caught.value)
