"""A check that float32 products of this process have float32's accuracy.

Any library in the process may change them: vLLM's batch-invariant mode replaces aten::mm, bmm and
others for everybody, by kernels that read float32 as TF32 (10 bits), and torch itself has such
settings. The check finds this by its effect, whatever the library and its version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from onepolicy.config import UsageError

LOG = logging.getLogger(__name__)
SIZE = 128  # rows and columns of the matrices
LARGEST_ERROR = 2e-5
"""Relative error of a product that float32 stays below (1e-6 at SIZE). TF32 makes 3e-4."""

_PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": torch.mm,
    "addmm": lambda a, b: torch.addmm(a.new_zeros(SIZE), a, b),
    "bmm": lambda a, b: torch.bmm(a[None], b[None])[0],
    "matmul": lambda a, b: torch.matmul(a[None, None], b[None, None])[0, 0],
    "linear": lambda a, b: torch.nn.functional.linear(a, b.T),
}


@torch.no_grad()
def product_errors(device: torch.device) -> dict[str, float]:
    """Return the relative error of each float32 product on the device (Frobenius norms)."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    with torch.autocast(device.type, enabled=False):
        found = {
            name: product(left.to(device), right.to(device)).cpu().double()
            for name, product in _PRODUCTS.items()
        }
    norm = float(exact.norm())
    return {name: float((value - exact).norm()) / norm for name, value in found.items()}


def check_float32_products(device: torch.device, *, needed: bool) -> None:
    """Raise UsageError if a float32 product on the device is less exact than float32.

    needed: the trainer computes in float32. False: log a warning.
    """
    errors = product_errors(device)
    # also if an error is NaN
    rough = [name for name, error in errors.items() if not error <= LARGEST_ERROR]
    if not rough:
        return
    worst = max(errors.values())
    problem = (
        f"float32 products on {device} have a relative error of {worst:.1g} ({', '.join(rough)}), "
        "where float32 has 1e-06: something in this process replaced them, as vLLM's "
        "batch-invariant mode (VLLM_BATCH_INVARIANT=1) or TF32 do"
    )
    if needed:
        raise UsageError(
            f"model.dtype: float32, but {problem}; run vLLM as a server "
            "(rollout.engine.kind = vllm-server), or turn that off (docs/on_policy.md)"
        )
    LOG.warning("%s", problem)
