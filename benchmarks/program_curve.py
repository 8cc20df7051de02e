"""The reward of a program's episodes while its policy is trained, a few seeds.

    python benchmarks/program_curve.py                 # seeds 1 2 3
    python benchmarks/program_curve.py --show          # train nothing: what is in the tree

The policy and the conversations are those of benchmarks/zero, with problems of four digits: a lead
asks a helper three times, and the helper guesses a tenth of its answers instead of calling its
tool. That is what training takes off. plain.py plays them through the gateway in its sandbox, with
the standard library as its client.

Settings and seeds are those of a pilot with seed 0, in which the reward rose from 0.56 to 0.75 in
ten steps. The claim was fixed before the runs: in each of the seeds 1, 2 and 3 the mean reward of
the last five steps is above that of the first five.

A finished run is a line of program_curve.jsonl and is not played again. An interrupted one is
resumed, so you can stop the script at any time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gym_curves import train
from zero.conversations import write_problems

from onepolicy.run.log import read_metrics

ZERO = Path(__file__).resolve().parent / "zero"
RESULTS = Path(__file__).with_suffix(".jsonl")
SEEDS, ENDS = (1, 2, 3), 5
DIGITS, PROBLEMS = 4, 256
SETTINGS = (
    *('task.command=["python3", "/program/plain.py", "{prompt}"]', f"task.folder={ZERO}/program"),
    *(f"task.template={ZERO}/template.jinja", "task.seconds=3600", "task.concurrency=16"),
    *("steps=24", "numerics=fast", "rollout.max_staleness=0", "rollout.prompts_per_step=4"),
    *("rollout.group_size=8", "rollout.engine.max_num_seqs=32", "rollout.sampling.top_p=1"),
    *("objective.entropy_coef=0", "optim.lr=2e-4", "optim.warmup_steps=2", "checkpoint.every=4"),
    *("log.counterfactual_every=0", "log.report=false"),
)
"""Beside the recipe of benchmarks/zero."""


def play(seed: int, out: Path, more: Sequence[str] = ()) -> dict[str, Any]:
    """Train a seed to its end, and return what is kept of it."""
    run, problems = out / f"seed{seed}", out / "problems.jsonl"
    if not problems.exists():
        write_problems(problems, PROBLEMS, DIGITS)
    settings = (*SETTINGS, f"task.problems.path={problems}", *more)
    train(ZERO / "recipe.toml", ZERO / "policy", run, seed, 1, settings)
    steps = [row for row in read_metrics(run) if "train/reward" in row]
    return {"seed": seed, "rewards": [round(row["train/reward"], 4) for row in steps]}


def ends_of(row: dict[str, Any]) -> tuple[float, float]:
    """Return the mean reward of the first and of the last steps."""
    rewards = row["rewards"]
    return statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])


def read_rows() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS, metavar="N")
    parser.add_argument("--out", type=Path, default=Path("runs/program_curve"))
    parser.add_argument("--show", action="store_true", help="train nothing")
    options = parser.parse_args()
    for seed in options.seeds:
        if options.show or any(row["seed"] == seed for row in read_rows()):
            continue
        row = play(seed, options.out)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print("| seed | steps | reward, first 5 | last 5 |\n|---|---|---|---|")
    for row in read_rows():
        first, last = ends_of(row)
        print(f"| {row['seed']} | {len(row['rewards'])} | {first:.2f} | {last:.2f} |")


if __name__ == "__main__":
    main()
