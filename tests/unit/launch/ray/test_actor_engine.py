"""An engine in an actor whose process dies, is silent or loses its answers: every request is
answered, once."""

import asyncio
import functools
import math
import random
import time
from types import SimpleNamespace

import pytest
import torch

from onepolicy.launch.ray import connect

connect.prepare_environment(own=True)  # for tests in this process that start Ray
ray = pytest.importorskip("ray")
from ray.exceptions import (  # noqa: E402
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    OutOfMemoryError,
)

from onepolicy.config import TrainingError, UsageError  # noqa: E402
from onepolicy.config.cluster import RayCluster  # noqa: E402
from onepolicy.launch.ray import actor_engine as remote  # noqa: E402
from onepolicy.launch.ray import replica_actor, tensors  # noqa: E402
from onepolicy.launch.ray.actor_engine import ActorEngine  # noqa: E402
from onepolicy.launch.ray.replica_actor import EngineState, Moment  # noqa: E402
from onepolicy.launch.ray.replicas import Replicas  # noqa: E402
from onepolicy.launch.ray.tensors import from_buckets, put_weights  # noqa: E402
from onepolicy.rollout.remote.client import EngineLost  # noqa: E402
from onepolicy.types import Completion, Sampling  # noqa: E402
from support.fake_ray import Actor, Engine, Reference  # noqa: E402
from support.waiting import LIMIT_S, until  # noqa: E402

STATE = EngineState(Reference("spec"), 1)
NO_MEMORY = OutOfMemoryError("the node has no memory")


@pytest.fixture
def engines(monkeypatch):
    """Return every engine that was built, the newest last."""
    built = []

    def build(spec, threads):
        assert (spec, threads) == ("spec", 1)
        built.append(Engine())
        return built[-1]

    monkeypatch.setattr(tensors, "build_engine", build)
    monkeypatch.setattr(remote, "PING_S", 0.01)
    monkeypatch.setattr(remote.ray, "kill", kill)
    monkeypatch.setattr(remote.ray, "cancel", lambda reply: reply.actor.cancel(reply))
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


async def gone(engines):
    """Return an actor that Ray does not restart, the engine that asks it, and a lost request."""
    actor, engine = await built()
    actor.restart = lambda: None
    waiting = asyncio.ensure_future(asked(engine, [1], 300))
    await until(lambda: engines[0].started)
    actor.die()
    await until(lambda: engine._gone_since is not None)
    return actor, engine, waiting


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
    name = process._name
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


class Busy(Actor):
    """An actor that answers nothing until `free`."""

    def __init__(self, restarts=1):
        super().__init__(restarts)
        self.free = asyncio.Event()

    async def run(self, method, args, answer):
        await self.free.wait()
        await super().run(method, args, answer)


@in_event_loop
async def test_loading_for_longer_than_the_reply_limit_is_no_silence(engines):
    """A process answers nothing while it takes weights over. The ping of before waits as well."""
    actor, engine = await built(Busy, reply_timeout=0.3)
    waiting = asyncio.ensure_future(asked(engine, range(3)))
    await until(lambda: "ping" in actor.calls)
    loading = asyncio.ensure_future(engine.load(weights(4), 4))
    await asyncio.sleep(1)
    assert not waiting.done()
    actor.free.set()
    await loading
    assert [each.token_ids.tolist() for each in await waiting] == [[n] * 3 for n in range(3)]
    assert engine.take_metrics() == {}


@in_event_loop
async def test_loading_for_longer_than_a_restart_may_take_is_silence(engines):
    """A ping of before the load does not hide it."""
    actor, engine = await built(Busy, restart_timeout=0.3)
    waiting = asyncio.ensure_future(asked(engine, range(3)))
    await until(lambda: "ping" in actor.calls)
    loading = asyncio.ensure_future(engine.load(weights(4), 4))
    await until(lambda: actor.restarts == 0)  # Ray was told to start another process
    actor.free.set()
    await loading
    assert [each.token_ids.tolist() for each in await waiting] == [[n] * 3 for n in range(3)]
    assert engine.version == engines[-1].version == 4


