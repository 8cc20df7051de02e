"""What a GRPO step of benchmarks/step.py cannot do without, and what goes beside it.

    python benchmarks/step_profile.py                  # the three workloads of step.py, one thread
    python benchmarks/step_profile.py --workloads 26+75 512+128 --steps 3

A step's CPU seconds, and those of its operators by torch's profiler: matrix products (weighted sums
of rows count, by which the engine multiplies and attends), fused attention, and all others with
their number of calls. A product's seconds are those that it takes in the step, so a floor for as
long as no faster kernel is found. The first step compiles kernels and is left out; a number is
the median of the others. A profile of 128+1000 takes 10 GB.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass

from step_ours import Options, Ours
from torch.profiler import ProfilerActivity, profile

WORKLOADS = ("26+75", "512+128", "128+1000")
PRODUCTS = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
    *("mkldnn::_linear_pointwise", "aten::_embedding_bag_forward_only"),
)
ATTENTION = "aten::_scaled_dot_product_"


@dataclass(frozen=True)
class Found:
    """A step's CPU seconds, and what the profiler saw of them."""

    step: float
    products: float
    attention: float
    others: float
    calls: int  # of the others


def profiled(run: Ours) -> Found:
    begun = time.process_time()
    run.result()
    step = time.process_time() - begun
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run.result()
    seconds = dict.fromkeys(("products", "attention", "others"), 0.0)
    calls = 0
    for event in seen.key_averages():
        kind = kind_of(event.key)
        seconds[kind] += event.self_cpu_time_total / 1e6
        if kind == "others":
            calls += event.count
    return Found(step, **seconds, calls=calls)


def kind_of(name: str) -> str:
    if name in PRODUCTS:
        return "products"
    return "attention" if name.startswith(ATTENTION) else "others"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny", help="policy folder (default: make-policy's)")
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, choices=WORKLOADS)
    parser.add_argument("--steps", type=int, default=1, help="pairs of steps, one of them profiled")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    args = parser.parse_args()
    for workload in args.workloads:
        with tempfile.TemporaryDirectory() as folder:
            steps = 2 * args.steps + 1
            run = Ours(Options(args.model, workload, steps, args.threads, args.dtype), folder)
            run.result()
            found = [profiled(run) for _ in range(args.steps)]
        middle = {
            name: statistics.median(getattr(each, name) for each in found)
            for name in Found.__annotations__
        }
        needed = middle["products"] + middle["attention"]
        print(
            f"{workload}: {middle['step']:.2f} s, products {middle['products']:.2f} s, attention "
            f"{middle['attention']:.2f} s, {middle['calls']:.0f} other operators "
            f"{middle['others']:.2f} s; products and attention / step {needed / middle['step']:.2f}"
            f"; load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
