"""Settings of the objective: advantages, surrogate, reduction, and the terms beside them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from onepolicy.config.base import (
    LARGEST_FLOAT,
    LARGEST_INT,
    Frozen,
    LearningRate,
    PositiveFloat,
    SmallCount,
    Tokens,
)
from onepolicy.config.presets import objective_presets

DEFAULT_CLIP = (0.2, 0.28)  # clip-higher, DAPO section 3.1
GROUP_BASELINES = ("group", "leave-one-out")
"""Baselines that compare a sample with the others of its group."""


class KLConfig(Frozen):
    """KL divergence from a frozen reference model, token by token. Off unless coef is set."""

    coef: float = Field(0.0, ge=0, le=LARGEST_FLOAT)
    """Coefficient of the KL term. 0: no reference model, no KL."""
    where: Literal["loss", "reward"] = "loss"
    """loss: a term with a gradient. reward: subtracted from each token's reward, before
    advantages."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log(pi / pi_ref): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    importance: Literal["none", "old", "rollout"] = "none"
    """Multiply the loss term by the ratio new / old or new / rollout, so that its gradient is that
    of the KL (DeepSeek-V3.2, unbiased KL estimate)."""
    reference: str | None = None
    """Folder or hub id of the reference, with the policy's vocabulary. Unset: model.path, in a fork
    too: the model that the first run started from. Set a checkpoint's folder for another."""

    @property
    def in_reward(self) -> bool:
        """True if the KL is subtracted from rewards."""
        return self.coef > 0 and self.where == "reward"

    @property
    def in_loss(self) -> bool:
        """True if the KL is a term of the loss."""
        return self.coef > 0 and self.where == "loss"

    @model_validator(mode="after")
    def _check_gradient(self) -> Self:
        if self.in_reward and self.importance != "none":
            raise ValueError(
                f"objective.kl.importance: {self.importance}, but a reward has no gradient to "
                "correct; use objective.kl.where = loss, or leave it out"
            )
        if self.in_loss and self.estimator == "k1" and self.importance == "none":
            raise ValueError(
                "objective.kl.estimator: the gradient of k1 in the loss is that of log pi, zero on "
                "average, so it only adds noise; use k2 or k3, set kl.importance, or kl.where = "
                "reward"
            )
        return self


class CriticConfig(Frozen):
    """A copy of the policy's backbone with a scalar head and an AdamW of its own.

    Its optimiser has the other settings of `optim`.
    """

    lr: LearningRate = 1e-5
    """Learning rate of the critic."""
    clip: PositiveFloat | None = 0.2
    """Most that a new value may differ from the old one before the loss is clipped. Unset: no
    clip."""


