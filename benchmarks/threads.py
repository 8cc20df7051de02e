"""Threads of engine and trainer in one process: a few quickstart steps per setting, each in a
process of its own.

    python benchmarks/threads.py                 # hf and vllm, 1 and 2 threads, OpenMP both ways
    python benchmarks/threads.py --kinds hf --rounds 3
    python benchmarks/threads.py --kinds vllm --threads 1 --omp 0 1 2   # OMP_NUM_THREADS (0: unset)

Slots (prompts included) per second of the rollout, and seconds of the update; medians over the
steps after the first. OpenMP waits passively and actively. Needs the tiny policy (`onepolicy
make-policy`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

Setting = tuple[str, int, str, int]  # engine, train.threads, OMP_WAIT_POLICY, OMP_NUM_THREADS
SMALL = ["eval.every=0", "log.counterfactual_every=0", "log.tensorboard=false", "log.report=false"]


def run(setting: Setting, recipe: str, steps: int) -> list[dict[str, float]]:
    """Return the metrics of the steps of one run, the first left out."""
    kind, threads, wait, omp = setting
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    environment["OMP_WAIT_POLICY"] = wait
    if omp:
        environment["OMP_NUM_THREADS"] = str(omp)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        settings = [
            f"out={out}",
            f"steps={steps}",
            f"train.threads={threads}",
            f"rollout.engine.kind={kind}",
        ]
        if kind == "vllm":
            settings.append("rollout.engine.kv_cache_gib=0.25")
        command = [sys.executable, "-m", "onepolicy", "train", recipe, *settings, *SMALL]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "time/update" in row][1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="recipes/quickstart.toml")
    parser.add_argument("--kinds", nargs="+", default=["hf", "vllm"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--wait", nargs="+", default=["passive", "active"])
    parser.add_argument("--omp", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    settings = list(itertools.product(args.kinds, args.threads, args.wait, args.omp))
    found: dict[Setting, list[dict[str, float]]] = {setting: [] for setting in settings}
    for _ in range(args.rounds):
        for setting in settings:
            found[setting] += run(setting, args.recipe, args.steps)
    table = Table(
        "engine", "threads", "OpenMP", "OMP_NUM_THREADS", "rollout slots/s", "update s", "step s"
    )
    for setting, rows in found.items():
        slots = [
            row["train/tokens_per_second"] * row["time/step"] / row["time/rollout"] for row in rows
        ]
        update, step = ([row[f"time/{part}"] for row in rows] for part in ("update", "step"))
        numbers = (
            f"{statistics.median(slots):.0f}",
            f"{statistics.median(update):.2f}",
            f"{statistics.median(step):.2f}",
        )
        table.add_row(setting[0], str(setting[1]), setting[2], str(setting[3] or "unset"), *numbers)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
