"""prime-rl's custom loss, with every correction that one sample of a step can express.

prime-rl scores no batch before the update: its only ratio is policy being trained / rollout. With
one update per batch, as prime-rl does, the old policy is the new one, detached. So fixed
corrections take that, and live ones take the ratio as it is.
"""

from __future__ import annotations

import functools
import json
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.reweight import reweight
from onepolicy.integrations.core.advantages import needs_whole_step, of_a_part, turns_of
from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.core.preflight import Preflight
from onepolicy.integrations.core.settings import read_settings
from onepolicy.integrations.core.step import token_metrics

FIRST = FirstStep("prime-rl")
"""Of this process. prime-rl hands the loss no object that lives as long."""


class LossOutputs(NamedTuple):
    """The result of a loss, as prime-rl reads it."""

    loss: Tensor  # scalar: a sum over tokens, which prime-rl divides by the step's count
    metrics: dict[str, Tensor]  # [n] values of tokens, which prime-rl joins over samples and ranks


class _Weights(NamedTuple):
    weight: Tensor  # [T] float32
    keep: Tensor  # [T] bool


def loss(
    inputs: Any,
    *,
    correction: Any = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_tau: float = 0.0,
) -> LossOutputs:
    """Return the policy loss of one sample: -sum(weight * advantage * log p).

    Args:
        inputs: prime-rl's LossInputs.
        correction: a preset's name, or a table as in a recipe. None weighs nothing.
        clip_low, clip_high: bounds of the ratio below and above 1, for `ppo-is`.
        kl_tau: coefficient of prime-rl's squared log-ratio. Its own losses have one.

    Raises:
        UsageError: there is no such correction, or one sample cannot express it.
    """
    config = _config(json.dumps(correction, sort_keys=True))
    new, mask = inputs.trainer_logprobs, inputs.loss_mask.bool()
    rollout, advantages = inputs.inference_logprobs.float(), inputs.advantages.float()
    if not mask.any():
        return LossOutputs(new.sum() * 0.0, {})
    FIRST.gather(new.detach().float(), rollout, mask)
    found = _weights(config, new.detach().float(), rollout, mask, advantages)
    # the difference is masked before exp: where it is inf, exp's gradient would be NaN
    ratio = torch.where(found.keep, new - rollout, 0.0).exp()
    if config.surrogate == "ppo":
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        surrogate = torch.min(ratio * advantages, clipped * advantages)
    else:
        surrogate = advantages * new
    per_token = -torch.where(found.keep, found.weight * surrogate, 0.0)
    if kl_tau:
        finite = mask & rollout.isfinite()
        per_token = per_token + kl_tau * torch.where(finite, new - rollout, 0.0).square()
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    return LossOutputs(per_token.sum(), _metrics(new.detach(), rollout, mask, found))


@functools.cache
def _config(correction: str) -> CorrectionConfig:
    """Return the correction of a JSON text that one sample can express."""
    settings = read_settings({"correction": json.loads(correction)}, "trainer.loss.kwargs")
    config = settings.correction or CorrectionConfig()
    report = Preflight("prime-rl")
    report.require(
        f"one sample for {config.name}",
        not needs_whole_step(config),
        found="a loss that prime-rl calls once a sample",
        fix="it counts over the whole step; choose another correction",
    )
    report.require(
        "sampler's log-probabilities for score centering",
        config.centering == "none",
        found=f"centering={config.centering}",
        fix="prime-rl carries no likeliest tokens of the sampler; choose another correction",
    )
    report.finish()
    return of_a_part(config)


def _weights(
    config: CorrectionConfig, logp: Tensor, rollout: Tensor, mask: Tensor, advantages: Tensor
) -> _Weights:
    """Return weight and keep of each token, fixed and live parts together."""
    rows = logp[None], rollout[None], mask[None]
    turn = turns_of(rows[2])
    fixed = reweight(*rows, config.fixed_part, turn=turn, advantage=advantages[None])
    if config.live_part is None:
        return _Weights(fixed.weight[0], fixed.keep[0])
    live = live_weights(*rows, config.live_part, turn=turn, advantage=advantages[None])
    return _Weights((fixed.weight * live.weight)[0], (fixed.keep & live.keep)[0])


def _metrics(logp: Tensor, rollout: Tensor, mask: Tensor, found: _Weights) -> dict[str, Tensor]:
    values = token_metrics(logp, rollout)
    metrics = {name: row[mask & row.isfinite()] for name, row in values.items()}
    metrics["correction/weight_mean"] = found.weight[mask]
    metrics["correction/rejected"] = (~found.keep)[mask].float()
    return metrics
