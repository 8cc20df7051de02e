"""An engine in an actor whose process dies, is silent or loses its answers: every request is
answered, once."""

import asyncio
import functools
import random
import time

import pytest
import torch

from onepolicy.launch.ray import connect

connect.prepare_environment(own=True)  # for tests in this process that start Ray
ray = pytest.importorskip("ray")
from onepolicy.config import UsageError  # noqa: E402
from onepolicy.config.cluster import RayCluster  # noqa: E402
from onepolicy.launch.ray import actor_engine as remote  # noqa: E402
from onepolicy.launch.ray import replica_actor  # noqa: E402
from onepolicy.launch.ray.actor_engine import ActorEngine  # noqa: E402
from onepolicy.launch.ray.replica_actor import EngineState, Moment, tensors_of  # noqa: E402
from onepolicy.launch.ray.replicas import Replicas, put_weights  # noqa: E402
from onepolicy.rollout.remote.client import EngineLost  # noqa: E402
from onepolicy.types import Sampling  # noqa: E402
from support.fake_ray import Actor, Engine, Reference  # noqa: E402
from support.waiting import LIMIT_S, until  # noqa: E402

STATE = EngineState(Reference("spec"), 1)


@pytest.fixture
def engines(monkeypatch):
    """Return every engine that was built, the newest last."""
    built = []

    def build(spec, threads):
        assert (spec, threads) == ("spec", 1)
        built.append(Engine())
        return built[-1]

    monkeypatch.setattr(replica_actor, "build_engine", build)
    monkeypatch.setattr(remote, "PING_S", 0.01)
    monkeypatch.setattr(remote.ray, "kill", kill)
    return built


def kill(actor, no_restart=True):
    if no_restart:
        actor.restarts = 0
    actor.die()


def in_event_loop(test):
    @functools.wraps(test)
    def run(*args, **fixtures):
        asyncio.run(test(*args, **fixtures))

    return run


async def opened(actor, **cluster):
    loaded = await actor.process.load(STATE)
    return ActorEngine("replica 0", actor, STATE, loaded, RayCluster(**cluster))


async def built(cls=Actor, restarts=1, **cluster):
    """Return an actor whose engine is built, and the engine that asks it."""
    actor = cls(restarts)
    return actor, await opened(actor, restarts=restarts, **cluster)


def weights(version):
    return put_weights([("w", torch.full((1,), float(version)))], Reference)


def asked(engine, numbers, max_tokens=3):
    return asyncio.gather(
        *(engine.generate([n], Sampling(1.0, max_tokens), seed=100 + n) for n in numbers),
        return_exceptions=True,
    )


@in_event_loop
async def test_requests_of_one_moment_start_together_and_in_order(engines):
    _, engine = await built()
    done = await asked(engine, range(20))
    again = await asked(engine, [40])
    assert [c.token_ids.tolist() for c in done + again] == [[n] * 3 for n in [*range(20), 40]]
    assert engines[0].started == [100 + n for n in [*range(20), 40]]
    assert engine.take_metrics() == {}
    async with asyncio.timeout(LIMIT_S):
        for n in range(10):
            (done,) = await asked(engine, [n], 1)
            assert done.token_ids.tolist() == [n]


@in_event_loop
async def test_requests_that_arrive_in_another_order_start_in_theirs(engines):
    """Those of a moment whose others were answered before a loss wait for nobody."""
    process, sampling = replica_actor.ReplicaProcess(), Sampling(1.0, 1)
    places = [2, 0, 1]
    name = process._process
    calls = (process.generate([p], sampling, p, STATE, Moment(name, 7, p, 3)) for p in places)
    await asyncio.gather(*calls)
    assert engines[0].started == [0, 1, 2]
    await process.generate([9], sampling, 9, STATE, Moment("the one before", 8, 2, 3))
    assert engines[0].started[-1] == 9


@pytest.mark.parametrize("how", ["killed", "killed while idle", "hangs"])
@in_event_loop
async def test_a_lost_process_gets_the_current_weights_and_its_requests(how, engines, caplog):
    silence = {"reply_timeout": 1} if how == "hangs" else {}
    actor, engine = await built(**silence)
    await engine.load(weights(4), 4)
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


