"""Export of an adapter's checkpoint: the adapter alone, or its base with the adapter merged in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import ModelConfig, UsageError
from onepolicy.files import write_folder
from onepolicy.models import lora
from onepolicy.models.load import context_length, foreign_files, load_base
from onepolicy.sync.canary import canary_prompts
from onepolicy.sync.truth import merge_loss
from onepolicy.train import checkpoint

ADAPTER_FILES = (lora.CONFIG, lora.WEIGHTS)
NOT_COPIED = (checkpoint.STATE, "config.json")
PROMPTS, TOP = 32, 64
"""Prompts of the fixed batch, and likeliest tokens after each that are compared."""


class MergeLoss(NamedTuple):
    """The change that a merge into another dtype makes to log-probabilities [nats]."""

    effect: float  # how far the adapter moves them
    lost: float  # how far a merge moves them otherwise


def export_adapter(folder: Path, out: Path) -> int:
    """Write the adapter and the tokenizer of a checkpoint to `out`, as peft loads them.

    `out` is complete or absent. Returns the bytes of A and B. Raises UsageError if the checkpoint
    is damaged or holds no adapter.
    """
    checkpoint.verify(folder)
    if not lora.is_adapter_folder(folder):
        raise UsageError(
            f"--adapter: {folder} holds a whole model and no adapter; leave --adapter out"
        )
    with foreign_files("the adapter", ModelConfig(path=str(folder)), limited=False):
        size = sum(tensor.nbytes for tensor in load_file(folder / lora.WEIGHTS).values())
    with write_folder(out) as writing:
        for name in ADAPTER_FILES:
            shutil.copyfile(folder / name, writing / name)
        _copy_tokenizer(folder, writing)
    return size


def export_merged(folder: Path, out: Path, dtype: torch.dtype) -> tuple[int, MergeLoss]:
    """Write base + adapter of a checkpoint to `out` as one model, with matrices in `dtype`.

    Base and adapter are added in float32. `out` is complete or absent. Returns the bytes of the
    weights and the loss of the merge. Raises UsageError if the checkpoint is damaged, or its base
    is not the one that the adapter was trained on.
    """
    checkpoint.verify(folder)
    adapter = ModelConfig(path=str(folder))
    with foreign_files("the adapter", adapter, limited=False):
        model = load_base(adapter, torch.device("cpu"))
        tuner = lora.put_adapter(model, folder)
    loss = _merge_loss(model, dtype)
    merged = lora.merge(tuner)
    for parameter in merged.parameters():
        if parameter.dim() > 1:
            parameter.data = parameter.data.to(dtype)
    merged.config.dtype = dtype
    with write_folder(out) as writing:
        merged.save_pretrained(writing)
        checkpoint.write_index(writing)
        _copy_tokenizer(folder, writing)
    return sum(parameter.nbytes for parameter in merged.parameters()), loss


@torch.no_grad()
def _merge_loss(model: PreTrainedModel, dtype: torch.dtype) -> MergeLoss:
    """Measure the loss of a merge into `dtype` after random prompts, without an engine."""
    vocab, longest = model.config.get_text_config().vocab_size, context_length(model.config)
    prompts = torch.tensor(canary_prompts(vocab, longest, PROMPTS), device=model.device)
    with lora.adapters_off(model):
        base = _score(model, prompts)
    ids = base.topk(min(TOP, vocab)).indices
    return MergeLoss(*merge_loss(model, dtype, lambda: _score(model, prompts), base, ids))


def _score(model: PreTrainedModel, prompts: Tensor) -> Tensor:
    """Return the log-probabilities of the token after each prompt, [P, vocabulary] float32."""
    return model(input_ids=prompts, use_cache=False).logits[:, -1].float().log_softmax(-1)


def _copy_tokenizer(folder: Path, out: Path) -> None:
    for path in folder.iterdir():
        weights = ".safetensors" in path.suffixes or path.name == lora.CONFIG  # or their index
        if path.is_file() and not weights and path.name not in NOT_COPIED:
            shutil.copyfile(path, out / path.name)
