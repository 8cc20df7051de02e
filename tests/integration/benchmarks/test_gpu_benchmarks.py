"""Every benchmark for a GPU runs at toy shapes on the CPU, by the same code; the queue of them."""

import json
import subprocess
import sys

import pytest
import torch
from gpu import attention, decode, engine, head, invariance, moe, step, sync
from gpu.harness import Bench
from gpu.lease import Results

from support.paths import ROOT

NAMES = {
    engine.main: ["onepolicy", "generate, dynamic cache", "profile"],
    engine.beside_pages: ["onepolicy", "generate_batch", "onepolicy / generate_batch"],
    engine.compiled: ["generate, static cache"],
    step.main: ["onepolicy, bfloat16", "padded, autocast", "padded / onepolicy, float32"],
    moe.main: ["stock", "off", "record", "replay", "replay and native", "soft", "waits"],
    head.main: ["chunks", "whole", "linear_cross_entropy"],
    attention.main: ["onepolicy", "varlen_attn", "SDPA padded", "pages"],
    sync.main: ["one flat copy", "cast", "convert", "checksum", "receive", "all together"],
    invariance.main: ["checks of the on-policy mode", "torch's mean", "linear"],
    decode.main: ["a prompt of", "decode step of 4 layers of 30B", "overlap"],
}
"""Benchmark -> beginnings of its results' names."""


@pytest.mark.full
@pytest.mark.parametrize("run", NAMES, ids=lambda run: f"{run.__module__}.{run.__name__}")
def test_a_benchmark_at_toy_shapes(run, tmp_path):
    results = Results(tmp_path)
    bench = Bench("case", torch.device("cpu"), results, tiny=True)
    run(bench)
    rows = results.rows()
    for beginning in NAMES[run]:
        assert any(row["name"].startswith(beginning) for row in rows), (beginning, rows)
    assert bench.errors == 0


def command(*arguments):
    path = ROOT / "benchmarks" / "gpu" / "run.py"
    words = [sys.executable, path, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.mark.full
@pytest.mark.process
def test_a_lease_goes_on_where_the_first_ended(tmp_path):
    """Two leases that end too early, each resumed."""
    names = ["head", "attention kernels", "moe"]
    first = command(*names, "--tiny", "--jobs", 1, "--seconds", 0, "--out", tmp_path / "a")
    assert first.returncode == 1
    assert first.stdout.count("not reached") == 3
    second = command(names[1], "--tiny", "--resume", tmp_path / "a", "--out", tmp_path / "b")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "0 cases ended well before" in second.stdout
    third = command(*names, "--tiny", "--resume", tmp_path / "b", "--out", tmp_path / "c")
    assert third.returncode == 0, third.stdout + third.stderr
    assert "1 cases ended well before: attention kernels" in third.stdout
    rows = [json.loads(line) for line in (tmp_path / "c" / "results.jsonl").open()]
    assert [row["case"] for row in rows if "ended" in row] == ["attention kernels", "head", "moe"]
    assert all(row["tiny"] and row["machine"]["torch"] for row in rows if "lease" in row)
    outcomes = [row["outcome"] for row in rows if "outcome" in row]
    assert outcomes == ["passed"] * 5


@pytest.mark.full
@pytest.mark.process
@pytest.mark.skipif(torch.cuda.is_available(), reason="this system has a CUDA device")
def test_without_a_gpu_it_says_so(tmp_path):
    done = command("--out", tmp_path)
    assert done.returncode == 1, done.stderr
    assert "no CUDA device here; --tiny runs the same code" in done.stdout
