"""One training step of a trainer whose whole batch passes through one function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.report import Sums, report
from onepolicy.correct.weights import Average
from onepolicy.integrations.core.advantages import turns_of, weighted_advantages
from onepolicy.integrations.core.metrics import mismatch_metrics

PER_TOKEN = ("mismatch/k1", "mismatch/k3", "mismatch/f2")
"""Metrics that are means over tokens, so that each token has a value of its own."""
NONFINITE = "mismatch/nonfinite"
LIVE = ("correction/rejected", "correction/weight_mean", "correction/ratio_mean")
"""Metrics of a live correction that are means over tokens, as trainers average micro-batches."""
LN2 = 0.6931471805599453


class MeasuredStep(NamedTuple):
    """The advantages of a step with their correction, and its metrics."""

    advantages: Tensor  # [B, T]
    metrics: dict[str, float]  # `mismatch/...`, `correction/...`


class LiveBatch(NamedTuple):
    """The inputs of a trainer's loss, with a correction that needs the policy being trained."""

    advantages: Tensor  # [B, T], 0 where not kept
    logp_old: Tensor  # [B, T], what the loss is to take for its old log-probabilities
    metrics: dict[str, float]  # of LIVE, in this micro-batch; 0 where there is none


@torch.no_grad()
def measure_and_correct(
    advantages: Tensor,  # [B] or [B, T]
    logp_old: Tensor,  # [B, T] float32, trainer before the update
    logp_rollout: Tensor,  # [B, T] float32, rollout engine
    mask: Tensor,  # [B, T] bool, the sampled tokens
    correction: CorrectionConfig | None,
    average: Average = "slots",
) -> MeasuredStep:
    """Return the advantages of a step with the correction's weights, and its metrics.

    average: of the trainer's loss, as of `weighted_advantages`.

    Of a correction that needs the policy being trained, only the part that does not is applied
    (`live_batch` has the other), and nothing is reported.

    Raises UsageError as of `weighted_advantages`.
    """
    metrics = mismatch_metrics(logp_old, logp_rollout, mask)
    if correction is None:
        return MeasuredStep(advantages, metrics)
    sides, turn = (logp_old, logp_rollout, mask), turns_of(mask)
    found = weighted_advantages(
        advantages, *sides, correction.fixed_part, turn=turn, average=average
    )
    if not correction.live:
        metrics = metrics | found.report
    return MeasuredStep(found.advantages, metrics)


@torch.no_grad()
def live_batch(
    advantages: Tensor,  # [B, T]
    logp_new: Tensor,  # [B, T] float32, policy being trained
    logp_old: Tensor,  # [B, T] float32, the trainer's own old log-probabilities
    logp_rollout: Tensor,  # [B, T] float32, rollout engine
    mask: Tensor,  # [B, T] bool
    correction: CorrectionConfig,  # one that is live
) -> LiveBatch:
    """Return the inputs of a loss of exp(new - old) * advantage that apply a live correction.

    With the surrogate pg, weight * advantage * log p, the old log-probabilities are the new ones:
    the ratio is 1 and its gradient is that of log p, and no clip acts. With ppo they are the
    rollout's.
    """
    part = correction.live_part
    assert part is not None
    logp_new = logp_new.detach().float()
    live = live_weights(
        logp_new, logp_rollout, mask, part, turn=turns_of(mask), advantage=advantages.float()
    )
    weighted = torch.where(live.keep, advantages * live.weight, 0.0)
    if correction.surrogate == "pg":
        logp_old = logp_new
    elif correction.surrogate == "ppo":
        logp_old = torch.where(logp_rollout.isfinite() & mask, logp_rollout, logp_new)
    return LiveBatch(weighted.to(advantages.dtype), logp_old, _live_metrics(part, live.sums))


def _live_metrics(correction: CorrectionConfig, sums: Sums) -> dict[str, float]:
    """Return the metrics of LIVE: the same names on every rank, and no value that is not finite.

    A trainer that sums them by name or by position would hang, or log NaN for all ranks.
    """
    numbers = report(correction, sums)
    metrics = dict.fromkeys(LIVE, 0.0)
    return metrics | {name: numbers[name] for name in LIVE if math.isfinite(numbers[name])}


def token_metrics(logp_old: Tensor, logp_rollout: Tensor) -> dict[str, Tensor]:
    """Return each token's value [N] of the metrics of PER_TOKEN, and of `mismatch/nonfinite`.

    Where a log-probability is not finite, the values of PER_TOKEN are NaN, to be left out, and that
    of nonfinite is 1.
    """
    log_rho = logp_old.double() - logp_rollout.double()
    finite = log_rho.isfinite()
    values = (-log_rho, log_rho.expm1() - log_rho, (log_rho.abs() > LN2).double())
    found = {
        name: torch.where(finite, value, torch.nan).float()
        for name, value in zip(PER_TOKEN, values, strict=True)
    }
    return found | {NONFINITE: (~finite).float()}


def padded(rows: Sequence[Tensor]) -> Tensor:
    """Return tensors [T_i] as one [B, T], with zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def unpadded(batch: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return rows of [B, T] with the lengths of the tensors that `padded` took."""
    return [row[: len(old)] for row, old in zip(batch, like, strict=True)]
