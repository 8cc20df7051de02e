"""A model's parameters over the ranks: FSDP2, one group per decoder layer and one for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from onepolicy.config import UsageError


@dataclass(frozen=True, slots=True)
class FSDPSharding:
    """Over which ranks, and in which dtype parameters are gathered (None: their own)."""

    mesh: DeviceMesh
    compute: torch.dtype | None = None

    def shard(self, model: nn.Module) -> None:
        """In place, layer by layer onto the mesh's device. `model` is a transformers model or holds one (the critic).

        Gradients are summed over the ranks in float32, not averaged: a slot's share in the loss is fixed beforehand.
        """
        precision = MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=torch.float32)
        held = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
        for part in (*decoder_layers(held), model):
            # the outermost too: by default it stays gathered after a forward, where an optimiser would miss its shards
            sharded = fully_shard(
                part, mesh=self.mesh, mp_policy=precision, reshard_after_forward=True
            )
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def load(self, empty: PreTrainedModel, read: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """The model that `read` returns, sharded. Only rank 0 calls it and holds it whole, in host memory.

        empty: the same on the meta device. Tied parameters would come apart there, so then every rank reads them all.
        """
        if len(list(empty.parameters())) < len(
            list(empty.named_parameters(remove_duplicate=False))
        ):
            model = read()
            self.shard(model)
            return model
        source = read() if self.mesh.get_local_rank() == 0 else None
        self.shard(empty)
        empty.to_empty(device=self.mesh.device_type)
        tensors = (
            {} if source is None else dict(source.named_parameters()) | dict(source.named_buffers())
        )
        with torch.no_grad():
            for name, parameter in empty.named_parameters():
                whole = (
                    torch.empty(parameter.shape, dtype=parameter.dtype)
                    if source is None
                    else tensors[name].detach()
                )
                assert isinstance(parameter, DTensor)
                part = distribute_tensor(
                    whole.detach().to(parameter.device), self.mesh, parameter.placements
                )
                parameter.to_local().copy_(part.to_local())
            for name, buffer in empty.named_buffers():
                if source is not None:
                    buffer.copy_(tensors[name])
                dist.broadcast(buffer, 0)
        if source is not None:
            empty.generation_config = source.generation_config
        return empty.eval()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """What transformers says must stay on one device."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UsageError(
            f"train.ranks: {type(model).__name__} does not say what its layers are (_no_split_modules), so it is not "
            "known how to spread it over ranks; set train.ranks to 0"
        )
    return layers


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a shard, gathered: every rank must call this for the same tensors in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
