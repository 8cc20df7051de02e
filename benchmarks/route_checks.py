"""CPU time of the checks of routes, in microseconds per slot, on one thread.

    python benchmarks/route_checks.py

Synthetic routes of 16 samples of 1,024 slots, 48 layers, 8 of 128 experts. The trainer's own choice
has another order in 10% of the routers and another expert in 4%. Best of 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from onepolicy.divergence.routing import router_differences, routing_disagreement
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import RouteSpec, check_path
from onepolicy.replay.windows import check_captured
from onepolicy.types import RoutingTrace

LAYERS, TOP_K, EXPERTS, SAMPLES, SLOTS = 48, 8, 128, 16, 1024
ROUNDS = 5


def main() -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    rollout, own = routes(generator)
    bounds = torch.arange(SAMPLES + 1) * SLOTS
    segment = torch.arange(SAMPLES).repeat_interleave(SLOTS)
    tokens = torch.randint(0, 1000, (SAMPLES, SLOTS + 1), generator=generator)
    spec = RouteSpec(rollout.layers, EXPERTS, TOP_K, "error")
    differing = router_differences(rollout, own)

    def completions() -> None:
        for sample in range(SAMPLES):
            rows = rollout.at(slice(sample * SLOTS, (sample + 1) * SLOTS))
            check_path(rows, tokens[sample], spec, "sample")

    works: dict[str, Callable[[], object]] = {
        "driver: completions": completions,
        "driver: metrics": lambda: routing_disagreement(
            own, rollout, segment=segment, differing=differing
        ),
        "ranks: captured": lambda: check_captured(rollout, own, bounds),
        "ranks: differences": lambda: router_differences(rollout, own),
        "ranks: alignment": lambda: check_alignment(rollout, own, bounds, differing=differing),
    }
    total = 0.0
    for name, work in works.items():
        seconds = min(cpu_seconds(work) for _ in range(ROUNDS))
        total += seconds
        print(f"{name:22} {seconds / (SAMPLES * SLOTS) * 1e6:6.2f} us per slot")
    print(f"{'sum':22} {total / (SAMPLES * SLOTS) * 1e6:6.2f}")


def routes(generator: torch.Generator) -> tuple[RoutingTrace, RoutingTrace]:
    """Return the rollout's routes and the trainer's own choice."""
    rows = SAMPLES * SLOTS
    ids = torch.empty(rows, LAYERS, TOP_K, dtype=torch.uint8)
    for layer in range(LAYERS):
        scores = torch.rand(rows, EXPERTS, generator=generator)
        ids[:, layer] = scores.topk(TOP_K).indices
    own = ids.clone()
    reordered = torch.rand(rows, LAYERS, generator=generator) < 0.10
    own[reordered] = own[reordered].flip(-1)
    other = torch.rand(rows, LAYERS, generator=generator) < 0.04
    chosen = own[other].long()
    unused = torch.ones(len(chosen), EXPERTS).scatter(1, chosen, 0).argmax(1)
    chosen[:, -1] = unused
    own[other] = chosen.to(torch.uint8)
    valid = torch.ones(rows, dtype=torch.bool)
    layers = tuple(range(LAYERS))
    return RoutingTrace(ids, valid, layers, EXPERTS), RoutingTrace(own, valid, layers, EXPERTS)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
