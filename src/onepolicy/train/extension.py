"""Extensions of an update beside the policy's own loss. The learner calls each of them in turn."""

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
    logp_behaviour: Tensor  # [T] float32, the policy in the denominator of the loss's ratio
    score_baseline: Tensor | None = None  # [T] float32, of the policy loss


class LearnerExtension:
    """Hooks of an update. Every method does nothing here.

    The learner calls the methods in the order in which they are listed.
    """

    def fill_fields(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        """Fill per-slot fields of the batch before the update."""
        return batch

    def adjust(self, micro: MicroBatch) -> None:
        """Change the weights, rejections or baseline of a micro-batch after its forward."""

    def backward(self, micro: MicroBatch, slots: int, sums: Counter[str]) -> None:
        """Run the extension's own loss and backward, after the policy's backward.

        slots: trainable slots of the whole optimiser step.
        """

    def clip_gradients(self) -> list[float]:
        """Clip the extension's own gradients. Return their norms before clipping."""
        return []

    def optimizer_step(self, rate: float) -> None:
        """Make one optimiser step at `rate` times the extension's own learning rate."""

    def zero_grad(self) -> None: ...

    def metrics(self, batch: TokenBatch, sums: Counter[str]) -> dict[str, float]:
        """Return the metrics of the step, at its end."""
        return {}

    def pop_counts(self) -> dict[str, Tensor]:
        """Return and reset this rank's measurements; the driver passes them to `add_counts`."""
        return {}

    def add_counts(self, answers: Sequence[dict[str, Tensor]]) -> None:
        """Add the measurements of all ranks.

        answers: one per rank; an answer may hold other tensors too.
        """


class Reference(LearnerExtension):
    """The frozen model of objective.kl. It routes every token itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def fill_fields(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        logp = scorer.compute_per_slot(batch, lambda micro: scorer.forward(micro, self.model).logp)
        return batch.replace(logp_ref=logp)
