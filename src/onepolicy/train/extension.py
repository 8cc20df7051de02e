"""What an update may have beside the policy's own loss: each is a small object, and the learner goes through a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.train.forward import Scored
from onepolicy.train.scorer import PolicyScorer
from onepolicy.types import TokenBatch


@dataclass(slots=True)
class MicroBatch:
    """A micro-batch of an update after its forward."""

    batch: TokenBatch  # on the model's device
    scored: Scored
    score_baseline: Tensor | None = None  # [T] float32: score baseline of the policy loss


class LearnerExtension:
    """Every method does nothing here. The learner calls them in the order in which they stand."""

    def fill(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        """Before the update: fill per-slot fields of the batch."""
        return batch

    def weigh(self, micro: MicroBatch) -> None:
        """After a forward: change the micro-batch's weights, rejections or baseline."""

    def learn(self, micro: MicroBatch, slots: int, sums: Counter[str]) -> None:
        """After the policy's backward: own loss and backward. slots: trainable ones of the whole optimiser step."""

    def clip(self) -> list[float]:
        """Clip own gradients; their norms before."""
        return []

    def step(self, rate: float) -> None:
        """One optimiser step at `rate` times the own learning rate."""

    def zero_grad(self) -> None: ...

    def metrics(self, batch: TokenBatch, sums: Counter[str]) -> dict[str, float]:
        """Of the step, which this ends."""
        return {}

    def take(self) -> dict[str, Tensor]:
        """What was measured since the last call, for the driver of several ranks; `add` takes it there."""
        return {}

    def add(self, taken: Sequence[dict[str, Tensor]]) -> None:
        """taken: of every rank, together with what else it answered."""


class Reference(LearnerExtension):
    """The frozen model of objective.kl. It routes every token itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def fill(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        logp = scorer.per_slot(batch, lambda micro: scorer.forward(micro, self.model).logp)
        return batch.replace(logp_ref=logp)
