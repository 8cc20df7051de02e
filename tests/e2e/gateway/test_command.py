"""`onepolicy gateway` on a small model, without its socket: an audit reads what programs played."""

import asyncio
import json
import socket

import httpx2
import pytest

from onepolicy.build.gateway import GatewayOptions, build_gateway, run_gateway
from onepolicy.cli import main
from onepolicy.gateway.conformance.client import Client
from onepolicy.gateway.conformance.command import check_gateway
from onepolicy.gateway.session import Limits
from onepolicy.record.read import read_dump
from support.paths import ROOT

pytestmark = pytest.mark.gateway
MODEL = ROOT / "tests" / "support" / "policies" / "small"
SECRET = {"x-api-key": "s" * 16}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"


SETTINGS = [f"model.path={MODEL}", "rollout.sampling.max_tokens=12"]


def options_of(tmp_path):
    return GatewayOptions(
        out=tmp_path / "out",
        name="small",
        template=TEMPLATE,
        thoughts="keep",
        limits=Limits(),
        secret=SECRET["x-api-key"],
    )


def gateway_of(tmp_path, *overrides):
    return build_gateway({}, [*SETTINGS, *overrides], options_of(tmp_path))


async def play(client, name):
    """Play three turns, with a system message that changes before the third."""
    begun = await client.post("/v1/episodes", json={"episode": name}, headers=SECRET)
    headers = {"x-api-key": begun.json()["key"]}
    messages = [{"role": "system", "content": "1"}, {"role": "user", "content": f"{name}+1="}]
    for turn in range(3):
        if turn == 2:
            messages[0]["content"] = "2"
        body = {"messages": messages}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        messages.append(answer.json()["choices"][0]["message"])
        messages.append({"role": "user", "content": "2+2="})
    return await end(client, name)


async def end(client, name):
    body = {"episode": name, "reward": 0.5}
    ended = await client.post("/v1/episodes/end", json=body, headers=SECRET)
    return ended.json()


async def play_all(app, names, play=play):
    transport = httpx2.ASGITransport(app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        return await asyncio.gather(*(play(client, name) for name in names))


def test_every_token_has_the_trainers_value_to_the_bit(tmp_path):
    app, episodes = gateway_of(tmp_path, "numerics=on-policy")
    lines = asyncio.run(play_all(app, ["0", "1", "2"]))
    assert [line["samples"] for line in lines] == [2, 2, 2]
    assert all(line["breaks"][0]["reason"] == "system changed" for line in lines)
    assert all(line["breaks"][0]["token"] == 0 for line in lines)
    assert not episodes.names
    tokens = 0
    for block in read_dump(tmp_path / "out" / "dump", {}):
        mask = block.columns["mask"]
        ours, theirs = (block.columns[f"logp_{side}"][mask] for side in ("trainer", "rollout"))
        assert (ours == theirs).all()
        assert (block.columns["routes_rollout"] == block.columns["routes_trainer"]).all()
        tokens += mask.sum()
    assert tokens > 30


def test_an_audit_reads_the_supports_of_an_episode(tmp_path, capsys):
    app, _ = gateway_of(tmp_path, "numerics=on-policy", "rollout.sampling.top_p=0.8")
    asyncio.run(play_all(app, ["0", "1", "2", "3"]))
    dump = tmp_path / "out" / "dump"
    for block in read_dump(dump, {}):
        mask, counts = block.columns["mask"], block.columns["support_counts"]
        assert (counts[mask] > 0).all()
        assert not counts[~mask].any()
        rollout, trainer = (block.columns[f"logp_{side}"][mask] for side in ("rollout", "trainer"))
        assert (rollout == trainer).all()
        assert (block.columns["logp_vocabulary"][mask] < trainer).any()
    assert main(["audit", str(dump)]) == 0
    printed = capsys.readouterr().out
    assert "support" in printed, printed


def test_the_conformance_kit_passes_on_a_policy(tmp_path):
    """Its model calls no tool, so some transcripts are left out."""
    app, episodes = gateway_of(tmp_path)

    async def check():
        transport = httpx2.ASGITransport(app)
        async with httpx2.AsyncClient(transport=transport) as http:
            client = Client(http, "http://gateway", SECRET["x-api-key"], "small")
            return await check_gateway(client)

    outcomes = asyncio.run(check())
    assert [(o.transcript.name, o.check, o.why) for o in outcomes if o.check] == []
    assert sum(not outcome.left_out for outcome in outcomes) > 15
    assert not episodes.names
    lines = (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    assert all(json.loads(line)["reward"] == 0 for line in lines)


def test_an_episode_whose_scoring_fails_is_noted_and_kept(tmp_path, monkeypatch):
    app, episodes = gateway_of(tmp_path, "replay.duplicate_routes=newest")

    def fail(*args, **how):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("onepolicy.build.gateway.pack", fail)
        (answer,) = asyncio.run(play_all(app, ["a"]))
    assert "not scored and stays open: out of memory" in answer["error"]["message"]
    assert episodes.names == ["a"]
    assert episodes.to_end("a").history.duplicate_routes == "newest"
    (line,) = (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    noted = json.loads(line)
    assert (noted["reward"], noted["note"]) == (0.5, "not scored: out of memory")
    assert noted["counts"]["turns"] == 3
    (again,) = asyncio.run(play_all(app, ["a"], end))
    assert again["samples"] == 2
    lines = (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    assert [json.loads(line).get("open", False) for line in lines] == [True, False]


def test_the_server_gives_turns_some_seconds_to_end(tmp_path, monkeypatch):
    """It uses the socket that was bound before the model was loaded, and Ctrl-C is its end."""
    seen = []

    def run(server, sockets):
        seen.append((server.config.timeout_graceful_shutdown, sockets))
        raise KeyboardInterrupt

    monkeypatch.setattr("uvicorn.Server.run", run)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert run_gateway({}, SETTINGS, options_of(tmp_path), listener) == 0
    assert seen == [(20, [listener])]


def test_an_episode_that_nobody_ended_is_noted(tmp_path):
    app, episodes = gateway_of(tmp_path)

    async def leave_one_open():
        async with app.router.lifespan_context(app):
            episodes.find(episodes.key_of("open"))

    asyncio.run(leave_one_open())
    (line,) = (tmp_path / "out" / "episodes.jsonl").read_text().splitlines()
    noted = json.loads(line)
    assert (noted["episode"], noted["reward"], noted["note"]) == ("open", None, "not ended")
