"""Settings of the objective: advantages, surrogate, reduction, and the terms beside them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

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
from onepolicy.config.rules import Rule, error
from onepolicy.config.spelling import did_you_mean
from onepolicy.config.surrogates import SURROGATES, SurrogateName, SurrogateRow

DEFAULT_CLIP = (0.2, 0.28)  # clip-higher, DAPO section 3.1


KL_RULES: tuple[Rule[KLConfig], ...] = (
    error(
        "objective.kl.importance: {importance}, but a reward has no gradient to correct; use "
        "objective.kl.where = loss, or leave it out",
        lambda kl: kl.in_reward and kl.importance != "none",
    ),
    error(
        "objective.kl.estimator: the gradient of k1 in the loss is that of log pi, zero on "
        "average, so it only adds noise; use k2 or k3, set kl.importance, or kl.where = reward",
        lambda kl: kl.in_loss and kl.estimator == "k1" and kl.importance == "none",
    ),
)


class KLConfig(Frozen):
    """KL divergence from a frozen reference model, token by token. Off unless coef is set."""

    rules: ClassVar = KL_RULES

    coef: float = Field(0.0, ge=0, le=LARGEST_FLOAT)
    """Coefficient of the KL term. 0: no reference model, no KL."""
    where: Literal["loss", "reward"] = "loss"
    """A term with a gradient, or subtracted from each token's reward before advantages."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log(pi / pi_ref): k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d."""
    importance: Literal["none", "old", "rollout"] = "none"
    """Multiply the loss term by new / old or new / rollout, so that its gradient is the KL's
    (DeepSeek-V3.2)."""
    reference: str | None = None
    """Folder or hub id of the reference, with the policy's vocabulary. Unset: model.path, which the
    first run started from, in a fork too."""

    @property
    def in_reward(self) -> bool:
        """True if the KL is subtracted from rewards."""
        return self.coef > 0 and self.where == "reward"

    @property
    def in_loss(self) -> bool:
        """True if the KL is a term of the loss."""
        return self.coef > 0 and self.where == "loss"


class CriticConfig(Frozen):
    """A copy of the policy's backbone with a scalar head and an AdamW of its own.

    Its optimiser has the other settings of `optim`.
    """

    lr: LearningRate = 1e-5
    """Learning rate of the critic."""
    clip: PositiveFloat | None = 0.2
    """Most that a value may move before its loss is clipped. Unset: no clip."""


OBJECTIVE_RULES: tuple[Rule[ObjectiveConfig], ...] = (
    error(
        "objective.normalise: std is of a group's rewards; with baseline = {baseline} use none or "
        "global",
        lambda objective: objective.normalise == "std" and objective.baseline != "group",
    ),
    error(
        "objective.dynamic_sampling: {dynamic_sampling}, but with baseline = {baseline} equal "
        "rewards carry a signal; set it to 0",
        lambda objective: objective.dynamic_sampling > 0 and not objective.compares_groups,
    ),
    error(
        "objective.kl.where: reward would be divided by the standard deviation of a group's "
        "rewards; use normalise = none or global, or kl.where = loss",
        lambda objective: objective.kl.in_reward and objective.normalise == "std",
    ),
    error(
        "objective.dual_clip: {dual_clip} is inside the clip range; set it above 1 + clip_high = "
        "{highest_ratio:g}",
        lambda objective: (
            "dual_clip" in objective.loss.reads
            and objective.dual_clip is not None
            and objective.dual_clip <= objective.highest_ratio
        ),
    ),
    error(
        "objective.ratio_level: trajectory is a product of ratios, which leaves every clip range "
        "on long responses; {surrogate} takes token, sequence or sequence-token",
        lambda objective: (
            bool(objective.loss.levels) and objective.ratio_level not in objective.loss.levels
        ),
    ),
    error(
        "objective.surrogate: {surrogate} has one advantage per sample, but baseline = critic, "
        "kl.where = reward and gamma make it one per token; use a group baseline, kl.where = "
        "loss, gamma = 1",
        lambda objective: (
            objective.loss.whole_samples
            and (
                objective.has_critic
                or objective.kl.in_reward
                or (objective.gamma != 1 and not objective.compares_groups)
            )
        ),
    ),
)


