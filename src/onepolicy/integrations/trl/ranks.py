"""Small values of all processes of a trainer, sent as JSON. Nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch


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
    return [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes, strict=True)]
