"""Parts of an update beside the policy's own loss, and an update's measurements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.correct.report import Sums, combine
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


@dataclass(slots=True)
class Measured:
    """The measurements of an update. Those of micro-batches, minibatches and ranks add up."""

    sums: Counter[str] = field(default_factory=Counter)  # over slots
    seconds: float = 0.0  # of the forwards that replace a scoring forward (bypass)
    replaced: list[Tensor] = field(default_factory=list)
    """[L] of each forward in soft replay: the fraction of experts that were replaced."""
    correction: Sums | None = None  # of the correction's current-policy part
    scored: TokenBatch | None = None  # the first minibatch as its update scored it (bypass)

    def add_correction(self, sums: Sums) -> None:
        if self.correction is not None:
            sums = combine([self.correction, sums])
        self.correction = sums


class UpdatePart:
    """A set of calls in an update. Every method does nothing here.

    The learner calls the methods in the order in which they are listed.
    """

    def fill_fields(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        """Fill per-slot fields of the batch before the update."""
        return batch

    def adjust(self, micro: MicroBatch, measured: Measured) -> None:
        """Change the weights, rejections or baseline of a micro-batch after its forward."""

    def backward(self, micro: MicroBatch, slots: int, measured: Measured) -> None:
        """Run the part's own loss and backward, after the policy's backward.

        slots: trainable slots of the whole optimiser step.
        """

    def metrics(self, batch: TokenBatch, measured: Measured) -> dict[str, float]:
        """Return the metrics of the step, at its end."""
        return {}


class Reference(UpdatePart):
    """The frozen model of objective.kl. It routes every token itself."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.no_grad()
    def fill_fields(self, batch: TokenBatch, scorer: PolicyScorer) -> TokenBatch:
        logp = scorer.compute_per_slot(batch, lambda micro: scorer.forward(micro, self.model).logp)
        return batch.replace(logp_ref=logp)
