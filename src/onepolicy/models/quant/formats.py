"""Rounding to int8 and float8 e4m3, and back.

All scales are symmetric and float32: value = scale * code. Each row has a scale. A row is an output
channel of a weight, or a token of the activations.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from onepolicy.config import UsageError
from onepolicy.config.quant import Fp8, Fp8Weight, Int8, QuantFormat

MIN_CAPABILITY = {"int8": (7, 5), "fp8": (8, 9)}
"""Compute capability from which on a CUDA device's tensor cores multiply these codes."""
SIDE_MULTIPLE = {"int8": 8, "fp8": 16}
"""The sides of a weight must be multiples of this on a CUDA device (torch 2.13)."""
MIN_INT_MM_ROWS = 17
"""`torch._int_mm` takes no fewer rows on a CUDA device."""


def int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight, exactly. x [N, in] int8, weight [in, out] int8 -> [N, out] int32."""
    if x.device.type == "cpu" or len(x) >= MIN_INT_MM_ROWS:
        return torch._int_mm(x, weight)
    return padded_int8_product(x, weight)


def padded_int8_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `int8_product` of fewer rows than a CUDA device takes, filled up with zeros."""
    padded = nn.functional.pad(x, (0, 0, 0, MIN_INT_MM_ROWS - len(x)))
    return torch._int_mm(padded, weight)[: len(x)]


def e4m3_product(x: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Return x @ weight.T, scaled, in float32.

    x [N, in] and weight [out, in] are e4m3, their scales [N, 1] and [out, 1] float32 -> [N, out].
    `_scaled_mm` would round to bfloat16 with scales of rows (on 8.9 always), so it gets none. This
    is the CPU's result too.
    """
    one = scale.new_ones(())
    product = torch._scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32)
    return product.mul_(scale).mul_(weight_scale.t())


def check_device(config: QuantFormat, device: torch.device) -> None:
    """Raise UsageError, with the reason, if this device cannot multiply the format's codes."""
    where = "rollout.quant.format"
    if device.type == "cuda" and config.format in MIN_CAPABILITY:
        found, needed = torch.cuda.get_device_capability(device), MIN_CAPABILITY[config.format]
        if found < needed:
            raise UsageError(
                f"{where}: {config.format} needs a GPU of compute capability "
                f"{needed[0]}.{needed[1]}, this one has {found[0]}.{found[1]}; use fp8-weight or "
                "leave rollout.quant out"
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
    """Raise UsageError if a CUDA device cannot multiply codes of this weight [..., out, in].

    path: the weight's name, for the message.
    """
    if weight.device.type != "cuda":
        return
    multiple = SIDE_MULTIPLE.get(config.format, 1)
    if any(side % multiple for side in weight.shape[-2:]):
        raise UsageError(
            f"rollout.quant.format: {config.format} on a GPU needs sides that are multiples of "
            f"{multiple}, but {path} is {' x '.join(map(str, weight.shape))}; use fp8-weight"
        )


INT8_MAX = 127  # -128 is left out, so that codes are symmetric
E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_SCALE = 1e-12  # scale of a row of zeros


def absmax(x: Tensor) -> Tensor:
    """Return the largest magnitude of each row of x [..., n], [..., 1] float32, but not 0."""
    return x.abs().amax(-1, keepdim=True).float().clamp_(min=MIN_SCALE)


def _divided(x: Tensor, most: float) -> Tensor:
    """Return x / most. On a GPU torch multiplies by the inverse of a number, which rounds twice."""
    return x / x.new_full((), most)


def to_int8(x: Tensor, scale: Tensor) -> Tensor:
    """Return the codes of x [..., n] float32. They saturate at 127. Ties round to even."""
    return (x / scale).round_().clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


def int8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., n] int8 and scales [..., 1] float32 of x [..., n].

    The scale is such that a row's largest magnitude becomes 127.
    """
    x = x.float()
    scale = _divided(absmax(x), INT8_MAX)
    return to_int8(x, scale), scale


def e4m3_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes [..., n] float8_e4m3fn and scales [..., 1] float32 of x [..., n].

    The scale is such that a row's largest magnitude becomes 448.
    """
    x = x.float()
    scale = _divided(absmax(x), E4M3_MAX)
    # Rounding can exceed 448, where e4m3 has only NaN.
    codes = (x / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    return codes, scale


def from_e4m3(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of finite e4m3 codes times 2^-8, exact in dtypes of 16 bits or more.

    Shifting the codes into the bits of a float16 gives these values, subnormal ones too, because
    its exponent's bias is 8 larger. That is ten times faster than torch's conversion on the CPU.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # the sign fills the upper byte
    bits = (bits << 7).bitwise_and_(0x3F80).bitwise_or_(bits.bitwise_and_(-0x8000))
    return bits.view(torch.float16).to(dtype)


E4M3_UNIT = 2.0**8
"""The factor that `from_e4m3` leaves out."""


def fake_quantise(x: Tensor, bits: int) -> Tensor:
    """Return x [..., n] rounded to 2^bits - 1 equidistant values per row, in float32."""
    x = x.float()
    most = 2 ** (bits - 1) - 1
    scale = _divided(absmax(x), most)
    return (x / scale).round_().clamp_(-most, most) * scale
