"""Values of all processes of a trainer, sent as JSON. Nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch

from onepolicy.integrations.core.metrics import COUNTS, LARGEST


def gather_json(accelerator: Any, value: Any) -> list[Any]:
    """Return the value of every process, in the order of their ranks.

    All processes must call it. Values are whatever JSON holds; tuples come back as lists.
    """
    if accelerator.num_processes == 1:
        return [value]
    from accelerate.utils import gather, pad_across_processes

    text = bytearray(json.dumps(value).encode())
    own = torch.frombuffer(text, dtype=torch.uint8).to(accelerator.device)
    sizes = gather(torch.tensor([len(own)], device=accelerator.device)).tolist()
    rows = gather(pad_across_processes(own, dim=0)[None]).cpu()
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def broadcast_json(accelerator: Any, value: Any) -> Any:
    """Return the main process's value, in every process. As `gather_json`."""
    if accelerator.num_processes == 1:
        return value
    from accelerate.utils import broadcast

    text = bytearray()
    if accelerator.is_main_process:
        text = bytearray(json.dumps(value).encode())
    size = int(broadcast(torch.tensor([len(text)], device=accelerator.device)))
    row = torch.zeros(size, dtype=torch.uint8)
    if accelerator.is_main_process:
        row = torch.frombuffer(text, dtype=torch.uint8)
    return json.loads(broadcast(row.to(accelerator.device)).cpu().numpy().tobytes())


class TrlLog:
    """The numbers that `trainer.log` averages and reports."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def add(self, metrics: dict[str, float]) -> None:
        """Add numbers of this process. All processes must call it as often."""
        of_ranks: list[dict[str, float]] = gather_json(self._trainer.accelerator, metrics)
        names = sorted({name for one in of_ranks for name in one})
        for name in names:
            values = [one[name] for one in of_ranks if name in one]
            value = sum(values) / len(values)
            last = name.rpartition("/")[2]
            if last in LARGEST:
                value = max(values)
            elif last in COUNTS:
                value = sum(values)
            self._trainer._metrics["train"][name].append(value)
