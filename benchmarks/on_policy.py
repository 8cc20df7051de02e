"""A GRPO step with numerics = on-policy beside one with fast: rollout, scoring and update, one step
of each in turn.

    python benchmarks/on_policy.py                     # float32 and bfloat16, one thread
    python benchmarks/on_policy.py --dtypes float32 --steps 9 --profile

64 sequences of about 75 new tokens of the tiny policy (8 problems, 8 completions each); the
learning rate is so small that both sides keep sampling from the same policy. Ratios are of medians;
absolute times depend on the machine. `--profile` prints where the time of one step of each goes, by
operator.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from onepolicy.build.components import build_components
from onepolicy.config import resolve
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepRunner
from onepolicy.sync.push import push_weights

PHASES = ("rollout", "score", "update", "step")
SIDES = ("fast", "on-policy")


def runner_of(numerics: str, dtype: str, args: argparse.Namespace) -> StepRunner:
    settings = {
        "out": "unused",
        "steps": 1000,
        "numerics": numerics,
        "model": {"path": args.model, "dtype": dtype},
        "task": {"kind": "chain", "ops": 12},
        "rollout": {
            "prompts_per_step": 8,
            "group_size": args.sequences // 8,
            "sampling": {"max_tokens": args.new},
            "engine": {"dtype": dtype, "max_num_seqs": args.sequences},
        },
        "optim": {"lr": 1e-12},
        "train": {"threads": args.threads},
        "log": {"counterfactual_every": 0},
    }
    parts, _ = build_components(resolve(settings))
    asyncio.run(push_weights(parts.learner, parts.engine))
    return StepRunner(parts, build_hooks(parts))


def step(runner: StepRunner, number: int) -> dict[str, float]:
    metrics = asyncio.run(runner.rl_step(number)).metrics
    return {phase: metrics[f"time/{phase}"] for phase in PHASES} | {"k3": metrics["mismatch/k3"]}


def report(dtype: str, seconds: dict[str, list[dict[str, float]]]) -> Table:
    table = Table(title=f"{dtype}: seconds per step, median of {len(seconds['fast'])}")
    for column in ("", *SIDES, "ratio", "ratio step by step"):
        table.add_column(column, justify="right")
    for phase in PHASES:
        fast, ours = ([one[phase] for one in seconds[side]] for side in SIDES)
        pairs = statistics.median(b / a for a, b in zip(fast, ours, strict=True))
        a, b = statistics.median(fast), statistics.median(ours)
        table.add_row(phase, f"{a:.3f}", f"{b:.3f}", f"{b / a:.2f}", f"{pairs:.2f}")
    largest = [f"{max(one['k3'] for one in seconds[side]):.1e}" for side in SIDES]
    table.add_row("largest k3", *largest, "", "")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="tiny", help="policy folder (default: the one make-policy made)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--new", type=int, default=75, help="most new tokens of a sequence")
    parser.add_argument(
        "--steps", type=int, default=5, help="counted steps of each, after one warm-up"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    for dtype in args.dtypes:
        sides = {side: runner_of(side, dtype, args) for side in SIDES}
        seconds: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(args.steps + 1):
            for side, runner in sides.items():
                taken = step(runner, number)
                if number:
                    seconds[side].append(taken)
        Console().print(report(dtype, seconds))
        for side, runner in sides.items() if args.profile else ():
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                step(runner, args.steps + 1)
            print(
                side,
                profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15),
                sep="\n",
            )


if __name__ == "__main__":
    main()
