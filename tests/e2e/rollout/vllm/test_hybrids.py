"""Recurrent hybrids in vLLM: bfloat16 on a CPU, routes read and replayed, weights updated."""

import json
import os
import subprocess
import sys

import pytest

from support.vllm_hybrids import updated, write_torchvision

pytestmark = pytest.mark.vllm


def check(family, found):
    for version, (without, replayed, other) in enumerate(found):
        print(f"{family} v{version}: k3 {without:.1e} without, {replayed:.1e} with; {other:.1%}")
        assert 0 < other < 0.15
        assert replayed < 0.7 * without < 0.05


@pytest.mark.parametrize(
    "family", [pytest.param("granitemoehybrid", marks=pytest.mark.full), "qwen3_next"]
)
def test_replay_lowers_k3_before_and_after_an_update(family, tmp_path):
    check(family, updated(family, tmp_path))


@pytest.mark.full
def test_so_it_does_for_the_layout_of_make_policy(tmp_path):
    """A process of its own: vLLM's Qwen3.5 imports torchvision, and asks a process whether it is
    there."""
    write_torchvision(tmp_path / "packages")
    path = os.pathsep.join([str(tmp_path / "packages"), *sys.path])
    family = "qwen3_5_moe_text"
    command = [sys.executable, "-m", "support.vllm_hybrids", family, str(tmp_path / "model")]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    check(family, json.loads(done.stdout.splitlines()[-1]))
