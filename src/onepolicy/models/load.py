"""Open a transformers causal LM and its tokenizer, with every check that needs no weights made first."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from onepolicy.config import ModelConfig, UsageError


def device_of(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"train.device: {name!r} is not a torch device; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"train.device: {name!r}, but torch sees no CUDA device; use auto or cpu")
    return device


def read_config(model: ModelConfig) -> PreTrainedConfig:
    """The model's config. Raises UsageError for a folder or hub id that holds none."""
    path = Path(model.path)
    looks_local = path.is_absolute() or model.path.startswith(".") or model.path.count("/") != 1
    if path.exists() and not (path / "config.json").is_file():
        raise UsageError(f"model.path: {path} has no config.json; give a folder saved by transformers' save_pretrained")
    if not path.exists() and looks_local:
        raise UsageError(f"model.path: no folder {model.path}; give a saved model, a hub id (org/name) or `tiny`")
    try:
        return AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"model.path: cannot read the config of {model.path!r}: {reason}") from None


def context_length(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().max_position_embeddings)


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path: {model.path} has no tokenizer: {str(error).splitlines()[0]}") from None
    if tokenizer.eos_token_id is None:
        raise UsageError(
            f"model.path: the tokenizer of {model.path} has no eos token, so no completion could ever stop"
        )
    return tokenizer


def load_model(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Weights in `dtype` on `device`, in eval mode. An incomplete checkpoint is an error, not random weights."""
    opened: Any
    try:
        opened = AutoModelForCausalLM.from_pretrained(
            model.path, dtype=dtype, trust_remote_code=model.trust_remote_code, output_loading_info=True
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"model.path: cannot load {model.path!r}: {str(error).splitlines()[0]}") from None
    loaded, info = opened
    if info["missing_keys"]:
        raise UsageError(f"model.path: {model.path} lacks weights, first {sorted(info['missing_keys'])[0]}")
    return loaded.to(device).eval()


def cache_dir() -> Path:
    """Where policies made here are kept: $XDG_CACHE_HOME/onepolicy, by default ~/.cache/onepolicy."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onepolicy"
