"""Parts of launch/ray/ that need no running Ray: settings, resources and messages."""

import dataclasses
import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

from onepolicy.interfaces import NumericsContract
from onepolicy.launch.ray import connect

connect.prepare_environment(own=True)  # for tests in this process that start Ray
ray = pytest.importorskip("ray")

from onepolicy.config import RunConfig, TrainingError, UsageError, resolve  # noqa: E402
from onepolicy.launch.ray.actors import contract_from_json  # noqa: E402
from onepolicy.launch.ray.placement import ResourceRequest  # noqa: E402
from onepolicy.launch.ray.wire import (  # noqa: E402
    GenerateRequest,
    decode_replies,
    decode_requests,
    encode_replies,
    encode_requests,
)
from onepolicy.types import Completion, RouteSpan, RoutingTrace, Sampling  # noqa: E402

BASE = {"out": "x", "steps": 1, "model": {"path": "tiny"}, "task": {"kind": "chain"}}


def settings(*overrides) -> RunConfig:
    return resolve(BASE, ["cluster.kind=ray", *overrides])


def test_the_folder_of_weights_is_free_to_choose():
    for weights in ("stream", "disk"):
        config = settings(f"cluster.sync={weights}", "cluster.sync_dir=x")
        assert config.cluster.sync_dir == "x"


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


def completion(weights):
    ids, valid = torch.tensor([[[0, 3]], [[2, 1]]], dtype=torch.uint8), torch.tensor([True, False])
    spans = (RouteSpan(0, 1, "prefill", 7), RouteSpan(1, 1, "decode", 8))
    trace = RoutingTrace(ids, valid, (4,), 8, spans, weights)
    tokens, logp = torch.tensor([5, 6], dtype=torch.int32), torch.tensor([-0.5, -1.0])
    return Completion(tokens, logp, tokens + 2, "length", trace, 1, fingerprint="{}")


def test_messages_keep_every_field():
    sampling = Sampling(0.7, 5, stop=(0, 9), top_logprobs=2, routes_from=1)
    requests = {
        3: GenerateRequest(torch.tensor([1, 2]), sampling, 2**53 + 1),
        1: GenerateRequest(torch.tensor([4]), Sampling(0.0, 1), 0),
    }
    found = decode_requests(encode_requests(requests))
    assert list(found) == [3, 1]
    for number, each in requests.items():
        assert torch.equal(found[number].prompt_ids, each.prompt_ids)
        assert (found[number].sampling, found[number].seed) == (each.sampling, each.seed)
    whole, weighed = completion(None), completion(torch.rand(2, 1, 2))
    bare = dataclasses.replace(
        whole, routing=None, finish="stop", fingerprint=None, top_ids=torch.ones(2, 1).int()
    )
    replies = {0: whole, 1: bare, 2: UsageError("no"), 3: KeyError("what"), 4: weighed}
    answers = decode_replies(encode_replies(replies))
    for number in (0, 1, 4):
        assert_equal(answers[number], replies[number])
    assert (type(answers[2]), str(answers[2])) == (UsageError, "no")
    assert (type(answers[3]), str(answers[3])) == (TrainingError, "KeyError: 'what'")


def assert_equal(found, expected):
    for field in dataclasses.fields(expected):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(b, RoutingTrace):
            assert_equal(a, b)
        elif isinstance(b, torch.Tensor):
            assert torch.equal(a, b)
            assert a.dtype == b.dtype
        else:
            assert a == b, field.name


def test_contract_survives_json():
    modules = (("m", "x"), ("n", "y"))
    contract = NumericsContract("on-policy", "float32", "a", "b", "c", modules, "d")
    assert contract_from_json(json.loads(json.dumps(dataclasses.asdict(contract)))) == contract


@pytest.mark.process
def test_an_actor_sets_its_environment_before_torch_is_imported():
    """A worker imports the class first, and OMP_WAIT_POLICY counts only if it is set before torch's
    import."""
    check = (
        "import onepolicy.launch.ray.rank_actor, onepolicy.launch.ray.replica_actor, sys; "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
