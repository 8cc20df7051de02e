"""`onepolicy export` once torch is loaded: the files that transformers, vLLM and SGLang load."""

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
from onepolicy.console import print_status, print_text
from onepolicy.files import write_folder
from onepolicy.models.load import DTYPES, files_of_index
from onepolicy.models.lora import NF4, read_header
from onepolicy.notation import number
from onepolicy.train import checkpoint
from onepolicy.train.adapter_export import export_adapter, export_merged

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
NOT_EXPORTED = (checkpoint.STATE, INDEX, CONFIG)
DAMAGED = "export another checkpoint"


def export(folder: Path, out: Path, dtype: str, *, adapter: bool) -> None:
    """Write the model of a checkpoint, or of a run's newest, to `out`, and print that folder.

    adapter: write the adapter of a run with train.lora alone.
    """
    if (folder / checkpoint.FOLDER).is_dir():
        folder = checkpoint.latest_checkpoint(folder)
    if adapter or (folder / "adapter_config.json").is_file():
        size = _export_lora(folder, out, dtype, alone=adapter)
    else:
        print_status(f"exporting {folder} in {dtype}")
        size = export_checkpoint(folder, out, DTYPES[dtype])
    print_status(f"{size / 1e9:.3f} GB of weights written")
    print_text(out)


def _export_lora(folder: Path, out: Path, dtype: str, *, alone: bool) -> int:
    """Write an adapter, alone or merged into its base. Return the bytes of the weights."""
    if alone:
        print_status(f"exporting the adapter of {folder}")
        size = export_adapter(folder, out)
        if NF4 in read_header(folder):
            print_status("it was trained on its base in nf4, and is another policy on any other")
        return size
    print_status(f"merging the adapter of {folder} into its base in {dtype}")
    size, loss = export_merged(folder, out, DTYPES[dtype])
    if NF4 in read_header(folder):
        print_status("its base was in nf4: the model written holds what that dequantises to")
    print_status(
        f"the adapter moves the log-probabilities of a fixed batch by {number(loss.effect)} nats; "
        f"merged into {dtype} it moves them {number(loss.lost)} nats otherwise"
    )
    return size


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
