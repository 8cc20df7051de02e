"""An engine in an actor whose process dies, is silent or loses its answers: every request is
answered, once."""

import asyncio
import functools
import random
import time
from dataclasses import replace

import pytest
import torch

from onepolicy.launch.ray import connect

connect.prepare_environment(own=True)  # for tests in this process that start Ray
ray = pytest.importorskip("ray")
from onepolicy.config import TrainingError, UsageError  # noqa: E402
from onepolicy.config.cluster import RayCluster  # noqa: E402
from onepolicy.interfaces import EngineCaps  # noqa: E402
from onepolicy.launch.ray import actor_engine as remote  # noqa: E402
from onepolicy.launch.ray import replica, replica_actor  # noqa: E402
from onepolicy.launch.ray.actor_engine import ActorEngine  # noqa: E402
from onepolicy.launch.ray.wire import GenerateRequest, decode_replies, encode_requests  # noqa: E402
from onepolicy.rollout.remote.client import EngineLost  # noqa: E402
from onepolicy.rollout.remote.replicas import Replicas  # noqa: E402
from onepolicy.sync.checksum import ChecksumAccumulator  # noqa: E402
from onepolicy.sync.weight_files import WeightFiles, WrittenWeights  # noqa: E402
from onepolicy.types import Sampling  # noqa: E402
from support.fake_ray import Actor, Engine  # noqa: E402
from support.waiting import LIMIT_S, until  # noqa: E402


@pytest.fixture
def engines(monkeypatch):
    """Return every engine that was built, the newest last."""
    built = []

    def build(_):
        built.append(Engine())
        return built[-1]

    monkeypatch.setattr(replica, "build_engine", build)
    monkeypatch.setattr(remote, "REBUILD_INTERVAL_S", 0.01)
    monkeypatch.setattr(remote.ray, "kill", lambda actor, no_restart=True: actor.die())
    return built


@pytest.fixture
def written(tmp_path):
    files = WeightFiles(str(tmp_path))
    checksums = ChecksumAccumulator(b"key")
    folder = files.write_version(checksums.add_each([("w", torch.ones(1))]), 4)
    yield WrittenWeights(str(folder), 4, b"key", checksums.pop_all())
    del files  # which removes the folder


class Stopping(Engine):
    """An engine that an incomplete weight update takes out of service, as the engines that sample.

    Its requests end with the weights that it was built with.
    """

    interrupted = 0

    async def generate(self, prompt_ids, sampling, *, seed):
        self.started.append(seed)
        await until(lambda: self.version != 0)
        if self.version < 0:
            self.interrupted += 1
            raise RuntimeError("the last load_weights failed half-way")
        return await super().generate(prompt_ids, replace(sampling, max_tokens=1), seed=seed)

    async def load_weights(self, weights, version):
        self.version = -1
        if not list(weights):
            await until(lambda: self.interrupted == len(self.started))
            raise TrainingError("the sender is gone")
        self.version = version


class BreaksOff:
    """A broadcast that ends half-way, because another receiver has died."""

    def __init__(self, actor):
        self.actor = actor

    def cancel(self):
        pass

    async def send_to(self, receive):
        await self.actor.process._replica.engine.load_weights([], 4)


def in_event_loop(test):
    @functools.wraps(test)
    def run(*args, **fixtures):
        asyncio.run(test(*args, **fixtures))

    return run


def opened(actor, **cluster):
    cluster, caps = RayCluster(**cluster), EngineCaps(False, 64)
    return ActorEngine("replica 0", actor, "{}", caps, cluster, "127.0.0.1")


async def built(cls=Actor, restarts=1, **cluster):
    """Return an actor whose engine is built, and the engine that asks it."""
    actor = cls(restarts)
    await actor.process.build("{}", 0)
    return actor, opened(actor, restarts=restarts, **cluster)


