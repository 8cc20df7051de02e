"""The current-policy part of a correction, over the micro-batches of a step.

It needs the log-probabilities of the policy that is being trained, which only the loss has.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, TrainingError
from onepolicy.correct.current_policy import centered_score
from onepolicy.correct.report import Sums, combine, report
from onepolicy.correct.slots import Fields
from onepolicy.correct.weights import evaluate
from onepolicy.train.extension import LearnerExtension, MicroBatch
from onepolicy.types import TokenBatch

PREFIX = "current_policy."  # of the tensors that ranks send
SUM_FIELDS = tuple(field.name for field in dataclasses.fields(Sums))


class CurrentPolicyCorrection(LearnerExtension):
    """Weights, gates and score centering that depend on the policy being trained."""

    def __init__(self, config: CorrectionConfig, part: CorrectionConfig) -> None:
        """Build the correction. part: the current-policy part of `config` (`live_part`)."""
        self.config, self.part = config, part
        self._sums: list[Sums] = []  # per micro-batch

    def adjust(self, micro: MicroBatch) -> None:
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
        self._sums.append(live.sums)
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

    def metrics(self, batch: TokenBatch, sums: Counter[str]) -> dict[str, float]:
        """Return all metrics of the correction, or only those of the current-policy gates.

        The latter if `reweight` has already reported the rest of the correction.
        """
        metrics = report(self.part, combine(self._sums))
        self._sums.clear()
        if self.config.ratio == "new/rollout":
            return metrics
        gates = {
            f"{name}.new": value
            for name, value in metrics.items()
            if name.startswith("correction/rejected/")
        }
        kept = sums["kept"]
        return gates | {
            "correction/kept": kept,
            "correction/rejected": 1 - kept / batch.num_trainable,
        }

    def pop_counts(self) -> dict[str, Tensor]:
        if not self._sums:
            return {}
        sums = combine(self._sums)
        self._sums = []
        return {f"{PREFIX}{name}": getattr(sums, name).cpu() for name in SUM_FIELDS}

    def add_counts(self, answers: Sequence[dict[str, Tensor]]) -> None:
        sums_of_ranks = [
            _sums_of(answer) for answer in answers if f"{PREFIX}{SUM_FIELDS[0]}" in answer
        ]
        if sums_of_ranks:
            self._sums.append(combine(sums_of_ranks))


def _sums_of(answer: dict[str, Tensor]) -> Sums:
    missing = [name for name in SUM_FIELDS if f"{PREFIX}{name}" not in answer]
    if missing:
        raise TrainingError(f"a rank's answer is malformed: its sums lack {missing[0]}")
    return Sums(**{name: answer[f"{PREFIX}{name}"] for name in SUM_FIELDS})
