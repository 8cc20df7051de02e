"""The adapter that a learner hands to an engine which computes with it (train.lora.sync)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor


class AdapterSource(Protocol):
    """A LoRA adapter: its name, and its tensors, in memory or as files."""

    name: str  # in requests and replies

    def factors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return A [r, I] and B [O, r], float32, by the name of the weight that they adapt."""
        ...

    def write(self, folder: Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json, for engines that load files."""
        ...