def asked(engine, numbers, max_tokens=3):
    return asyncio.gather(
        *(engine.generate([n], Sampling(1.0, max_tokens), seed=100 + n) for n in numbers),
        return_exceptions=True,
    )


@in_event_loop
async def test_requests_interrupted_by_a_failed_broadcast_continue(written, monkeypatch):
    stopping = Stopping()
    monkeypatch.setattr(replica, "build_engine", lambda _: stopping)
    actor, engine = await built()
    running = asyncio.ensure_future(asked(engine, range(3)))
    await until(lambda: len(stopping.started) == 3)
    await engine.load_files(written, BreaksOff(actor))
    done = await asyncio.wait_for(running, LIMIT_S)
    assert [int(each.version[0]) for each in done] == [4, 4, 4]
    assert stopping.interrupted == 3


@in_event_loop
async def test_requests_of_one_moment_start_together_and_in_order(engines):
    actor, engine = await built()
    done = await asked(engine, range(20))
    again = await asked(engine, [40])  # by an exchange of its own
    assert [c.token_ids.tolist() for c in done + again] == [[n] * 3 for n in [*range(20), 40]]
    assert engines[0].started == [100 + n for n in [*range(20), 40]]
    assert actor.calls.count("submit_requests") == 2
    assert engine.take_metrics() == {}
    async with asyncio.timeout(LIMIT_S):
        for n in range(10):
            (done,) = await asked(engine, [n], 1)
            assert done.token_ids.tolist() == [n]


@pytest.mark.parametrize(
    ("how", "weights"),
    [("killed", "disk"), ("killed", "stream"), ("killed while idle", "stream"), ("hangs", "disk")],
)
@in_event_loop
async def test_a_lost_process_gets_the_current_weights_and_its_requests(
    how, weights, engines, written, caplog
):
    silence = {"reply_timeout": 1} if how == "hangs" else {}
    actor, engine = await built(sync=weights, **silence)
    await engine.load_files(written)
    if how == "killed while idle":
        actor.die()
        await until(lambda: actor.process is not None)  # it is back before anybody asks
    actor.hung = how == "hangs"
    waiting = asyncio.ensure_future(asked(engine, range(6), 50))
    if how == "killed":
        await until(lambda: engines[0].started)
        actor.die()
    done = await waiting
    assert [c.token_ids.tolist() for c in done] == [[n] * 50 for n in range(6)]
    assert all((c.version == 4).all() for c in done)
    assert len(engines) == 2
    assert engines[1].started == [100 + n for n in range(6)]  # each once, its seed unchanged
    counts = {"rollout/replica_restarts": 1, "rollout/requests_repeated": 6}
    assert engine.take_metrics() == counts
    assert engine.version == 4
    assert "replica 0 is back after" in caplog.text


class Ended:
    """A broadcast that ends before this receiver has all weights."""

    def __init__(self, error):
        self.error = error

    async def send_to(self, receive):
        raise self.error


@in_event_loop
async def test_a_receiver_that_lost_a_broadcast_is_sent_the_weights_alone(engines, written, caplog):
    """A process that was not the cause stays. One that gave no answer is replaced."""
    again = "replica 0 is sent the weights once more, alone: another receiver is gone"
    for error, lives in ((TrainingError("another receiver is gone"), 1), (TimeoutError(), 2)):
        engines.clear()
        caplog.clear()
        _, engine = await built()
        await engine.load_files(written, Ended(error))
        assert engine.version == engines[-1].version == 4
        assert len(engines) == lives
        assert (again in caplog.text) == (lives == 1)


@in_event_loop
async def test_changed_weight_files_are_refused(engines, written):
    _, engine = await built(sync="disk")
    other = {"w": [*written.sums["w"][:2], written.sums["w"][2] + 1]}
    with pytest.raises(TrainingError, match=r"cluster\.sync_dir: weights of version 4 .*'w'"):
        await engine.load_files(replace(written, sums=other))
    assert engine.version == engines[0].version == -1


