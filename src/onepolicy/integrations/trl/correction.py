"""A correction at the places that TRL has for it: the advantages, and the old log-probabilities.

TRL's losses multiply a ratio new / old by the advantage. A weight that is known before the update
goes into the advantages of the whole generation. A weight of the policy that is being trained is
known only in the loss, after the training forward, and goes into the micro-batch's advantages
there. With the surrogate pg, weight * A * log p, the loss gets no old log-probabilities: TRL then
takes the new ones, the ratio is 1, and its gradient is that of log p.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig
from onepolicy.correct.current_policy import live_weights
from onepolicy.correct.report import report
from onepolicy.correct.weights import Average
from onepolicy.integrations.core.advantages import turns_of, weighted_advantages

OLD, RATIO = "old_per_token_logps", "importance_sampling_ratio"


def has_one_weight_a_sequence(config: CorrectionConfig) -> bool:
    """Return whether all tokens of a sequence have the same weight."""
    levels = config.weight.level in ("none", "geometric", "sequence")
    return levels and all(gate.scope == "sequence" for gate in config.gates)


def average_of(trainer: Any) -> Average:
    """Return the unit that TRL's loss is a mean over. RLOO has no loss_type: sequences."""
    if getattr(trainer, "loss_type", "rloo") in ("grpo", "sapo", "rloo"):
        return "sequences"
    return "slots"


def correct_generation(
    generation: MutableMapping[str, Any],  # TRL's batch; its advantages are replaced
    logp_old: Tensor,  # [B, T] float32
    logp_rollout: Tensor,  # [B, T] float32
    mask: Tensor,  # [B, T] bool
    config: CorrectionConfig,
    average: Average = "slots",
) -> dict[str, float]:
    """Weigh the advantages by the part of the correction that is fixed. Return its report.

    average: of the trainer's loss (`average_of`). TRL's own importance ratio, if it is there,
    becomes 1: ours replaces it. Where the advantages are [B] and the loss is of whole sequences
    (RLOO), they stay [B].
    """
    applied = weighted_advantages(
        generation["advantages"],
        logp_old,
        logp_rollout,
        mask,
        config.fixed_part,
        turn=turns_of(mask),
        average=average,
    )
    generation["advantages"] = applied.advantages
    if "old_logps" in generation:  # RLOO
        first = mask.int().argmax(1, keepdim=True)
        generation["advantages"] = applied.advantages.gather(1, first)[:, 0]
    if RATIO in generation:
        generation[RATIO] = torch.ones_like(generation[RATIO])
    if config.ratio == "new/rollout":  # only rejects; the loss has the rest to report
        return {}
    return applied.report


@torch.no_grad()
def correct_micro_batch(
    inputs: MutableMapping[str, Any],  # of `_compute_loss`, a copy that may be changed
    logp_new: Tensor,  # [B, T] float32, detached
    logp_rollout: Tensor,  # [B, T] float32
    mask: Tensor,  # [B, T] bool
    config: CorrectionConfig,  # one that is live
) -> dict[str, float]:
    """Weigh a micro-batch's advantages under the policy that is being trained. Return a report."""
    part = config.live_part
    assert part is not None
    advantages = inputs["advantages"]
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand_as(mask)
    live = live_weights(
        logp_new, logp_rollout, mask, part, turn=turns_of(mask), advantage=advantages.float()
    )
    inputs["advantages"] = torch.where(live.keep, advantages * live.weight, 0.0)
    if config.surrogate == "pg":
        inputs[OLD] = None
    elif config.surrogate == "ppo":
        inputs[OLD] = torch.where(logp_rollout.isfinite() & mask, logp_rollout, logp_new)
    if not mask.any():
        return {}
    metrics = report(part, live.sums)
    if config.ratio == "new/rollout":
        return metrics
    gates = "correction/rejected/"
    return {f"{name}.new": value for name, value in metrics.items() if name.startswith(gates)}
