"""Sampling supports (docs/supports.md): the gap with and without them, and their cost.

    python benchmarks/supports.py gap                 # rho and k3 over the support, and over all
    python benchmarks/supports.py gap --engine vllm   # the same with vLLM in this process
    python benchmarks/supports.py exact               # on-policy: how many values differ
    python benchmarks/supports.py cost --pairs 21     # a step with them / without, same tokens

The policy is the tiny one, or --model. Without supports the engine cuts its distribution as before
and the trainer scores over the whole vocabulary. `cost` plays 512 + 128 tokens, in turns, in CPU
seconds of one thread; it learns at a rate of 1e-9, so both sides sample the same tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from step_ours import PARTS as TIMED
from step_ours import Options, Ours

from onepolicy.divergence.logprob import mismatch
from onepolicy.run.hooks import build_hooks
from onepolicy.run.step import StepRunner
from onepolicy.types import TokenBatch

KINDS = {
    "none": [],
    "top-p 0.8": ["top_p=0.8"],
    "top-p 0.95": ["top_p=0.95"],
    "top-p 0.95, top-k 20": ["top_p=0.95", "top_k=20"],
    "min-p 0.05": ["min_p=0.05"],
}
ON_POLICY = ["numerics=on-policy", "correction.preset=off", "optim.lr=1.5e-4"]
SHORT = "26+75"


def run_of(
    args: argparse.Namespace, kind: str, workload: str, folder: str, *more: str, dtype: str = ""
) -> Ours:
    settings = [f"rollout.sampling.{setting}" for setting in KINDS[kind]]
    if args.engine == "vllm":
        settings.append("rollout.engine.kind=vllm")
        if kind != "none" and "top_k=20" not in KINDS[kind]:
            settings.append("rollout.sampling.top_k=20")  # it returns the likeliest of a number
    settings += ["optim.lr=1e-9", f"task.ops={args.ops}", *more]
    return Ours(Options(args.model, workload, 1000, 1, dtype or args.dtype, settings), folder)


def row_of(batch: TokenBatch) -> list[str]:
    """Return mean rho and k3 of a scored batch."""
    assert batch.logp_old is not None
    mask = batch.trainable
    rho = (batch.logp_old - batch.logp_rollout)[mask].double().exp()
    found = mismatch(batch.logp_old, batch.logp_rollout, mask, segment=batch.segment)
    return [f"{float(rho.mean()):.4f}", f"{found.k3:.2e}"]


def gap(args: argparse.Namespace) -> None:
    """Print one row a kind of cut."""
    table = Table(title=f"{args.engine}, {args.dtype} rollouts, {args.steps} steps")
    for name in ("cut", "tokens", "kept", "rho over support", "k3", "rho over all", "k3 over all"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(args, kind, SHORT, folder)
            batches = [run.result().batch for _ in range(args.steps)]
        scorer = run.parts.learner.scorer
        over_all = [scorer.score(batch.replace(support=None)) for batch in batches]
        first = batches[0]
        kept = "all"
        if first.support is not None:
            kept = f"{float(first.support.sizes[first.trainable].double().mean()):.2f}"
        tokens = sum(batch.num_trainable for batch in batches)
        rows = zip(*(row_of(batch) for batch in batches), strict=True)
        rows_all = zip(*(row_of(batch) for batch in over_all), strict=True)
        cells = [_median(each) for each in (*rows, *rows_all)]
        table.add_row(kind, f"{tokens:,}", kept, *cells)
    Console().print(table)


def _median(cells: tuple[str, ...]) -> str:
    return sorted(cells, key=float)[len(cells) // 2]


def exact(args: argparse.Namespace) -> None:
    """Print how many log-probabilities of engine and trainer differ in on-policy mode."""
    table, totals = Table(title="numerics = on-policy"), [0, 0, 0]
    for name in ("cut", "dtype", "tokens", "with a choice", "differ"):
        table.add_column(name, justify="right")
    for dtype in ("float32", "bfloat16"):
        for kind in list(KINDS)[1:]:
            with tempfile.TemporaryDirectory() as folder:
                more = [*ON_POLICY, f"model.dtype={dtype}"]
                run = run_of(args, kind, SHORT, folder, *more, dtype=dtype)
                results = [run.result() for _ in range(args.steps)]
            seen = sum(result.batch.num_trainable for result in results)
            free = sum(with_a_choice(result.batch) for result in results)
            wrong = sum(int(result.metrics["mismatch/differing"]) for result in results)
            table.add_row(kind, dtype, f"{seen:,}", f"{free:,}", f"{wrong:,}")
            for at, count in enumerate((wrong, seen, free)):
                totals[at] += count
    Console().print(table)
    Console().print("{:,} of {:,} differ; {:,} of these had a choice".format(*totals))


def with_a_choice(batch: TokenBatch) -> int:
    """Return how many log-probabilities can differ: over a support of one token they are 0."""
    assert batch.support is not None
    return int((batch.trainable & (batch.support.sizes > 1)).sum())


PARTS = {  # of a step
    "recording": ("rollout",),
    "scoring and update": ("score", "update"),
    "the whole step": ("rollout", "score", "update", "sync"),
}


def cost(args: argparse.Namespace) -> None:
    """Print the ratio of a step's parts with supports to the same without."""
    for kind in ("top-p 0.95", "top-p 0.95, top-k 20"):
        ratios: dict[str, list[float]] = {name: [] for name in PARTS}
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(args, kind, "512+128", folder)
            for pair in range(args.pairs + 1):
                order = [True, False] if pair % 2 else [False, True]
                seconds = {given: _seconds(run, supports=given) for given in order}
                for name, found in ratios.items():
                    if pair:  # the first calls compile and allocate
                        found.append(seconds[True][name] / seconds[False][name])
        for name, found in ratios.items():
            ordered = sorted(found)
            middle = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
            print(
                f"{kind}, {name}: with / without {statistics.median(found):.3f}, "
                f"half of the pairs in {middle[0]:.3f} to {middle[1]:.3f}",
                flush=True,
            )


def _seconds(run: Ours, *, supports: bool) -> dict[str, float]:
    """Return the CPU seconds of PARTS in one step."""
    run.done = 0  # the same problems and seeds
    sampling = dataclasses.replace(run.parts.sampling, support=supports)
    parts = dataclasses.replace(run.parts, sampling=sampling)
    runner = StepRunner(parts, build_hooks(parts))
    with (
        mock.patch.object(run, "runner", runner),
        mock.patch.object(run.parts.learner, "_narrows", supports),  # a batch without is no fault
        mock.patch("time.perf_counter", time.process_time),  # the clock of a step's parts
    ):
        result = run.result()
    assert (result.batch.support is not None) == supports
    seconds = {name: result.metrics[f"time/{name}"] for name in TIMED}
    return {name: sum(seconds[each] for each in of_part) for name, of_part in PARTS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"gap": gap, "exact": exact, "cost": cost}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--model", default="tiny", help="policy folder (default: make-policy's)")
    parser.add_argument("--ops", type=int, default=12, help="task.ops of that policy's task")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commands[args.command](args)


if __name__ == "__main__":
    main()
