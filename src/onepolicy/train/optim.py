"""The optimiser and its learning rate."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from onepolicy.config.model import OptimConfig


def learning_rate(config: OptimConfig, update: int, done: float) -> float:
    """Of optimiser step `update` (from 0), with this share of the run's steps done.

    Not a share of optimiser steps: a parent with other mini_steps, or steps with fewer, have counted otherwise.
    """
    warm = min(1.0, (update + 1) / (config.warmup_steps + 1))
    left = 1 - done if config.decay == "linear" else 1.0
    return config.lr * warm * left


MASTER = "master"  # state of a parameter: its float32 value


class MasterAdamW(torch.optim.AdamW):
    """AdamW of parameters in any dtype with moments and weights in float32; the parameters are the weights rounded.

    In bfloat16 alone an update of less than 1/256 of a weight is lost.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rounded = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter.dtype != torch.float32:
                    rounded[parameter] = parameter.data
                    grad, parameter.grad = parameter.grad.float(), None
                    parameter.data = self.state[parameter].pop(MASTER, parameter.data.float())
                    parameter.grad = grad
        try:
            super().step()
        finally:
            for parameter, data in rounded.items():
                parameter.grad = None
                self.state[parameter][MASTER] = parameter.data
                parameter.data = data.copy_(parameter.data)


def adamw(model: nn.Module, config: OptimConfig, device: torch.device) -> MasterAdamW:
    return MasterAdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )


def clip_gradients(model: nn.Module, limit: float) -> float:
    """Scale the gradients to a total norm of at most `limit`; the norm before, over all ranks of a sharded model."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
