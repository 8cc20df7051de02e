"""The critic of PPO: a copy of the policy's backbone with a scalar head and its own AdamW.

Its weights and optimiser are saved in the run's checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import UsageError
from onepolicy.config.model import OptimConfig
from onepolicy.config.objective import CriticConfig
from onepolicy.models.buckets import BucketedPacking
from onepolicy.objective.gae import value_loss
from onepolicy.train.optimizers import adamw
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.sharded.fsdp import FSDPSharding
from onepolicy.train.state import sharded_like
from onepolicy.train.update_parts import Measured, MicroBatch, UpdatePart
from onepolicy.types import TokenBatch


class ValueModel(nn.Module):
    """A backbone with a scalar head.

    The head starts at zero, so until it has learned, every value is 0.
    """

    def __init__(self, backbone: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = backbone
        parameter = next(backbone.parameters())
        size = backbone.config.get_text_config().hidden_size
        self.head = nn.Linear(size, 1, device=parameter.device, dtype=parameter.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, micro: TokenBatch) -> Tensor:
        """Return [T] float32: the value of the state before each slot's token is chosen.

        It is 0 where a slot is not trainable.
        """
        hidden = self.backbone(
            input_ids=micro.input_ids[None],
            position_ids=micro.positions[None],
            use_cache=False,
            packing=BucketedPacking.of(micro.cu_seqlens, micro.input_ids.device),
        ).last_hidden_state[0]
        return torch.where(micro.trainable, self.head(hidden)[:, 0].float(), 0.0)


class Critic(UpdatePart):
    """The value model, its loss and its optimiser."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: CriticConfig,
        optim: OptimConfig,
        sharding: FSDPSharding | None = None,
        *,
        protect: bool = False,
        autocast: torch.dtype | None = None,
    ) -> None:
        """Build the critic.

        model: a second copy of the policy, prepared for training; its language head is not used.
        protect: also learn from slots that the correction rejects. autocast: of its forwards.
        """
        backbone = model.base_model
        assert isinstance(backbone, PreTrainedModel)
        self.values = ValueModel(backbone)
        if sharding is not None:
            sharding.shard(self.values)
        self.config, self.protect, self.autocast = config, protect, autocast
        device = next(self.values.parameters()).device
        self.optimizer = adamw(self.values, optim.model_copy(update={"lr": config.lr}), device)

    def fill_fields(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        return batch.replace(value=scorer.compute_per_slot(batch, self._values))

    def _values(self, batch: TokenBatch) -> Tensor:
        """Return the values [T] float32."""
        device, on = batch.input_ids.device.type, self.autocast is not None
        with torch.autocast(device, self.autocast, enabled=on):
            values: Tensor = self.values(batch)
        return values

    def backward(self, micro: MicroBatch, slots: int, measured: Measured) -> None:
        batch = micro.batch
        assert batch.value is not None, "score() fills value"
        assert batch.value_target is not None, "compute_advantages() fills value_target"
        assert batch.keep is not None
        mask = batch.keep
        if self.protect:
            mask = batch.trainable
        loss, clipped = value_loss(
            self._values(batch), batch.value, batch.value_target, clip=self.config.clip
        )
        total = torch.where(mask, loss, 0.0).sum()
        (total / slots).backward()
        clipped_slots = (mask & clipped).sum().item()
        measured.sums.update({"value_loss": total.item(), "value_clipped": clipped_slots})

    def optimizer_step(self, rate: float) -> None:
        """Make one optimiser step at `rate` times the critic's own learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * rate
        self.optimizer.step()

    def metrics(self, batch: TokenBatch, measured: Measured) -> dict[str, float]:
        explained = explained_variance(batch)
        if explained is None:
            return {}
        return {"train/value_explained": explained}

    def load(self, weights: dict[str, Tensor], path: str) -> None:
        """Copy these tensors into the critic. Names are those of `values.state_dict()`."""
        state = self.values.state_dict()
        if state.keys() != weights.keys():
            raise UsageError(
                f"{path}: not the critic of this model; delete the checkpoint for an older one"
            )
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(sharded_like(tensor, weights[name]))


@torch.no_grad()
def explained_variance(batch: TokenBatch) -> float | None:
    """Return 1 - Var(R - V) / Var(R) over the trainable slots.

    It is 1 for a critic that predicts every return, and 0 for one that predicts their mean. None if
    all returns are equal up to float32 rounding: then there is no variance to explain.
    """
    assert batch.value is not None
    assert batch.value_target is not None
    target = batch.value_target[batch.trainable].double()
    value = batch.value[batch.trainable].double()
    total = float(target.var(correction=0))
    unexplained = float((target - value).var(correction=0))
    rounding = 1e-12 * float((target.square() + value.square()).mean())
    if not total > rounding:
        return None
    return 1 - unexplained / total
