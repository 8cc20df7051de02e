"""The gateway's server without a socket: keys, retries, streams, pings, limits."""

import asyncio
import json

import pytest

from onepolicy.gateway import server
from onepolicy.gateway.episodes import Episodes
from support.gateway_app import App, session_of

USER = {"role": "user", "content": "hello"}
PATHS = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/responses": {"input": "hello"},
}


def text_of(answer):
    body = answer.json()
    if "choices" in body:
        return body["choices"][0]["message"]["content"]
    return (body.get("content") or body["output"][0]["content"])[0]["text"]


@pytest.mark.parametrize("path", PATHS)
def test_an_answer_and_errors_in_its_dialect(path):
    app = App("yes")
    answer = app.post(path, PATHS[path])
    assert (answer.status_code, text_of(answer), answer.json()["model"]) == (200, "yes", "tiny")
    for key in ("wrong", app.secret, f"{app.secret}.a", f"b{app.key[1:]}", "a/b.c", f"{app.key}0"):
        refused = app.post(path, PATHS[path], key=key)
        assert refused.status_code == 401
        assert "is of no episode" in refused.json()["error"]["message"]
    assert app.post(path, {}).status_code == 400
    assert app.post(path, [1]).json()["error"]["message"] == "the body is not a JSON object"
    squeezed = app.post(path, PATHS[path], headers={"content-encoding": "zstd"})
    assert squeezed.status_code == 415


def test_both_kinds_of_key_and_what_programs_ask_first():
    app = App("yes")
    given = {"x-api-key": app.episodes.key_of("b")}
    assert app.post("/v1/messages", PATHS["/v1/messages"], key="", headers=given).status_code == 200
    assert sorted(app.episodes.names) == ["b"]
    assert app.send("HEAD", "/").status_code == 200
    assert app.send("GET", "/v1/models").json()["data"][0]["id"] == "tiny"
    assert app.send("POST", "/v1/embeddings").status_code == 404


def test_a_retry_gets_the_same_bytes():
    app = App("one", "two", "three")
    path = "/v1/chat/completions"
    first = app.post(path, PATHS[path])
    for headers in ({"x-stainless-retry-count": "1"}, {"x-stainless-retry-count": "2"}):
        assert app.post(path, PATHS[path], headers=headers).content == first.content
    again = app.post(path, PATHS[path], headers={"x-stainless-retry-count": "0"})
    assert text_of(again) == "two"  # the same question again, not another try
    named = {"idempotency-key": "k"}
    third = app.post(path, PATHS[path], headers=named)
    assert app.post(path, PATHS[path], headers=named).content == third.content
    other = app.post(path, PATHS[path] | {"stream": True}, headers=named)
    assert (other.status_code, "with another body" in other.text) == (422, True)
    assert app.post(path, PATHS[path], headers=named).content == third.content
    assert len(app.engine.requests) == 3
    assert app.episodes.find(app.key).replayed == 4


def test_a_stream_waits_with_pings_and_ends_with_its_error():
    app = App("yes", pace=server.Pace(0, 0.01))
    generate = app.engine.generate

    async def slow(*args, **how):
        await asyncio.sleep(0.1)
        if app.fail:
            raise RuntimeError("lost")
        return await generate(*args, **how)

    app.engine.generate = slow
    for path, body in PATHS.items():
        text = app.post(path, body | {"stream": True}).text
        ping = "event: ping\n" if "messages" in path else ": ping\n"
        assert text.startswith(ping)
        assert "yes" in text
    app.fail = True
    for path, body in PATHS.items():
        answer = app.post(path, body | {"stream": True})
        assert answer.status_code == 200  # it had begun
        assert "the engine failed" in answer.text.split("\n\n")[-2]
        answer = app.post(path, body)
        assert (answer.status_code, "the engine failed" in answer.text) == (500, True)
    assert app.episodes.find(app.key).history.counts()["turns"] == 3


