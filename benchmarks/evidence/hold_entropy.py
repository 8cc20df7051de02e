"""Hold the entropy of a run of the study where it starts: the intervention `entropy-held` of
growth-2.

A fixed bonus cannot: with 0.03 the entropy first fell by a third and then rose to 3 (the pilots of
docs/evidence.md). So the coefficient follows the entropy: objective.entropy_coef * (1 - H /
target), within plus and minus objective.entropy_coef, where H is a running mean over minibatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

import onepolicy.train.learner
from onepolicy.config import ObjectiveConfig
from onepolicy.objective.loss import policy_loss
from onepolicy.types import TokenBatch

DECAY = 0.9  # of the running mean, a minibatch


@contextmanager
def held_entropy(target: float) -> Iterator[None]:
    """Train with a bonus that holds the entropy [nats] at `target`, until the context ends."""
    mean: float | None = None

    def loss(
        logp_new: Tensor,
        batch: TokenBatch,
        *,
        config: ObjectiveConfig,
        entropy: Tensor | None = None,
        **rest: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        nonlocal mean
        assert entropy is not None, "objective.entropy_coef is above 0"
        now = float(entropy.detach()[batch.trainable].mean())
        mean = now if mean is None else DECAY * mean + (1 - DECAY) * now
        bonus = config.entropy_coef * bonus_share(mean, target)
        held = config.model_copy(update={"entropy_coef": bonus})
        return policy_loss(logp_new, batch, config=held, entropy=entropy, **rest)

    onepolicy.train.learner.policy_loss = loss
    try:
        yield
    finally:
        onepolicy.train.learner.policy_loss = policy_loss


def bonus_share(entropy: float, target: float) -> float:
    """Return the part of the bonus at this entropy, in [-1, 1]; below 0 it lowers the entropy."""
    return max(-1.0, min(1.0, 1 - entropy / target))
