"""The current-policy part of a correction, over the micro-batches of a step.

It needs the log-probabilities of the policy that is being trained, which only the loss has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.correct.current_policy import centered_score
from onepolicy.correct.report import report
from onepolicy.correct.slots import Fields
from onepolicy.correct.weights import evaluate
from onepolicy.train.update_parts import Measured, MicroBatch, UpdatePart
from onepolicy.types import TokenBatch


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
        assert scored.top is not None, "collect() asks the engine for top log-probabilities"
        assert rollout is not None
        slots = centred.nonzero()[:, 0]
        baseline = centered_score(scored.top[slots], rollout[slots], self.config)
        return torch.zeros_like(scored.logp).index_copy(0, slots, baseline)

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