class ObjectiveConfig(Frozen):
    """Rewards -> advantages -> surrogate -> one scalar.

    `preset` names a row of objectives.toml to start from. Settings beside it replace single ones of
    that row. Without a preset: GRPO with clip-higher and a token mean.
    """

    preset: str | None = None
    """Published objective to start from (`onepolicy config objective`). Unset: GRPO with
    clip-higher."""
    baseline: Literal["group", "leave-one-out", "none", "critic"] = "group"
    """A reward is compared with its group's mean, its siblings' mean, nothing, or a critic
    (GAE)."""
    normalise: Literal["std", "none", "global"] = "std"
    """std: divide a group's advantages by their standard deviation. global: whiten the advantages
    of all trainable slots of the step. none: neither."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token, of returns and GAE. 1: none."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE. 1: compare with the whole return. Less trusts the critic more."""
    surrogate: Literal["ppo", "pg", "cispo", "sapo", "gmpo", "topr"] = "ppo"
    """Loss of a slot from its ratio and advantage (docs/objectives.md has the equations)."""
    ratio_level: Literal["token", "sequence", "sequence-token", "trajectory"] = "token"
    """Ratio r of a slot: its own, the geometric mean of its sample (GSPO), that value with the
    slot's own gradient (GSPO-token), or the product over the sample (TOPR)."""
    clip_low: float = Field(DEFAULT_CLIP[0], ge=0, le=1)
    """The PPO ratio is clipped from below to 1 - clip_low."""
    clip_high: float = Field(DEFAULT_CLIP[1], ge=0, le=LARGEST_FLOAT)
    """The PPO ratio is clipped from above to 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1, le=LARGEST_FLOAT)
    """Largest ratio that counts where the advantage is negative (dual-clip PPO). Unset: no
    limit."""
    tau_positive: PositiveFloat = 1.0
    """SAPO: steepness of the gate where the advantage is positive."""
    tau_negative: PositiveFloat = 1.05
    """SAPO: steepness of the gate where the advantage is not positive."""
    reduction: Literal[
        "token-mean",
        "prompt-mean",
        "episode-mean",
        "sequence-mean-token-mean",
        "sequence-mean-token-sum",
        "sequence-mean-token-constant",
    ] = "token-mean"
    """Mean or sum that makes one scalar. Denominators count the optimiser step before rejection."""
    reduction_length: Tokens | None = None
    """Constant of sequence-mean-token-constant [tokens]. Unset: rollout.sampling.max_tokens."""
    kl: KLConfig = KLConfig()
    """KL divergence from a reference model."""
    entropy_coef: float = Field(0.0, ge=0, le=LARGEST_FLOAT)
    """Coefficient of the entropy bonus of a slot. 0: none."""
    critic: CriticConfig | None = None
    """Critic of baseline = critic."""
    dynamic_sampling: int = Field(0, ge=0, le=LARGEST_INT)
    """Rounds of further problems that replace groups whose rewards are all equal (DAPO). 0:
    none."""
    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Last share of rollout.sampling.max_tokens, over which the reward falls linearly by
    overlong_penalty (DAPO eq. 13). 0: off."""
    overlong_penalty: PositiveFloat = 1.0
    """Reward that a response of full length loses, with overlong_buffer."""
    num_minibatches: SmallCount = 1
    """Optimiser steps per batch. Samples are split into this many parts, by whole groups."""

    @property
    def has_critic(self) -> bool:
        """True if a critic is trained."""
        return self.baseline == "critic"

    @property
    def name(self) -> str:
        """The preset, marked if settings differ from it; grpo or custom without one."""
        if self == self.of_preset():
            return self.preset or "grpo"
        return "custom" if self.preset is None else f"{self.preset} (changed)"

    def of_preset(self) -> ObjectiveConfig:
        """Return the settings of this preset without changes, or the defaults without a preset."""
        return ObjectiveConfig(preset=self.preset)

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        merged = dict(data)
        if isinstance(data.get("preset"), str):
            merged = _preset_settings(data["preset"]) | data
        if merged.get("baseline") == "critic" and merged.get("critic") is None:
            merged["critic"] = {}
        return merged

    @model_validator(mode="after")
    def _check_baseline(self) -> Self:
        if self.normalise == "std" and self.baseline != "group":
            raise ValueError(
                "objective.normalise: std is of a group's rewards; with baseline = "
                f"{self.baseline} use none or global"
            )
        if self.dynamic_sampling and self.baseline not in GROUP_BASELINES:
            raise ValueError(
                f"objective.dynamic_sampling: {self.dynamic_sampling}, but with baseline = "
                f"{self.baseline} equal rewards carry a signal; set it to 0"
            )
        if self.kl.in_reward and self.normalise == "std":
            raise ValueError(
                "objective.kl.where: reward would be divided by the standard deviation of a "
                "group's rewards; use normalise = none or global, or kl.where = loss"
            )
        return self

    @model_validator(mode="after")
    def _check_surrogate(self) -> Self:
        name = self.surrogate
        if name == "ppo" and self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"objective.dual_clip: {self.dual_clip} is inside the clip range; set it above "
                f"1 + clip_high = {1 + self.clip_high:g}"
            )
        if self.ratio_level == "trajectory" and name in ("ppo", "cispo", "sapo"):
            raise ValueError(
                "objective.ratio_level: trajectory is a product of ratios, which leaves every clip "
                f"range on long responses; {name} takes token, sequence or sequence-token"
            )
        discounts = self.gamma != 1 and self.baseline not in GROUP_BASELINES
        if name == "gmpo" and (self.has_critic or self.kl.in_reward or discounts):
            raise ValueError(
                "objective.surrogate: gmpo has one advantage per sample, but baseline = critic, "
                "kl.where = reward and gamma make it one per token; use a group baseline, kl.where "
                "= loss, gamma = 1"
            )
        return self


def _preset_settings(name: str) -> dict[str, Any]:
    """Return the settings of a row of objectives.toml. Raises ValueError for an unknown name."""
    if name not in objective_presets():
        from onepolicy.config.spelling import did_you_mean

        known = ", ".join(objective_presets()) + did_you_mean(name, objective_presets())
        raise ValueError(f"objective.preset: none is called {name!r}; there are {known}")
    settings: dict[str, Any] = objective_presets()[name]["settings"]
    return settings
