"""Settings of `make-policy`: the shape of the tiny policy, and its supervised warm-up."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from onepolicy.config.base import (
    LARGEST_FLOAT,
    Count,
    Frozen,
    LargeCount,
    LearningRate,
    Seed,
    SmallCount,
    Tokens,
)
from onepolicy.config.rules import Rule, error, unused
from onepolicy.config.task import ChainTask, TaskConfig

POLICY_RULES: tuple[Rule[PolicyConfig], ...] = (
    error(
        "top_k: {top_k} is more than experts={experts}; lower it or add experts",
        lambda policy: policy.top_k > policy.experts,
    ),
    error(
        "kv_heads: {kv_heads} does not divide heads={heads}; use a divisor of it",
        lambda policy: policy.heads % policy.kv_heads != 0,
    ),
    error(
        "head_dim: {head_dim} is odd, but rotary embeddings turn pairs; use an even number",
        lambda policy: policy.head_dim % 2 == 1,
    ),
    error(
        "mistakes_from: {mistakes_from} leaves none of {steps} steps; lower it",
        lambda policy: policy.clean_steps == policy.steps,
    ),
    *unused("mistakes_from", lambda policy: not policy.mistakes, "mistakes = 0"),
)


class PolicyConfig(Frozen):
    """A Qwen3-MoE of 3.6 million parameters, warmed up on solutions with planted mistakes.

    With `recurrent` it is a Qwen3.5-MoE.
    """

    rules: ClassVar = POLICY_RULES

    task: TaskConfig = ChainTask()
    """Task whose answers the policy is warmed up on."""
    hidden_size: SmallCount = 128
    """Width of the residual stream."""
    layers: SmallCount = 8
    """Decoder layers, all of them MoE."""
    recurrent: int = Field(0, ge=0, le=64)
    """Layers of the gated delta rule before each of attention: 3 is Qwen3.5-MoE's. 0: attention
    only."""
    experts: SmallCount = 32
    """Experts of a layer."""
    top_k: SmallCount = 4
    """Experts that a router chooses for a token."""
    expert_size: SmallCount = 32
    """Intermediate width of one expert."""
    heads: SmallCount = 4
    """Query heads of attention."""
    kv_heads: SmallCount = 2
    """Key and value heads of attention. Divides heads."""
    head_dim: SmallCount = 32
    """Width of a head, even."""
    max_len: Tokens = 512
    """Context length [tokens]."""
    mistakes: float = Field(0.1, ge=0, lt=1)
    """Share of planted errors in the warm-up data, which RL then removes: random digits (chain),
    letters and digits of the answer (other tasks). 0: none."""
    mistakes_from: float = Field(0.0, ge=0, lt=1)
    """Share of the warm-up before mistakes are planted; with them copying from the prompt is learnt
    late or never."""
    steps: Count = 800
    """Optimiser steps of the warm-up."""
    tokens_per_step: LargeCount = 1024
    """Tokens of a warm-up step."""
    lr: LearningRate = 2e-3
    """Learning rate of the warm-up."""
    warmup_steps: Count = 50
    """Steps over which the learning rate rises linearly from 0."""
    load_balance: float = Field(0.01, ge=0, le=LARGEST_FLOAT)
    """Coefficient of the router load-balancing loss. 0: none."""
    threads: SmallCount = 1
    """CPU threads. Weights depend on it in the last bits, so the machine does not choose it."""
    seed: Seed = 0
    """Seed of weights and warm-up data."""

    @property
    def clean_steps(self) -> int:
        """Warm-up steps before mistakes are planted."""
        return round(self.mistakes_from * self.steps)


def cached_policy_path(config: PolicyConfig) -> Path:
    """Return the folder of this policy in the user's cache.

    Its name follows from the settings, so other settings have another folder.
    """
    left_out = set()
    if not config.recurrent:  # policies that were made before the setting keep their folder
        left_out.add("recurrent")
    settings = config.model_dump_json(exclude=left_out)
    digest = hashlib.blake2b(settings.encode(), digest_size=5).hexdigest()
    return cache_dir() / f"policy-{digest}"


def cache_dir() -> Path:
    """Return the folder of policies made here: $XDG_CACHE_HOME/onepolicy or ~/.cache/onepolicy."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onepolicy"