@in_event_loop
async def test_weights_of_the_version_that_it_has_are_loaded(engines):
    """The first push of a run has version 0, as the weights that engines are built with. An adapter
    is tried out by more pushes of one version."""
    actor, engine = await built()
    for version, value in ((0, 10), (0, 11), (1, 12), (1, 13), (0, 14)):
        await engine.load(put_weights([("w", torch.tensor(value))], Reference), version)
        assert engines[0].loaded[-1] == value
        assert engine.version == engines[0].version == version
    actor.die()
    await asked(engine, [1])
    assert engines[1].loaded == [14]


@pytest.mark.parametrize("error", [ActorUnavailableError("", None), ActorDiedError(), NO_MEMORY])
@in_event_loop
async def test_a_process_that_could_not_be_reached_for_a_while_is_not_given_up(
    error, engines, caplog
):
    """Ray also says of a process that it died while it starts another (a node that is drained)."""
    actor, engine = await built(restart_timeout=0.3)
    actor.miss = error
    waiting = asyncio.ensure_future(asked(engine, [1], 10**6))
    for _ in range(2):
        actor.unreachable = True
        await until(lambda: engine._gone_since is not None)
        actor.unreachable = False
        await until(lambda: engine._gone_since is None)
        await asyncio.sleep(0.5)
    assert actor.restarts == 1  # nobody has killed it
    assert not waiting.done()
    assert caplog.text.count("replica 0 is back after") == 2
    waiting.cancel()
    assert {True, False} == {pause == 0 for pause in actor.pauses}  # not lost in the last second


@pytest.mark.parametrize("error", [ActorUnschedulableError("no room"), NO_MEMORY])
@in_event_loop
async def test_a_process_without_another_is_lost_whatever_ended_it(error, engines):
    actor, engine = await built(restarts=0)
    actor.death = error
    waiting = asyncio.ensure_future(asked(engine, range(2), 300))
    await until(lambda: engines[0].started)
    actor.die()
    for each in await waiting:
        assert isinstance(each, EngineLost)
        assert str(each).endswith(f"(cluster.restarts = 0): {error}")


@in_event_loop
async def test_a_push_gives_a_process_that_is_gone_no_more_time(engines):
    actor, engine, waiting = await gone(engines)
    engine._gone_since = since = engine._gone_since - 100
    loading = asyncio.ensure_future(engine.load(weights(4), 4))
    await until(lambda: actor.pending)
    await asyncio.sleep(0.1)
    assert engine._gone_since == since
    Actor.restart(actor)
    await loading
    assert isinstance((await waiting)[0], Completion)


@in_event_loop
async def test_a_process_that_is_back_has_the_whole_time_to_load(engines):
    """Not what is left to the load that the process before it began."""
    _, engine = await built(restart_timeout=60)
    engine._loading, engine._load_began = 1, time.monotonic() - 59
    assert engine._load_seconds_left() < 2
    engine._miss("killed")
    assert engine._load_seconds_left() > 60
    engine._note("another")
    assert engine._load_seconds_left() > 50


@in_event_loop
async def test_no_load_is_late_before_it_begins(engines):
    """It waits for cancelled requests first."""
    _, engine = await built()
    ends = asyncio.get_running_loop().create_future()
    engine._given_up = [ends]
    loading = asyncio.ensure_future(engine.load(weights(4), 4))
    await until(lambda: engine._waiting)
    engine._load_began -= 3600
    assert engine._load_seconds_left() == math.inf
    ends.set_result(None)
    await loading
    assert engine.version == 4


@in_event_loop
async def test_weights_that_stay_on_their_way_are_asked_for_by_another_process(engines):
    """The first process answers all the time that it lives and is ready."""
    actor, engine = await built(restart_timeout=0.3)
    stored = put_weights([("w", torch.ones(1))], functools.partial(Reference, stuck=True))
    loading = asyncio.ensure_future(engine.load(stored, 4))
    await until(lambda: actor.restarts == 0)
    stored[0].arrive.set()
    await loading
    assert engine.version == engines[1].version == 4


@pytest.mark.parametrize("times", [1, 2, 3])
@in_event_loop
async def test_weights_that_were_lost_on_their_way_are_asked_for_again(times, engines):
    actor, engine = await built()
    stored = put_weights([("w", torch.ones(1))], functools.partial(Reference, lost=times))
    if times < remote.TRANSFERS:
        await engine.load(stored, 4)
        assert engines[0].loaded == [1]
    else:
        with pytest.raises(TrainingError, match="replica 0: ObjectLostError"):
            await engine.load(stored, 4)
    assert actor.calls.count("load") == min(times + 1, remote.TRANSFERS)


