"""The part of a correction that needs the policy being trained, over the micro-batches of a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, TrainingError
from onepolicy.correct.current_policy import centered_score, live_weights
from onepolicy.correct.report import Sums, combine, report
from onepolicy.train.extension import LearnerExtension, MicroBatch
from onepolicy.types import TokenBatch

PREFIX = "live."  # of tensors that ranks send


class CurrentPolicyCorrection(LearnerExtension):
    def __init__(self, config: CorrectionConfig, part: CorrectionConfig) -> None:
        """part: of `config`, what is evaluated with the new policy (`live_part`)."""
        self.config, self.part = config, part
        self._sums: list[Sums] = []  # per micro-batch

    def weigh(self, micro: MicroBatch) -> None:
        """Multiply the micro-batch's weights, add rejections, set the baseline of score centering."""
        batch, new = micro.batch, micro.scored
        live = live_weights(
            new.logp,
            batch.logp_rollout,
            batch.trainable,
            self.part,
            segment=batch.segment,
            turn=batch.turn,
            advantage=batch.advantage,
        )
        assert batch.weight is not None
        assert batch.keep is not None
        self._sums.append(live.sums)
        if self.config.centering != "none":
            micro.score_baseline = self._score_baseline(micro, live.centred)
        micro.batch = batch.replace(weight=batch.weight * live.weight, keep=batch.keep & live.keep)

    def _score_baseline(self, micro: MicroBatch, where: Tensor) -> Tensor:
        """[T] float32: the value whose gradient is the rollout policy's mean score, 0 outside `where`."""
        new, rollout = micro.scored, micro.batch.top_logp_rollout
        assert new.top is not None, "collect() asks the engine for what score centering needs"
        assert rollout is not None
        slots = where.nonzero()[:, 0]
        score_baseline = centered_score(new.top[slots], rollout[slots], self.config)
        return torch.zeros_like(new.logp).index_copy(0, slots, score_baseline)

    def metrics(self, batch: TokenBatch, sums: Counter[str]) -> dict[str, float]:
        """All of the correction, or the gates it adds to what was fixed before."""
        numbers = report(self.part, combine(self._sums))
        self._sums.clear()
        if self.config.ratio == "new/rollout":
            return numbers
        gates = {
            f"{name}.new": value
            for name, value in numbers.items()
            if name.startswith("correction/rejected/")
        }
        kept = sums["kept"]
        return gates | {
            "correction/kept": kept,
            "correction/rejected": 1 - kept / batch.num_trainable,
        }

    def take(self) -> dict[str, Tensor]:
        taken, self._sums = self._sums, []
        if not taken:
            return {}
        sums = combine(taken)
        return {
            f"{PREFIX}{field.name}": getattr(sums, field.name).cpu()
            for field in dataclasses.fields(Sums)
        }

    def add(self, taken: Sequence[dict[str, Tensor]]) -> None:
        names = [field.name for field in dataclasses.fields(Sums)]
        found = [tensors for tensors in taken if f"{PREFIX}{names[0]}" in tensors]
        for tensors in found:
            if missing := [name for name in names if f"{PREFIX}{name}" not in tensors]:
                raise TrainingError(f"a rank's answer is malformed: its sums lack {missing[0]}")
        if found:
            each = [
                Sums(**{name: tensors[f"{PREFIX}{name}"] for name in names}) for tensors in found
            ]
            self._sums.append(combine(each))
