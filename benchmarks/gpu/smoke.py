"""The first minute: does anything run at all, and what can this card do?

Versions, the two ceilings of the card, one RL step of a tiny Qwen3-MoE with replay, and the
commands of a user on a trained policy of 0.5M parameters: train with replay, resume, the same in
one rank over NCCL, audit of the run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu.harness import ROOT, Bench

POLICY = ROOT / "benchmarks" / "evidence" / "policies" / "one-of-8"
RECIPE = """
out = "unused"
steps = 8
model = { path = "POLICY" }
task = { kind = "chain", ops = 4 }
optim = { lr = 1e-4 }
eval = { every = 0 }
checkpoint = { every = 4 }
log = { counterfactual_every = 2, tensorboard = false, report = false }
replay = { mode = "r3" }
[rollout]
prompts_per_step = 4
group_size = 8
sampling = { max_tokens = 28 }
engine = { kind = "hf", dtype = "bfloat16", max_num_seqs = 32, max_len = 48 }
"""
KEPT = ("mismatch/k3", "train/grad_norm")


def main(bench: Bench) -> None:
    with bench.case("ceilings"):
        bench.record("ceilings", **ceilings(bench))
    with bench.case("one step"):
        one_step(bench)
    with tempfile.TemporaryDirectory() as folder:
        commands(bench, Path(folder))
    if bench.device.type == "cuda":
        bench.record("memory", peak_gb=torch.cuda.max_memory_allocated() / 1e9)


def ceilings(bench: Bench) -> dict[str, float]:
    """Return the TFLOP/s of a large product in bfloat16 and the GB/s of a copy."""
    n = bench.size(8192, 128)
    a, b = (torch.randn(n, n, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(bench.size(2**30, 2**10), device=bench.device)
    target = torch.empty_like(source)
    product = bench.measure(lambda: a @ b, share=2.0).median
    copy = bench.measure(lambda: target.copy_(source), share=2.0).median
    return {"tflops": 2 * n**3 / product / 1e12, "gb_per_second": 2 * source.nbytes / copy / 1e9}


def one_step(bench: Bench) -> None:
    """Record one RL step by the objects of a run: sampled, scored with replay, updated, pushed."""
    from support.whole_step import check, measure

    for case in ("qwen3_moe r3 tis", "qwen3_moe r3 tis bfloat16"):
        found = measure(case, lambda model: model.to(bench.device))
        bench.record(case, **{key: found[key] for key in ("gap", "grad_norm", "moved")})
        check(found, tolerance=1e-4)


def commands(bench: Bench, folder: Path) -> None:
    """Run the commands of a user and record what the run's metrics say."""
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE.replace("POLICY", str(POLICY)), encoding="utf-8")
    device = [f"train.device={bench.device.type}"]
    whole, ranks = folder / "whole", folder / "ranks"
    steps: dict[str, list[str]] = {
        "train": ["train", str(recipe), f"out={whole}", "steps=4", *device],
        "resume": ["train", "--resume", str(whole), "steps=8"],
        "audit": ["audit", str(whole)],
        "one rank": ["train", str(recipe), f"out={ranks}", "steps=2", "train.ranks=1", *device],
    }
    for name, arguments in steps.items():
        with bench.case(name):
            seconds = command(arguments, bench)
            values: dict[str, Any] = {"seconds": seconds}
            if name != "audit":
                out = ranks if name == "one rank" else whole
                values |= last_metrics(out)
            bench.record(name, **values)


def command(arguments: list[str], bench: Bench) -> float:
    """Run one command in this process. Return its seconds; raise if it failed."""
    from onepolicy.cli import main as onepolicy

    begun = time.perf_counter()
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)  # the log
    try:
        status = onepolicy(arguments)
        bench.synchronize()
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
    if status:
        raise RuntimeError(f"onepolicy {' '.join(arguments)}: status {status}, see log.txt")
    return time.perf_counter() - begun


def last_metrics(out: Path) -> dict[str, float]:
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1])
    return {key: last[key] for key in KEPT if key in last}
