"""Several vLLM servers as one engine: one is lost, its requests are repeated, and it comes back."""

import asyncio
import contextlib
import dataclasses
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from onepolicy.config import TrainingError, UsageError, VLLMServerConfig
from onepolicy.rollout.remote import servers
from onepolicy.rollout.remote.addresses import server_urls
from onepolicy.rollout.remote.client import EngineLost, OtherWeights
from onepolicy.rollout.remote.servers import ServerFleet
from onepolicy.sync.push import checked_push
from onepolicy.types import Sampling
from support.fake_learner import FakeLearner
from support.fake_vllm import (
    GENERATE,
    HF,
    VOCAB,
    FakeVLLM,
    aborted_at_once,
    embedding,
    engine_of,
    model_shape,
)
from support.http_server import Reply
from support.waiting import LIMIT_S

SAMPLING = Sampling(temperature=1.0, max_tokens=6)
PROMPTS = [[i, i + 1, 3] for i in range(3, 13)]


@pytest.fixture
def fakes(checkpoints):
    with contextlib.ExitStack() as stack:
        made = [FakeVLLM(checkpoints[0][0], model_shape(HF)) for _ in range(2)]
        for fake in made:
            stack.enter_context(fake.server)
        yield made


def fleet_of(fakes, checkpoints, **settings):
    by_url = {fake.server.url: fake for fake in fakes}
    made = ServerFleet(
        lambda url: engine_of(by_url[url], retries=2, **settings), lambda: list(by_url)
    )
    asyncio.run(made.start(checkpoints[0][0]))
    return made


async def sample(fleet, prompts=PROMPTS, sampling=SAMPLING):
    return await asyncio.gather(
        *(fleet.generate(prompt, sampling, seed=i) for i, prompt in enumerate(prompts))
    )


def load(fleet, checkpoint, version=1):
    asyncio.run(fleet.load_weights(iter(checkpoint[1].state_dict().items()), version))


def assert_sampled_with(completions, checkpoint, version):
    """Every token's log-probability is that of this model's table."""
    table = checkpoint[1].state_dict()["model.embed_tokens.weight"]
    for prompt, done in zip(PROMPTS, completions, strict=True):
        assert set(done.version.tolist()) == {version}
        path = [prompt[-1], *done.token_ids.tolist()]
        logp = (table[path[:-1]] @ table.T).log_softmax(-1)
        expected = logp[range(len(path) - 1), path[1:]]
        assert (done.logp - expected).abs().max() < 1e-5


def restart(fake):
    """Restart the server as another process on its port, with its initial weights."""
    fake.weights, fake.table, fake.probe = "default", embedding(fake.model), None


def leave_idle(fleet):
    """Let no server have had a request for a long time."""
    for member in fleet._all:
        member.last_used = -1e9


@pytest.mark.few(1)
@pytest.mark.parametrize("sync", ["gloo", "disk"])
def test_all_servers_sample_and_all_get_the_weights(fakes, checkpoints, sync, tmp_path):
    fleet = fleet_of(fakes, checkpoints, sync=sync, sync_dir=str(tmp_path))
    before = [fake.sampled for fake in fakes]
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[0], 0)
    assert all(fake.sampled > b for fake, b in zip(fakes, before, strict=True))
    load(fleet, checkpoints[1])
    assert fleet.version == 1
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 1)
    metrics = fleet.take_metrics()
    assert (metrics["rollout/servers"], metrics["rollout/requests_repeated"]) == (2, 0)
    asyncio.run(fleet.confirm_weights())


def test_every_server_is_asked_whether_the_first_push_leaves_it_its_weights(
    fakes, checkpoints, monkeypatch
):
    """All prompts of the canary hash to one server, and another's weights are wrong."""
    fleet = fleet_of(fakes, checkpoints)
    monkeypatch.setattr(fleet._placement, "choose", lambda prompt, first, loads: min(loads))
    learner = FakeLearner(checkpoints[0][1], version=0)
    asyncio.run(checked_push(learner, fleet, vocab=VOCAB))
    for fake in fakes:
        take = fake._take
        fake._take = lambda weights, take=take: take((name, w * 1.5) for name, w in weights)
        with pytest.raises(TrainingError, match=f"giving .*{fake.server.url} the weights it alrea"):
            asyncio.run(checked_push(learner, fleet, vocab=VOCAB))
        fake._take = take
        load(fleet, checkpoints[0])


