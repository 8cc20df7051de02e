"""What is optimised, and how rollout/trainer mismatch is corrected and replayed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from onepolicy.config.base import Frozen


class ReplayConfig(Frozen):
    mode: Literal["off", "r3"] = "r3"
    """`r3`: the trainer uses the experts the rollout used (rollout routing replay); MoE models only."""


class CorrectionOff(Frozen):
    kind: Literal["off"] = "off"


class TIS(Frozen):
    """Token-level truncated importance sampling: weight = min(rho, cap), rho = pi_trainer / pi_rollout."""

    kind: Literal["tis"] = "tis"
    cap: PositiveFloat = 2.0


CorrectionConfig = Annotated[CorrectionOff | TIS, Field(discriminator="kind")]


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
