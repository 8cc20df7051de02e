"""The HTTP client of engines: its retries, its refusals, and its error messages."""

import asyncio
import functools
import gzip
import json
import threading
import typing
import zlib
from itertools import product

import pytest

from onepolicy.config import ServiceUnavailable, TrainingError, UsageError
from onepolicy.replay.checks import MisalignedRoutesError
from onepolicy.rollout.remote import client as http
from onepolicy.rollout.remote.bodies import MAX_REPLY_BYTES, MalformedReply, parse_json, read_body
from onepolicy.rollout.remote.client import (
    EngineClient,
    EngineLost,
)
from support.http_server import Reply, Server, first
from support.waiting import LIMIT_S, wait_until


def counted(requests=0, retried=0, dropped=0):
    names = ("requests", "requests_retried", "requests_dropped")
    counts = zip(names, (requests, retried, dropped), strict=True)
    return {f"rollout/{name}": count for name, count in counts}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.001)


def client_of(server, **kwargs):
    settings = {"retries": 2, "timeout_s": LIMIT_S} | kwargs
    return EngineClient(server.url, server="the test server", **settings)


def good(_):
    return {"ok": 1}


def ask(server, **kwargs):
    client = client_of(server, **kwargs)
    return client, asyncio.run(client.post("/do", {"x": [1, 2]}, params={"mode": "abort"}))