def test_a_server_that_is_lost_in_the_first_push_is_lost_alone(fakes, checkpoints, monkeypatch):
    fleet = fleet_of(fakes, checkpoints)
    lost = fleet._members[1].engine

    async def gone():
        raise EngineLost("gone")

    async def push_weights(learner, engine):
        monkeypatch.setattr(lost, "reset_cache", gone)

    monkeypatch.setattr("onepolicy.sync.push.push_weights", push_weights)
    learner = FakeLearner(checkpoints[0][1], version=0)
    asyncio.run(checked_push(learner, fleet, vocab=VOCAB))
    assert [member.engine is lost for member in fleet._members] == [False]


def test_servers_that_read_files_are_not_limited_by_the_loops_threads(
    fakes, checkpoints, tmp_path, monkeypatch
):
    """One that had to wait for a thread would take no weights, and the others would leave it."""
    fleet = fleet_of(fakes, checkpoints, sync="disk", sync_dir=str(tmp_path), timeout_s=LIMIT_S)
    monkeypatch.setattr(servers, "BYTES_AHEAD", 1)

    async def update():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        await fleet.load_weights(iter(checkpoints[1][1].state_dict().items()), 1)

    asyncio.run(update())
    assert fleet.take_metrics()["rollout/servers"] == 2


def test_requests_of_a_lost_server_are_repeated_on_the_others(fakes, checkpoints, caplog):
    fleet, second = fleet_of(fakes, checkpoints), fakes[1]
    second.hold = 2  # it stops in the middle of its requests

    async def lose_one():
        work = asyncio.ensure_future(sample(fleet))
        await second.sampling(second.sampled + 4)
        await asyncio.to_thread(second.server.__exit__, None, None, None)
        return await work

    assert_sampled_with(asyncio.run(lose_one()), checkpoints[0], 0)
    (line,) = [each for each in caplog.messages if "is lost" in each]
    assert second.server.url in line
    repeated = fleet.take_metrics()
    assert repeated["rollout/servers"] == 1
    assert repeated["rollout/requests_repeated"] > 0
    assert f"its {int(repeated['rollout/requests_repeated'])} requests go to the 1 engines" in line

    load(fleet, checkpoints[1])  # without it
    asyncio.run(fleet.confirm_weights())
    assert fleet.take_metrics()["rollout/servers"] == 1


def test_requests_of_a_server_that_shuts_down_are_repeated_on_the_others(fakes, checkpoints):
    fleet = fleet_of(fakes, checkpoints)
    fakes[1].spoil[GENERATE] = aborted_at_once
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[0], 0)
    metrics = fleet.take_metrics()
    assert metrics["rollout/servers"] == 1
    assert metrics["rollout/requests_repeated"] > 0


def test_a_server_that_is_back_gets_weights_before_requests(fakes, checkpoints, caplog):
    fleet, (_, second) = fleet_of(fakes, checkpoints), fakes
    (member,) = [each for each in fleet._all if each.name == second.server.url]
    fleet._lose(member, EngineLost("gone"))
    second.weights, second.table = "default", second.table * 3  # it has restarted with others
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[0], 0)
    load(fleet, checkpoints[1])
    assert any("is back; it gets the weights" in each for each in caplog.messages)
    before = second.sampled
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 1)
    assert second.sampled > before


def test_a_server_that_is_back_with_less_is_not_used(fakes, checkpoints, caplog, monkeypatch):
    """A request that it cannot serve would end the run."""
    fleet, (_, second) = fleet_of(fakes, checkpoints), fakes
    (member,) = [each for each in fleet._all if each.name == second.server.url]
    fleet._lose(member, EngineLost("gone"))
    come_back, engine = member.engine.come_back, member.engine

    async def with_fewer():
        await come_back()
        engine.caps = dataclasses.replace(engine.caps, top_logprobs=1)

    monkeypatch.setattr(engine, "come_back", with_fewer)
    load(fleet, checkpoints[1])
    assert "answers again, but is not used: it can do less" in caplog.text
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 1)
    assert member.is_lost
    monkeypatch.setattr(engine, "come_back", come_back)
    load(fleet, checkpoints[0], version=2)
    assert not member.is_lost


