"""The trained model and how its parameters are held and updated."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from onepolicy.config.base import Frozen

Beta = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(Frozen):
    path: str
    """Folder or hub id of a transformers causal LM with its tokenizer; `tiny` is the policy `make-policy` builds."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trained parameters."""
    lm_head: Literal["same", "float32"] = "same"
    """float32: the vocabulary projection alone, where parameters or autocast make what is below it bfloat16."""
    trust_remote_code: bool = False


class OptimConfig(Frozen):
    """AdamW with gradient clipping."""

    lr: PositiveFloat = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: PositiveFloat = 1e-8
    weight_decay: float = Field(0.0, ge=0)
    warmup_steps: int = Field(0, ge=0)
    """Optimiser steps over which the learning rate rises linearly from 0."""
    decay: Literal["none", "linear"] = "none"
    """linear: the learning rate falls linearly over the whole run and would reach 0 one optimiser step after its last.
    A fork with another number of steps falls over its own."""
    clip_norm: PositiveFloat = 1.0


class TrainConfig(Frozen):
    device: str = "auto"
    """`auto`: cuda if there is one, else cpu."""
    threads: PositiveInt | None = None
    """CPU threads of the trainer and of engines in its process; unset: all cores."""
    tokens_per_micro_batch: PositiveInt = 16384
    """Samples are packed into micro-batches of at most this many slots; a longer sample gets one of its own."""
    activation_checkpointing: bool = False
    autocast: Literal["off", "bfloat16"] = "off"
    reuse_scoring_forward: bool = False
    """Keep the graph of the scoring forward and use it for the update: one forward fewer per step, at the price of
    holding every activation of the step. Needs objective.mini_steps = 1 and no activation checkpointing."""
