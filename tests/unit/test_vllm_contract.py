"""What is read of vLLM's routes and which versions are refused: no vllm needed."""

import numpy as np
import pytest

from onepolicy.config import UsageError, resolve
from onepolicy.replay.checks import RouteRules
from onepolicy.rollout.vllm.contract import check_version, trace_of

RULES = RouteRules((1, 3), num_experts=8, top_k=2, missing="error")  # layers 0 and 2 of 4 are dense


def rows(prompt, completion):
    """[prompt + completion - 1, 4, 2] as 0.30 returns them: every decoder layer, zeros for dense ones."""
    found = np.zeros((prompt + completion - 1, 4, 2), dtype=np.uint8)
    found[:, 1] = [[i % 8, (i + 1) % 8] for i in range(len(found))]
    found[:, 3] = [[(i + 3) % 8, i % 8] for i in range(len(found))]
    return found


def trace(found, prompt=5, cached=3):
    return trace_of(found, prompt=prompt, cached=cached, rules=RULES, depth=4, version=6)


def test_moe_layers_are_kept_with_the_origin_of_every_row():
    found = rows(5, 4)
    got = trace(found)
    assert got.ids.tolist() == found[:, [1, 3]].tolist()
    assert got.layers == (1, 3)
    assert [(s.source, s.start, s.length, s.version) for s in got.spans] == [
        ("cache", 0, 3, 6),
        ("prefill", 3, 2, 6),
        ("decode", 5, 3, 6),
    ]
    assert [s.source for s in trace(rows(5, 1), cached=0).spans] == ["prefill"]


def test_routes_of_moe_layers_only_or_none_are_refused():
    with pytest.raises(UsageError, match="routes have 2 layers and axis='all'"):
        trace(rows(5, 4)[:, [1, 3]])  # what 0.21 returned
    with pytest.raises(UsageError, match="dense layer 0 has routes"):
        trace(np.roll(rows(5, 4), 1, axis=1))
    with pytest.raises(UsageError, match="no routes"):
        trace(None)


@pytest.mark.parametrize(
    ("version", "cpu", "routes", "message"),
    [
        ("0.30.0", True, True, None),
        ("0.30.1+cpu", True, False, None),
        ("0.28.0", False, True, None),
        ("0.29.0", True, True, "on the CPU only 0.30"),
        ("0.31.0", True, False, "Triton"),
        ("0.31.0", False, True, r"from 0\.31 on"),
        ("0.27.1", False, True, "44214"),
        ("0.26.0", False, True, "54730"),
        ("0.21.0", False, True, "prompt and completion routes apart"),
        ("0.19.1", False, True, "int32"),
        ("0.9.2", False, True, "cannot return routes"),
        ("0.26.0", False, False, "not tested"),
        ("dev", False, True, "cannot return routes"),
    ],
)
def test_versions(version, cpu, routes, message):
    if message is None:
        check_version(version, cpu=cpu, routes=routes)
        return
    with pytest.raises(UsageError, match=message):
        check_version(version, cpu=cpu, routes=routes)


RUN = {"out": "x", "steps": 1, "model": {"path": "x"}, "task": {"kind": "chain"}, "optim": {"lr": 1e-4}}


def test_engine_kind_defaults_to_hf():
    assert resolve(RUN | {"rollout": {"engine": {"slots": 3}}}).rollout.engine.kind == "hf"
    assert resolve(RUN | {"rollout": {"engine": {"kind": "vllm", "slots": 3}}}).rollout.engine.kind == "vllm"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"replay": {"mode": "weights"}}, "vLLM does not return"),
        ({"model": {"path": "x", "dtype": "bfloat16"}}, "reads the checkpoint unrounded"),
        ({"rollout": {"engine": {"kind": "vllm", "prefix": True}}}, "prefix"),
    ],
)
def test_settings_vllm_cannot_honour(settings, message):
    base = RUN | {"rollout": {"engine": {"kind": "vllm", "dtype": "float32"}}}
    with pytest.raises(ValueError, match=message):
        resolve(base | settings)
