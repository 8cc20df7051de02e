"""What cluster/ does without a running Ray: settings, room, messages, and an engine whose process dies."""

import asyncio

import pytest
import torch

from onepolicy.cluster import start

start.prepare(own=True)  # for tests in this process that start Ray
ray = pytest.importorskip("ray")
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError  # noqa: E402

from onepolicy.cluster import engine as remote  # noqa: E402
from onepolicy.cluster import replica  # noqa: E402
from onepolicy.cluster.engine import RemoteEngine  # noqa: E402
from onepolicy.cluster.hosts import contract_of  # noqa: E402
from onepolicy.cluster.place import Needs  # noqa: E402
from onepolicy.cluster.wire import Request, decode_answers, decode_requests, encode_answers, encode_requests  # noqa: E402
from onepolicy.config import RunConfig, TrainingError, UsageError, resolve  # noqa: E402
from onepolicy.config.cluster import RayCluster  # noqa: E402
from onepolicy.interfaces import EngineCaps  # noqa: E402
from onepolicy.invariant.contract import Contract  # noqa: E402
from onepolicy.rollout.http import EngineLost  # noqa: E402
from onepolicy.rollout.weight_files import WeightFiles  # noqa: E402
from onepolicy.sync.checksum import Checksums  # noqa: E402
from onepolicy.types import Completion, RouteSpan, RoutingTrace, Sampling  # noqa: E402

BASE = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.replicas=2"], "cluster.replicas: unknown setting with kind=local"),
        (["rollout.engine.kind=vllm-server"], "rollout.engine.kind: vllm-server is a server of its own"),
        (["rollout.quant.format=int8", "rollout.quant.activations=static"], "rollout.quant.activations: static scales"),
        (["train.device=cuda:1"], "train.device: cuda:1, but with cluster.kind = ray it is Ray"),
        (["cluster.auth=none"], "cluster.auth: none has no effect without cluster.address"),
        (["cluster.replicas=0"], "cluster.replicas"),
        (["cluster.shared_dir=x"], "cluster.shared_dir: has no effect with cluster.weights = stream"),
    ],
)
def test_settings_that_cannot_be(overrides, message):
    kind = [] if "kind=local" in message else ["cluster.kind=ray"]
    with pytest.raises(UsageError, match=message):
        resolve(BASE, [*kind, *overrides])


def test_vllm_beside_ranks_is_fine_in_a_process_of_its_own():
    overrides = ["train.ranks=2", "rollout.engine.kind=vllm"]
    with pytest.raises(UsageError, match=r"cluster\.kind = ray"):
        resolve(BASE, overrides)
    assert resolve(BASE, [*overrides, "cluster.kind=ray"]).train.ranks == 2


@pytest.mark.parametrize("address", ["http://a:1", "ray://a:1", "somewhere", "a:b"])
def test_no_address(address):
    with pytest.raises(UsageError, match=r"cluster\.address: .* is not host:port of a running Ray"):
        start.check_address(address, "none")


def test_a_ray_that_everybody_can_command_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    start.check_address("auto", "none")
    with pytest.raises(UsageError, match=r"cluster\.auth: a Ray without token authentication"):
        start.check_address("10.0.0.1:6379", "token")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    start.check_address("10.0.0.1:6379", "token")


def settings(*overrides) -> RunConfig:
    return resolve(BASE, ["cluster.kind=ray", *overrides])


