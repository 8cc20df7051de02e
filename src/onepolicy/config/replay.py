"""Settings of routing replay: whose experts the trainer uses."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from onepolicy.config.base import Frozen

MIN_AGREEMENT = 0.8
DuplicateRoutes = Literal["as-sampled", "as-cached", "newest"]
ROLLOUT_MODES = ("r3", "soft", "weights")
"""Modes of RolloutReplay."""


class ReplayOff(Frozen):
    """The trainer routes every token itself."""

    mode: Literal["off"] = "off"
    """The trainer routes every token itself."""


class R2(Frozen):
    """The update uses the experts of the scoring forward: routing replay of GSPO (2507.18071)."""

    mode: Literal["r2"] = "r2"
    """The update uses the experts of the scoring forward (routing replay, arXiv:2507.18071)."""


class RolloutReplay(Frozen):
    """Settings of the modes that use the rollout's experts, in scoring and in the update."""

    source: Literal["engine", "reprefill"] = "engine"
    """Who records routes: the engine, or for engines that return none a forward of a second copy of
    the model over the finished samples (its routes may differ from the engine's)."""
    missing: Literal["error", "native"] = "error"
    """A sample without routes: stop the run, or let the trainer route it."""
    min_agreement: float = Field(MIN_AGREEMENT, ge=0, lt=1)
    """Least share of replayed experts that the trainer would choose too, in every layer and every
    16 tokens; below it the run stops. 0: replay whatever comes."""
    duplicate_routes: DuplicateRoutes = "as-sampled"
    """Route of a token that several forwards fed (after an abort or a lost cache): that of its
    log-probability, of its cached keys, or of the newest weights."""


class R3(RolloutReplay):
    """The rollout's experts, weighted by the trainer (rollout routing replay, arXiv:2510.11370)."""

    mode: Literal["r3"] = "r3"
    """The rollout's experts, weighted by the trainer (rollout routing replay, arXiv:2510.11370)."""


class SoftReplay(RolloutReplay):
    """r3, but the trainer replaces a replayed expert that it finds too unlikely."""

    mode: Literal["soft"] = "soft"
    """As r3, but the trainer replaces experts that it finds too unlikely."""
    ratio: float = Field(gt=0, le=1)
    """A replayed expert stays if its score is at least this times that of the trainer's weakest own
    choice."""


class WeightsReplay(RolloutReplay):
    """The rollout's experts and combine weights, with the gradient of the trainer's own weights."""

    mode: Literal["weights"] = "weights"
    """The rollout's experts and combine weights, with the gradient of the trainer's own weights."""


ReplayConfig = Annotated[
    ReplayOff | R2 | R3 | SoftReplay | WeightsReplay, Field(discriminator="mode")
]
