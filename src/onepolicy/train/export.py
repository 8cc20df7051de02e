"""Export of a checkpoint's model: the files that transformers, vLLM and SGLang load, rounded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.config.json_shapes import parse_json
from onepolicy.files import write_folder
from onepolicy.models.load import files_of_index
from onepolicy.train import checkpoint

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
NOT_EXPORTED = (checkpoint.STATE, INDEX, CONFIG)
DAMAGED = "export another checkpoint"


def export_checkpoint(folder: Path, out: Path, dtype: torch.dtype) -> int:
    """Write the model and tokenizer of a checkpoint to `out`, with matrices in `dtype`.

    Vectors (norms, biases) stay as they are: they are small, and some families need them in
    float32. One weight file is in memory at a time. `out` is complete or absent. Returns the bytes
    of the weights. Raises UsageError if the checkpoint is damaged or has no whole model.
    """
    checkpoint.verify(folder)
    files = files_of_index(folder)
    if not files:
        raise UsageError(f"{folder}: has no {INDEX}, so no whole model to export")
    weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
    with write_folder(out) as writing:
        size = sum(_export_file(folder / name, writing / name, dtype) for name in sorted(files))
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map})
        (writing / INDEX).write_text(text, encoding="utf-8")
        _export_config(folder / CONFIG, writing / CONFIG, dtype)
        _copy_other_files(folder, writing)
    return size


def _export_file(source: Path, target: Path, dtype: torch.dtype) -> int:
    try:
        with safe_open(source, "pt") as file:
            names = list(file.keys())
            tensors = {name: _rounded(file.get_tensor(name), dtype) for name in names}
    # the others: kinds of numbers that torch lacks, or cannot round
    except (SafetensorError, AttributeError, LookupError, RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{source}: cannot be read: {reason}; {DAMAGED}") from None
    save_file(tensors, target, metadata={"format": "pt"})
    return sum(tensor.nbytes for tensor in tensors.values())


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dim() < 2 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _export_config(source: Path, target: Path, dtype: torch.dtype) -> None:
    config = parse_json(source.read_bytes(), str(source), DAMAGED)
    if not isinstance(config, dict):
        raise UsageError(f"{source}: not a JSON object; {DAMAGED}")
    config["dtype"] = str(dtype).removeprefix("torch.")
    target.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _copy_other_files(folder: Path, out: Path) -> None:
    """Copy the tokenizer and generation settings."""
    for path in folder.iterdir():
        weights = path.suffix == ".safetensors"
        if path.is_file() and not weights and path.name not in NOT_EXPORTED:
            shutil.copyfile(path, out / path.name)
