"""What a checkpoint holds of a learner, sharded or not."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

SHARDS = "shards"  # folder of a checkpoint that several ranks wrote


class CheckpointedCritic(Protocol):
    """A critic, as a checkpoint holds it."""

    @property
    def values(self) -> nn.Module: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    def load(self, weights: dict[str, Tensor], path: str) -> None: ...


class CheckpointedLearner(Protocol):
    """A learner, as a checkpoint holds it."""

    model: PreTrainedModel
    version: int
    updates: int
    skipped: int

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def critic(self) -> CheckpointedCritic | None: ...


def optimizer_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{key}/{name}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """This rank's part of a whole tensor, sharded as `parameter` is; the tensor itself if that is not sharded."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