class Held:
    """A handler that hangs until the `with` block ends or for some seconds, and then hangs up."""

    def __init__(self, seconds=LIMIT_S):
        self.ended, self.asked, self.seconds = threading.Event(), 0, seconds

    def __call__(self, _):
        self.asked += 1
        self.ended.wait(self.seconds)
        return Reply(hang_up=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ended.set()


def test_a_request_and_its_json_answer_arrive_unchanged(monkeypatch):
    monkeypatch.setenv("ENGINE_TOKEN", "s3cret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    packed = gzip.compress(json.dumps("x" * 3_000_000).encode())  # several pieces
    gets = {"GET /text": lambda _: Reply(b"OK", content_type="text/plain")}
    gets |= {"GET /empty": lambda _: Reply(b"")}
    gets |= {"GET /packed": lambda _: Reply(packed, encoding="gzip")}
    with Server({"POST /do": good} | gets) as server:
        client, reply = ask(server, token_env="ENGINE_TOKEN")
        found = [asyncio.run(client.get(path)) for path in ("/empty", "/text", "/packed")]
    assert found == [None, "OK", "x" * 3_000_000]
    assert reply == {"ok": 1}
    asked = server.asked[0]
    assert (asked.method, asked.path, asked.params) == ("POST", "/do", {"mode": "abort"})
    assert asked.body == {"x": [1, 2]}
    assert asked.headers["authorization"] == "Bearer s3cret"
    assert client.take_metrics() == counted(requests=4)
    assert client.take_metrics() == counted()


TOO_MUCH = bytes(http.MAX_REPLY_BYTES + 1)
TRANSIENT = {
    "503": Reply({"error": "engine"}, 503),
    "truncated": Reply({"ok": 1}, cut=3),
    "not JSON": Reply(b'{"ok": '),
    "hangs up": Reply(hang_up=True),
    "deep": Reply(b"[" * 100_000),
    "a key twice": Reply(b'{"ok": 1, "ok": 2}'),
    "digits": Reply(b'{"ok": ' + b"9" * 5000 + b"}"),
    "no UTF-8": Reply(b'{"ok": "\xff"}'),
    "too long": Reply(TOO_MUCH),
    "gzip of too much": Reply(gzip.compress(TOO_MUCH), encoding="gzip"),
    "gzip cut short": Reply(gzip.compress(b'{"ok": 1}')[:-4], encoding="gzip"),
    "no gzip": Reply(b'{"ok": 1}', encoding="gzip"),
    "another encoding": Reply(b'{"ok": 1}', encoding="br"),
}


def test_transient_errors_are_retried_up_to_the_bound(subtests):
    words = r"the test server: POST http://127.*/do, 3 times; got .*--resume"
    with Server({}) as server:
        for what, bad in TRANSIENT.items():
            with subtests.test(what):
                server.handlers["POST /do"] = first([bad], good)
                client, reply = ask(server)
                assert reply == {"ok": 1}
                assert client.take_metrics() == counted(requests=1, retried=1)
        server.handlers["POST /do"] = first([bad] * 3, good)
        client = client_of(server)
        with pytest.raises(TrainingError, match=words):
            asyncio.run(client.post("/do"))
        assert client.take_metrics() == counted(requests=1, retried=2, dropped=1)
        assert len(server.asked) == 2 * len(TRANSIENT) + 3


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


SMALL = gzip.compress(b"{}")
ENDLESS = {  # and how many chunks are taken
    "zeros": ([SMALL, *([bytes(2**16)] * 9)], 2),
    "a byte in the same chunk": ([SMALL + b"\0"] * 9, 1),
    "members": ([SMALL] * 9, 2),
    "members in one chunk": ([gzip.compress(b"") * 9] * 9, 1),
    "single bytes": ([*(SMALL[n : n + 1] for n in range(22)), b"", b"\0", b"\0"], 24),
    "empty blocks": ([GZIP_HEADER, *([EMPTY_BLOCK * 2**13] * 99)], 3),
    "a name": ([GZIP_HEADER[:3] + b"\x08" + GZIP_HEADER[4:], *([b"name" * 2**13] * 99)], 4),
}


def test_an_endless_gzip_body_is_refused_at_once(subtests):
    words = r"goes on after its end|a gzip body of more than 100 bytes"
    for what, (chunks, after) in ENDLESS.items():
        response = Gzipped(chunks)
        with subtests.test(what):
            with pytest.raises(MalformedReply, match=words):
                asyncio.run(read_body(response, 100))
            assert response.taken == after


def test_a_gzip_body_may_come_in_any_chunks():
    whole = gzip.compress(b"x" * 200_000)
    chunks = [whole[n : n + 1] for n in range(len(whole))]
    assert asyncio.run(read_body(Gzipped(chunks), 200_000)) == b"x" * 200_000
    packed = zlib.compressobj(level=6, wbits=31, strategy=zlib.Z_FIXED)
    high = bytes(range(144, 256)) * 20_000  # each takes 9 bits
    body = packed.compress(high) + packed.flush()
    assert asyncio.run(read_body(Gzipped([body]), len(high))) == high


def test_other_tasks_run_while_a_reply_comes_in_single_bytes_or_is_decompressed():
    class Plain(Gzipped):
        headers: typing.ClassVar = {}

    async def read(response, most):
        async with asyncio.timeout(0):
            await read_body(response, most)

    for response, most in (
        (Plain([b"1"] * 50), 100),
        (Gzipped([GZIP_HEADER[:1]]), 100),
        (Gzipped([gzip.compress(bytes(2**23))]), 2**40),
    ):
        with pytest.raises(TimeoutError):
            asyncio.run(read(response, most))


EVIL = "\x1b]0;owned\x07\x1b[2J\r\nonepolicy: all is well\x9b2J\u202e\u2028\x00\x7f"


OF_JSON = json.dumps({"error": EVIL}, ensure_ascii=False)


def test_a_servers_text_reaches_no_terminal_unescaped(subtests):
    def parse(reply):
        raise MalformedReply(f"it sent {reply}")

    texts = {"text/plain": EVIL, "application/json": OF_JSON}
    with Server({}) as server:
        for status, (kind, text) in product([503, 403, 307, 200], texts.items()):
            reply = Reply(text.encode(), status, content_type=kind)
            server.handlers["POST /do"] = first([reply] * 3, good)
            with subtests.test(status=status, kind=kind):
                with pytest.raises(TrainingError) as error:
                    asyncio.run(client_of(server).post("/do", parse=parse))
                assert str(error.value).isprintable()
                assert "owned" in str(error.value)


MISALIGNED = functools.partial(MisalignedRoutesError, layers_wrong=True)


@pytest.mark.parametrize(
    "kind", [UsageError, TrainingError, ServiceUnavailable, EngineLost, MalformedReply, MISALIGNED]
)
def test_an_error_keeps_no_more_than_its_line_breaks(kind):
    end = "; f\u00fcr \u4f60\u3000\u597d \U0001f600"
    text = str(kind(f"a problem\nof two lines, it said {EVIL}{end}"))
    assert text.replace("\n", "").replace("\u3000", "").isprintable()
    assert "\\x1b]0;owned\\x07" in text
    assert text.endswith(f"\\u202e\\u2028\\x00\\x7f{end}")
    assert str(kind(text)) == text.replace("\n", "\\n" if kind is MalformedReply else "\n")


def test_a_reply_that_parse_refuses_is_tried_again():
    def parse(reply):
        if "ok" not in reply:
            raise MalformedReply("no `ok` in it")
        return reply["ok"] + 1

    with Server({"GET /do": first([{}], good), "GET /no": lambda _: {}}) as server:
        assert asyncio.run(client_of(server).get("/do", parse=parse)) == 2
        with pytest.raises(TrainingError, match="reply that cannot be used: no `ok` in it"):
            asyncio.run(client_of(server, retries=0).get("/no", parse=parse))


def test_a_refusal_is_an_answer_and_shows_the_servers_reply():
    with Server({}) as server:
        with pytest.raises(TrainingError, match=r'got status 404: \{"detail": "Not Found"\}'):
            ask(server)
        assert len(server.asked) == 1


def test_time_out_is_per_attempt_and_retried():
    slow, words = Held(), r"/do, 2 times; got no answer within 0\.\d+ s"
    with Server({"POST /do": slow}) as server, slow, pytest.raises(TrainingError, match=words):
        ask(server, timeout_s=0.2, retries=1)
    slow, words = Held(), r"/do, [12] times in 0\.1 s, the limit of all attempts together; got no"
    with Server({"POST /do": slow}) as server, slow, pytest.raises(TrainingError, match=words):
        ask(server, timeout_s=0.05, retries=2)


def sample(server, timeout_s=0.05, **kwargs):
    client = client_of(server, retries=0, timeout_s=timeout_s, **kwargs)
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

    paused = {"GET /health": lambda _: Reply({}, 503)}  # as SGLang's, for which it samples
    with Server({"POST /do": slow, "GET /there": health, **paused}) as server:
        # a busy machine has this time for an answer
        assert sample(server, timeout_s=0.5, answer_path="/there") == {"ok": 1}


@pytest.mark.parametrize("status", [404, 503, 200])
def test_a_server_that_samples_nothing_is_given_up(status, monkeypatch):
    """It does not say that it lives, or it says so and samples less than a token in 0 s."""
    monkeypatch.setattr(http, "SLOWEST_TOKEN_S", 0.0 if status == 200 else LIMIT_S)
    hangs, words = Held(5), r"/do, 1 times; got no answer within 0.05 s"
    paths = {"POST /do": hangs, "GET /health": lambda _: Reply({}, status)}
    with Server(paths) as server, hangs, pytest.raises(TrainingError, match=words):
        sample(server)


@pytest.mark.full
def test_a_hung_engine_behind_a_healthy_server_costs_its_limit_once(monkeypatch):
    """An answer of 32k tokens may take 2 hours: six attempts of that would be half a day."""
    monkeypatch.setattr(http, "SLOWEST_TOKEN_S", 1e-3)
    hangs, words = Held(), r"[12] times in 2 s, the limit of all .* though it answers"
    with Server({"POST /do": hangs, "GET /health": lambda _: {}}) as server, hangs:
        client = client_of(server, retries=5, timeout_s=0.5)  # enough for /health
        with pytest.raises(TrainingError, match=words):
            asyncio.run(client.post("/do", {}, tokens=1000))
    assert hangs.asked <= 2


def test_a_stuck_engine_is_not_held_for_the_night():
    """A token of a loaded engine takes up to 30 ms."""
    answer = http._Call("POST", "/generate", 600.0, tokens=32_768)
    assert 6 * 0.03 * answer.tokens < answer.longest_s < 2 * 3600


SETTING, LIVES = "rollout.engine.timeout_s", ", though it answers"
WAITS = [
    (30.0, False, f"20 s ({SETTING})"),
    (9.876, False, "9.88 s, the rest of 60 s for all attempts"),
    (60.0, True, f"40 s ({SETTING} and 0.2 s for each of 100 tokens){LIVES}"),
    (30.0, True, f"30 s, the rest of 60 s for all attempts{LIVES}"),
]


def test_an_attempt_that_was_cut_says_how_long_it_ran():
    call = http._Call("POST", "/generate", 20.0, tokens=100)
    for left, alive, words in WAITS:
        assert http._describe_wait(call, left, alive) == f"no answer within {words}"


def test_a_hung_health_check_is_no_sign_of_life(monkeypatch):
    """The attempt ends while the check is under way."""
    monkeypatch.setattr(http, "SLOWEST_TOKEN_S", 1e-5)
    hangs, words = Held(), r"within 0\.2 s \(rollout.engine.timeout_s\)"
    paths = {"POST /do": hangs, "GET /health": hangs}
    with Server(paths) as server, hangs, pytest.raises(TrainingError, match=words):
        sample(server, timeout_s=0.2)


def test_a_server_that_is_silent_for_seconds_is_not_there(monkeypatch):
    monkeypatch.setattr(http, "ANSWER_S", 0.05)
    hangs = Held()
    with Server({"GET /there": hangs}) as server, hangs:
        client = client_of(server, retries=0, answer_path="/there")
        assert not asyncio.run(client.answers())
        assert not hangs.ended.is_set()


def test_a_health_check_is_read_with_a_bound(monkeypatch):
    """More than 16 MiB that come as 16 KiB are no sign of life, and are not kept."""
    taken = []

    async def watched(response, max_bytes):
        taken.append((response.request.url.path, max_bytes))
        return await read_body(response, max_bytes)

    monkeypatch.setattr(http, "read_body", watched)
    bomb, hangs = gzip.compress(bytes(2**24 + 1)), Held()
    paths = {"POST /do": hangs, "GET /health": lambda _: Reply(bomb, encoding="gzip")}
    with Server(paths) as server, hangs, pytest.raises(TrainingError, match=r"within 1 s \("):
        sample(server, timeout_s=1.0)  # a busy machine has it for /health
    assert ("/health", MAX_REPLY_BYTES) in taken


@pytest.mark.parametrize("one", [b"[]", b"{}", b"[[]]"])
def test_lists_and_objects_of_a_reply_have_a_bound(one):
    limit = 2**16
    few, many = limit // 8 // len(one), limit // len(one) // 2
    for count, refused in ((few - 1, False), (many, True)):
        body = b"[" + b",".join([one] * count) + b"]"
        assert len(body) <= limit
        if refused:
            with pytest.raises(MalformedReply, match="more than 8,192, the limit of this request"):
                parse_json(body, limit)
        else:
            assert len(parse_json(body, limit)) == count


def test_the_first_problem_is_kept_beside_the_last():
    broken, gone = Reply({"error": "CUDA error"}, 500), Reply(hang_up=True)
    handlers = {"POST /do": first([broken], lambda _: gone), "POST /broken": lambda _: broken}
    words = r"got RemoteProtocolError.*; the first time: status 500: .*CUDA error"
    with Server(handlers) as server:
        with pytest.raises(EngineLost, match=words):
            asyncio.run(client_of(server).post("/do"))
        with pytest.raises(EngineLost) as caught:
            asyncio.run(client_of(server).post("/broken"))
    assert str(caught.value).count("CUDA error") == 1


def test_an_absent_server_is_a_usage_error_only_at_the_start():
    with Server({}) as server:
        client = client_of(server, retries=1)

    async def at_start():
        with client.startup_errors():
            await client.get("/health")

    words = r"rollout.engine.url: .* GET .*/health, 2 times; got ConnectError.*right url"
    with pytest.raises(UsageError, match=words):
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
    assert client.take_metrics() == counted(requests=2, dropped=2)


ADDRESSES = [
    ("localhost:8000", None, "is not the address of a server"),
    ("http://127.0.0.1:1/?a=b", None, "has a user, a password or a query in it"),
    ("http://me:pw@127.0.0.1:1", None, "has a user, a password or a query in it"),
    ("http://10.1.2.3:8000", None, "on another machine; protect it"),
    ("http://localhost:8000", "NOT_SET_ANYWHERE", "variable NOT_SET_ANYWHERE is not set"),
    ("http://localhost:8000", "hunter2pw", "that it names is not set; if its value is the token"),
    ("http://localhost:8000", "9F8E7D6C", "is not the name of an environment variable"),
    ("http://localhost:8000", "AB8E7D6C9F", "that it names is not set; if its value is the token"),
]


def test_addresses_that_cannot_work_are_refused(subtests):
    for url, token_env, words in ADDRESSES:
        with subtests.test(url):
            with pytest.raises(UsageError, match=words) as caught:
                EngineClient(url, token_env=token_env, server="the test server")
            assert not [each for each in ("pw@", "2pw", "7D6C") if each in str(caught.value)]