@in_event_loop
async def test_requests_that_wait_for_an_update_ask_for_the_settings_once(engines, monkeypatch):
    """So they start together, as in a process that has the weights."""
    monkeypatch.setattr(Engine, "ready_to_load", False)
    actor, engine = await built()
    fetched = STATE.spec.fetched
    loading = asyncio.ensure_future(engine.load(weights(4), 4))
    await until(lambda: actor.process._changing.locked())
    waiting = asyncio.ensure_future(asked(engine, range(4)))
    await until(lambda: len(actor.pending) >= 5)
    engines[0].may_load.set()
    await loading
    assert [each.token_ids.tolist() for each in await waiting] == [[n] * 3 for n in range(4)]
    assert STATE.spec.fetched == fetched


@in_event_loop
async def test_answers_are_signs_of_life(engines, monkeypatch):
    """Pings do not arrive, and the time between two requests is longer than a restart may take."""
    actor, engine = await built(restart_timeout=LIMIT_S)
    actor.unreachable = True
    for number in range(3):
        now = functools.partial(lambda hours: time.monotonic() + 3600 * hours, number)
        monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=now))
        (done,) = await asked(engine, [number], 30)
        assert done.token_ids.tolist() == [number] * 30
        assert engine._gone_since is None
    assert actor.restarts == 1


@in_event_loop
async def test_the_time_of_a_blocked_event_loop_is_not_that_of_a_restart(engines):
    """The process is back meanwhile, but nobody has asked it yet."""
    actor, engine = await built(restart_timeout=0.3)
    actor.unreachable = True
    waiting = asyncio.ensure_future(asked(engine, [1], 50))
    await until(lambda: engine._gone_since is not None)
    actor.unreachable = False
    time.sleep(0.5)
    (done,) = await waiting
    assert done.token_ids.tolist() == [1] * 50
    assert actor.restarts == 1


@in_event_loop
async def test_a_restart_begins_when_somebody_waits_for_it(engines, monkeypatch):
    """A process was lost, and its requests were given up long ago."""
    monkeypatch.setattr(remote, "LAST_PING_S", 0.01)
    actor, engine, given_up = await gone(engines)
    given_up.cancel()
    await asyncio.sleep(0.1)
    engine._gone_since -= 3600
    waiting = asyncio.ensure_future(asked(engine, [2]))
    await asyncio.sleep(0.2)
    Actor.restart(actor)
    (done,) = await waiting
    assert done.token_ids.tolist() == [2] * 3


@in_event_loop
async def test_a_late_answer_of_a_former_process_is_no_restart(engines):
    _, engine = await built()
    first = engine._process
    engine._note("second")
    engine._note(first)
    engine._note("second")
    assert engine.take_metrics() == {"rollout/replica_restarts": 1}


@in_event_loop
async def test_a_process_is_ready_once_it_has_weights(engines, monkeypatch):
    """A driver gives one that is not the time of a restart."""
    monkeypatch.setattr(Engine, "ready_to_load", False)
    process = replica_actor.ReplicaProcess()
    assert await process.ping(3600) == (process._name, False)
    state = EngineState(Reference("spec"), 1, 3, 7, tuple(weights(7)))
    loading = asyncio.ensure_future(process.load(state))
    await until(lambda: engines)
    assert await process.ping(3600) == (process._name, False)
    engines[0].may_load.set()
    await loading
    assert await process.ping(0) == (process._name, True)


