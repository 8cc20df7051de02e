"""SkyRL's policy loss `onepolicy`: corrections that need the policy that is being trained.

SkyRL's registry is the only one that hands a loss the rollout's log-probabilities. Its losses are
sums: the reduction is folded into the advantages before, so rejected tokens stay in the count.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.integrations.core.advantages import named_correction
from onepolicy.integrations.core.step import live_batch

NAME = "onepolicy"


def register_loss(correction: str | CorrectionConfig) -> None:
    """Register the loss `onepolicy` with SkyRL, at the top of your script.

    SkyRL checks the names of losses when it starts, and sends registered ones to its workers, where
    onepolicy must be installed too.

    Raises UsageError if the correction does not need the policy being trained.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry

    PolicyLossRegistry.register(NAME, policy_loss_of(correction))


def registered_correction() -> CorrectionConfig | None:
    """Return the correction of the loss that SkyRL's registry has, None if it has none of ours."""
    utilities = sys.modules.get("skyrl.backends.skyrl_train.utils.ppo_utils")
    if utilities is None or NAME not in utilities.PolicyLossRegistry.list_available():
        return None
    loss = utilities.PolicyLossRegistry.get(NAME)
    correction: CorrectionConfig | None = getattr(loss, "keywords", {}).get("correction")
    return correction


def policy_loss_of(correction: str | CorrectionConfig) -> Any:
    """Return the loss function of a correction, as SkyRL calls it."""
    config = named_correction(correction)
    assert config is not None
    if not config.live:
        raise UsageError(
            f"register_loss: {config.name} needs no policy being trained; leave SkyRL's loss and "
            "give the correction to attach"
        )
    return functools.partial(policy_loss, correction=config)


def policy_loss(
    log_probs: Tensor,  # [B, R], carries the graph
    old_log_probs: Tensor,  # [B, R]
    advantages: Tensor,  # [B, R], divided by SkyRL's denominators
    config: Any,
    loss_mask: Tensor | None = None,  # [B, R]
    rollout_logprobs: Tensor | None = None,  # [B, R]
    *,
    correction: CorrectionConfig,
    **_: Any,
) -> tuple[Tensor, dict[str, float]]:
    """Return the sum of PPO's clipped loss with the correction applied, and its metrics.

    Raises UsageError if SkyRL hands over no log-probabilities of the rollout.
    """
    if rollout_logprobs is None or loss_mask is None:
        raise UsageError(
            "policy_loss_type=onepolicy: the batch has no rollout_logprobs; set "
            "generator.sampling_params.logprobs, so that the engine returns them"
        )
    mask = loss_mask > 0
    live = live_batch(
        advantages, log_probs, old_log_probs.float(), rollout_logprobs.float(), mask, correction
    )
    ratio = torch.where(mask, log_probs - live.logp_old, 0.0).clamp(-20, 20).exp()
    clipped = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    surrogate = torch.min(ratio * live.advantages, clipped * live.advantages)
    share = ((ratio - clipped).detach().abs() > 0)[mask].float()
    clip_ratio = float(share.sum()) / max(len(share), 1)
    return -(surrogate * mask).sum(), live.metrics | {"clip_ratio": clip_ratio}