@in_event_loop
async def test_a_process_that_does_not_come_back_is_lost_for_every_request(engines, monkeypatch):
    """Out of restarts, or with one that takes too long."""
    actor, engine = await built(restarts=0)
    waiting = asyncio.ensure_future(asked(engine, range(3), 300))
    await until(lambda: engines[0].started)
    actor.die()
    for error in await waiting:
        assert isinstance(error, EngineLost)
        assert "gone for good" in str(error)
    monkeypatch.setattr(Actor, "restart", lambda actor: None)
    actor, engine = await built(restart_timeout=0.2)
    actor.die()
    (error,) = await asked(engine, [1])
    assert isinstance(error, EngineLost)
    assert "within 0.2 s (cluster.restart_timeout)" in str(error)


@in_event_loop
async def test_an_exchange_leaves_no_task_behind(engines):
    _, engine = await built()
    before = asyncio.all_tasks()
    for round_ in range(3):
        await asked(engine, [round_, round_ + 1])
    await until(lambda: engine._exchange_task is None)
    for _ in range(10):  # a cancelled task ends in a later round of the loop
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@in_event_loop
async def test_an_error_of_one_request_is_its_own(engines):
    _, engine = await built()
    bad = asyncio.ensure_future(engine.generate([1], Sampling(9.0, 2), seed=0))
    (good,) = await asked(engine, [2], 5)
    with pytest.raises(UsageError, match="too hot"):
        await bad
    assert good.token_ids.tolist() == [2] * 5


@in_event_loop
async def test_an_answer_that_comes_as_its_request_is_given_up_is_dropped(engines, monkeypatch):
    _, engine = await built()
    given_up = asyncio.ensure_future(engine.generate([1], Sampling(1.0, 1), seed=0))

    def decode(data):
        given_up.cancel()
        return decode_replies(data)

    monkeypatch.setattr(remote, "decode_replies", decode)
    (done,) = await asked(engine, [2])
    assert done.token_ids.tolist() == [2] * 3
    assert given_up.cancelled()


@pytest.mark.few(1)
@pytest.mark.parametrize("lossy", [False, True])
@in_event_loop
async def test_every_request_is_answered_despite_cancellations_and_losses(
    lossy, engines, monkeypatch
):
    """Requests come at random moments and many are given up at once, while messages and answers get
    lost and processes die."""
    monkeypatch.setattr(remote, "COLLECT_TIMEOUT_S", 0.05)
    # Longer than the test waits: no request may be answered only because an answer that was lost
    # timed out.
    patient = {"reply_timeout": 2 * LIMIT_S, "restart_timeout": 2 * LIMIT_S}

    async def trial(seed):
        chance = random.Random(seed)
        actor = Actor(restarts=99, chance=chance if lossy else None)
        await actor.process.build("{}", 0)
        engine, kept = opened(actor, **patient), {}
        for number in range(12):
            sampling = Sampling(1.0, chance.randrange(1, 9))
            asked = asyncio.create_task(engine.generate([number], sampling, seed=0))
            if chance.random() < 0.5:
                await asyncio.sleep(chance.choice([0, 0, 0.001, 0.01]))
                asked.cancel()
            else:
                kept[number] = asked
            await asyncio.sleep(chance.choice([0, 0.001, 0.01]))
            if lossy and chance.random() < 0.05 and actor.process is not None:
                actor.die()
        _, waiting = await asyncio.wait(kept.values(), timeout=LIMIT_S)
        assert not waiting, f"seed {seed}: {len(waiting)} requests are never answered"
        for number, task in kept.items():
            assert set(task.result().token_ids.tolist()) == {number}

    await asyncio.gather(*(trial(seed) for seed in range(60)))


def one_request():
    return encode_requests({7: GenerateRequest(torch.tensor([1]), Sampling(1.0, 1), 0)})


