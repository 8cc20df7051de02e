"""A GRPO step with numerics = on-policy beside one with fast, one step of each in turn.

    python benchmarks/on_policy.py                     # float32 and bfloat16, one thread
    python benchmarks/on_policy.py --dtypes float32 --steps 9 --profile
    python benchmarks/on_policy.py --workload 512+128

64 sequences of the tiny policy with prompts of about 26 and answers of about 75 tokens, or 32 of
exactly the lengths that another workload says. The learning rate is so small that both sides keep
sampling from the same policy. CPU seconds of this process are counted, which other processes hardly
change. A ratio is the median over pairs of steps, with its 95% bootstrap interval. `--profile`
prints the operators that take longer in one step of the one than in one of the other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from replay import ratio
from rich.console import Console
from rich.table import Table
from step_ours import Options, Ours
from torch.profiler import ProfilerActivity, profile

from onepolicy.run.step import StepTimer, push_and_check, sample_rollouts, train_on_rollouts

PARTS = ("rollout", "update", "step")  # scoring is part of the update
SIDES = ("fast", "on-policy")
ROWS = 12  # of a profile

Context = AbstractContextManager[Any]
PLAIN: Context = nullcontext()


def run_of(numerics: str, dtype: str, folder: str, args: argparse.Namespace) -> Ours:
    settings = [f"numerics={numerics}", f"model.dtype={dtype}", "optim.lr=1e-12"]
    options = Options(args.model, args.workload, 1000, args.threads, dtype, settings)
    return Ours(options, folder)


def step(run: Ours, rollout: Context = PLAIN, update: Context = PLAIN) -> dict[str, float]:
    """Make the next step, its parts in these contexts. Return CPU seconds by part, and k3."""
    parts, number = run.parts, run.done
    run.done += 1
    begun = time.process_time()
    with rollout:
        rollouts = asyncio.run(sample_rollouts(parts, number))
    sampled = time.process_time()
    with update:
        result = train_on_rollouts(parts, run.runner.hooks, number, rollouts, StepTimer())
    updated = time.process_time()
    asyncio.run(push_and_check(parts))
    taken = {"rollout": sampled - begun, "update": updated - sampled}
    return taken | {"step": time.process_time() - begun, "k3": result.metrics["mismatch/k3"]}


def report(title: str, steps: dict[str, list[dict[str, float]]]) -> Table:
    table = Table(title=f"{title}: CPU seconds, median of {len(steps['fast'])} steps")
    for column in ("", *SIDES, "on-policy / fast"):
        table.add_column(column, justify="right")
    for part in PARTS:
        fast, ours = ([one[part] for one in steps[side]] for side in SIDES)
        medians = (f"{statistics.median(times):.3f}" for times in (fast, ours))
        table.add_row(part, *medians, ratio(ours, fast, 2))
    table.add_row("largest k3", *(f"{max(one['k3'] for one in steps[s]):.1e}" for s in SIDES), "")
    return table


def differences(title: str, profiles: dict[str, profile]) -> Table:
    """Return the operators whose own CPU time differs most, in milliseconds, with their calls."""
    found = {
        side: {e.key: (e.self_cpu_time_total / 1000, e.count) for e in p.key_averages()}
        for side, p in profiles.items()
    }
    table = Table(title=title)
    for column in ("operator", *(f"{side} [ms]" for side in SIDES), *(f"{s} calls" for s in SIDES)):
        table.add_column(column, justify="right")
    rows = {
        name: [found[side].get(name, (0.0, 0)) for side in SIDES]
        for name in {*found["fast"], *found["on-policy"]}
    }
    largest = sorted(rows, key=lambda name: rows[name][0][0] - rows[name][1][0])
    for name in [*largest[:ROWS], *largest[-ROWS // 2 :]]:
        table.add_row(name, *(f"{t:.1f}" for t, _ in rows[name]), *(str(n) for _, n in rows[name]))
    sums = [sum(time for time, _ in found[side].values()) for side in SIDES]
    table.add_row("all", *(f"{total:.1f}" for total in sums), "", "")
    return table


def measure(dtype: str, folder: str, args: argparse.Namespace) -> None:
    runs = {side: run_of(side, dtype, folder, args) for side in SIDES}
    steps: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(args.steps + 1):
        for side, run in runs.items():
            taken = step(run)
            if number:
                steps[side].append(taken)
    console = Console(width=140)
    console.print(report(f"{dtype}, {args.workload}", steps))
    if args.profile:
        cpu = [ProfilerActivity.CPU]
        profiles = {side: [profile(activities=cpu) for _ in range(2)] for side in SIDES}
        for side, run in runs.items():
            step(run, *profiles[side])
        for i, part in enumerate(PARTS[:2]):
            console.print(differences(f"{dtype}, {part}", {s: profiles[s][i] for s in SIDES}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="tiny", help="policy folder (default: the one make-policy made)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument(
        "--workload", default="26+75", help="tokens of a prompt and of a completion"
    )
    parser.add_argument(
        "--steps", type=int, default=5, help="counted steps of each, after one warm-up"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            measure(dtype, folder, args)
    print("load of the machine, 1, 5 and 15 minutes:", *(f"{x:.1f}" for x in os.getloadavg()))


if __name__ == "__main__":
    main()