def test_an_address_that_no_client_takes_ends_no_run(fakes, checkpoints, caplog):
    fleet = fleet_of(fakes, checkpoints)
    made, first = fleet._make, list(fleet._urls())

    def make(url):
        if url not in first:
            raise UsageError("rollout.engine.token_env: the server is on another machine")
        return made(url)

    fleet._make, fleet._urls = make, lambda: [*first, "http://10.0.0.5:8000"]
    for version in (1, 2):
        load(fleet, checkpoints[1], version)
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 2)
    assert caplog.text.count("http://10.0.0.5:8000 is not used: rollout.engine.token_env") == 1


def test_a_server_lost_in_an_update_keeps_no_other_from_its_weights(fakes, checkpoints):
    fleet, (_, second) = fleet_of(fakes, checkpoints), fakes
    second.server.__exit__(None, None, None)
    load(fleet, checkpoints[1])
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 1)
    assert fleet.take_metrics()["rollout/servers"] == 1


@pytest.mark.parametrize("path", ["/collective_rpc", "/reset_prefix_cache", "/resume"])
def test_requests_of_a_server_lost_in_the_middle_of_an_update_are_repeated(
    fakes, checkpoints, path
):
    fleet, (first, second) = fleet_of(fakes, checkpoints), fakes
    first.hold = second.hold = 2
    first.sampled = second.sampled = 0

    async def lose_one():
        work = asyncio.ensure_future(sample(fleet))
        await first.sampling(2)
        await second.sampling(2)
        second.spoil[path] = lambda reply, number: Reply(hang_up=True)
        await fleet.load_weights(iter(checkpoints[1][1].state_dict().items()), 1)
        return await work

    done = asyncio.run(lose_one())
    assert [len(each.token_ids) for each in done] == [SAMPLING.max_tokens] * len(PROMPTS)
    assert {int(each.version[-1]) for each in done} == {1}
    metrics = fleet.take_metrics()
    assert metrics["rollout/servers"] == 1
    assert metrics["rollout/requests_repeated"] > 0


def test_a_lost_server_that_hangs_holds_up_neither_updates_nor_recovery(fakes, checkpoints, caplog):
    fleet, (_, second) = fleet_of(fakes, checkpoints), fakes
    released = threading.Event()

    def hangs(request):
        released.wait(LIMIT_S)
        return Reply(hang_up=True)

    second.server.handlers |= {"GET /health": hangs, "GET /weight_info": hangs}
    (member,) = [each for each in fleet._all if each.name == second.server.url]
    fleet._lose(member, EngineLost("gone"))
    member.engine.dialect.once._timeout_s = 0.05  # it never answers
    try:
        load(fleet, checkpoints[1], 1)
        asyncio.run(fleet.come_back())
        load(fleet, checkpoints[1], 2)
        assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 2)
    finally:
        released.set()
    assert fleet.take_metrics()["rollout/servers"] == 1
    assert (
        caplog.messages.count(f"{second.server.url} does not answer; it is asked again later") == 1
    )


def test_other_weights_in_one_server_are_noticed(fakes, checkpoints):
    fleet = fleet_of(fakes, checkpoints)
    fakes[1].weights = "of somebody else"
    with pytest.raises(EngineLost, match="may have sampled with other weights"):
        asyncio.run(fleet.confirm_weights())


def test_a_batch_finds_the_restart_of_an_idle_server(fakes, checkpoints):
    """All its requests start together, and await one question."""
    fleet, (_, second) = fleet_of(fakes, checkpoints), fakes
    load(fleet, checkpoints[1])
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 1)
    asyncio.run(fleet.confirm_weights())
    restart(second)
    leave_idle(fleet)
    before, asked = second.sampled, second.server.count("/weight_info")
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[1], 1)
    assert (second.sampled, second.server.count("/weight_info")) == (before, asked + 1)
    metrics = fleet.take_metrics()
    assert metrics["rollout/servers"] == 1
    assert metrics["rollout/requests_repeated"] > 1
    asyncio.run(fleet.confirm_weights())  # nothing of it was used


