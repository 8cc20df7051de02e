"""Sharded weights on disk -> a model folder in transformers' layout, a few tensors in memory at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from onepolicy.models.load import layer_of
from onepolicy.train.sharded.shards import MODEL, SHARDS, WEIGHTS, read, sizes_in

FILE_BYTES = 2**30
INDEX = "model.safetensors.index.json"


def export(folder: Path, like: PreTrainedModel) -> None:
    """Write model-*.safetensors, their index and the config; then the sharded weights go, which are the same.

    like: the model on the meta device, with the config to be written.
    """
    start = f"{MODEL}/"
    weights = {n.removeprefix(start): about for n, about in sizes_in(folder).items() if n.startswith(start)}
    places: dict[str, str] = {}
    for number, names in enumerate(groups(weights), start=1):
        tensors = {start + n: torch.empty(weights[n].size, dtype=weights[n].properties.dtype) for n in names}
        read(folder, tensors)
        saved = revert_weight_conversion(like, {n.removeprefix(start): t for n, t in tensors.items()})
        file = f"model-{number:05d}.safetensors"
        save_file({n: t.clone() for n, t in saved.items()}, folder / file, metadata={"format": "pt"})
        places |= dict.fromkeys(saved, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    like.config.save_pretrained(folder)
    if like.generation_config is not None:
        like.generation_config.save_pretrained(folder)
    for written in (folder / SHARDS).glob(f"*model-{WEIGHTS:05d}-of-*.safetensors"):
        written.unlink()


def groups(weights: dict[str, TensorStorageMetadata]) -> Iterator[list[str]]:
    """Names for files of about FILE_BYTES; a layer's tensors stay together, because some are saved as parts of one."""
    layers: dict[str, list[str]] = {}
    for name in weights:
        layers.setdefault(layer_of(name), []).append(name)
    group: list[str] = []
    size = 0
    for names in layers.values():
        group += names
        size += sum(weights[name].size.numel() * weights[name].properties.dtype.itemsize for name in names)
        if size >= FILE_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
