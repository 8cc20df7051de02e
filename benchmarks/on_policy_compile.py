"""torch.compile of the small kernels that both sides of on-policy numerics share: equal bits and
speed.

python benchmarks/on_policy_compile.py
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from onepolicy.invariant import ops

SIZES = {
    "silu": (256, 26624),
    "rms_norm": (64, 6400),
}  # rows of a decode step and a training step, tiny policy


def rms_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def microseconds(function: Callable[[Tensor], Tensor], x: Tensor, rounds: int = 60) -> float:
    taken = []
    for _ in range(rounds):
        start = time.process_time()
        function(x)
        taken.append(time.process_time() - start)
    return 1e6 * statistics.median(taken)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    for name, eager, width in (("silu", ops.silu, 32), ("rms_norm", rms_norm, 128)):
        compiled = torch.compile(
            (lambda x: x / (1 + (-x).exp())) if name == "silu" else rms_norm, dynamic=True
        )
        rows = torch.randn(SIZES[name][-1], width)
        whole = compiled(rows)
        cuts = [(0, 2), (1, 4), (3, 10), (9, 300), (300, len(rows))]
        moved = sum(not torch.equal(compiled(rows[a:b].clone()), whole[a:b]) for a, b in cuts)
        print(f"{name}: {moved} of {len(cuts)} parts differ from the whole when compiled")
        for size in SIZES[name]:
            times = [microseconds(function, rows[:size].clone()) for function in (eager, compiled)]
            print(f"  [{size}, {width}]: eager {times[0]:.0f} us, compiled {times[1]:.0f} us")


if __name__ == "__main__":
    main()
