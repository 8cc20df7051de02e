"""The optimiser and its learning rate."""

from __future__ import annotations

import torch
from torch import nn

from onepolicy.config.model import OptimConfig


def learning_rate(config: OptimConfig, update: int, done: float) -> float:
    """Of optimiser step `update` (from 0), with this share of the run's steps done.

    Not a share of optimiser steps: a parent with other mini_steps, or steps with fewer, have counted otherwise.
    """
    warm = min(1.0, (update + 1) / (config.warmup_steps + 1))
    left = 1 - done if config.decay == "linear" else 1.0
    return config.lr * warm * left


def adamw(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )
