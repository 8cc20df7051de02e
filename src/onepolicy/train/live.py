"""The part of a correction that needs the policy being trained, over the micro-batches of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.correct.live import centered_score, live_weights
from onepolicy.correct.receipt import Sums, combine, report
from onepolicy.train.forward import Scored
from onepolicy.types import TokenBatch


class LiveCorrection:
    """Does nothing if the correction has no such part."""

    def __init__(self, config: CorrectionConfig) -> None:
        self.config, self.part = config, config.live_part
        self._sums: list[Sums] = []  # per micro-batch

    def apply(self, new: Scored, micro: TokenBatch) -> tuple[TokenBatch, Tensor | None]:
        """The micro-batch with the weights and rejections of `new`, and the `centre` of its policy loss."""
        if self.part is None:
            return micro, None
        live = live_weights(
            new.logp,
            micro.logp_rollout,
            micro.trainable,
            self.part,
            segment=micro.segment,
            turn=micro.turn,
            advantage=micro.advantage,
        )
        assert micro.weight is not None
        assert micro.keep is not None
        self._sums.append(live.sums)
        centre = None if self.config.centering == "none" else self._centre(new, micro, live.centred)
        return micro.replace(weight=micro.weight * live.weight, keep=micro.keep & live.keep), centre

    def _centre(self, new: Scored, micro: TokenBatch, where: Tensor) -> Tensor:
        """[T] float32: the value whose gradient is the rollout policy's mean score, 0 outside `where`."""
        assert new.top is not None, "collect() asks the engine for what score centering needs"
        assert micro.top_logp_rollout is not None
        slots = where.nonzero()[:, 0]
        centre = centered_score(new.top[slots], micro.top_logp_rollout[slots], self.config)
        return torch.zeros_like(new.logp).index_copy(0, slots, centre)

    def take(self) -> Sums | None:
        """What was measured since the last report, which starts anew; `add` puts it back, of this or other ranks."""
        taken, self._sums = self._sums, []
        return combine(taken) if taken else None

    def add(self, sums: Sums) -> None:
        self._sums.append(sums)

    def report(self, kept: float, slots: int) -> dict[str, float]:
        """Of the step, which this ends: all of the correction, or the gates it adds to what was fixed before."""
        if self.part is None:
            return {}
        numbers = report(self.part, combine(self._sums))
        self._sums.clear()
        if self.config.ratio == "new/rollout":
            return numbers
        gates = {f"{name}.new": value for name, value in numbers.items() if name.startswith("correction/rejected/")}
        return gates | {"correction/kept": kept, "correction/rejected": 1 - kept / slots}