def test_a_check_that_an_update_overtakes_loses_no_server(fakes, checkpoints, monkeypatch):
    """A server may have the new name before we know that its update has ended."""
    fleet, updates = fleet_of(fakes, checkpoints), 1
    load(fleet, checkpoints[1])

    async def confirm_weights():
        fleet._updates += updates
        raise OtherWeights("of the update")

    for member in fleet._all:
        monkeypatch.setattr(member.engine, "confirm_weights", confirm_weights)
    leave_idle(fleet)
    asyncio.run(sample(fleet))
    assert fleet.take_metrics()["rollout/servers"] == 2
    updates = 0
    leave_idle(fleet)
    with pytest.raises(EngineLost):
        asyncio.run(sample(fleet))


@pytest.mark.parametrize("found_by", ["push", "request", "retry"])
def test_completions_of_a_server_found_with_other_weights_are_not_used(
    fakes, checkpoints, found_by, monkeypatch
):
    fleet, (_, second) = fleet_of(fakes, checkpoints), fakes
    load(fleet, checkpoints[1])
    monkeypatch.setattr(servers, "IDLE_S", math.inf)
    restart(second)  # and nobody asks
    before = second.sampled
    assert {int(v) for done in asyncio.run(sample(fleet)) for v in done.version} == {1}
    assert second.sampled > before
    find = lambda: asyncio.run(sample(fleet))  # noqa: E731
    if found_by == "push":
        find = lambda: load(fleet, checkpoints[0], 2)  # noqa: E731
    elif found_by == "request":
        monkeypatch.setattr(servers, "IDLE_S", 3.0)
        leave_idle(fleet)
    else:
        hung_up = [Reply(hang_up=True)]
        second.spoil[GENERATE] = lambda reply, _: hung_up.pop() if hung_up else reply
    with pytest.raises(EngineLost, match=r"may have sampled with other weights, \d+ completions"):
        find()
    with pytest.raises(EngineLost, match="may have sampled with other weights"):
        asyncio.run(fleet.confirm_weights())  # of other steps in play

    asyncio.run(fleet.come_back())
    load(fleet, checkpoints[0], 2)
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[0], 2)
    asyncio.run(fleet.confirm_weights())
    assert fleet.take_metrics()["rollout/servers"] == 2


def test_a_restart_after_the_completions_were_confirmed_loses_the_server_alone(fakes, checkpoints):
    fleet = fleet_of(fakes, checkpoints)
    load(fleet, checkpoints[1])
    asyncio.run(sample(fleet))
    asyncio.run(fleet.confirm_weights())
    restart(fakes[1])
    load(fleet, checkpoints[0], 2)
    assert_sampled_with(asyncio.run(sample(fleet)), checkpoints[0], 2)
    assert fleet.take_metrics()["rollout/servers"] == 1


def test_without_a_server_the_engine_is_lost(fakes, checkpoints):
    fleet = fleet_of(fakes, checkpoints)
    for fake in fakes:
        fake.server.__exit__(None, None, None)
    with pytest.raises(EngineLost, match="none of the engines is left"):
        asyncio.run(sample(fleet))


def test_addresses_from_a_list_a_file_and_a_name(tmp_path):
    listed = tmp_path / "servers.txt"
    listed.write_text("# ours\nhttp://a:8000/\n\nhttp://b:8000 # the second\nhttp://a:8000\n")
    assert server_urls(f"file:{listed}") == ["http://a:8000", "http://b:8000"]
    assert server_urls(("http://a:1", "http://b:2")) == ["http://a:1", "http://b:2"]
    assert "http://127.0.0.1:8000" in server_urls("dns:http://localhost:8000")
    assert "http://127.0.0.1:8000/a/b" in server_urls("dns:http://localhost:8000/a/b/")
    listed.write_text("\n")
    with pytest.raises(UsageError, match="has no address"):
        server_urls(f"file:{listed}")
    with pytest.raises(UsageError, match="cannot be read"):
        server_urls(f"file:{tmp_path / 'none'}")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        with pytest.raises(UsageError, match="is a folder, a device or a pipe"):
            server_urls(f"file:{path}")
    for url, problem in (
        ([], "list one or more"),
        (["http://a:1", "http://a:1/"], "each once"),
        (["http://a:1", "b:1"], "not the address"),
        ("dns:https://a:1", "no certificate"),
        ("file:", "names no file"),
    ):
        with pytest.raises(ValueError, match=problem):
            VLLMServerConfig(url=url)
