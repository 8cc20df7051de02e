"""Limits on the JSON files of a stranger's model folder, which transformers takes for its own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from transformers import PreTrainedConfig

from onepolicy.bounded import less_memory
from onepolicy.config import ModelConfig, UsageError

CONFIG_MEMORY, MEMORY_PER_BYTE = 2**31, 64
"""Bytes that reading a config or tokenizer may take, and more for each byte of the folder's files.

A config of a kilobyte can ask for a billion labels."""


def memory_of_settings(model: ModelConfig) -> AbstractContextManager[None]:
    """Return a context in which reading a config or tokenizer takes little memory."""
    return less_memory(CONFIG_MEMORY + MEMORY_PER_BYTE * _size_of(model, "*.json"))


def refuse_large_shapes(model: ModelConfig, config: PreTrainedConfig) -> None:
    """Raise UsageError if the config's largest matrices are far larger than the stored weights.

    transformers would fill them with random numbers before anyone sees that the shapes differ.
    """
    stored = _size_of(model, "*.safetensors")
    if stored == 0:
        return
    sizes = {
        name: value
        for name, value in config.get_text_config().to_dict().items()
        if type(value) is int and value > 0
    }
    hidden, experts = sizes.get("hidden_size", 1), [1]
    experts += [n for name, n in sizes.items() if "experts" in name and "per_tok" not in name]
    inner = min((n for name, n in sizes.items() if name.endswith("intermediate_size")), default=1)
    layers = sizes.get("num_hidden_layers", 1) * inner * max(experts)
    needed = 4 * hidden * max(sizes.get("vocab_size", 1), layers)
    if needed > CONFIG_MEMORY // 2 + MEMORY_PER_BYTE * stored:
        raise UsageError(
            f"model.path: the config.json of {model.path} makes weights of {needed:,} bytes, its "
            f"files hold {stored:,}; restore the config.json that belongs to them"
        )


def _size_of(model: ModelConfig, pattern: str) -> int:
    """Return the bytes of the folder's files with such a name; 0 for an id of the hub."""
    return sum(path.stat().st_size for path in Path(model.path).glob(pattern) if path.is_file())