class ObjectiveConfig(Frozen):
    """Rewards -> advantages -> surrogate -> one scalar.

    `preset` names a row of objectives.toml to start from. Settings beside it replace single ones of
    that row. Without a preset: GRPO with clip-higher and a token mean.
    """

    rules: ClassVar = OBJECTIVE_RULES

    preset: str | None = None
    """Published objective to start from (`onepolicy config objective`). Unset: GRPO with
    clip-higher."""
    baseline: Literal["group", "leave-one-out", "none", "critic"] = "group"
    """What a reward is compared with: its group's mean, its siblings' mean, nothing, a critic
    (GAE)."""
    normalise: Literal["std", "none", "global"] = "std"
    """std: divide a group's advantages by their standard deviation. global: whiten all trainable
    slots of the step."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token, of returns and GAE. 1: none."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE. 1: compare with the whole return. Less trusts the critic more."""
    surrogate: SurrogateName = "ppo"
    """Loss of a slot from its ratio and advantage (docs/objectives.md)."""
    ratio_level: Literal["token", "sequence", "sequence-token", "trajectory"] = "token"
    """Ratio of a slot: its own, its sample's geometric mean (GSPO), that with the slot's own
    gradient (GSPO-token), its sample's product (TOPR)."""
    clip_low: float = Field(DEFAULT_CLIP[0], ge=0, le=1)
    """The PPO ratio is clipped from below to 1 - clip_low."""
    clip_high: float = Field(DEFAULT_CLIP[1], ge=0, le=LARGEST_FLOAT)
    """The PPO ratio is clipped from above to 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1, le=LARGEST_FLOAT)
    """Largest ratio that counts where the advantage is negative. Unset: no limit."""
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
    """How slots become one scalar. Denominators count the optimiser step before rejection."""
    reduction_length: Tokens | None = None
    """Constant of sequence-mean-token-constant [tokens]. Unset: rollout.sampling.max_tokens."""
    kl: KLConfig = KLConfig()
    """KL divergence from a reference model."""
    entropy_coef: float = Field(0.0, ge=0, le=LARGEST_FLOAT)
    """Coefficient of the entropy bonus of a slot. 0: none."""
    critic: CriticConfig | None = None
    """Critic of baseline = critic."""
    dynamic_sampling: int = Field(0, ge=0, le=LARGEST_INT)
    """Rounds of further problems in place of groups with equal rewards (DAPO). Those that
    are not played are skipped. 0: none."""
    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Last share of rollout.sampling.max_tokens, over which the reward falls by overlong_penalty
    (DAPO eq. 13). 0: off."""
    overlong_penalty: PositiveFloat = 1.0
    """Reward that a response of full length loses, with overlong_buffer."""
    num_minibatches: SmallCount = 1
    """Optimiser steps per batch, which is split by whole groups."""

    @property
    def has_critic(self) -> bool:
        """True if a critic is trained."""
        return self.baseline == "critic"

    @property
    def compares_groups(self) -> bool:
        """True if a sample is compared with the others of its group."""
        return self.baseline in ("group", "leave-one-out")

    @property
    def loss(self) -> SurrogateRow:
        """The row of the surrogate."""
        return SURROGATES[self.surrogate]

    @property
    def highest_ratio(self) -> float:
        """Ratio above which one is clipped."""
        return 1 + self.clip_high

    @property
    def name(self) -> str:
        """The preset, marked if settings differ from it; grpo or custom without one."""
        if self == self.of_preset():
            return self.preset or "grpo"
        return "custom" if self.preset is None else f"{self.preset} (changed)"

    def of_preset(self) -> ObjectiveConfig:
        """Return the settings of this preset without changes, or the defaults without a preset."""
        return ObjectiveConfig(preset=self.preset)

    def usual(self, name: str) -> Any:
        return getattr(self.of_preset(), name)

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


def _preset_settings(name: str) -> dict[str, Any]:
    """Return the settings of a row of objectives.toml. Raises ValueError for an unknown name."""
    if name not in objective_presets():
        known = ", ".join(objective_presets()) + did_you_mean(name, objective_presets())
        raise ValueError(f"objective.preset: none is called {name!r}; there are {known}")
    settings: dict[str, Any] = objective_presets()[name]["settings"]
    return settings
