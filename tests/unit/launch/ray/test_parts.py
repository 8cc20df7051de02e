"""Parts of launch/ray/ that need no running Ray: settings, resources and messages."""

import subprocess
import sys

import pytest
import torch

from onepolicy.launch.ray import connect
from onepolicy.types import NumericsContract

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


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["cluster.replicas=2"], "cluster.replicas: unknown setting with kind=local"),
        (
            ["rollout.engine.kind=vllm-server"],
            "rollout.engine.kind: vllm-server is a server of its own",
        ),
        (
            ["rollout.quant.format=int8", "rollout.quant.activations=static"],
            "rollout.quant.activations: static scales",
        ),
        (["train.device=cuda:1"], "train.device: cuda:1, but with cluster.kind = ray it is Ray"),
        (["cluster.replicas=0"], "cluster.replicas"),
    ],
)
def test_settings_that_cannot_be(overrides, message):
    kind = [] if "kind=local" in message else ["cluster.kind=ray"]
    with pytest.raises(UsageError, match=message):
        resolve(BASE, [*kind, *overrides])


def test_vllm_beside_ranks_needs_a_process_of_its_own():
    overrides = ["train.ranks=2", "rollout.engine.kind=vllm"]
    with pytest.raises(UsageError, match=r"cluster\.kind = ray"):
        resolve(BASE, overrides)
    assert resolve(BASE, [*overrides, "cluster.kind=ray"]).train.ranks == 2


@pytest.mark.parametrize("address", ["http://a:1", "ray://a:1", "somewhere", "a:b"])
def test_no_address(address):
    with pytest.raises(UsageError, match=r"cluster\.address: .* is not host:port of a running Ray"):
        connect.check_address(address, "none")


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


def settings(*overrides) -> RunConfig:
    return resolve(BASE, ["cluster.kind=ray", *overrides])


@pytest.mark.parametrize("weights", ["stream", "disk"])
def test_the_folder_of_weights_is_free_to_choose(weights):
    assert settings(f"cluster.sync={weights}", "cluster.sync_dir=x").cluster.sync_dir == "x"


def test_room():
    config = settings(
        "cluster.replicas=2", "cluster.cpus_per_replica=3", "train.ranks=3", "train.threads=2"
    )
    request = ResourceRequest.from_config(config, cuda=False)
    assert request.bundles == [{"CPU": 2.0}] * 2 + [{"CPU": 3.0}] * 2
    assert [
        request.rank_bundle(1),
        request.rank_bundle(2),
        request.replica_bundle(0),
        request.replica_bundle(1),
    ] == [0, 1, 2, 3]
    request = ResourceRequest.from_config(config, cuda=True)  # the driver's GPU is reserved as well
    assert request.bundles == [{"CPU": 2.0, "GPU": 1.0}] * 3 + [{"CPU": 3.0, "GPU": 1.0}] * 2
    assert [request.rank_bundle(1), request.replica_bundle(0)] == [1, 3]
    request = ResourceRequest.from_config(settings("cluster.gpus_per_replica=0.5"), cuda=True)
    assert request.replicas == ({"CPU": 1.0, "GPU": 0.5},)
    parallel = settings("rollout.engine.kind=vllm", "rollout.engine.tensor_parallel_size=4")
    request = ResourceRequest.from_config(parallel, cuda=True)
    assert request.replicas == ({"CPU": 1.0, "GPU": 4.0},)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cluster.kind=local", "the learner's process has that one device"),
        ("cluster.gpus_per_replica=1", "tensor_parallel_size: 4 takes 4 GPUs"),
    ],
)
def test_devices_that_do_not_go_with_tensor_parallelism(override, words):
    with pytest.raises(UsageError, match=words):
        settings("rollout.engine.kind=vllm", "rollout.engine.tensor_parallel_size=4", override)


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
    return Completion(
        tokens, torch.tensor([-0.5, -1.0]), tokens + 2, "length", trace, 1, fingerprint="{}"
    )


@pytest.mark.parametrize("weights", [False, True])
def test_messages_keep_every_field(weights):
    requests = {
        3: GenerateRequest(
            torch.tensor([1, 2]),
            Sampling(0.7, 5, stop=(0, 9), top_logprobs=2, routes_from=1),
            2**53 + 1,
        ),
        1: GenerateRequest(torch.tensor([4]), Sampling(0.0, 1), 0),
    }
    found = decode_requests(encode_requests(requests))
    assert list(found) == [3, 1]
    for number, each in requests.items():
        assert torch.equal(found[number].prompt_ids, each.prompt_ids)
        assert (found[number].sampling, found[number].seed) == (each.sampling, each.seed)
    whole = completion(weights)
    bare = Completion(
        whole.token_ids, whole.logp, whole.version, "stop", top_ids=torch.ones(2, 1).int()
    )
    answers = decode_replies(
        encode_replies({0: whole, 1: bare, 2: UsageError("no"), 3: KeyError("what")})
    )
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
    contract = NumericsContract(
        "on-policy", "float32", "a", "b", "c", (("m", "x"), ("n", "y")), "d"
    )
    assert (
        contract_from_json({**vars_of(contract), "modules": [["m", "x"], ["n", "y"]]}) == contract
    )


def vars_of(contract):
    return {name: getattr(contract, name) for name in NumericsContract.__dataclass_fields__}


@pytest.mark.parametrize("module", ["rank_actor", "replica_actor"])
def test_an_actor_sets_its_environment_before_torch_is_imported(module):
    """A worker imports the class first, and OMP_WAIT_POLICY counts only if it is set before torch's
    import."""
    check = (
        f"import onepolicy.launch.ray.{module}, sys; "
        f"assert not {{'torch', 'transformers'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check], check=True)
