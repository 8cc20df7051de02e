"""Sampling supports (docs/supports.md): the gap with and without them, and their cost.

    python benchmarks/supports.py gap                 # rho and k3 over the support, and over all
    python benchmarks/supports.py cost --pairs 21     # a step with them / without, same tokens

The policy is the tiny one, or --model. Without supports the engine cuts its distribution as before
and the trainer scores over the whole vocabulary. `cost` plays 512 + 128 tokens, in turns, in CPU
seconds of one thread; it learns at a rate of 1e-9, so both sides sample the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table
from step_ours import Options, Ours

from onepolicy.config.rollout import SamplingConfig
from onepolicy.divergence.logprob import mismatch
from onepolicy.types import TokenBatch

KINDS = {
    "none": [],
    "top-p 0.8": ["top_p=0.8"],
    "top-p 0.95": ["top_p=0.95"],
    "top-p 0.95, top-k 20": ["top_p=0.95", "top_k=20"],
    "min-p 0.05": ["min_p=0.05"],
}


def run_of(args: argparse.Namespace, kind: str, workload: str, folder: str) -> Ours:
    settings = [f"rollout.sampling.{setting}" for setting in KINDS[kind]]
    settings += ["optim.lr=1e-9", f"task.ops={args.ops}"]
    options = Options(args.model, workload, 1000, 1, args.dtype, settings)
    return Ours(options, folder)


def row_of(batch: TokenBatch) -> list[str]:
    """Return mean rho and k3 of a scored batch."""
    assert batch.logp_old is not None
    mask = batch.trainable
    rho = (batch.logp_old - batch.logp_rollout)[mask].double().exp()
    found = mismatch(batch.logp_old, batch.logp_rollout, mask, segment=batch.segment)
    return [f"{float(rho.mean()):.4f}", f"{found.k3:.2e}"]


def gap(args: argparse.Namespace) -> None:
    """Print one row a kind of cut."""
    table = Table(title=f"{args.dtype} rollouts, {args.steps} steps")
    for name in ("cut", "tokens", "kept", "rho over support", "k3", "rho over all", "k3 over all"):
        table.add_column(name, justify="right")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(args, kind, "26+75", folder)
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


def cost(args: argparse.Namespace) -> None:
    """Print the ratio of a step with supports to the same step without."""
    for kind in ("top-p 0.95", "top-p 0.95, top-k 20"):
        ratios = []
        with tempfile.TemporaryDirectory() as folder:
            run = run_of(args, kind, "512+128", folder)
            for pair in range(args.pairs + 1):
                order = [True, False] if pair % 2 else [False, True]
                seconds = {given: _seconds(run, supports=given) for given in order}
                if pair:  # the first calls compile and allocate
                    ratios.append(seconds[True] / seconds[False])
        ordered = sorted(ratios)
        middle = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
        print(
            f"{kind}: with / without {statistics.median(ratios):.3f}, "
            f"half of the pairs in {middle[0]:.3f} to {middle[1]:.3f}"
        )


def _seconds(run: Ours, *, supports: bool) -> float:
    narrows = SamplingConfig.narrows
    if not supports:
        narrows = property(lambda _: False)
    run.done = 0  # the same problems and seeds
    with mock.patch.object(SamplingConfig, "narrows", narrows):
        begun = time.process_time()
        run.step()
        return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = {"gap": gap, "cost": cost}
    parser.add_argument("command", choices=commands)
    parser.add_argument("--model", default="tiny", help="policy folder (default: make-policy's)")
    parser.add_argument("--ops", type=int, default=12, help="task.ops of that policy's task")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=21)
    args = parser.parse_args()
    torch.set_num_threads(1)
    commands[args.command](args)


if __name__ == "__main__":
    main()
