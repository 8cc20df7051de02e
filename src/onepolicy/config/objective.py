"""What is optimised, and whether the rollout's experts are replayed."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from onepolicy.config.base import Frozen


class ReplayOff(Frozen):
    """The trainer routes every token itself."""

    mode: Literal["off"] = "off"


class R2(Frozen):
    """The update takes the experts that scoring chose: the routing replay of the GSPO paper (arXiv:2507.18071)."""

    mode: Literal["r2"] = "r2"


MIN_AGREEMENT = 0.8


class FromRollout(Frozen):
    """Modes that take the rollout's experts, in scoring and in the update."""

    source: Literal["engine", "reprefill"] = "engine"
    """Who records the routes: the engine while it samples, or (for engines that return none) a forward over finished
    samples by a second copy of the model in rollout.engine.dtype. The latter may differ from what the engine chose."""
    missing: Literal["error", "native"] = "error"
    """A sample whose engine returned no routes: `error` stops the run, `native` lets the trainer route it (counted in
    replay/missing_samples)."""
    min_agreement: float = Field(MIN_AGREEMENT, ge=0, lt=1)
    """Least share of the replayed experts that the trainer's routers must have chosen themselves, in every layer and in
    every stretch of 16 tokens; below it the run stops. 0: replay whatever comes."""


class R3(FromRollout):
    """The rollout's experts, weighted by the trainer (rollout routing replay, arXiv:2510.11370)."""

    mode: Literal["r3"] = "r3"


class SoftReplay(FromRollout):
    """Like r3, but an expert the trainer itself finds too unlikely gives way to one of the trainer's own."""

    mode: Literal["soft"] = "soft"
    ratio: float = Field(gt=0, le=1)
    """A replayed expert stays while its score is at least this times the weakest score the trainer selects itself."""


class WeightsReplay(FromRollout):
    """The rollout's experts and its combine weights; the gradient is that of the trainer's own weights."""

    mode: Literal["weights"] = "weights"

    @model_validator(mode="after")
    def _weights_are_there(self) -> Self:
        if self.missing == "native":
            raise ValueError("missing: native has no weights to replay; use mode = r3, or missing = error")
        return self


ROLLOUT_ROUTES = ("r3", "soft", "weights")  # modes that are FromRollout
ReplayConfig = Annotated[ReplayOff | R2 | R3 | SoftReplay | WeightsReplay, Field(discriminator="mode")]


class GRPOConfig(Frozen):
    """Group-relative policy optimisation with clip-higher and a token mean over a fixed denominator."""

    kind: Literal["grpo"] = "grpo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The PPO ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(0.28, ge=0)
    normalise: Literal["std", "none"] = "std"
    """Divide a group's centred rewards by their standard deviation, or not (Dr.GRPO)."""
    mini_steps: PositiveInt = 1
    """Optimiser steps per batch; samples are split into this many parts by whole groups."""