@in_event_loop
async def test_a_process_that_is_lost_while_it_loads_loads_again(engines, monkeypatch):
    monkeypatch.setattr(Engine, "ready_to_load", False)
    actor, engine = await built()
    loading = asyncio.ensure_future(engine.load(weights(4), 4))
    await until(lambda: actor.process._changing.locked())
    actor.die()
    await until(lambda: len(engines) == 2)
    engines[1].may_load.set()
    await loading
    assert engine.version == engines[1].version == 4


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
    actor, engine = await built(restarts=5, reply_timeout=0.2, restart_timeout=0.3)
    actor.die()
    (error,) = await asked(engine, [1])
    assert isinstance(error, EngineLost)
    assert "within 0.3 s (cluster.restart_timeout)" in str(error)


@in_event_loop
async def test_an_answer_leaves_no_task_behind(engines):
    _, engine = await built()
    before = asyncio.all_tasks()
    for round_ in range(3):
        await asked(engine, [round_, round_ + 1])
    # a cancelled task ends in a later round of the loop, a ping of the process after PING_S
    await until(lambda: asyncio.all_tasks() == before)


@in_event_loop
async def test_an_error_of_one_request_is_its_own(engines):
    _, engine = await built()
    bad = asyncio.ensure_future(engine.generate([1], Sampling(9.0, 2), seed=0))
    (good,) = await asked(engine, [2], 5)
    with pytest.raises(UsageError, match="replica 0: too hot"):
        await bad
    assert good.token_ids.tolist() == [2] * 5


@pytest.mark.few(1)
@pytest.mark.parametrize("lossy", [False, True])
@in_event_loop
async def test_every_request_is_answered_despite_cancellations_and_losses(lossy, engines):
    """Requests come at random moments and many are given up at once, while answers get lost and
    processes die."""
    # Longer than the test waits: no request may be answered only because an answer that was lost
    # timed out.
    patient = {"reply_timeout": 2 * LIMIT_S, "restart_timeout": 2 * LIMIT_S}

    async def trial(seed):
        chance = random.Random(seed)
        actor = Actor(restarts=99)
        engine, kept = await opened(actor, **patient), {}
        actor.chance = chance if lossy else None
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
async def test_loading_for_longer_than_the_reply_limit_is_no_silence(engines, monkeypatch):
    """A process answers nothing while it takes weights over."""
    looks, wait_for_reply = [], remote.wait_for_reply

    def counting(answer, limit, excused):
        return wait_for_reply(answer, limit, lambda: looks.append(excused()) or looks[-1])

    monkeypatch.setattr(remote, "wait_for_reply", counting)

    class Busy(Actor):
        async def run(self, method, args, answer):
            await engines[0].may_load.wait()
            await super().run(method, args, answer)

    actor, engine = await built(Busy, reply_timeout=0.2)
    engines[0].may_load.clear()
    waiting = asyncio.ensure_future(asked(engine, range(3)))
    await until(lambda: "ping" in actor.calls)
    loading = asyncio.ensure_future(engine.load(weights(4), 4))
    # of one ping at the least more than it has
    await until(lambda: looks.count(True) > 2 * remote.REPLY_CHECKS)
    assert not waiting.done()
    engines[0].may_load.set()
    await loading
    assert [each.token_ids.tolist() for each in await waiting] == [[n] * 3 for n in range(3)]
    assert engine.take_metrics() == {}


@in_event_loop
async def test_a_process_that_returns_during_an_update_gets_the_update(engines, monkeypatch):
    """It reads the version before, which its requests brought. Then it gets the update."""
    actor, engine = await built()
    together = Replicas([engine], Reference)
    await together.load_weights([("w", torch.ones(1))], 1)
    monkeypatch.setattr(Engine, "ready_to_load", False)
    actor.die()
    waiting = asyncio.create_task(together.generate([3], Sampling(1.0, 2), seed=0))
    await until(lambda: len(engines) == 2)
    update = asyncio.create_task(together.load_weights([("w", 2 * torch.ones(1))], 2))
    await until(lambda: engine._state.version == 2)
    assert not update.done()
    engines[1].may_load.set()
    await asyncio.wait_for(update, LIMIT_S)
    assert set((await waiting).version.tolist()) <= {1, 2}
    assert engines[1].version == together.version == 2


def test_weights_in_buckets_are_the_weights(monkeypatch):
    monkeypatch.setattr("onepolicy.launch.ray.replicas.BUCKET_BYTES", 64)
    whole = torch.arange(40.0)
    sent = {"a": whole[:9], "b.c": whole[8:].view(4, 8).t(), "half": whole.bfloat16()}
    sent |= {"ids": torch.arange(3), "one": torch.tensor(2.5), "none": torch.zeros(0, 2)}
    buckets = put_weights(iter(sent.items()), lambda value: value)
    assert len(buckets) > 2
    found = dict(tensors_of(buckets))
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
