"""Corrections as factors on the advantages, for trainers without a hook in the loss.

Every surrogate in use (PPO's clip, dual clip, clip-higher, GSPO, CISPO, SAPO, REINFORCE) is linear
in the advantage as long as its sign stays. So an advantage times a weight w >= 0 is the policy loss
times w, whatever the trainer's loss looks like. KL and entropy terms stay as they are. A rejected
slot has w = 0, and the trainer's mask and denominator stay: the others do not become louder.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.correct.presets import check_config, preset
from onepolicy.correct.reweight import reweight
from onepolicy.correct.weights import Average


class WeightedAdvantages(NamedTuple):
    """The advantages of a step with their correction."""

    advantages: Tensor  # [B, T], the weight multiplied in; 0 where not kept
    weight: Tensor  # [B, T] float32
    keep: Tensor  # [B, T] bool
    report: dict[str, float]  # `correction/...`; empty if the mask selects nothing


def fixed_correction(correction: str | CorrectionConfig) -> CorrectionConfig:
    """Return a correction whose weights do not need the policy that is being trained.

    Raises:
        UsageError: no correction has the name, or it needs the ratio of the new policy, which
            exists only in the trainer's loss.
    """
    config = named_correction(correction)
    assert config is not None
    if config.live:
        raise UsageError(
            f"correction {config.name} needs the ratio of the policy that is being trained, which "
            "exists only in the loss; weights on the advantages cannot express it. Choose a fixed "
            "one (tis, mis, icepop, ...) or the trainer's loss hook"
        )
    return config


def named_correction(correction: str | CorrectionConfig | None) -> CorrectionConfig | None:
    """Return a correction by its name, or None for none. Raises UsageError for an unknown name."""
    if correction is None:
        return None
    config: object = correction
    if isinstance(correction, str):
        config = preset(correction)
    check_config("correction", config)
    assert isinstance(config, CorrectionConfig)
    return config


def of_a_part(config: CorrectionConfig) -> CorrectionConfig:
    """Return the correction for a hook that sees a part of a batch: a sample, a micro-batch.

    `max_nonfinite` is a share of the whole batch, so a part does not raise for it. Tokens that are
    not finite are rejected all the same, and counted in `mismatch/nonfinite`.
    """
    return config.model_copy(update={"max_nonfinite": 1.0})


def needs_whole_step(config: CorrectionConfig) -> bool:
    """Return whether a weight depends on other samples of the step."""
    return config.scales or any(gate.aggregate == "budget" for gate in config.gates)


def turns_of(mask: Tensor) -> Tensor:  # [B, T] bool -> [B, T] int64
    """Return the turn of each response token, from 0 on.

    A turn is a run of sampled tokens; tool output lies between the runs. The other tokens have the
    number of the turn before them, and 0 before the first.
    """
    before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
    starts = mask & ~before
    return (starts.cumsum(1) - 1).clamp(min=0)


@torch.no_grad()
def weighted_advantages(
    advantages: Tensor,  # [B] or [B, T] floating
    logp_old: Tensor,  # [B, T] float32, trainer before the update
    logp_rollout: Tensor,  # [B, T] float32, rollout engine
    mask: Tensor,  # [B, T] bool, the sampled tokens
    correction: CorrectionConfig,
    *,
    turn: Tensor | None = None,  # [B, T] int64, turn of each token
    average: Average = "slots",
) -> WeightedAdvantages:
    """Return the advantages [B, T] times the correction's weight of each token.

    Call it once per step on all samples: self-normalisation and budgets count over the step.
    average: of the trainer's loss, over all tokens or over sequences of their means.

    Raises:
        UsageError: shapes do not fit together, or as of `onepolicy.reweight`.
    """
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand_as(mask)
    if advantages.shape != mask.shape:
        raise UsageError(
            f"weighted_advantages: advantages are {list(advantages.shape)} and the mask "
            f"{list(mask.shape)}; give [B] or the shape of the mask"
        )
    if not mask.any():
        nothing = torch.zeros_like(logp_old)
        none = torch.zeros_like(advantages)  # not a product: they may be NaN
        return WeightedAdvantages(none, nothing, torch.zeros_like(mask), {})
    applied = reweight(
        logp_old, logp_rollout, mask, correction, turn=turn, advantage=advantages, average=average
    )
    # A rejected slot may hold an advantage that is not finite.
    corrected = torch.where(applied.keep, advantages * applied.weight, 0.0)
    return WeightedAdvantages(
        corrected.to(advantages.dtype), applied.weight, applied.keep, applied.report
    )
