"""int8 and float8 e4m3: rounding to them, and back.

All scales are symmetric and float32: value = scale * code. A scale belongs to a row, which is an output channel of a
weight or a token of the activations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepolicy.config import UsageError
from onepolicy.config.quant import Fp8, Fp8Weight, Int8, QuantFormat

MIN_CAPABILITY = {"int8": (7, 5), "fp8": (8, 9)}
"""Of CUDA devices whose tensor cores multiply these codes."""
SIDE_MULTIPLE = {"int8": 8, "fp8": 16}
"""What the sides of a weight must be multiples of on a CUDA device (torch 2.13)."""
MIN_INT_MM_ROWS = 17
"""Fewest rows `torch._int_mm` takes there."""


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, in] int8, weight [in, out] int8 -> [N, out] int32, exact."""
    if x.device.type == "cpu" or len(x) >= MIN_INT_MM_ROWS:
        return torch._int_mm(x, weight)
    return padded_int8_product(x, weight)


def padded_int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """`int8_product` with rows of zeros up to the fewest a CUDA device takes."""
    return torch._int_mm(nn.functional.pad(x, (0, 0, 0, MIN_INT_MM_ROWS - len(x))), weight)[
        : len(x)
    ]


def e4m3_product(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """x [N, in] and weight [out, in] in e4m3, scales [N, 1] and [out, 1] float32 -> [N, out] float32.

    `_scaled_mm` rounds to bfloat16 when it is given scales of rows (on 8.9 always), so it gets none: as on the CPU.
    """
    one = scale.new_ones(())
    return (
        torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32)
        .mul_(scale)
        .mul_(weight_scale.t())
    )


def check_device(config: QuantFormat, device: torch.device) -> None:
    """UsageError with the reason if this device cannot multiply the format in the embedded engine."""
    where = "rollout.quant.format"
    if device.type == "cuda" and config.format in MIN_CAPABILITY:
        found, needed = torch.cuda.get_device_capability(device), MIN_CAPABILITY[config.format]
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
        raise UsageError(
            f"{where}: torch has no kernels for {config.format} here: {reason}"
        ) from error


def check_shape(config: QuantFormat, path: str, weight: Tensor) -> None:
    """UsageError if a CUDA device cannot multiply with this weight [..., out, in] in codes."""
    multiple = SIDE_MULTIPLE.get(config.format, 1) if weight.device.type == "cuda" else 1
    if any(side % multiple for side in weight.shape[-2:]):
        raise UsageError(
            f"rollout.quant.format: {config.format} on a GPU needs sides that are multiples of {multiple}, but {path} "
            f"is {' x '.join(map(str, weight.shape))}; use fp8-weight"
        )


INT8_MAX = 127  # -128 is left out, so that codes are symmetric
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_SCALE = 1e-12  # scale of a row of zeros


def absmax(x: Tensor) -> Tensor:
    """[..., 1] float32"""
    return x.abs().amax(-1, keepdim=True).float().clamp_(min=MIN_SCALE)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Codes of x [..., n] float32; beyond 127 scales they saturate. Ties go to even."""
    return (x / scale).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] -> codes [..., n] int8, scale [..., 1] float32: a row's largest value becomes 127."""
    x = x.float()
    scale = absmax(x) / INT8_MAX
    return to_int8(x, scale), scale


def e4m3_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., n] -> codes [..., n] float8_e4m3fn, scale [..., 1] float32: a row's largest value becomes 448."""
    x = x.float()
    scale = absmax(x) / E4M3_MAX
    return (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(
        E4M3
    ), scale  # rounding can pass 448, where e4m3 has only NaN


def from_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of finite codes times 2^-8, exact in every dtype of 16 bits or more.

    On the CPU torch converts them one by one. Shifted into the bits of a float16, whose exponent's bias is 8 larger,
    they are right at once, subnormal ones too: ten times faster.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    bits = (bits << 7).bitwise_and_(0x3F80).bitwise_or_(bits.bitwise_and_(-0x8000))
    return bits.view(torch.float16).to(dtype)


E4M3_UNIT = 2.0**8
"""What `from_e4m3` leaves out."""


def fake_quantise(x: Tensor, bits: int) -> Tensor:
    """x rounded to 2^bits - 1 equidistant values per row [..., n], in float32."""
    x = x.float()
    most = 2 ** (bits - 1) - 1
    scale = absmax(x) / most
    return (x / scale).round_().clamp_(-most, most) * scale
