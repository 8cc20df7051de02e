"""The trained model and how its parameters are held and updated."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from onepolicy.config.base import LARGEST, MOST, Amount, Few, Frozen, Rate, Tokens

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

    lr: Rate = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.98)
    eps: Amount = 1e-8
    weight_decay: float = Field(0.0, ge=0, le=LARGEST)
    warmup_steps: int = Field(0, ge=0, le=MOST)
    """Optimiser steps over which the learning rate rises linearly from 0."""
    lr_decay: Literal["none", "linear"] = "none"
    """linear: the learning rate falls linearly over the whole run and would reach 0 one optimiser step after its last.
    A fork with another number of steps falls over its own."""
    clip_norm: Amount = 1.0
    max_skipped: int = Field(0, ge=0, le=MOST)
    """Updates in a row that are skipped because their gradients are not finite: weights and moments stay, the log says
    so (train/updates_skipped). One more ends the run; 0: the first one does."""


class TrainConfig(Frozen):
    device: str = "auto"
    """`auto`: cuda if there is one, else cpu."""
    threads: Few | None = None
    """CPU threads of the trainer and of engines in its process; unset: all cores, half of them each where the embedded
    engine samples while the trainer learns (rollout.max_staleness)."""
    tokens_per_micro_batch: Tokens = 16384
    """Samples are packed into micro-batches of at most this many slots; a longer sample gets one of its own."""
    activation_checkpointing: bool = False
    autocast: Literal["off", "bfloat16"] = "off"
    fsdp_param_dtype: Literal["same", "bfloat16"] = "same"
    """bfloat16: with train.ranks, forward and backward use parameters gathered in bfloat16 (FSDP2's mixed precision),
    while the ranks' float32 shards, the sum of their gradients and AdamW stay float32."""
    ranks: int = Field(0, ge=0, le=2**16)
    """Processes that share the learner by FSDP2, one per GPU; this process is the first and starts the others. 0: the
    learner lives unsharded in this process. Under torchrun it is the number of its processes and may be left out."""
    rank_timeout: Amount = 1800.0
    """With train.ranks: seconds after which a rank that does not answer, or does not come, ends the run."""
    reuse_scoring_forward: bool = False
    """Keep the graph of the scoring forward and use it for the update: one forward fewer per step, at the price of
    holding every activation of the step. Needs objective.num_minibatches = 1 and no activation checkpointing."""

    @model_validator(mode="after")
    def _ranks_take_effect(self) -> Self:
        if not self.ranks:
            for name in ("fsdp_param_dtype", "rank_timeout"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    raise ValueError(
                        f"train.{name}: {value} has no effect without train.ranks; set that as well, under torchrun to "
                        "the number of its processes"
                    )
        if self.fsdp_param_dtype == "bfloat16" and self.autocast == "bfloat16":
            raise ValueError(
                "train.autocast: has no effect with train.fsdp_param_dtype = bfloat16; choose one"
            )
        if self.ranks > 1 and ":" in self.device:
            raise ValueError(
                f"train.device: {self.device} is one device, but each of train.ranks = {self.ranks} takes its own; use "
                "auto, cpu or cuda"
            )
        return self
