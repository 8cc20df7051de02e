"""The optimiser of a model, by `optim.state`."""

from __future__ import annotations

import torch
from torch import nn

from onepolicy.config.model import OptimConfig
from onepolicy.train.eight_bit_adamw import EightBitAdamW
from onepolicy.train.optim import MasterAdamW
from onepolicy.train.streamed_adamw import HostAdamW


def adamw(model: nn.Module, config: OptimConfig, device: torch.device) -> MasterAdamW:
    """Return the AdamW whose state rests where the settings say."""
    widen_gradients(model)
    kind: type[MasterAdamW] = MasterAdamW
    if config.state == "host":
        kind = HostAdamW
    elif config.state == "8bit":
        kind = EightBitAdamW
    return kind(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )


def widen_gradients(model: nn.Module) -> None:
    """Add gradients up in float32: of 256 equal shares bfloat16 would lose those that follow."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32
