"""What computed a rollout travels with it, and another build is not taken for the same."""

import json
import os
import subprocess
import sys

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.invariant.fingerprint import (
    ENVIRONMENT,
    cannot_claim,
    differences,
    digest,
    fingerprint,
)
from onepolicy.invariant.require_equal import require_equal
from onepolicy.types import all_known
from support.objective_batches import batch as packed

CPU = torch.device("cpu")
PRINT = "import torch, onepolicy.invariant.fingerprint as f; print(f.fingerprint(torch.device('cpu'), 'on-policy'))"


@pytest.fixture(scope="module")
def ours():
    return fingerprint(CPU, "on-policy")


@pytest.fixture(scope="module")
def avx2():
    """Of a process that computes with another instruction set."""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    return subprocess.run(
        [sys.executable, "-c", PRINT], env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_same_process_may_claim(ours):
    assert fingerprint(CPU, "on-policy") == ours
    assert cannot_claim(ours, {ours}) is None
    assert "numerics: on-policy, fast" in cannot_claim(ours, {ours, fingerprint(CPU, "fast")})


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has no AVX-512"
)
def test_another_instruction_set_is_refused(ours, avx2):
    why = cannot_claim(ours, {avx2})
    for part in ("ATEN_CPU_CAPABILITY: unset, avx2", "capability: AVX512, AVX2", "bits: "):
        assert part in why  # the setting, what it did, and that kernels give other bits


def test_threads_travel_but_do_not_matter(ours):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        other = fingerprint(CPU, "on-policy")
    finally:
        torch.set_num_threads(before)
    assert json.loads(other)["threads"] == str(before + 1)
    assert differences(ours, other) == []


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_every_variable_that_chooses_kernels_is_seen(ours, name, monkeypatch):
    monkeypatch.setenv(name, "something")
    assert differences(ours, fingerprint(CPU, "on-policy")) == [f"{name}: unset, something"]


def test_settings_of_torch_are_seen(ours):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = differences(ours, fingerprint(CPU, "on-policy"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == [f"matmul_precision: {before}, medium"]


def test_unknown_of_one_is_unknown_of_all():
    a, b = frozenset({"a"}), frozenset({"b"})
    assert all_known([a, b]) == {"a", "b"}
    assert all_known([a, frozenset()]) == frozenset()
    assert "no fingerprint" in cannot_claim("{}", frozenset())
    assert digest("a") != digest("b")


def test_a_step_with_another_fingerprint_stops_the_run(ours, avx2):
    batch = packed([3, 2], torch.ones(5, dtype=torch.bool), [0.0, 0.0])
    same = batch.replace(logp_old=batch.logp_rollout, fingerprints=frozenset({ours}))
    require_equal(same, None, ours, when="step 1")
    with pytest.raises(
        TrainingError, match=r"step 1: trainer and rollout were not computed alike .* capability"
    ):
        require_equal(same.replace(fingerprints=frozenset({avx2})), None, ours, when="step 1")
    with pytest.raises(TrainingError, match="no fingerprint"):
        require_equal(same.replace(fingerprints=frozenset()), None, ours, when="step 1")