@in_event_loop
async def test_an_answer_is_repeated_until_its_arrival_is_known(engines):
    process = replica_actor.ReplicaProcess()
    await process.build("{}", 0)
    await process.submit_requests(0, one_request())
    for _ in range(2):
        assert list(decode_replies(await process.collect_replies(0, 5, []))) == [7]
    assert decode_replies(await process.collect_replies(0, 0.01, [7])) == {}


@in_event_loop
async def test_messages_from_before_a_rebuild_are_refused(engines):
    process = replica_actor.ReplicaProcess()
    await process.build("{}", 2)
    for message in (
        process.submit_requests(1, one_request()),
        process.collect_replies(1, 0.01, []),
        process.build("{}", 1),  # it would drop what was asked since
    ):
        with pytest.raises(replica_actor.NotBuilt):
            await message
    assert not engines[0].started


@in_event_loop
async def test_an_answer_during_a_blocked_event_loop_is_no_silence():
    """Each turn of the event loop, however long it takes, is at most one of the REPLY_CHECKS of
    an answer."""
    for after in (0, 5):  # 5: one that is only on its way when the loop goes on
        answer = asyncio.get_running_loop().create_future()

        async def hold_up(answer=answer, after=after):
            time.sleep(0.3)
            for _ in range(after):
                await asyncio.sleep(0)
            answer.set_result("here")

        held = asyncio.create_task(hold_up())
        assert await remote.wait_for_reply(answer, 0.2) == "here"
        await held
    with pytest.raises(TimeoutError):
        await remote.wait_for_reply(asyncio.get_running_loop().create_future(), 0.05)


@in_event_loop
async def test_loading_for_longer_than_the_reply_limit_is_no_silence(engines, written, monkeypatch):
    """A process answers no request while it takes weights over."""
    looks, wait_for_reply = [], remote.wait_for_reply

    def counting(answer, limit, excused):
        return wait_for_reply(answer, limit, lambda: looks.append(excused()) or looks[-1])

    monkeypatch.setattr(remote, "wait_for_reply", counting)

    class Busy(Actor):
        async def run(self, method, args, answer):
            (result,) = await asyncio.gather(method(*args), return_exceptions=True)
            await engines[0].may_load.wait()
            answer.set_result(result)

    _, engine = await built(Busy, sync="disk", reply_timeout=0.2)
    waiting = asyncio.ensure_future(asked(engine, range(3)))
    await until(lambda: engines[0].started)
    engines[0].may_load.clear()
    loading = asyncio.ensure_future(engine.load_files(written))
    # of one request at the least more than it has
    await until(lambda: looks.count(True) > 2 * remote.REPLY_CHECKS)
    assert not waiting.done()
    engines[0].may_load.set()
    await loading
    assert [each.token_ids.tolist() for each in await waiting] == [[n] * 3 for n in range(3)]
    assert engine.take_metrics() == {}


@in_event_loop
async def test_weights_stay_until_a_returning_process_has_read_them(engines, tmp_path, monkeypatch):
    """An update comes while it reads the version before. Then it gets the update."""
    files = WeightFiles(str(tmp_path))
    actor, engine = await built(sync="disk")
    together = Replicas([engine], files)
    await together.load_weights([("w", torch.ones(1))], 1)
    monkeypatch.setattr(Engine, "ready_to_load", False)
    actor.die()
    waiting = asyncio.create_task(together.generate([3], Sampling(1.0, 2), seed=0))
    await until(lambda: len(engines) == 2)
    update = asyncio.create_task(together.load_weights([("w", torch.zeros(1))], 2))
    await until(lambda: engine._loaded.version == 2)
    assert (files.folder / "version_1").exists()
    assert not update.done()
    engines[1].may_load.set()
    await asyncio.wait_for(update, LIMIT_S)
    assert (await waiting).version.tolist() == [2, 2]
    assert [path.name for path in files.folder.iterdir()] == ["version_2"]
