"""FSDP2 over the ranks: one group per decoder layer, and one for all other parameters."""

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
    """The ranks that share a model, and the dtype in which its parameters are gathered."""

    mesh: DeviceMesh
    compute: torch.dtype | None = None  # None: the parameters' own

    def shard(self, model: nn.Module) -> None:
        """Shard a model in place, layer by layer, onto the mesh's device.

        `model` is a transformers model or contains one (the critic). Gradients are summed over the
        ranks in float32, not averaged, because the loss weight of a slot is already that of the
        whole minibatch.
        """
        precision = MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=torch.float32)
        transformer = next(m for m in model.modules() if isinstance(m, PreTrainedModel))
        for part in (*decoder_layers(transformer), model):
            # reshard_after_forward for the outermost group too. By default it stays gathered after
            # a forward, and then an optimiser would not find its shards.
            sharded = fully_shard(
                part, mesh=self.mesh, mp_policy=precision, reshard_after_forward=True
            )
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def load(self, empty: PreTrainedModel, read: Callable[[], PreTrainedModel]) -> PreTrainedModel:
        """Return the model that `read` returns, sharded.

        empty: the same model on the meta device. Only rank 0 calls `read`, and holds the whole
        model in host memory. Tied parameters would be separated on the meta device. So for a model
        with tied parameters every rank reads the whole model.
        """
        if _has_tied_parameters(empty):
            model = read()
            self.shard(model)
            return model
        source = None
        if self.mesh.get_local_rank() == 0:
            source = read()
        self.shard(empty)
        empty.to_empty(device=self.mesh.device_type)
        self._copy_from_rank_0(empty, source)
        if source is not None:
            empty.generation_config = source.generation_config
        return empty.eval()

    @torch.no_grad()
    def _copy_from_rank_0(self, model: PreTrainedModel, source: PreTrainedModel | None) -> None:
        """Copy parameters and buffers of `source` into the sharded model.

        source: None on all ranks but rank 0.
        """
        tensors: dict[str, Tensor] = {}
        if source is not None:
            tensors = dict(source.named_parameters()) | dict(source.named_buffers())
        for name, parameter in model.named_parameters():
            if source is None:
                whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            else:
                whole = tensors[name].detach()
            assert isinstance(parameter, DTensor)
            part = distribute_tensor(whole.to(parameter.device), self.mesh, parameter.placements)
            parameter.to_local().copy_(part.to_local())
        for name, buffer in model.named_buffers():
            if source is not None:
                buffer.copy_(tensors[name])
            dist.broadcast(buffer, 0)


def _has_tied_parameters(model: PreTrainedModel) -> bool:
    return len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that transformers declares as one unit (_no_split_modules)."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    if not layers:
        raise UsageError(
            f"train.ranks: {type(model).__name__} does not declare its layers (_no_split_modules), "
            "so it cannot be sharded over ranks; set train.ranks to 0"
        )
    return layers


def gather_full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a shard.

    Every rank must call this for the same tensors in the same order.
    """
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    return tensor
