"""The fingerprint of a rollout travels with it, and another build has another one."""

import json
import os
import subprocess
import sys

import pytest
import torch

from onepolicy.config import TrainingError
from onepolicy.invariant.fingerprint import (
    ENVIRONMENT_VARIABLES,
    compute_fingerprint,
    difference_reason,
    fingerprint_differences,
    short_digest,
)
from onepolicy.invariant.require_equal import require_equal
from onepolicy.types import merge_fingerprints
from support.objective_batches import batch as packed

CPU = torch.device("cpu")
PRINT = (
    "import torch, onepolicy.invariant.fingerprint as f; "
    "print(f.compute_fingerprint(torch.device('cpu'), 'on-policy'))"
)


@pytest.fixture(scope="module")
def ours():
    return compute_fingerprint(CPU, "on-policy")


def test_the_same_process_may_claim(ours):
    assert compute_fingerprint(CPU, "on-policy") == ours
    assert difference_reason(ours, {ours}) is None
    both = {ours, compute_fingerprint(CPU, "fast")}
    assert "numerics: on-policy, fast" in difference_reason(ours, both)


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has no AVX-512"
)
def test_another_instruction_set_is_refused(ours):
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-c", PRINT]
    avx2 = subprocess.check_output(command, env=environment, text=True).strip()
    why = difference_reason(ours, {avx2})
    for part in ("ATEN_CPU_CAPABILITY: unset, avx2", "capability: AVX512, AVX2", "bits: "):
        assert part in why  # the setting, what it did, and that kernels give other bits


def test_threads_travel_but_do_not_matter(ours):
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        other = compute_fingerprint(CPU, "on-policy")
    finally:
        torch.set_num_threads(before)
    assert json.loads(other)["threads"] == str(before + 1)
    assert fingerprint_differences(ours, other) == []


def test_every_variable_that_chooses_kernels_is_seen(ours, monkeypatch):
    for name in ENVIRONMENT_VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "something")
            found = fingerprint_differences(ours, compute_fingerprint(CPU, "on-policy"))
            assert found == [f"{name}: unset, something"]


def test_settings_of_torch_are_seen(ours):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        found = fingerprint_differences(ours, compute_fingerprint(CPU, "on-policy"))
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == [f"matmul_precision: {before}, medium"]


def test_unknown_of_one_is_unknown_of_all():
    a, b = frozenset({"a"}), frozenset({"b"})
    assert merge_fingerprints([a, b]) == {"a", "b"}
    assert merge_fingerprints([a, frozenset()]) == frozenset()
    assert "no fingerprint" in difference_reason("{}", frozenset())
    assert short_digest("a") != short_digest("b")


def test_a_step_with_another_fingerprint_stops_the_run(ours):
    avx2 = json.dumps(json.loads(ours) | {"capability": "AVX1", "bits": "x"})
    batch = packed([3, 2], torch.ones(5, dtype=torch.bool), [0.0, 0.0])
    same = batch.replace(logp_old=batch.logp_rollout, fingerprints=frozenset({ours}))
    require_equal(same, None, ours, when="step 1")
    for theirs, words in (
        ({avx2}, r"step 1: trainer and rollout were not computed alike .*(?i:capability)"),
        ((), "no fingerprint"),
    ):
        other = same.replace(fingerprints=frozenset(theirs))
        with pytest.raises(TrainingError, match=words):
            require_equal(other, None, ours, when="step 1")
