"""Our correction in the place of verl's, on a batch of its driver."""

from __future__ import annotations

from typing import Any, Literal

from onepolicy.config import CorrectionConfig
from onepolicy.correct.reweight import reweight
from onepolicy.integrations.core.advantages import turns_of

Average = Literal["slots", "sequences"]


def correct_batch(
    data: Any, correction: CorrectionConfig, *, loss_agg_mode: str = "token-mean"
) -> dict[str, float]:
    """Add `rollout_is_weights` to a DataProto and return the correction's report.

    The batch is that of a whole step: self-normalisation and budgets count over it. Every policy
    loss of verl multiplies the weights in. A rejected token weighs 0. `response_mask` stays as it
    is, and with it every denominator and baseline, so rejecting some tokens does not make the
    others louder.

    Args:
        data: with old_log_probs, rollout_log_probs and response_mask [B, R], padded on the right.
        correction: one that needs no new policy.
        loss_agg_mode: verl's. Self-normalised weights average 1 in the mean that the loss takes.
    """
    tensors = data.batch
    mask = tensors["response_mask"].bool()
    average: Average = "slots"
    if loss_agg_mode == "seq-mean-token-mean":
        average = "sequences"
    applied = reweight(
        tensors["old_log_probs"].float(),
        tensors["rollout_log_probs"].float(),
        mask,
        correction,
        turn=turns_of(mask),
        average=average,
    )
    tensors["rollout_is_weights"] = applied.weight
    return applied.report
