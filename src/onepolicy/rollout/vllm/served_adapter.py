"""A vLLM server's part of train.lora.sync = native: what it takes, and the files of an adapter.

vLLM's server loads an adapter from a folder and keeps no other copy, so the worker that receives
one writes it to a folder of its own.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from onepolicy.rollout.remote.replies import AdapterLimits
from onepolicy.sync.weight_files import WeightFiles

ADAPTERS_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""vLLM's variable without which its server loads no adapters while it runs."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_limits(lora_config: Any) -> AdapterLimits | None:
    """Return the adapters that this server takes, None if this server loads no adapters.

    lora_config: of vLLM, None without adapters.
    """
    if lora_config is None or os.environ.get(ADAPTERS_VARIABLE) != "1":
        return None
    layers = sorted(lora_config.target_modules or [])
    return AdapterLimits(rank=int(lora_config.max_lora_rank), layers=layers)


class AdapterFiles:
    """A folder of this process with its newest adapter.

    It is removed when the process ends, or by the next such process if this one was killed.
    """

    def __init__(self) -> None:
        self._files = WeightFiles(None, "TMPDIR")  # removes its folder when it is collected
        self._number = 0

    def write(self, tensors: dict[str, Tensor], settings: str) -> str:
        """Write an adapter as peft and vLLM load it. Return its folder.

        settings: content of adapter_config.json. The adapter before the last one is removed: vLLM
        may read the last one again until this one is loaded.
        """
        self._number += 1
        base = self._files.folder
        shutil.rmtree(base / str(self._number - 2), ignore_errors=True)
        folder = base / str(self._number)
        folder.mkdir()
        (folder / CONFIG).write_text(settings, encoding="utf-8")
        kept = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
        save_file(kept, folder / WEIGHTS, metadata={"format": "pt"})
        return str(folder)
