"""Limits on the JSON files of a stranger's model folder, which transformers takes for its own."""

from __future__ import annotations

import copy
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from onepolicy.bounded import less_memory, refuse_holes, refuse_pipes, size_of_data
from onepolicy.config import ModelConfig, UsageError
from onepolicy.errors import short_repr

CONFIG_MEMORY, MEMORY_PER_BYTE = 2**31, 64
"""Bytes that reading a config or tokenizer may take, and more for each byte of the folder's files.

A config of a kilobyte can ask for a billion layers."""
MAX_LAYERS, MAX_LABELS = 512, 10_000
SIZE = re.compile(
    r"^(n_embd|n_head|n_inner|d_model|d_ff|d_kv)$|_(size|dim|heads|experts|groups|rank)$"
)
NO_SIZE = re.compile(r"window|chunk|max|batch|image|patch|pad|group_size|block_size")
"""Settings of a config that are widths or counts of tensors, and those that only sound like it."""
MOST_OF_A_SIZE, MOST_TOKENS = 2**20, 2**24
AT_LEAST_ONE = ("hidden_size", "num_attention_heads", "vocab_size", "head_dim")
MOST_NUMBERS, NUMBERS_PER_BYTE = 2**26, 2
"""Numbers that the tensors of a model may have, and more for each byte of its stored weights.

A byte holds two numbers of the smallest format (MXFP4)."""


def refuse_holes_in(model: ModelConfig) -> None:
    """Raise UsageError if a model's folder has a file that is nearly all holes, or a pipe.

    Limits grow with the sizes of files, and files are read whole.
    """
    for path in Path(model.path).glob("*"):
        refuse_pipes(path)
        if path.is_file():
            refuse_holes(path, "restore the file")


def memory_of_settings(model: ModelConfig) -> AbstractContextManager[None]:
    """Return a context in which reading a config or tokenizer takes little memory."""
    return less_memory(CONFIG_MEMORY + MEMORY_PER_BYTE * _size_of(model, "*.json"))


def check_counts(model: ModelConfig) -> None:
    """Raise ValueError if a folder's config asks for many layers or labels, or for huge tensors.

    Transformers makes a list of the layers, which takes minutes of a billion, and names for all
    labels. It also copies them several times, which takes 10 s of a million. `plan` reads a config
    without its weights, so nothing else says how large its tensors may be.
    """
    file = Path(model.path) / "config.json"
    if file.is_file():
        json.loads(file.read_bytes(), object_hook=_check_counts)


def _check_counts(fields: dict[str, Any]) -> dict[str, Any]:
    expected = {"num_hidden_layers": ("1 to", MAX_LAYERS), "num_labels": ("at most", MAX_LABELS)}
    if "configuration_files" in fields:
        raise ValueError("configuration_files names other configs in its place; leave it out")
    for name, (words, most) in expected.items():
        count = fields.get(name)
        if isinstance(count, int | float) and count > most:
            raise ValueError(f"{name} is {short_repr(count)}; expected {words} {most}")
    for name, value in fields.items():
        _check_size(name, value)
    return fields


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not SIZE.search(name) or NO_SIZE.search(name):
        return
    least, most = int(name in AT_LEAST_ONE), MOST_OF_A_SIZE
    if "vocab" in name:
        most = MOST_TOKENS
    if not least <= value <= most:
        raise ValueError(f"{name} is {short_repr(value)}; expected {least} to {most}")


def check_experts(config: PreTrainedConfig) -> None:
    """Raise ValueError if a token would get more experts than there are, or none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    counts = [getattr(config, name, None) for name in names]
    most = max((count for count in counts if isinstance(count, int)), default=0)
    chosen = getattr(config, "num_experts_per_tok", None)
    if most and isinstance(chosen, int) and not 1 <= chosen <= most:
        raise ValueError(f"num_experts_per_tok is {chosen}; expected 1 to {most}")


def on_meta(config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return the config's model on the meta device: names and shapes without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **options)
    return model


def refuse_large_shapes(model: ModelConfig, config: PreTrainedConfig) -> None:
    """Raise UsageError if the config's tensors are far larger than the stored weights.

    transformers would fill them with random numbers before anyone sees that the shapes differ.
    Tensors that no checkpoint has (rotary frequencies, masks) count too.
    """
    stored = _size_of(model, "*.safetensors")
    if stored == 0 and not Path(model.path).exists():
        return
    plain = copy.deepcopy(config)
    if hasattr(plain, "quantization_config"):
        del plain.quantization_config
    empty = on_meta(plain, trust_remote_code=model.trust_remote_code)
    tensors = {id(tensor): tensor for tensor in (*empty.parameters(), *empty.buffers())}
    numbers = sum(tensor.numel() for tensor in tensors.values())
    if numbers > MOST_NUMBERS + NUMBERS_PER_BYTE * stored:
        largest = max(tensors.values(), key=torch.Tensor.numel)
        raise UsageError(
            f"model.path: the config.json of {model.path} makes tensors of {numbers:,} numbers, "
            f"the largest of shape {list(largest.shape)}, but its files hold {stored:,} bytes; "
            "restore the config.json that belongs to them"
        )


def _size_of(model: ModelConfig, pattern: str) -> int:
    """Return the bytes of the folder's files with such a name; 0 for an id of the hub."""
    return sum(size_of_data(path) for path in Path(model.path).glob(pattern) if path.is_file())