@in_event_loop
async def test_repeated_and_late_requests_of_a_moment_wait_for_nobody(engines, monkeypatch):
    """Ray repeats a call to a process that lives if it was cut off from it."""
    process = replica_actor.ReplicaProcess()
    await process.load(STATE)

    def request(number, place, size=2):
        moment = Moment(process._name, number, place, size)
        return asyncio.ensure_future(process.generate([1], Sampling(1.0, 1), 7, STATE, moment))

    async with asyncio.timeout(LIMIT_S):
        monkeypatch.setattr(replica_actor, "MEETING_TIMEOUT_S", 100 * LIMIT_S)
        both = request(0, 0), request(0, 0), request(0, 1), request(0, 1)  # twice each, at once
        await asyncio.gather(*both)
        await request(0, 0)  # again, when the moment is over
        monkeypatch.setattr(replica_actor, "MEETING_TIMEOUT_S", 0.05)
        await asyncio.gather(request(2, 0, 3), request(2, 1, 3))  # one is missing
        monkeypatch.setattr(replica_actor, "MEETING_TIMEOUT_S", 100 * LIMIT_S)
        await request(2, 2, 3)
        await request(1, 0)  # of a moment before
        here = request(4, 0)
        await asyncio.gather(request(5, 0), request(5, 1))
        assert not here.done()  # the rest of its moment comes after the next
        await asyncio.gather(here, request(4, 1))
    assert process._meetings == {}


@in_event_loop
async def test_a_request_that_cannot_be_sent_is_an_error_of_its_caller(engines, monkeypatch):
    actor, engine = await built()
    call = actor.call

    def refuse(method, args):
        if method == "generate":
            raise ValueError("Ray is not connected")
        return call(method, args)

    actor.call = refuse
    async with asyncio.timeout(LIMIT_S):
        for error in await asked(engine, range(3)):
            assert isinstance(error, ValueError)
        actor.call = call
        (done,) = await asked(engine, [5])
    assert done.token_ids.tolist() == [5] * 3


@pytest.mark.parametrize("what", ["load", "reset_cache"])
@in_event_loop
async def test_a_cancelled_request_has_ended_before_weights_and_caches_change(what, engines):
    """vLLM's refuses both while a request runs."""
    _, engine = await built()
    waiting = asyncio.ensure_future(engine.generate([1], Sampling(1.0, 10**6), seed=0))
    await until(lambda: engines[0].running)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    if what == "load":
        await engine.load(weights(1), 1)
        assert engines[0].running_at_load == [0]
    else:
        await engine.reset_cache()
    assert engines[0].running == 0


@in_event_loop
async def test_a_load_outlives_the_cancelled_request_that_began_it(engines, monkeypatch):
    monkeypatch.setattr(Engine, "ready_to_load", False)
    process = replica_actor.ReplicaProcess()
    state = EngineState(Reference("spec"), 1, 1, 5, tuple(weights(5)))
    request = process.generate([1], Sampling(1.0, 1), 7, state, Moment("another", 0, 0, 1))
    waiting = asyncio.ensure_future(request)
    await until(lambda: engines and engines[0].running_at_load)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    engines[0].may_load.set()
    _, version, _ = await process.load(state)
    assert version == 5
    assert len(engines[0].running_at_load) == 1  # none was broken off in the middle
    assert engines[0].loaded == [5]


@in_event_loop
async def test_answers_that_were_lost_are_asked_for_again(engines):
    """Also those to a load and to a reset of the cache."""
    actor, engine = await built()
    lost, run = [], actor.run

    async def lose_first(method, args, answer):
        if method.__name__ not in lost:
            lost.append(method.__name__)
            answer.set_exception(remote.ObjectLostError("ref", None, ""))
        else:
            await run(method, args, answer)

    actor.run = lose_first
    await engine.load(weights(3), 3)
    await engine.reset_cache()
    (done,) = await asked(engine, [4])
    assert {"load", "reset_cache", "generate"} <= set(lost)
    assert done.token_ids.tolist() == [4] * 3
    assert engine.version == 3
    assert engine.take_metrics() == {"rollout/requests_repeated": 1}


@in_event_loop
async def test_a_lost_replica_holds_no_weights(engines):
    """Its last ones would stay in the object store until the run ends."""
    actor, engine = await built(restarts=0)
    await engine.load(weights(1), 1)
    actor.die()
    await asked(engine, [1])
    assert engine._state.weights == ()


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
    monkeypatch.setattr("onepolicy.launch.ray.tensors.BUCKET_BYTES", 64)
    whole = torch.arange(40.0)
    sent = {"a": whole[:9], "b.c": whole[8:].view(4, 8).t(), "half": whole.bfloat16()}
    sent |= {"ids": torch.arange(3), "one": torch.tensor(2.5), "none": torch.zeros(0, 2)}
    buckets = put_weights(iter(sent.items()), lambda value: value)
    assert len(buckets) > 2
    found = dict(from_buckets(buckets))
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
