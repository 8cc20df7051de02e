"""Words about routes that are wrong, or about a router that has collapsed (checks.py)."""

from __future__ import annotations

import functools
import logging

LOG = logging.getLogger(__name__)


def misaligned_hint(age: int, least: float, moved: int) -> str:
    """Return what else may be the cause of routes that are not the trainer's, and the setting.

    age: updates since the oldest token was sampled. least: replay.min_agreement. moved: optimiser
    steps that the weights have made in this step.
    """
    hints = []
    if moved:
        hints.append(
            f"Or earlier minibatches of the step ({moved}) changed the routers' choices; lower "
            f"optim.lr, objective.num_minibatches or replay.min_agreement = {least} then. Samples "
            f"are counted within minibatch {moved + 1}"
        )
    if age > 0:
        hints.append(
            f"Or they are too old: the oldest tokens were sampled {age} updates ago, and every "
            "update changes the routers' choices; then lower rollout.max_staleness or optim.lr, or "
            "replay.min_agreement"
        )
    return ". ".join(hints) or f"The least agreement is replay.min_agreement = {least}"


@functools.cache
def warn_of_collapse(layer: int, experts: tuple[int, ...]) -> None:
    """Warn once of a router that sends every token to these experts."""
    LOG.warning(
        "layer %d: the router has collapsed: engine and trainer both send every token of a sample "
        "to experts %s. These routes are right, but the policy may be damaged beyond repair. Lower "
        "optim.lr or objective.entropy_coef and continue from an earlier checkpoint",
        layer,
        list(experts),
    )
