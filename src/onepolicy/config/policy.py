"""The tiny policy `make-policy` builds: its shape, and the supervised warm-up that makes it worth training."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from onepolicy.config.base import LARGEST, Count, Few, Frozen, Many, Rate, Seed, Tokens
from onepolicy.config.task import ChainTask, TaskConfig


class PolicyConfig(Frozen):
    """A Qwen3-MoE of 3.6 million parameters, warmed up on worked solutions with planted mistakes."""

    task: TaskConfig = ChainTask()
    hidden_size: Few = 128
    layers: Few = 8
    experts: Few = 32
    top_k: Few = 4
    expert_size: Few = 32
    """Intermediate width of one expert."""
    heads: Few = 4
    kv_heads: Few = 2
    head_dim: Few = 32
    max_len: Tokens = 512
    """Context length."""
    mistakes: float = Field(0.1, ge=0, lt=1)
    """Share of errors planted in the warm-up data, the sampling error RL then removes. Chain task: results replaced by
    a random digit, carried on consistently; other tasks: letters and digits of the answer
    replaced by random ones."""
    mistakes_from: float = Field(0.0, ge=0, lt=1)
    """Share of the warm-up before any mistakes are planted. Copying from the prompt is learnt late or never from
    answers with mistakes; once learnt, it survives them."""
    steps: Count = 800
    tokens_per_step: Many = 1024
    lr: Rate = 2e-3
    warmup_steps: Count = 50
    load_balance: float = Field(0.01, ge=0, le=LARGEST)
    """Weight of the router load-balancing loss during the warm-up."""
    threads: Few = 1
    """CPU threads. Weights depend on it in the last bits, so it is fixed rather than taken from the machine."""
    seed: Seed = 0

    @model_validator(mode="after")
    def _shape_is_possible(self) -> Self:
        if self.top_k > self.experts:
            raise ValueError(
                f"top_k: {self.top_k} is more than experts={self.experts}; lower it or add experts"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads: {self.kv_heads} does not divide heads={self.heads}; use a divisor of it"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim: {self.head_dim} is odd, but rotary embeddings turn pairs; use an even number"
            )
        return self

    @model_validator(mode="after")
    def _mistakes_are_planted(self) -> Self:
        if self.mistakes_from and not self.mistakes:
            raise ValueError(
                f"mistakes_from: {self.mistakes_from} has no effect with mistakes=0; leave it out"
            )
        if self.clean_steps == self.steps:
            raise ValueError(
                f"mistakes_from: {self.mistakes_from} leaves none of {self.steps} steps; lower it"
            )
        return self

    @property
    def clean_steps(self) -> int:
        """Warm-up steps before mistakes are planted."""
        return round(self.mistakes_from * self.steps)


def cached_path(config: PolicyConfig) -> Path:
    """Where this policy lives in the user's cache. The name follows from the settings, so a change makes a new one."""
    digest = hashlib.blake2b(config.model_dump_json().encode(), digest_size=5).hexdigest()
    return cache_dir() / f"policy-{digest}"


def cache_dir() -> Path:
    """Where policies made here are kept: $XDG_CACHE_HOME/onepolicy, by default ~/.cache/onepolicy."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onepolicy"
