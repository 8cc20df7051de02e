"""Time to draw a token of each row, by blocks of a large vocabulary and by one running sum.

    python benchmarks/sampling.py --vocabulary 151936 --rows 64

CPU seconds of one thread, log-probabilities included, in turns.
"""

import argparse
import statistics
import time

import torch

from onepolicy.rollout.hf.sampler import invert_cdf_by_blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logits = torch.randn(args.rows, args.vocabulary) * 2
    uniform = torch.rand(args.rows, dtype=torch.float64)
    times: dict[str, list[float]] = {"one running sum": [], "blocks": []}
    for _ in range(args.rounds):
        for found, draw in zip(times.values(), (one_sum, invert_cdf_by_blocks), strict=True):
            start = time.process_time()
            draw(torch.log_softmax(logits, -1).exp(), uniform)
            found.append(time.process_time() - start)
    medians = {name: statistics.median(found) for name, found in times.items()}
    for name, seconds in medians.items():
        print(f"{name:16} {seconds * 1e3:7.1f} ms")
    print(f"blocks / one running sum {medians['blocks'] / medians['one running sum']:.2f}")


def one_sum(probability: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    cdf = probability.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cdf, uniform[:, None] * cdf[:, -1:], right=True)


if __name__ == "__main__":
    main()
