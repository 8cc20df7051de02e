"""Weights, gates and statistics of every preset over one million slots, against one softmax over
the same slots.

    python benchmarks/correct.py

512 sequences; the softmax has a vocabulary of 1000, in chunks of 8192 slots, float32. Prints
seconds, the ratio to the softmax of the same run (median of 3 each), and the peak of memory held
during a call beside its inputs and the returned weight and keep (1.25 fields), in [T] float32
fields.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import time
from collections.abc import Callable

parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--slots", type=int, default=1_000_000)
parser.add_argument("--device", default="cpu")
parser.add_argument("presets", nargs="*")
args = parser.parse_args()
os.environ.update(OMP_NUM_THREADS=str(args.threads), OMP_WAIT_POLICY="passive")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from onepolicy.config.presets import correction_presets  # noqa: E402
from onepolicy.correct.current_policy import live_weights  # noqa: E402
from onepolicy.correct.presets import preset  # noqa: E402
from onepolicy.correct.report import report  # noqa: E402
from onepolicy.correct.reweight import reweight  # noqa: E402
from onepolicy.train.dry_run import PeakMemory  # noqa: E402

SEQUENCES, VOCABULARY, CHUNK = 512, 1000, 8192
T, DEVICE = args.slots, torch.device(args.device)


def median(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def softmax(logits: Tensor) -> None:
    for _ in range(0, T, CHUNK):
        logits.softmax(-1)


def main() -> None:
    torch.manual_seed(0)
    rollout = -1 - 5 * torch.rand(T, device=DEVICE)  # no noise lifts one above 0
    old = rollout + torch.randn(T, device=DEVICE) * 0.05
    mask = torch.rand(T, device=DEVICE) < 0.9
    segment = (torch.arange(T, device=DEVICE) * SEQUENCES // T).long()
    more = {
        "segment": segment,
        "turn": torch.zeros_like(segment),
        "advantage": torch.randn(T, device=DEVICE),
    }
    logits = torch.randn(CHUNK, VOCABULARY, device=DEVICE)
    yardstick = median(lambda: softmax(logits))
    print(
        f"{T} slots, {SEQUENCES} sequences, {DEVICE}, {args.threads} threads; "
        f"softmax {yardstick:.3f} s\n"
    )
    print("| preset | seconds | / softmax | memory [T float32] |\n| --- | --- | --- | --- |")
    for name in args.presets or correction_presets():
        config = preset(name)

        def run(config=config) -> None:
            if (live := config.live_part) is not None:
                report(live, live_weights(old, rollout, mask, live, **more).sums)
            if not config.live or config.fixed_part.rejects:
                reweight(old, rollout, mask, config.fixed_part, **more)

        seconds = median(run)
        with PeakMemory([old, rollout, mask, *more.values()]) as peak:
            run()
        fields = peak.peak / (4 * T) - 1.25
        print(f"| {name} | {seconds:.3f} | {seconds / yardstick:.2f} | {fields:.1f} |", flush=True)
    print(
        f"\npeak of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} "
        f"MiB"
    )


if __name__ == "__main__":
    main()