def test_room():
    config = settings("cluster.replicas=2", "cluster.cpus_per_replica=3", "train.ranks=3", "train.threads=2")
    needs = Needs.of(config, cuda=False)
    assert needs.bundles == [{"CPU": 2.0}] * 2 + [{"CPU": 3.0}] * 2
    assert [needs.rank(1), needs.rank(2), needs.replica(0), needs.replica(1)] == [0, 1, 2, 3]
    needs = Needs.of(config, cuda=True)  # the driver's GPU is reserved as well
    assert needs.bundles == [{"CPU": 2.0, "GPU": 1.0}] * 3 + [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert [needs.rank(1), needs.replica(0)] == [1, 3]
    needs = Needs.of(settings("cluster.gpus_per_replica=0.5"), cuda=True)
    assert needs.replicas == ({"CPU": 1.0, "GPU": 0.5},)


def completion(weights=False):
    ids = torch.tensor([[[0, 3]], [[2, 1]]], dtype=torch.uint8)
    trace = RoutingTrace(
        ids,
        torch.tensor([True, False]),
        (4,),
        8,
        (RouteSpan(0, 1, "prefill", 7), RouteSpan(1, 1, "decode", 8)),
        torch.rand(2, 1, 2) if weights else None,
    )
    tokens = torch.tensor([5, 6], dtype=torch.int32)
    return Completion(tokens, torch.tensor([-0.5, -1.0]), tokens + 2, "length", trace, 1, fingerprint="{}")


@pytest.mark.parametrize("weights", [False, True])
def test_messages_keep_every_field(weights):
    requests = {
        3: Request(torch.tensor([1, 2]), Sampling(0.7, 5, stop=(0, 9), top_logprobs=2, routes_from=1), 2**53 + 1),
        1: Request(torch.tensor([4]), Sampling(0.0, 1), 0),
    }
    found = decode_requests(encode_requests(requests))
    assert list(found) == [3, 1]
    for number, each in requests.items():
        assert torch.equal(found[number].prompt_ids, each.prompt_ids)
        assert (found[number].sampling, found[number].seed) == (each.sampling, each.seed)
    whole = completion(weights)
    bare = Completion(whole.token_ids, whole.logp, whole.version, "stop", top_ids=torch.ones(2, 1).int())
    answers = decode_answers(encode_answers({0: whole, 1: bare, 2: UsageError("no"), 3: KeyError("what")}))
    assert_equal(answers[0], whole)
    assert_equal(answers[1], bare)
    assert (type(answers[2]), str(answers[2])) == (UsageError, "no")
    assert (type(answers[3]), str(answers[3])) == (TrainingError, "KeyError: 'what'")


def assert_equal(found, expected):
    for name in Completion.__dataclass_fields__:
        a, b = getattr(found, name), getattr(expected, name)
        if isinstance(b, RoutingTrace):
            assert torch.equal(a.ids, b.ids)
            assert torch.equal(a.valid, b.valid)
            assert (a.layers, a.num_experts, a.spans) == (b.layers, b.num_experts, b.spans)
            assert (a.weights is None) == (b.weights is None)
            assert b.weights is None or torch.equal(a.weights, b.weights)
        elif isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b, name


def test_contract_survives_json():
    contract = Contract("on-policy", "float32", "a", "b", "c", (("m", "x"), ("n", "y")), "d")
    assert contract_of({**vars_of(contract), "modules": [["m", "x"], ["n", "y"]]}) == contract


def vars_of(contract):
    return {name: getattr(contract, name) for name in Contract.__dataclass_fields__}


class Engine:
    """In the replica's process: samples the prompt's first token, one event loop turn per requested token."""

    def __init__(self):
        self.caps, self.version = EngineCaps(False, 64), 0
        self.started = []

    async def generate(self, prompt_ids, sampling, *, seed):
        self.started.append(seed)
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0.001)
        if sampling.temperature == 9.0:
            raise UsageError("too hot")
        tokens = torch.tensor([prompt_ids[0]] * sampling.max_tokens, dtype=torch.int32)
        return Completion(tokens, torch.zeros(len(tokens)), torch.full_like(tokens, self.version), "length")

    async def load_weights(self, weights, version):
        assert [name for name, _ in weights] == ["w"]
        self.version = version

    async def reset_cache(self):
        pass


class Actor:
    """A Ray actor without Ray: `die` loses its process, its memory and what it was asked."""

    def __init__(self, restarts=1):
        self.restarts, self.calls, self.pending, self.hung = restarts, [], [], False
        self.process = replica.ReplicaProcess()

    def __getattr__(self, method):
        return type("Method", (), {"remote": lambda _, *args: self.call(method, args)})()

    def call(self, method, args):
        self.calls.append(method)
        if self.process is None:
            return self.failed(ActorDiedError() if self.restarts < 0 else ActorUnavailableError("restarting", None))
        answer = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(self.run(getattr(self.process, method)(*args), answer))
        self.pending.append((task, answer))
        return answer

    async def run(self, coroutine, answer):
        (result,) = await asyncio.gather(coroutine, return_exceptions=True)
        if self.hung:
            await asyncio.sleep(60)
        if answer.done():
            return
        if isinstance(result, Exception):
            answer.set_exception(RayTaskError("method", "trace", result))
        else:
            answer.set_result(result)

    async def failed(self, error):
        raise error

    def die(self):
        self.restarts -= 1
        self.process = None
        for task, answer in self.pending:
            task.cancel()
            if not answer.done():
                answer.set_exception(ActorUnavailableError("its process died", None))
        if self.restarts >= 0:
            asyncio.get_running_loop().call_later(0.05, self.restart)

    def restart(self):
        self.process, self.pending, self.hung = replica.ReplicaProcess(), [], False


@pytest.fixture
def engines(monkeypatch):
    """Every engine that was built, the newest last."""
    built = []

    def build(_):
        built.append(Engine())
        return built[-1]

    monkeypatch.setattr(replica, "build_engine", build)
    monkeypatch.setattr(remote, "AGAIN", 0.01)
    monkeypatch.setattr(remote.ray, "kill", lambda actor, no_restart=True: actor.die())
    return built


@pytest.fixture
def folder(tmp_path):
    files = WeightFiles(str(tmp_path))
    checksums = Checksums()
    folder = files.write(checksums.passing([("w", torch.ones(1))]), 4)
    yield str(folder), 4, checksums.take()
    del files  # which removes the folder


def opened(actor, **cluster):
    return RemoteEngine("replica 0", actor, "{}", EngineCaps(False, 64), RayCluster(**cluster), "127.0.0.1")


def asked(engine, numbers, max_tokens=3):
    return asyncio.gather(
        *(engine.generate([n], Sampling(1.0, max_tokens), seed=100 + n) for n in numbers), return_exceptions=True
    )


