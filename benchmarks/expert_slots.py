"""Microseconds per slot of an expert layer, forward and backward, by the number of slots.

    python benchmarks/expert_slots.py --rounds 5

The layer is the tiny policy's (32 experts, 4 active, float32). Every call has a fresh routing, so
that the experts' row counts differ as in training. CPU seconds of one thread, sizes in turn, median
of the rounds.
"""

import argparse
import statistics
import time

import torch
from engine import build_model

from onepolicy.models import experts


def seconds(module: torch.nn.Module, slots: int, calls: int) -> float:
    """Return the seconds of one forward and backward of this many slots."""
    hidden = torch.randn(slots, 128, requires_grad=True)
    routes = [torch.rand(slots, 32).topk(4).indices for _ in range(calls)]
    weights = torch.rand(slots, 4, requires_grad=True)
    start = time.process_time()
    for ids in routes:
        experts.grouped_experts(module, hidden, ids, weights).sum().backward()
    return (time.process_time() - start) / calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, nargs="+", default=[400, 800, 1600, 2000, 2048, 6400])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=4, help="per size and round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    module = build_model().model.layers[0].mlp.experts
    found: dict[int, list[float]] = {slots: [] for slots in args.slots}
    for n in range(args.rounds + 1):
        for slots, values in found.items():
            taken = seconds(module, slots, args.calls)
            if n:  # the first round warms up
                values.append(1e6 * taken / slots)
    for slots, values in found.items():
        print(f"{slots:6d} slots: {statistics.median(values):6.2f} us a slot")


if __name__ == "__main__":
    main()
