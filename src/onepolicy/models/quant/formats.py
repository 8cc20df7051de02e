"""int8 and float8 e4m3: rounding to them, and back.

All scales are symmetric and float32: value = scale * code. A scale belongs to a row, which is an output channel of a
weight or a token of the activations.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127  # -128 is left out, so that codes are symmetric
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST = 1e-12  # scale of a row of zeros


def absmax(x: Tensor) -> Tensor:
    """[..., 1] float32"""
    return x.abs().amax(-1, keepdim=True).float().clamp_(min=SMALLEST)


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
    return (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale  # rounding can pass 448, where e4m3 has only NaN


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


def fake(x: Tensor, bits: int) -> Tensor:
    """x rounded to 2^bits - 1 equidistant values per row [..., n], in float32."""
    x = x.float()
    most = 2 ** (bits - 1) - 1
    scale = absmax(x) / most
    return (x / scale).round_().clamp_(-most, most) * scale
