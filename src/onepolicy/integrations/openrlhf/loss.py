"""Corrections that need the policy being trained, in OpenRLHF's policy loss."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from onepolicy.integrations.core.step import live_batch
from onepolicy.integrations.openrlhf.experience import own_settings


def extend(module: Any) -> None:
    """Extend PolicyLoss. With a correction of ours, OpenRLHF's own is off: one of them counts."""
    theirs = module.PolicyLoss.forward

    def forward(
        self: Any,
        log_probs: Tensor,  # [B, A], carries the graph
        old_log_probs: Tensor,  # [B, A]
        advantages: Tensor,  # [B, A], with the fixed part's weights
        action_mask: Tensor,  # [B, A]
        rollout_log_probs: Tensor | None = None,  # [B, A]
        **more: Any,
    ) -> Any:
        settings = own_settings()
        if settings.correction is not None:
            self.is_correction_level = "off"
        if settings.live is not None:
            assert rollout_log_probs is not None, "the experience maker has checked it"
            live = live_batch(
                advantages,
                log_probs,
                old_log_probs,
                rollout_log_probs.float(),
                action_mask.bool(),
                settings.live,
            )
            advantages, old_log_probs = live.advantages, live.logp_old
            info = getattr(self, "onepolicy_info", {})
            info.update({name: log_probs.new_tensor(x) for name, x in live.metrics.items()})
        return theirs(
            self, log_probs, old_log_probs, advantages, action_mask, rollout_log_probs, **more
        )

    module.PolicyLoss.forward = forward


def extend_actor(module: Any) -> None:
    """Extend ActorPPOTrainer: its loss gets the `info` of its micro-batch, which is logged."""
    theirs = module.ActorPPOTrainer.training_step

    def training_step(self: Any, experience: Any, *args: Any, **kwargs: Any) -> Any:
        self.actor_loss_fn.onepolicy_info = experience.info
        return theirs(self, experience, *args, **kwargs)

    module.ActorPPOTrainer.training_step = training_step
