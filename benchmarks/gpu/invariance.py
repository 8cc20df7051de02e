"""Which operators give a row the same bits whatever else is computed: those of on-policy numerics.

Every check of `invariant.enable.check_build`, also those after the first that fails, and torch's
own kernels beside them, which would be faster.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from gpu.harness import Bench
from torch import Tensor

from onepolicy.invariant import enable, ops

CUTS = (1, 2, 9, 26, 60)


@torch.inference_mode()
def main(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(bench.device)

    failed, held = [], 0
    checks = (enable._check_rows, enable._check_attention, enable._check_weighted_rows)
    for name, whole, parts in itertools.chain(*(check(normal) for check in checks)):
        if torch.equal(whole, parts):
            held += 1
        else:
            failed.append(name)
    bench.record("checks of the on-policy mode", held=held, failed=failed)
    for name, call in TORCHS_OWN.items():
        broken = []
        for width in bench.size((64, 700, 1024, 4096), (64, 700)):
            for dtype in (torch.float32, torch.bfloat16):
                x = normal(300, width).to(dtype)
                with bench.case(f"{name} {width} {dtype}"):
                    whole = call(x)
                    parts = torch.cat([call(part) for part in torch.tensor_split(x, CUTS)])
                    if not torch.equal(whole, parts):
                        broken.append(f"{width} {dtype}")
        bench.record(f"torch's {name}", depends_on_other_rows=broken)
    speed(bench, normal)


def _linear(x: Tensor) -> Tensor:
    torch.manual_seed(0)
    weight = torch.randn(x.shape[1], 1024, device=x.device).to(x.dtype)
    return x @ weight


TORCHS_OWN: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(-1, keepdim=True),
    "sum": lambda x: x.sum(-1, keepdim=True),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1, keepdim=True),
    "rms_norm": lambda x: torch.nn.functional.rms_norm(x, (x.shape[-1],)),
    "matmul": _linear,
}


def speed(bench: Bench, normal: Callable[..., Tensor]) -> None:
    """Record the time of the mode's own product beside torch's."""
    rows, width = bench.size((8192, 1024), (64, 64))
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = normal(rows, width).to(dtype), normal(width, width).to(dtype)
        with bench.case(f"linear {dtype}"):
            own = bench.measure(lambda x=x, w=weight: ops.linear(x, w), share=3.0).median
            plain = bench.measure(
                lambda x=x, w=weight: torch.nn.functional.linear(x, w), share=1.0
            ).median
            bench.record(f"linear {rows}x{width} {dtype}", seconds=own, over_torchs=own / plain)
