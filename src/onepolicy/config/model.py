"""The trained model and how its parameters are held and updated."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from onepolicy.config.base import (
    LARGEST_FLOAT,
    LARGEST_INT,
    Frozen,
    LearningRate,
    PositiveFloat,
    SmallCount,
    Tokens,
)
from onepolicy.config.lora import LoraSetting

Beta = Annotated[float, Field(ge=0, lt=1)]


def usable_cores() -> int:
    """Return how many cores this process may use, which train.threads and train.ranks share."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ModelConfig(Frozen):
    """The model that is trained."""

    path: str
    """Folder or hub id of a transformers causal LM with its tokenizer, or `tiny` (make-policy)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the trained parameters. A new run on a GPU that names no precision takes bfloat16,
    with float32 master weights."""
    lm_head: Literal["same", "float32"] = "same"
    """Dtype of the vocabulary projection: `same` as the layers below it, or float32."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder or hub page brings along."""


class OptimConfig(Frozen):
    """AdamW with gradient clipping."""

    lr: LearningRate = 1e-6
    """Learning rate."""
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    """AdamW's decay rates of the two moments."""
    eps: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = Field(0.0, ge=0, le=LARGEST_FLOAT)
    """AdamW's weight decay. 0: none."""
    warmup_steps: int = Field(0, ge=0, le=LARGEST_INT)
    """Optimiser steps over which the rate rises linearly from 0; a fork counts its parent's too.
    0: none."""
    lr_decay: Literal["none", "linear"] = "none"
    """linear: the rate falls to 0 after the end of the run, or of the fork."""
    clip_norm: PositiveFloat = 1.0
    """Largest gradient norm; a longer gradient is scaled down."""
    state: Literal["device", "host", "8bit"] = "device"
    """Where AdamW's moments and masters are between updates: beside the parameters, in host memory,
    or beside them with moments in 8 bits (torchao)."""
    max_skipped: int = Field(0, ge=0, le=LARGEST_INT)
    """Updates in a row that may be skipped for gradients that are not finite. 0: the first ends the
    run."""


class TrainConfig(Frozen):
    """Device, precision and memory of the trainer."""

    device: str = "auto"
    """Torch device: cpu, cuda, cuda:N. auto: cuda if there is one."""
    threads: SmallCount | None = None
    """CPU threads of the trainer and of engines in its process. Unset: all cores, or half each
    where the embedded engine samples while the trainer learns."""
    tokens_per_micro_batch: Tokens = 16384
    """Most slots of a micro-batch. A longer sample has one of its own."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward: less memory, more time."""
    logits_chunk: int | None = Field(None, ge=0, le=LARGEST_INT)
    """Most slots whose logits exist at once; the backward computes each chunk's again. Unset: 1 GiB
    of float32 logits. 0: no chunks."""
    autocast: Literal["off", "bfloat16"] = "off"
    """torch.autocast of the trainer's forwards, for float32 parameters."""
    fsdp_param_dtype: Literal["same", "bfloat16"] = "same"
    """With train.ranks: dtype of the parameters that FSDP2 gathers. Shards, sums of gradients and
    AdamW stay float32."""
    ranks: int = Field(0, ge=0, le=2**16)
    """Processes that share the learner by FSDP2, one per GPU. 0: one process, unsharded. May be
    left out under torchrun."""
    rank_timeout: PositiveFloat = 1800.0
    """Seconds after which a rank that does not answer or start ends the run."""
    reuse_scoring_forward: bool | None = None
    """Update by the graph of the scoring forward: saves a forward, keeps all activations of a step.
    Needs one minibatch and no activation checkpointing. Unset: in steps of one micro-batch, where
    it costs no memory."""

    skip_zero_advantage: bool = True
    """Leave groups with equal rewards out of the update where the loss has no other term: baseline
    group or leave-one-out, one minibatch, no ranks."""
    share_prompts: bool = True
    """Compute a group's common prefix once per forward, where tokens and replayed routes agree. On
    a CPU; not in soft replay, nor with recurrent layers."""

    lora: LoraSetting = None
    """Train low-rank adapters in place of the weights (docs/lora.md). Unset or off: all weights."""