def test_requests_of_one_moment_start_together_and_in_order(engines):
    async def run():
        actor = Actor()
        await actor.process.build("{}")
        engine = opened(actor)
        done = await asked(engine, range(20))
        again = await asked(engine, [40])  # by an exchange of its own
        assert [c.token_ids.tolist() for c in done + again] == [[n] * 3 for n in [*range(20), 40]]
        assert engines[0].started == [100 + n for n in [*range(20), 40]]
        assert actor.calls.count("submit") == 2
        assert engine.take_metrics() == {}

    asyncio.run(run())


def test_requests_one_after_another(engines):
    async def run():
        actor = Actor()
        await actor.process.build("{}")
        engine = opened(actor)
        async with asyncio.timeout(10):
            for n in range(10):
                (done,) = await asked(engine, [n], 1)
                assert done.token_ids.tolist() == [n]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("how", "weights"), [("killed", "disk"), ("killed", "stream"), ("killed while idle", "stream"), ("hangs", "disk")]
)
def test_a_lost_process_gets_the_current_weights_and_what_it_was_asked(how, weights, engines, folder, caplog):
    async def run():
        actor = Actor()
        await actor.process.build("{}")
        engine = opened(actor, weights=weights, reply_timeout=1, restart_timeout=20)
        await engine.load_files(*folder)
        if how == "killed while idle":
            actor.die()
            await asyncio.sleep(0.1)  # it is back before anybody asks
        actor.hung = how == "hangs"
        waiting = asyncio.ensure_future(asked(engine, range(6), 50))
        if how == "killed":
            while not engines[0].started:
                await asyncio.sleep(0.001)
            actor.die()
        done = await waiting
        assert [c.token_ids.tolist() for c in done] == [[n] * 50 for n in range(6)]
        assert all((c.version == 4).all() for c in done)
        assert len(engines) == 2
        assert engines[1].started == [100 + n for n in range(6)]  # each once, its seed unchanged
        assert engine.take_metrics() == {"rollout/replica_restarts": 1, "rollout/requests_repeated": 6}
        assert engine.version == 4

    asyncio.run(run())
    assert "replica 0 is back after" in caplog.text


class Ended:
    """A broadcast that ends before this receiver has all weights."""

    limit = 1.0

    def __init__(self, error):
        self.error = error

    async def to(self, receive):
        raise self.error


@pytest.mark.parametrize(("error", "lives"), [(TrainingError("another receiver is gone"), 1), (TimeoutError(), 2)])
def test_who_lost_a_broadcast_is_sent_the_weights_alone(error, lives, engines, folder, caplog):
    """A process that was not the cause stays; one that said nothing is replaced."""

    async def run():
        actor = Actor()
        await actor.process.build("{}")
        engine = opened(actor, restart_timeout=20)
        await engine.load_files(*folder, Ended(error))
        assert engine.version == engines[-1].version == 4
        assert len(engines) == lives

    asyncio.run(run())
    assert ("replica 0 is sent the weights once more, alone: another receiver is gone" in caplog.text) == (lives == 1)


def test_files_that_are_not_what_was_written_are_refused(engines, folder):
    async def run():
        actor = Actor()
        await actor.process.build("{}")
        engine = opened(actor, weights="disk")
        path, version, sums = folder
        with pytest.raises(TrainingError, match=r"replica 0: cluster\.shared_dir: weights of version 4 .*'w'"):
            await engine.load_files(path, version, {"w": [*sums["w"][:2], sums["w"][2] + 1]})
        assert engine.version == engines[0].version == -1

    asyncio.run(run())


def test_out_of_restarts_it_is_lost_for_every_request(engines):
    async def run():
        actor = Actor(restarts=0)
        await actor.process.build("{}")
        engine = opened(actor, restarts=0)
        waiting = asyncio.ensure_future(asked(engine, range(3), 300))
        while not engines[0].started:
            await asyncio.sleep(0.001)
        actor.die()
        for error in await waiting:
            assert isinstance(error, EngineLost)
            assert "gone for good" in str(error)

    asyncio.run(run())


def test_a_restart_that_takes_too_long_is_a_loss(engines, monkeypatch):
    monkeypatch.setattr(Actor, "restart", lambda actor: None)

    async def run():
        actor = Actor()
        await actor.process.build("{}")
        engine = opened(actor, restart_timeout=0.2)
        actor.die()
        (error,) = await asked(engine, [1])
        assert isinstance(error, EngineLost)
        assert "within 0.2 s (cluster.restart_timeout)" in str(error)

    asyncio.run(run())


def test_an_error_of_one_request_is_its_own(engines):
    async def run():
        actor = Actor()
        await actor.process.build("{}")
        engine = opened(actor)
        bad = asyncio.ensure_future(engine.generate([1], Sampling(9.0, 2), seed=0))
        (good,) = await asked(engine, [2], 5)
        with pytest.raises(UsageError, match="too hot"):
            await bad
        assert good.token_ids.tolist() == [2] * 5

    asyncio.run(run())
