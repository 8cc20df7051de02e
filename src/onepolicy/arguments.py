"""Checks of tensors that the public functions get: a plain layout, a kind that computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from onepolicy.errors import UsageError, describe_argument

Kind = Literal["floats", "whole numbers", "ids", "numbers", "bool"]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES: dict[Kind, tuple[torch.dtype, ...]] = {
    "floats": FLOATS,
    "whole numbers": WHOLE,
    "ids": (*WHOLE, torch.uint16, torch.uint32),  # that are only looked up
    "numbers": FLOATS + WHOLE,
    "bool": (torch.bool,),
}
FIX: dict[Kind, str] = {
    "floats": ".float()",
    "whole numbers": ".long()",
    "ids": ".long()",
    "numbers": ".float()",
    "bool": ".bool()",
}


def require_tensor(caller: str, name: str, value: object, kind: Kind | None = None) -> Tensor:
    """Return the argument if it is a tensor that can be computed with.

    kind: of its values; None: any. Raises UsageError that names the argument: it is no tensor, is
    nested, sparse or quantised, or has values of another kind.
    """
    if not isinstance(value, Tensor):
        expected = "a tensor" if kind is None else f"a tensor of {kind}"
        raise UsageError(f"{caller}: {name} is {describe_argument(value)}, expected {expected}")
    if value.is_nested or value.layout != torch.strided or value.is_quantized:
        raise UsageError(
            f"{caller}: {name} is {describe_argument(value)}, nested, sparse or quantised; "
            "expected a plain tensor"
        )
    if kind is not None and value.dtype not in DTYPES[kind]:
        raise UsageError(
            f"{caller}: {name} is {describe_argument(value)}, expected {kind}; pass "
            f"{name}{FIX[kind]}"
        )
    return value


def require_one_device(
    caller: str, given: Mapping[str, Tensor | None], *, values: bool = True
) -> None:
    """Raise UsageError if the arguments are on several devices.

    values: also if they are on meta, which has none.
    """
    devices = {name: str(value.device) for name, value in given.items() if value is not None}
    if len(set(devices.values())) > 1:
        found = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise UsageError(f"{caller}: {found}; pass them on one device")
    if values and "meta" in devices.values():
        names = ", ".join(devices)
        raise UsageError(f"{caller}: {names} on meta, a device without values; pass real tensors")
