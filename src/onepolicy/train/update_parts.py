"""Parts of an update beside the policy's own loss, and an update's measurements."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import CorrectionConfig, TrainingError
from onepolicy.correct.current_policy import centered_score, centered_support_score
from onepolicy.correct.report import Sums, combine, report
from onepolicy.correct.slots import Fields
from onepolicy.correct.weights import evaluate
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
    """[2, L] of each forward in soft replay: replaced share times valid rows; valid rows."""
    correction: Sums | None = None  # of the correction's current-policy part
    scored: TokenBatch | None = None  # as the update scored it, before its optimiser

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


class CurrentPolicyCorrection(UpdatePart):
    """Weights, gates and score centering that depend on the policy being trained."""

    def __init__(self, config: CorrectionConfig, part: CorrectionConfig) -> None:
        """Build the correction. part: the current-policy part of `config` (`live_part`)."""
        self.config, self.part = config, part

    def adjust(self, micro: MicroBatch, measured: Measured) -> None:
        """Multiply the weights, add rejections, set the baseline of score centering."""
        batch = micro.batch
        fields = Fields(
            micro.scored.logp,
            batch.logp_rollout,
            batch.trainable,
            batch.segment,
            batch.turn,
            batch.advantage,
        )
        with torch.no_grad():
            live = evaluate(self.part, fields)
        assert batch.weight is not None
        assert batch.keep is not None
        measured.add_correction(live.sums)
        if self.config.centering != "none":
            micro.score_baseline = self._score_baseline(micro, live.passed)
        micro.batch = batch.replace(weight=batch.weight * live.weight, keep=batch.keep & live.keep)

    def _score_baseline(self, micro: MicroBatch, centred: Tensor) -> Tensor:
        """Return [T] float32, whose gradient is the rollout policy's mean score.

        It is 0 outside the slots of `centred` [T] bool.
        """
        scored, rollout = micro.scored, micro.batch.top_logp_rollout
        if scored.kept_logp is not None:
            return self._support_baseline(micro, scored.kept_logp, centred)
        if scored.top is None:
            raise TrainingError(
                "batch: no log-probabilities of other tokens, which correction.centering = "
                f"{self.config.centering} needs; does the engine return them?"
            )
        assert rollout is not None
        slots = centred.nonzero()[:, 0]
        baseline = centered_score(scored.top[slots], rollout[slots], self.config)
        return torch.zeros_like(scored.logp).index_copy(0, slots, baseline)

    def _support_baseline(self, micro: MicroBatch, kept_logp: Tensor, centred: Tensor) -> Tensor:
        """Return `_score_baseline` over the support. kept_logp: [n], of the trainable slots."""
        batch = micro.batch
        assert batch.support is not None
        slots = batch.trainable.nonzero()[:, 0]
        support = batch.support.at(slots)
        assert support.logp is not None
        baseline = centered_support_score(kept_logp, support.logp, support.sizes, self.config)
        baseline = baseline.masked_fill(~centred[slots], 0.0)
        return torch.zeros_like(micro.scored.logp).index_copy(0, slots, baseline)

    def metrics(self, batch: TokenBatch, measured: Measured) -> dict[str, float]:
        """Return all metrics of the correction, or only those of the current-policy gates.

        The latter if `reweight` has already reported the rest of the correction.
        """
        assert measured.correction is not None, "an update has a micro-batch"
        metrics = report(self.part, measured.correction)
        if self.config.ratio == "new/rollout":
            return metrics
        gates = {
            f"{name}.new": value
            for name, value in metrics.items()
            if name.startswith("correction/rejected/")
        }
        kept = measured.sums["kept"]
        return gates | {
            "correction/kept": kept,
            "correction/rejected": 1 - kept / batch.num_trainable,
        }
