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
ASYNC, OFFLOADING = {"async_scheduling": True}, {"connector": "OffloadingConnector"}

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
    ({"version": (0, 20)} | ASYNC, {"version": (0, 22)} | ASYNC, "28284"),
    ({"version": (0, 21)} | ASYNC, {"version": (0, 21)}, "39917"),
    ({"version": (0, 20), "speculative": True}, {"version": (0, 21), "speculative": True}, "39917"),
    ({"version": (0, 25), "speculative": True}, {"version": (0, 26), "speculative": True}, "48622"),
    (OFFLOADING, {"version": (0, 31)} | OFFLOADING, "39568"),
    ({"version": (0, 33), "connector": "NixlPullConnector"}, {"version": (0, 33)}, "55584"),
    ({"version": (0, 16), "hybrid": True}, {"version": (0, 18), "hybrid": True}, "35744"),
    ({"version": (0, 27), "ray": True}, {"ray": True}, "NeMo/RL/pull/4057"),
    ({"version": (0, 31), "prefix_caching": False}, {"prefix_caching": False}, "45635"),
]


def test_each_row_is_refused_with_its_source_and_only_where_it_holds(subtests):
    for row, (bad, good, source) in zip(INCOMPATIBILITIES, ROWS, strict=True):
        with subtests.test(**GOOD | bad):
            words = rf"vllm 0\.\d+ with routes: .*{source}"
            with pytest.raises(UsageError, match=words) as refused:
                check_route_compatibility(Deployment(**GOOD | bad))
            assert row.why in str(refused.value)
            check_route_compatibility(Deployment(**GOOD | good))


def test_deployment_is_read_from_a_config_and_from_its_json():
    sizes = {"pipeline": 2, "decode_context": 1, "prefill_context": 4}
    parallel = {f"{name}_parallel_size": size for name, size in sizes.items()}
    parallel |= {"data_parallel_size": 3, "enable_eplb": True}
    tree = {
        "parallel_config": parallel | {"distributed_executor_backend": "ray"},
        "kv_transfer_config": {"kv_connector": "NixlConnector"},
        "speculative_config": {"method": "mtp"},
        "scheduler_config": {"async_scheduling": True},
        "cache_config": {"enable_prefix_caching": False},
        "model_config": {"is_hybrid": True},
    }
    rest = (True, "NixlConnector", True, True, False, True, True)
    expected = Deployment((0, 22), "cuda", 2, 4, 3, *rest)
    assert deployment_of(tree, "0.22.1", "cuda") == expected
    parts = {name: SimpleNamespace(**part) for name, part in tree.items()}
    assert deployment_of(SimpleNamespace(**parts), "0.22.1", "cuda") == expected
    assert deployment_of({}, "0.30.0", "cpu") == Deployment((0, 30), "cpu")


SUPPORTED = {"0.30.0": True, "0.30.1+cpu": True, "0.16.0": False, "0.33.0": False}
REFUSED = [
    ("0.29.0", True, "on the CPU only 0.30"),
    ("0.31.0", True, "on the CPU only 0.30"),
    ("0.15.1", False, "reload_weights takes no tensors"),
    ("0.34.0", False, "newer than any"),
    ("dev", False, "not a released version"),
]


def test_versions_of_the_engine_in_this_process(subtests):
    for version, cpu in SUPPORTED.items():
        with subtests.test(version):
            check_vllm_version(version, cpu=cpu)
    for version, cpu, words in REFUSED:
        with subtests.test(version), pytest.raises(UsageError, match=words):
            check_vllm_version(version, cpu=cpu)


def test_monolithic_kernels_are_found():
    plain, kernel = nn.Linear(1, 1), nn.Linear(1, 1)
    plain.quant_method = SimpleNamespace(is_monolithic=False)
    assert not has_monolithic_kernel(nn.Sequential(plain))
    kernel.quant_method = SimpleNamespace(is_monolithic=True)
    assert has_monolithic_kernel(nn.Sequential(plain, nn.Sequential(kernel)))
