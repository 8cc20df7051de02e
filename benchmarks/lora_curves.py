"""LoRA beside full training: the quickstart on a policy of the tree, with paired seeds.

An arm is recipes/quickstart.toml with SETTINGS and the arm's own settings. What a run measured is
one line of lora_curves.jsonl, in the tree. A run whose line is there is not played again, and an
interrupted one is resumed, so you can stop the script at any time and start it again.

    python benchmarks/lora_curves.py                         # every arm, seeds 0 1 2
    python benchmarks/lora_curves.py hf-full hf-lora --seeds 0
    python benchmarks/lora_curves.py --show                  # train nothing: tables and figure
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gym_curves import ROOT, train

from onepolicy.run.log import read_metrics

RECIPE = ROOT / "recipes" / "quickstart.toml"
POLICY = Path("benchmarks/evidence/policies/one-of-8")
RESULTS = Path(__file__).with_suffix(".jsonl")
VLLM = (
    'rollout.engine={kind="vllm",dtype="bfloat16",max_num_seqs=96,max_len=64,'
    "kv_cache_gib=0.25,block_size=32}"
)
HF = "rollout.engine.max_len=64"
SETTINGS = (
    "steps=32",
    "task.ops=4",
    "rollout.sampling.max_tokens=28",
    "eval.every=0",
    "log={counterfactual_every=0,report=false,tensorboard=false}",
    "checkpoint.every=16",
)
"""Beside the quickstart: the task of the policy, and fewer steps and measurements."""
FULL = ("optim.lr=5e-4",)
LORA = ("train.lora.rank=16", "optim.lr=1e-3")
ARMS = {
    "hf-full": (HF, *FULL),
    "hf-lora": (HF, *LORA),
    "vllm-full": (VLLM, *FULL),
    "vllm-lora": (VLLM, *LORA),
    "hf-lora-native": (HF, *LORA, "train.lora.sync=native"),
    "hf-lora-rank4": (HF, "train.lora.rank=4", "optim.lr=1e-3"),
    "hf-lora-fast": (HF, "train.lora.rank=16", "optim.lr=3e-3"),
}
"""Arm -> its settings. The first five are compared; the last two are another rank and rate."""
FIRST = ("hf-full", "hf-lora", "vllm-full", "vllm-lora")
"""Arms that are played with every seed before the others."""
CURVES = {
    "reward": "train/reward",
    "k3": "mismatch/k3",
    "entropy": "train/entropy",
    "delivered": "adapter/delivered",
    "effect": "adapter/effect",
    "merge_loss": "adapter/merge_loss",
    "step_s": "time/step",
    "sync_s": "time/sync",
    "sync_gib": "sync/gib",
}
"""Name in a line of the results -> metric of every step."""


def main() -> None:
    options = arguments()
    if not options.show:
        found = {(line["arm"], line["seed"]) for line in finished_runs(RESULTS)}
        arms = options.arms or list(ARMS)
        jobs = [(arm, seed) for seed in options.seeds for arm in arms if arm in FIRST]
        jobs += [(arm, seed) for seed in options.seeds for arm in arms if arm not in FIRST]
        jobs = [job for job in jobs if job not in found]
        with ThreadPoolExecutor(options.workers) as pool:
            for line in pool.map(lambda job: play(*job, options.out), jobs):
                print(line["arm"], line["seed"], line["reward"][-1], flush=True)
    from lora_curve_tables import write_figure, write_page

    lines = finished_runs(RESULTS)
    write_page(lines, ROOT / "docs" / "measured.md")
    write_figure(lines, ROOT / "docs" / "figures", png=options.png)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="*", choices=[[], *ARMS], help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], metavar="N")
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), help="run folders")
    parser.add_argument("--workers", type=int, default=2, help="runs at a time (default: 2)")
    parser.add_argument("--show", action="store_true", help="train nothing")
    parser.add_argument("--png", action="store_true", help="draw the figure as PNG too")
    return parser.parse_args()


def finished_runs(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def play(arm: str, seed: int, out: Path) -> dict[str, Any]:
    """Train one run in a process of its own. Keep and return its line of the results."""
    run = out / f"{arm}-seed{seed}"
    train(RECIPE, POLICY, run, seed, 1, (*SETTINGS, *ARMS[arm]))
    line = {"arm": arm, "seed": seed, "settings": list(ARMS[arm]), "commit": commit()}
    line |= measured(read_metrics(run))
    with RESULTS.open("a") as results:
        results.write(json.dumps(line) + "\n")
    shutil.rmtree(run / "checkpoints", ignore_errors=True)
    return line


def commit() -> str:
    """Return the commit of the code that ran."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def measured(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a run's curves, and the load of the machine at its end."""
    steps = [row for row in rows if "train/reward" in row]
    found: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}
    for name, metric in CURVES.items():
        values = [row.get(metric) for row in steps]
        if any(value is not None for value in values):
            found[name] = [None if v is None else float(f"{v:.4g}") for v in values]
    return found


if __name__ == "__main__":
    main()
