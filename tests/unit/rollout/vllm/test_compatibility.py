"""Combinations of vLLM whose routes are known to be wrong are refused, each with its source; no
vllm needed."""

from types import SimpleNamespace

import pytest
from torch import nn

from onepolicy.config import UsageError
from onepolicy.rollout.vllm.compatibility import (
    INCOMPATIBILITIES,
    Deployment,
    check_route_compatibility,
    deployment_of,
)
from onepolicy.rollout.vllm.start import check_vllm_version, has_monolithic_kernel

GOOD = {"version": (0, 30), "platform": "cuda"}

# One refused combination per row of INCOMPATIBILITIES, in its order, and the nearest one that is
# accepted.
ROWS = [
    ({"version": (0, 13)}, {"version": (0, 14)}, "28284"),
    ({"platform": "cpu", "version": (0, 26)}, {"version": (0, 26)}, "54730"),
    ({"platform": "cpu", "version": (0, 29)}, {"platform": "cpu"}, "44214"),
    ({"platform": "cpu", "version": (0, 31)}, {"version": (0, 31)}, "45635"),
    ({"platform": "npu"}, {}, "vllm-ascend/issues/16314"),
    ({"version": (0, 15)}, {"version": (0, 16)}, "33013"),
    ({"version": (0, 14), "eplb": True}, {"version": (0, 16), "eplb": True}, "33013"),
    ({"version": (0, 27), "monolithic": True}, {"version": (0, 28), "monolithic": True}, "54730"),
    ({"pipeline": 2}, {}, "35623"),
    ({"context": 2}, {}, "28284"),
    ({"data": 2}, {"version": (0, 21), "data": 2}, "37879"),
    (
        {"version": (0, 20), "async_scheduling": True},
        {"version": (0, 22), "async_scheduling": True},
        "28284",
    ),
    ({"version": (0, 21), "async_scheduling": True}, {"version": (0, 21)}, "39917"),
    ({"version": (0, 20), "speculative": True}, {"version": (0, 21), "speculative": True}, "39917"),
    ({"version": (0, 25), "speculative": True}, {"version": (0, 26), "speculative": True}, "48622"),
    (
        {"connector": "OffloadingConnector"},
        {"version": (0, 31), "connector": "OffloadingConnector"},
        "39568",
    ),
    ({"version": (0, 33), "connector": "NixlPullConnector"}, {"version": (0, 33)}, "55584"),
    ({"version": (0, 16), "hybrid": True}, {"version": (0, 18), "hybrid": True}, "35744"),
    ({"version": (0, 27), "ray": True}, {"ray": True}, "NeMo/RL/pull/4057"),
    ({"version": (0, 31), "prefix_caching": False}, {"prefix_caching": False}, "45635"),
]


@pytest.mark.parametrize("row", range(len(INCOMPATIBILITIES)))
def test_each_row_is_refused_with_its_source_and_only_where_it_holds(row):
    bad, good, source = ROWS[row]
    with pytest.raises(UsageError, match=rf"vllm 0\.\d+ with routes: .*{source}") as refused:
        check_route_compatibility(Deployment(**GOOD | bad))
    assert INCOMPATIBILITIES[row].reason in str(refused.value)
    check_route_compatibility(Deployment(**GOOD | good))


def test_every_row_is_tested():
    assert len(ROWS) == len(INCOMPATIBILITIES)


def test_deployment_is_read_from_a_config_and_from_its_json():
    tree = {
        "parallel_config": {
            "pipeline_parallel_size": 2,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 4,
            "data_parallel_size": 3,
            "enable_eplb": True,
            "distributed_executor_backend": "ray",
        },
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
        "speculative_config": {"method": "mtp"},
        "scheduler_config": {"async_scheduling": True},
        "cache_config": {"enable_prefix_caching": False},
        "model_config": {"is_hybrid": True},
    }
    expected = Deployment(
        (0, 22), "cuda", 2, 4, 3, True, "NixlConnector", True, True, False, True, True
    )
    assert deployment_of(tree, "0.22.1", "cuda") == expected
    parts = {name: SimpleNamespace(**part) for name, part in tree.items()}
    assert deployment_of(SimpleNamespace(**parts), "0.22.1", "cuda") == expected
    assert deployment_of({}, "0.30.0", "cpu") == Deployment((0, 30), "cpu")


@pytest.mark.parametrize(
    ("version", "cpu", "message"),
    [
        ("0.30.0", True, None),
        ("0.30.1+cpu", True, None),
        ("0.16.0", False, None),
        ("0.33.0", False, None),
        ("0.29.0", True, "on the CPU only 0.30"),
        ("0.31.0", True, "on the CPU only 0.30"),
        ("0.15.1", False, "reload_weights takes no tensors"),
        ("0.34.0", False, "newer than any"),
        ("dev", False, "not a released version"),
    ],
)
def test_versions_of_the_engine_in_this_process(version, cpu, message):
    if message is None:
        check_vllm_version(version, cpu=cpu)
        return
    with pytest.raises(UsageError, match=message):
        check_vllm_version(version, cpu=cpu)


def test_monolithic_kernels_are_found():
    plain, kernel = nn.Linear(1, 1), nn.Linear(1, 1)
    plain.quant_method = SimpleNamespace(is_monolithic=False)
    assert not has_monolithic_kernel(nn.Sequential(plain))
    kernel.quant_method = SimpleNamespace(is_monolithic=True)
    assert has_monolithic_kernel(nn.Sequential(plain, nn.Sequential(kernel)))
