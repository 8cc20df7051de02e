"""AdamW with moments in blocks of 8 bits (Dettmers et al., arXiv 2110.02861), by torchao."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from onepolicy.config import UsageError
from onepolicy.train.optim import MASTER
from onepolicy.train.streamed_adamw import State, StreamedAdamW, local

BLOCK = 256  # elements that share a scale
SMALLEST = 4096  # elements; tensors with fewer stay float32, as in bitsandbytes and torchao
SLICE = 2**22  # elements that are rounded at once, with 40 bytes of indices for each


def check_installed() -> None:
    """Raise UsageError if the package that holds the 8-bit state is missing."""
    if find_spec("torchao") is None:
        raise UsageError(
            "optim.state: 8bit needs torchao, which is not installed; "
            "pip install 'onepolicy[adam8bit]', or use optim.state=host"
        )


class EightBitAdamW(StreamedAdamW):
    """MasterAdamW whose two moments rest in 8 bits and a float32 scale for each 256 of them.

    An update computes with float32 moments and rounds them after it. Masters stay float32.
    Checkpoints hold float32 moments, so any `optim.state` reads them; here they are rounded again.
    """

    def fetch(self, parameter: Tensor, kept: Tensor) -> Tensor:
        from torchao.optim.subclass_8bit import OptimState8bit

        if not isinstance(kept, OptimState8bit):
            return kept
        value = torch.empty(kept.shape, device=kept.device)
        for part, rounded in zip(value.view(-1).split(SLICE), _slices(kept), strict=True):
            part.copy_(rounded.dequantize())
        if not isinstance(parameter, DTensor):
            return value
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def put(self, parameter: Tensor, key: str, value: Tensor, kept: Tensor | None) -> Tensor:
        part = local(value)
        if key == MASTER or part.numel() < SMALLEST or part.numel() % BLOCK:
            return value
        if kept is None:
            kept = _zeros(part, signed=key == "exp_avg")
        for exact, rounded in zip(part.reshape(-1).split(SLICE), _slices(kept), strict=True):
            rounded.copy_(exact)
        return kept

    def saved_state(self, parameter: Tensor) -> State:
        """Return float32 moments in host memory."""
        saved = {}
        for key, kept in super().saved_state(parameter).items():
            saved[key] = self.fetch(parameter, kept).detach().cpu()
        return saved


def _slices(kept: Any) -> Iterator[Any]:
    """Yield views of a rounded tensor, of SLICE elements each."""
    codes, scales = kept.codes.view(-1).split(SLICE), kept.scale.split(SLICE // BLOCK)
    for code, scale in zip(codes, scales, strict=True):
        yield type(kept)(code, scale, kept.qmap, kept.signed, dtype=torch.float32)


def _zeros(part: Tensor, *, signed: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    zeros: Tensor = OptimState8bit.zeros(
        part.shape, signed, BLOCK, part.device, dtype=torch.float32
    )
    return zeros
