"""Parts of launch/ray/ that need no running Ray: settings, resources and messages."""

import copyreg
import dataclasses
import io
import json
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from onepolicy.launch.ray import connect

connect.prepare_environment(own=True)  # for tests in this process that start Ray
ray = pytest.importorskip("ray")
from ray import cloudpickle  # noqa: E402

from onepolicy.build import sharded_learner  # noqa: E402
from onepolicy.config import (  # noqa: E402
    RunConfig,
    ServiceUnavailable,
    TrainingError,
    UsageError,
    resolve,
)
from onepolicy.launch.ray import actors  # noqa: E402
from onepolicy.launch.ray.placement import ResourceRequest  # noqa: E402
from onepolicy.launch.ray.tensors import bytes_of, tensor_of  # noqa: E402
from onepolicy.replay.checks import RoutingError  # noqa: E402
from onepolicy.rollout.spec import EngineSpec  # noqa: E402
from onepolicy.support.trace import SupportTrace  # noqa: E402
from onepolicy.train.sharded import rank  # noqa: E402
from onepolicy.types import Completion, RouteSpan, RoutingTrace  # noqa: E402

BASE = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


def settings(*overrides) -> RunConfig:
    return resolve(BASE, ["cluster.kind=ray", *overrides])


def test_no_address():
    for address in ("http://a:1", "ray://a:1", "somewhere", "a:b"):
        with pytest.raises(UsageError, match=r"cluster\.address: .* host:port of a running Ray"):
            connect.check_address(address, "none")


def test_the_connection_ends_with_the_run(monkeypatch):
    """Also where the run fails."""
    calls = []

    @contextmanager
    def launcher(*_):
        calls.append("launcher")
        yield

    monkeypatch.setattr(ray, "init", lambda **_: calls.append("init"))
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr("onepolicy.launch.ray.actors.ray_launcher", launcher)
    with pytest.raises(TrainingError), connect.open_ray_launcher(settings(), print):
        raise TrainingError("the run's")
    assert calls == ["init", "launcher", "shutdown"]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_handler_of_sigterm_outlives_the_start_of_ray(elsewhere, monkeypatch):
    """It reports the run. elsewhere: in another thread, where Ray sets none."""

    def own(*_):
        pass

    def init(**_):
        if not elsewhere:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    def connected():
        with connect._connected(settings(), settings().cluster):
            found.append(signal.getsignal(signal.SIGTERM))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    found, before = [], signal.signal(signal.SIGTERM, own)
    try:
        if elsewhere:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(connected).result()
        else:
            connected()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [own]


def test_an_ipv6_address_is_reached_without_its_brackets(monkeypatch):
    def refuse(place, timeout):
        raise ConnectionRefusedError(str(place))

    monkeypatch.setattr(connect.socket, "create_connection", refuse)
    for address, host in (("[::1]:6379", "::1"), ("10.0.0.1:6379", "10.0.0.1")):
        connect.check_address(address, "none")
        with pytest.raises(ServiceUnavailable) as refused:
            connect._check_port_answers(address)
        assert str(refused.value) == f"cluster.address: no Ray at {address}: {(host, 6379)}"


def test_a_ray_that_everybody_can_command_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    connect.check_address("auto", "none")
    with pytest.raises(UsageError, match=r"cluster\.auth: a Ray without token authentication"):
        connect.check_address("10.0.0.1:6379", "token")
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    connect.check_address("10.0.0.1:6379", "token")


