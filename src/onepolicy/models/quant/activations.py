"""int8 codes of what a layer multiplies its weights with: with scales of its own, or calibrated ones."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.models.quant.formats import INT8_MAX, SMALLEST, int8_rows, to_int8


class Static:
    """One scale for all inputs of a layer, calibrated once; until then every token has its own.

    Calibration transfer (FlashRL): activations change little while RL trains, so the scale of the first policy is kept.
    Every call notes what says whether that still holds: the largest value seen, and how many the scale cuts off.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None  # [] float32
        self.forget()

    def forget(self) -> None:
        self.largest = torch.zeros(())
        self.clipped = torch.zeros((), dtype=torch.int64)
        self.values = 0

    def calibrate(self, largest: float) -> None:
        self.scale = torch.tensor(max(largest / INT8_MAX, SMALLEST))
        self.forget()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, in] -> codes [N, in] int8, scale [N, 1] float32."""
        x = x.float()
        size = x.abs()
        self.largest = torch.maximum(self.largest, size.amax())
        if self.scale is None:
            return int8_rows(x)
        if self.scale.device != x.device:
            self.scale = self.scale.to(x.device)
        self.values += x.numel()
        self.clipped = self.clipped + (size > (INT8_MAX + 0.5) * self.scale).sum()
        return to_int8(x, self.scale), self.scale.expand(len(x), 1)

    @property
    def limit(self) -> float:
        """The calibrated largest value."""
        assert self.scale is not None
        return INT8_MAX * float(self.scale)

    @property
    def drift(self) -> float:
        """Largest value seen since `forget` over the calibrated one."""
        return float(self.largest) / self.limit


def staleness(layers: dict[str, Static]) -> dict[str, float]:
    """How well calibrated scales fit what was seen since the last call (loop/metrics.py); {} if nothing was."""
    seen = [layer for layer in layers.values() if layer.values]
    if not seen:
        return {}
    drift = [layer.drift for layer in seen]
    found = {
        "quant/clipped": sum(int(layer.clipped) for layer in seen) / sum(layer.values for layer in seen),
        "quant/drift_mean": sum(drift) / len(drift),
        "quant/drift_max": max(drift),
    }
    for layer in seen:
        layer.forget()
    return found
