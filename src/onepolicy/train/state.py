"""Protocols of the learner and critic that a checkpoint stores, sharded or not."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from onepolicy.train.optim import MasterAdamW

SHARDS = "shards"  # folder of a checkpoint that several ranks wrote


class CheckpointedCritic(Protocol):
    """A critic whose weights and optimiser a checkpoint stores."""

    @property
    def values(self) -> nn.Module: ...
    @property
    def optimizer(self) -> MasterAdamW: ...
    def load(self, weights: dict[str, Tensor], path: str) -> None: ...


class CheckpointedLearner(Protocol):
    """A learner whose weights, optimiser and counters a checkpoint stores."""

    model: PreTrainedModel
    version: int
    updates: int
    skipped: int

    @property
    def optimizer(self) -> MasterAdamW: ...
    @property
    def critic(self) -> CheckpointedCritic | None: ...


def optimizer_moments(model: nn.Module, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Return the optimiser's state tensors, named KEY/PARAMETER."""
    return {
        f"{key}/{name}": value.contiguous()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.saved_state(parameter).items()
    }


def sharded_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded like `parameter`.

    If `parameter` is not sharded, return the tensor itself.
    """
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