def test_a_process_that_imported_ray_before_does_not_start_one(monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with (
        pytest.raises(UsageError, match="this process has imported ray"),
        connect.open_ray_launcher(settings(), print),
    ):
        pass


def test_the_driver_takes_the_gpu_that_ray_has_reserved_or_none(monkeypatch):
    reply = SimpleNamespace(remote=lambda: json.dumps({"gpus": reserved}))
    reservation = SimpleNamespace(remote=lambda: SimpleNamespace(process_info_json=reply))
    actor_class = SimpleNamespace(options=lambda **_: reservation)
    reserved, chosen = [], []
    placement = SimpleNamespace(actor_options=lambda bundle: {})
    monkeypatch.setattr(actors.ray, "remote", lambda kind: actor_class)
    monkeypatch.setattr(actors.ray, "get", lambda given: given)
    monkeypatch.setattr(actors.torch.cuda, "set_device", chosen.append)
    for gpu, variable, index in (("3", "", 3), ("3", "2,3", 1), ("GPU-b", "GPU-a, GPU-b", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        reserved[:] = [gpu]
        assert actors._reserve_driver_gpu(placement) == chosen.pop() == index
    for gpu, variable in (("3", "0,1"), ("0", "GPU-a"), ("GPU-a", "")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        reserved[:] = [gpu]
        with pytest.raises(UsageError, match=f"CUDA_VISIBLE_DEVICES: Ray has reserved GPU {gpu} "):
            actors._reserve_driver_gpu(placement)
    assert not chosen


def test_paths_are_sent_for_any_working_folder(tmp_path, monkeypatch):
    """Those of a Ray that somebody else started have another one."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    here, hub = str(tmp_path / "model"), "org/name"
    config = settings("model.path=model", "objective.kl.coef=1", "objective.kl.reference=model")
    sent = []

    @contextmanager
    def everywhere(name, **arguments):
        sent.append((name, arguments))
        yield

    ranks = SimpleNamespace(everywhere=everywhere)
    monkeypatch.setattr(sharded_learner, "_build", lambda *given: given)
    assert sharded_learner.build_rank_learner(config, config.model, ranks)[0] == config
    (_, arguments) = sent.pop()
    told = RunConfig.model_validate_json(arguments["config"])
    assert (told.model.path, told.objective.kl.reference) == (here, here)
    assert json.loads(arguments["model"])["path"] == here
    learner = object.__new__(rank.RankLearner)
    learner.ranks, learner.adapter, saving = ranks, None, SimpleNamespace(then=lambda _: None)
    monkeypatch.setattr(rank.LocalLearner, "restore", lambda *_: None)
    monkeypatch.setattr(rank.RankLearner, "_start_saving", lambda *_: saving)
    learner.restore(Path("run"))
    learner.save(Path("run"), print)
    assert sent == [(call, {"folder": str(tmp_path / "run")}) for call in ("restore", "save")]
    run = SimpleNamespace(cluster=config.cluster, cuda=False)
    for path, expected in (("model", here), (hub, hub), ("tiny", "tiny")):
        model = config.model.model_copy(update={"path": path})
        spec = EngineSpec(model, config.rollout.engine, torch.device("cpu"), 64)
        assert actors._RunActors._replica_spec(run, spec).model.path == expected


def test_room():
    replicas = ("cluster.replicas=2", "cluster.cpus_per_replica=3")
    config = settings(*replicas, "train.ranks=3", "train.threads=2")
    request = ResourceRequest.from_config(config, cuda=False)
    assert request.bundles == [{"CPU": 2.0}] * 2 + [{"CPU": 3.0}] * 2
    assert [request.rank_bundle(i) for i in (1, 2)] == [0, 1]
    assert [request.replica_bundle(i) for i in (0, 1)] == [2, 3]
    request = ResourceRequest.from_config(config, cuda=True)  # the driver's GPU is reserved as well
    assert request.bundles == [{"CPU": 2.0, "GPU": 1.0}] * 3 + [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert [request.rank_bundle(1), request.replica_bundle(0)] == [1, 3]
    parallel = ["rollout.engine.kind=vllm", "rollout.engine.tensor_parallel_size=4"]
    for overrides, gpus in ((["cluster.gpus_per_replica=0.5"], 0.5), (parallel, 4.0)):
        request = ResourceRequest.from_config(settings(*overrides), cuda=True)
        assert request.replicas == ({"CPU": 1.0, "GPU": gpus},)


@pytest.mark.parametrize("cuda", [False, True])
def test_a_ray_of_our_own_has_room_for_every_run(cuda, monkeypatch):
    """Its CPUs are counted, and nothing is bound to them."""
    monkeypatch.setattr(connect.os, "cpu_count", lambda: 4)
    for replicas, each, ranks, threads in ((4, 1, 4, 1), (1, 1, 2, 16), (2, 3, 1, 2), (1, 1, 1, 1)):
        config = settings(
            *(f"cluster.replicas={replicas}", f"cluster.cpus_per_replica={each}"),
            *(f"train.ranks={ranks}", f"train.threads={threads}"),
        )
        bundles = ResourceRequest.from_config(config, cuda=cuda).bundles
        assert connect._cpus(config, config.cluster) >= sum(bundle["CPU"] for bundle in bundles)


def test_what_replicas_are_told_and_answer_survives_ray():
    """Ray pickles it; torch's tensors keep their bits, and our errors their words."""
    ids, valid = torch.tensor([[[0, 3]], [[2, 300]]]).to(torch.uint16), torch.tensor([True, False])
    spans = (RouteSpan(0, 1, "prefill", 7), RouteSpan(1, 1, "decode", 8))
    trace = RoutingTrace(ids, valid, (4,), 512, spans, torch.rand(2, 1, 2))
    support = SupportTrace.from_mask(torch.tensor([[True, False], [True, True]]), None)
    tokens, logp = torch.tensor([5, 6], dtype=torch.int32), torch.tensor([-0.5, -1.0])
    whole = Completion(
        tokens, logp, tokens + 2, "length", trace, 1, fingerprint="{}", support=support
    )
    pickled = io.BytesIO()
    pickler = pickle.Pickler(pickled)
    of_tensors = {torch.Tensor: lambda tensor: (tensor_of, (bytes_of(tensor),))}
    pickler.dispatch_table = copyreg.dispatch_table | of_tensors
    pickler.dump(whole)
    assert_equal(pickle.loads(pickled.getvalue()), whole)
    for tensor in (torch.tensor(2.5), torch.zeros(0, 2), torch.arange(6).view(2, 3).t()):
        assert torch.equal(tensor_of(bytes_of(tensor)), tensor)
    for error in (UsageError("a: b"), TrainingError("c"), RoutingError("d")):
        found = pickle.loads(cloudpickle.dumps(error))
        assert (type(found), str(found)) == (type(error), str(error))


def assert_equal(found, expected):
    for field in dataclasses.fields(expected):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(b, RoutingTrace | SupportTrace):
            assert_equal(a, b)
        elif isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b, field.name


@pytest.mark.process
def test_an_actor_sets_its_environment_before_torch_is_imported():
    """A worker imports the class first, and OMP_WAIT_POLICY counts only if it is set before torch's
    import."""
    check = (
        "import onepolicy.launch.ray.rank_actor, onepolicy.launch.ray.replica_actor, sys; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