def test_a_stream_that_fails_at_once_has_a_status():
    app = App("yes")
    body = PATHS["/v1/messages"] | {"stream": True, "messages": [{"role": "system"}]}
    answer = app.post("/v1/messages", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_count_tokens_samples_nothing():
    app = App("yes")
    answer = app.post("/v1/messages/count_tokens", PATHS["/v1/messages"])
    assert answer.json() == {"input_tokens": 1 + len("hello") + 2}
    assert not app.engine.requests


def test_a_body_that_is_too_large(monkeypatch):
    monkeypatch.setattr(server, "MOST_BYTES", 40)
    app = App("yes")
    answer = app.post("/v1/messages", {"messages": [USER | {"content": "x" * 40}]})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
    monkeypatch.setattr(server, "MOST_BYTES", 2**20)
    monkeypatch.setattr(server, "MOST_PARTS", 99)
    answer = app.post("/v1/messages", {"messages": [[]] * 50})
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")


def test_who_has_the_secret_begins_and_ends_episodes():
    app = App("yes")
    path, secret = "/v1/chat/completions", app.secret
    assert app.post("/v1/episodes", {"episode": "a"}, key=secret).json() == {"key": app.key}
    assert app.post("/v1/episodes", {"episode": "a/b"}, key=secret).status_code == 400
    app.post(path, PATHS[path])
    end = {"episode": "a", "reward": 0.5}
    for key in (app.key, "", "wrong"):  # a program cannot give itself a reward
        assert app.post("/v1/episodes", {"episode": "a"}, key=key).status_code == 401
        assert app.post("/v1/episodes/end", end, key=key).status_code == 401
    for reward in (None, "1", True, float("nan")):
        body = json.dumps({"episode": "a", "reward": reward})
        assert app.post("/v1/episodes/end", body, key=secret).status_code == 400
    assert app.post("/v1/episodes/end", end | {"episode": "b"}, key=secret).status_code == 404
    assert app.post("/v1/episodes/end", end, key=secret).json() == {"turns": 1}
    name, session, reward = app.ended
    assert (name, reward, len(session.history.turns)) == ("a", 0.5, 1)
    for path in PATHS:
        answer = app.post(path, PATHS[path])
        assert (answer.status_code, "has ended" in answer.text) == (403, True)


def test_who_ends_an_episode_again_gets_the_same_answer(monkeypatch):
    monkeypatch.setattr("onepolicy.gateway.episodes.MOST_ANSWERS", 1)
    app = App("yes", "no")
    app.post("/v1/messages", PATHS["/v1/messages"])
    end = {"episode": "a", "reward": 0.5}
    first = app.post("/v1/episodes/end", end, key=app.secret)
    app.fail = True  # it is not ended once more
    again = app.post("/v1/episodes/end", end, key=app.secret)
    assert (again.status_code, again.content) == (200, first.content)
    other = app.post("/v1/episodes/end", end | {"reward": 1}, key=app.secret)
    assert (other.status_code, "'a' was ended with 0.5" in other.text) == (403, True)
    assert app.post("/v1/episodes/tree", end, key=app.secret).status_code == 403
    app.fail = False
    app.post("/v1/messages", PATHS["/v1/messages"], key=app.episodes.key_of("b"))
    assert app.post("/v1/episodes/end", end | {"episode": "b"}, key=app.secret).status_code == 200
    old = app.post("/v1/episodes/end", end, key=app.secret)  # only the last answers are kept
    assert (old.status_code, "'a' has ended; its line is in" in old.text) == (403, True)


def test_who_has_the_secret_sees_the_tree_of_an_open_episode():
    app = App("yes")
    asked = {"episode": "a"}
    assert app.post("/v1/episodes/tree", asked, key=app.secret).status_code == 404
    app.post("/v1/chat/completions", PATHS["/v1/chat/completions"])
    assert app.post("/v1/episodes/tree", asked).status_code == 401  # a program's key
    (turn,) = app.post("/v1/episodes/tree", asked, key=app.secret).json()["turns"]
    (recorded,) = app.episodes.find(app.key).history.turns
    assert turn["sampled"] == recorded.completion.token_ids.tolist()
    assert turn["prompt"] == recorded.path.tokens[: recorded.start]
    assert (turn["parent"], turn["root"], turn["facts"]) == (None, 0, [])


def test_an_episode_that_cannot_be_scored_stays_open():
    app = App("yes")
    app.post("/v1/messages", PATHS["/v1/messages"])
    end = {"episode": "a", "reward": 0.5}
    app.fail = True
    failed = app.post("/v1/episodes/end", end, key=app.secret)
    assert (failed.status_code, "stays open: lost" in failed.text) == (500, True)
    app.fail = False
    assert app.post("/v1/episodes/end", end, key=app.secret).json() == {"turns": 1}


def test_an_episode_that_ends_while_a_body_is_sent_samples_nothing():
    app = App("yes")
    path = "/v1/messages"
    app.episodes.find(app.key)

    async def body():
        yield json.dumps(PATHS[path])[:9].encode()
        app.episodes.end("a")
        yield json.dumps(PATHS[path])[9:].encode()

    async def play():
        async with app.client() as client:
            return await client.post(path, content=body(), headers={"x-api-key": app.key})

    answer = asyncio.run(play())
    assert (answer.status_code, "has ended" in answer.text) == (403, True)
    assert not app.engine.requests


def test_an_episode_with_a_running_turn_is_not_ended():
    app = App("yes")
    generate, asked, go_on = app.engine.generate, asyncio.Event(), asyncio.Event()

    async def slow(*args, **how):
        asked.set()
        await go_on.wait()
        return await generate(*args, **how)

    app.engine.generate = slow
    end = {"episode": "a", "reward": 0.5}

    async def play():
        async with app.client() as client:
            headers = {"x-api-key": app.key}
            path = "/v1/messages"
            turn = asyncio.ensure_future(client.post(path, json=PATHS[path], headers=headers))
            await asked.wait()
            secret = {"x-api-key": app.secret}
            early = await client.post("/v1/episodes/end", json=end, headers=secret)
            go_on.set()
            answered = await turn
            return early, answered, await client.post("/v1/episodes/end", json=end, headers=secret)

    early, answered, ended = asyncio.run(play())
    assert (early.status_code, "1 turns of 'a' are being sampled" in early.text) == (409, True)
    assert (answered.status_code, ended.json()) == (200, {"turns": 1})


@pytest.mark.parametrize("path", PATHS)
def test_half_a_surrogate_pair_is_sent_as_ascii(path):
    """JSON can say it and UTF-8 cannot."""
    app = App("yes")
    body = json.dumps(PATHS[path] | {"model": "\ud800"})
    answer = app.post(path, body)
    assert (answer.status_code, answer.content.isascii()) == (200, True)
    assert answer.json()["model"] == "\ud800"
    refused = app.post(path, body.replace("hello", "\\ud800").replace('"user"', '"\\udfff"'))
    assert refused.content.isascii()
    assert app.post(path, '{"messages": NaN}').status_code == 400


def test_too_many_open_episodes(monkeypatch):
    monkeypatch.setattr("onepolicy.gateway.episodes.MOST_OPEN", 1)
    episodes = Episodes(lambda name: session_of("x"))
    episodes.find(episodes.key_of("a"))
    with pytest.raises(ValueError, match="episodes are open"):
        episodes.find(episodes.key_of("b"))
