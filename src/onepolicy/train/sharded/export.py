"""Export of a sharded checkpoint: model files in the layout of transformers, from the shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from onepolicy.models.load import layer_prefix
from onepolicy.train.sharded.shards import (
    MODEL,
    SHARDS,
    WEIGHTS_FILE,
    read_tensors,
    tensor_sizes,
)

FILE_BYTES = 2**30
INDEX = "model.safetensors.index.json"
PREFIX = f"{MODEL}/"


def export_model(folder: Path, like: PreTrainedModel) -> None:
    """Write model-*.safetensors, their index and the config. Then delete the sharded weights.

    like: the model on the meta device, with the config to be written.
    """
    weights = {
        name.removeprefix(PREFIX): size
        for name, size in tensor_sizes(folder).items()
        if name.startswith(PREFIX)
    }
    weight_map: dict[str, str] = {}
    for number, names in enumerate(file_groups(weights), start=1):
        tensors = _read_weights(folder, {name: weights[name] for name in names})
        saved = revert_weight_conversion(like, tensors)
        file = f"model-{number:05d}.safetensors"
        save_file(
            {name: tensor.clone() for name, tensor in saved.items()},
            folder / file,
            metadata={"format": "pt"},
        )
        weight_map |= dict.fromkeys(saved, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / INDEX).write_text(index, encoding="utf-8")
    if like.is_remote_code():
        custom_object_save(like, folder, config=like.config)  # type: ignore[arg-type]
    like.config.save_pretrained(folder)
    if like.generation_config is not None:
        like.generation_config.save_pretrained(folder)
    for written in (folder / SHARDS).glob(f"*model-{WEIGHTS_FILE:05d}-of-*.safetensors"):
        written.unlink()


def _read_weights(folder: Path, sizes: dict[str, TensorStorageMetadata]) -> dict[str, Tensor]:
    """Read the whole tensors with these names from the shards."""
    tensors = {
        PREFIX + name: torch.empty(size.size, dtype=size.properties.dtype)
        for name, size in sizes.items()
    }
    read_tensors(folder, tensors)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def file_groups(weights: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    """Yield the names of each file, of about FILE_BYTES.

    Tensors of one layer stay together, because some of them are saved as parts of one tensor.
    """
    layers: dict[str, list[str]] = {}
    for name in weights:
        layers.setdefault(layer_prefix(name), []).append(name)
    group: list[str] = []
    group_bytes = 0
    for names in layers.values():
        group += names
        group_bytes += sum(_num_bytes(weights[name]) for name in names)
        if group_bytes >= FILE_BYTES:
            yield group
            group, group_bytes = [], 0
    if group:
        yield group


def _num_bytes(size: TensorStorageMetadata) -> int:
    return size.size.numel() * size.properties.dtype.itemsize
