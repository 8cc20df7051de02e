"""Products of codes, and what devices ask of them: capability, rows, shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepolicy.config import UsageError
from onepolicy.config.quant import Fp8, Fp8Weight, Int8, QuantFormat
from onepolicy.models.quant.formats import e4m3_rows, int8_rows

CAPABILITY = {"int8": (7, 5), "fp8": (8, 9)}
"""Of CUDA devices whose tensor cores multiply these codes."""
MULTIPLE = {"int8": 8, "fp8": 16}
"""What the sides of a weight must be multiples of on a CUDA device (torch 2.13)."""
ROWS = 17
"""Fewest rows `torch._int_mm` takes there."""


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] int8, weight [in, out] int8 -> [N, out] int32, exact."""
    if x.device.type == "cpu" or len(x) >= ROWS:
        return torch._int_mm(x, weight)
    return padded_int8_product(x, weight)


def padded_int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """`int8_product` with rows of zeros up to the fewest a CUDA device takes."""
    return torch._int_mm(nn.functional.pad(x, (0, 0, 0, ROWS - len(x))), weight)[: len(x)]


def e4m3_product(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [N, in] and weight [out, in] in e4m3, scales [N, 1] and [out, 1] float32 -> [N, out] float32.

    `_scaled_mm` rounds to bfloat16 when it is given scales of rows (on 8.9 always), so it gets none: as on the CPU.
    """
    one = scale.new_ones(())
    return torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32).mul_(scale).mul_(weight_scale.t())


def check_device(config: QuantFormat, device: torch.device) -> None:
    """UsageError with the reason if this device cannot multiply the format in the embedded engine."""
    where = "rollout.quant.format"
    if device.type == "cuda" and config.format in CAPABILITY:
        found, needed = torch.cuda.get_device_capability(device), CAPABILITY[config.format]
        if found < needed:
            raise UsageError(
                f"{where}: {config.format} needs a GPU of compute capability {needed[0]}.{needed[1]}, this one has "
                f"{found[0]}.{found[1]}; use fp8-weight or leave rollout.quant out"
            )
    one = torch.eye(16, device=device)
    try:
        if isinstance(config, Int8):
            codes, _ = int8_rows(one)
            int8_product(codes, codes.t())
        elif isinstance(config, Fp8) and device.type == "cuda":
            codes, scale = e4m3_rows(one)
            e4m3_product(codes, scale, codes, scale)
        elif isinstance(config, Fp8 | Fp8Weight):
            e4m3_rows(one)
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{where}: torch has no kernels for {config.format} here: {reason}") from error


def check_shape(config: QuantFormat, path: str, weight: Tensor) -> None:
    """UsageError if a CUDA device cannot multiply with this weight [..., out, in] in codes."""
    multiple = MULTIPLE.get(config.format, 1) if weight.device.type == "cuda" else 1
    if any(side % multiple for side in weight.shape[-2:]):
        raise UsageError(
            f"rollout.quant.format: {config.format} on a GPU needs sides that are multiples of {multiple}, but {path} "
            f"is {' x '.join(map(str, weight.shape))}; use fp8-weight"
        )
