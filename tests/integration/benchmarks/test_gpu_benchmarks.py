"""Every benchmark for a GPU runs at toy shapes on the CPU, by the same code."""

import importlib
import json
import subprocess
import sys

import pytest
import torch
from gpu.harness import Bench

from support.paths import ROOT

NAMES = {
    "engine": ["onepolicy", "generate_batch", "generate, dynamic cache", "profile"],
    "step": ["onepolicy, bfloat16", "padded, autocast", "padded / onepolicy, float32"],
    "moe": ["stock", "off", "record", "replay", "replay and native", "soft", "waits"],
    "head": ["chunks", "whole", "linear_cross_entropy"],
    "attention": ["onepolicy", "varlen_attn", "SDPA padded", "flex_attention", "pages"],
    "sync": ["one flat copy", "cast", "convert", "checksum", "buckets", "receive", "all together"],
}
"""Benchmark -> beginnings of its cases' names."""


@pytest.mark.full
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_at_toy_shapes(name, tmp_path):
    bench = Bench(name, torch.device("cpu"), tmp_path, tiny=True)
    importlib.import_module(f"gpu.{name}").main(bench)
    content = json.loads((tmp_path / f"{name}.json").read_text())
    cases = [result["case"] for result in content["results"]]
    for beginning in NAMES[name]:
        assert any(case.startswith(beginning) for case in cases), (beginning, cases)
    assert not [result for result in content["results"] if "error" in result]
    assert content["tiny"] is True


def command(*arguments):
    path = ROOT / "benchmarks" / "gpu" / "run.py"
    return subprocess.run(
        [sys.executable, path, *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.full
@pytest.mark.process
def test_the_tests_are_run_and_recorded(tmp_path):
    done = command("1", "--tiny", "--out", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "tests.json").read_text())
    *each, last = content["results"]
    assert last == {"case": "all", "status": 0, "passed": len(each)}
    assert {result["outcome"] for result in each} == {"passed"}
    assert "outcome passed" in done.stdout


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="this system has a CUDA device")
def test_without_a_gpu_every_part_says_so(tmp_path):
    done = command("1", "2", "3", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no CUDA device") == 7
