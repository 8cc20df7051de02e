"""What is optimised, and whether the rollout's experts are replayed."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from onepolicy.config.base import LARGEST, MOST, Amount, Few, Frozen, Rate, Tokens
from onepolicy.config.correction import TERMS, CorrectionConfig
from onepolicy.config.near import did_you_mean


class ReplayOff(Frozen):
    """The trainer routes every token itself."""

    mode: Literal["off"] = "off"


class R2(Frozen):
    """The update takes the experts that scoring chose: the routing replay of the GSPO paper (arXiv:2507.18071)."""

    mode: Literal["r2"] = "r2"


MIN_AGREEMENT = 0.8
DuplicateRoutes = Literal["as-sampled", "as-cached", "newest"]


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
    duplicate_routes: DuplicateRoutes = "as-sampled"
    """Where several forwards of an episode fed the same token (another turn's prefill, a request that was aborted and
    resumed), whose route is replayed: of the first one, which the log-probability came from; of the last one, which the
    keys in the cache came from; or of the highest weight version."""


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
            raise ValueError(
                "missing: native has no weights to replay; use mode = r3, or missing = error"
            )
        return self


ROLLOUT_ROUTES = ("r3", "soft", "weights")  # modes that are FromRollout
ReplayConfig = Annotated[
    ReplayOff | R2 | R3 | SoftReplay | WeightsReplay, Field(discriminator="mode")
]


OBJECTIVES = Path(__file__).with_name("objectives.toml")
CLIP = (0.2, 0.28)  # clip-higher, DAPO section 3.1


def _default(config: Frozen, name: str) -> Any:
    return type(config).model_fields[name].default


class KLConfig(Frozen):
    """Divergence from a frozen reference model, token by token. Off unless coef is set."""

    coef: float = Field(0.0, ge=0, le=LARGEST)
    where: Literal["loss", "reward"] = "loss"
    """A term of the loss with its own gradient, or subtracted from the reward of each token before advantages."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log(pi / pi_ref): d, d^2 / 2, exp(-d) - 1 + d."""
    importance: Literal["none", "old", "rollout"] = "none"
    """Multiply the loss term by the live ratio new / old or new / rollout: its gradient is then that of the KL
    (DeepSeek-V3.2, unbiased KL estimate)."""
    reference: str | None = None
    """Folder or hub id of a model with the same vocabulary; unset: model.path, also in a fork: the model its first run
    started from, not the checkpoint it starts at (set it to that checkpoint's folder for a new anchor)."""

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        changed = [
            n
            for n in ("where", "estimator", "importance", "reference")
            if getattr(self, n) != _default(self, n)
        ]
        if not self.coef and changed:
            raise ValueError(
                f"objective.kl.{changed[0]}: no effect with objective.kl.coef = 0; set coef, or leave it out"
            )
        if self.where == "reward" and self.importance != "none":
            raise ValueError(
                "objective.kl.importance: a reward has no gradient to mend; it goes with kl.where = loss"
            )
        if (
            self.coef
            and self.where == "loss"
            and self.estimator == "k1"
            and self.importance == "none"
        ):
            raise ValueError(
                "objective.kl.estimator: the gradient of k1 in the loss is that of log pi, zero on average, so it only "
                "adds noise; use k2 or k3, set kl.importance, or kl.where = reward"
            )
        return self


class CriticConfig(Frozen):
    """A copy of the policy's backbone with a scalar head, trained by an AdamW of its own (the rest as in `optim`)."""

    lr: Rate = 1e-5
    clip: Amount | None = 0.2
    """A new value is compared with the return at no more than this from the old one, if that is worse; unset: never."""


class ObjectiveConfig(Frozen):
    """Rewards -> advantages -> surrogate -> one scalar. `preset` names a row of objectives.toml to start from; settings
    beside it replace single ones of that row. Without one: GRPO with clip-higher and a token mean."""

    preset: str | None = None
    baseline: Literal["group", "leave-one-out", "none", "critic"] = "group"
    """What a reward is compared with: the mean of its group, that of its siblings, nothing, or a critic (GAE)."""
    normalise: Literal["std", "none", "global"] = "std"
    """Divide a group's centred rewards by their standard deviation, not at all, or whiten the advantages of all
    trainable slots of the step."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token, of returns and GAE."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE: 1 compares with the whole return, less trusts the critic more."""
    surrogate: Literal["ppo", "pg", "cispo", "sapo", "gmpo", "topr"] = "ppo"
    ratio_level: Literal["token", "sequence", "sequence-token", "trajectory"] = "token"
    """The ratio r of a slot: its own; the geometric mean of its sample's (GSPO); the value of that with the gradient of
    its own (GSPO-token); or the product over the sample (TOPR)."""
    clip_low: float = Field(CLIP[0], ge=0, le=1)
    """The PPO ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    clip_high: float = Field(CLIP[1], ge=0, le=LARGEST)
    dual_clip: float | None = Field(None, gt=1, le=LARGEST)
    """With a negative advantage, the ratio counts as at most this (dual-clip PPO)."""
    tau_positive: Amount = 1.0
    """SAPO: steepness of the gate where the advantage is positive, and where it is not."""
    tau_negative: Amount = 1.05
    reduction: Literal[
        "token-mean",
        "prompt-mean",
        "episode-mean",
        "sequence-mean-token-mean",
        "sequence-mean-token-sum",
        "sequence-mean-token-constant",
    ] = "token-mean"
    """How slots become one scalar; every denominator is of the whole optimiser step, before any rejection."""
    reduction_length: Tokens | None = None
    """What sequence-mean-token-constant divides a sample's sum by; unset: rollout.sampling.max_tokens."""
    kl: KLConfig = KLConfig()
    entropy_coef: float = Field(0.0, ge=0, le=LARGEST)
    """Entropy bonus, per slot as the surrogate is."""
    critic: CriticConfig | None = None
    """Set by baseline = critic."""
    dynamic_sampling: int = Field(0, ge=0, le=MOST)
    """Rounds of further problems that replace groups whose rewards are all equal (DAPO section 3.2); 0: none."""
    overlong_buffer: float = Field(0.0, ge=0, le=1)
    """Share of rollout.sampling.max_tokens, at its end, over which the reward falls linearly by overlong_penalty
    (DAPO eq. 13); 0: off."""
    overlong_penalty: Amount = 1.0
    num_minibatches: Few = 1
    """Optimiser steps per batch; samples are split into this many parts by whole groups."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        merged = dict(data)
        if isinstance(data.get("preset"), str):
            if data["preset"] not in objective_presets():
                known = ", ".join(objective_presets()) + did_you_mean(
                    data["preset"], objective_presets()
                )
                raise ValueError(
                    f"objective.preset: none is called {data['preset']!r}; there are {known}"
                )
            merged = {**objective_presets()[data["preset"]]["settings"], **data}
        if merged.get("baseline") == "critic" and merged.get("critic") is None:
            merged["critic"] = {}
        return merged

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        critic = self.baseline == "critic"
        if self.critic is not None and not critic:
            raise ValueError(
                f"objective.critic: no effect with baseline = {self.baseline}; set baseline = critic"
            )
        if self.lam != 1 and not critic:
            raise ValueError(
                f"objective.lam: {self.lam} is of GAE; no effect with baseline = {self.baseline}"
            )
        if self.gamma != 1 and self.baseline in ("group", "leave-one-out"):
            raise ValueError(
                f"objective.gamma: {self.gamma} has no effect with baseline = {self.baseline}, which compares whole "
                "responses; use baseline = none or critic"
            )
        if self.normalise == "std" and self.baseline != "group":
            raise ValueError(
                f"objective.normalise: std is of a group's rewards; with baseline = {self.baseline} use none or global"
            )
        self._check_surrogate()
        if self.reduction_length is not None and self.reduction != "sequence-mean-token-constant":
            raise ValueError(
                f"objective.reduction_length: no effect with reduction = {self.reduction}"
            )
        if self.overlong_penalty != _default(self, "overlong_penalty") and not self.overlong_buffer:
            raise ValueError(
                "objective.overlong_penalty: no effect with overlong_buffer = 0; set overlong_buffer"
            )
        if self.dynamic_sampling and self.baseline not in ("group", "leave-one-out"):
            raise ValueError(
                f"objective.dynamic_sampling: with baseline = {self.baseline} equal rewards carry a signal; set it to 0"
            )
        if self.kl.where == "reward" and self.normalise == "std":
            raise ValueError(
                "objective.kl.where: reward would be divided by the standard deviation of a group's rewards; use "
                "normalise = none or global, or kl.where = loss"
            )
        return self

    def _check_surrogate(self) -> None:
        name, level = self.surrogate, self.ratio_level
        if name not in ("ppo", "cispo", "gmpo") and (self.clip_low, self.clip_high) != CLIP:
            raise ValueError(
                f"objective.clip_low, clip_high: no effect with surrogate = {name}, which does not clip"
            )
        if self.dual_clip is not None and name != "ppo":
            raise ValueError(
                f"objective.dual_clip: no effect with surrogate = {name}; it is of ppo"
            )
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"objective.dual_clip: {self.dual_clip} is inside the clip range; it starts above it"
            )
        if name != "sapo" and any(
            getattr(self, n) != _default(self, n) for n in ("tau_positive", "tau_negative")
        ):
            raise ValueError(
                f"objective.tau_positive, tau_negative: no effect with surrogate = {name}; they are of sapo"
            )
        if level != "token" and name in ("pg", "gmpo"):
            raise ValueError(
                f"objective.ratio_level: {level} has no effect with surrogate = {name}"
            )
        if level == "trajectory" and name != "topr":
            raise ValueError(
                f"objective.ratio_level: a product of ratios leaves every clip range on long responses; {name} takes "
                "token, sequence or sequence-token"
            )
        if level == "sequence-token" and name in ("cispo", "topr"):
            raise ValueError(
                f"objective.ratio_level: {name} takes the ratio without gradient; sequence is the same"
            )
        if name == "gmpo" and (
            self.baseline == "critic" or self.kl.where == "reward" or self.gamma != 1
        ):
            raise ValueError(
                "objective.surrogate: gmpo has one advantage per sample, but baseline = critic, kl.where = reward and "
                "gamma make it one per token; use a group baseline, kl.where = loss, gamma = 1"
            )

    @property
    def name(self) -> str:
        """The preset, marked if settings differ from it; grpo or custom without one."""
        if self.preset is None:
            return "grpo" if self == ObjectiveConfig() else "custom"
        return (
            self.preset
            if self == ObjectiveConfig(preset=self.preset)
            else f"{self.preset} (changed)"
        )


def check_pair(objective: ObjectiveConfig, correction: CorrectionConfig) -> None:
    """Raise ValueError on an objective and a correction that do not go together."""
    name = correction.name
    if correction.surrogate == "pg" and objective.surrogate != "pg":
        raise ValueError(
            f"correction: {name} multiplies advantage * log p by the ratio new/rollout, which is inside the surrogate "
            f"{objective.surrogate} already and would count twice; set objective.surrogate = pg (presets rloo, "
            "reinforce), or take a correction with old/rollout, or ppo-is"
        )
    if correction.surrogate == "ppo" and objective.surrogate == "pg":
        raise ValueError(
            f"correction: {name} makes the rollout the anchor of the surrogate's ratio, but pg has none, so nothing "
            "would be corrected; choose pg-tis or one with old/rollout"
        )
    if objective.reduction in ("prompt-mean", "episode-mean") and correction.scales:
        raise ValueError(
            f"objective.reduction: {name} scales all weights by a mean over slots or samples; {objective.reduction} "
            "has neither"
        )
    terms = {
        "kl": objective.kl.coef > 0 and objective.kl.where == "loss",
        "entropy": objective.entropy_coef > 0,
        "value": objective.critic is not None,
    }
    for term in set(TERMS) - set(correction.protect):
        if not terms[term]:
            raise ValueError(
                f"correction.protect: leaves out {term}, but this objective has no such term; add it"
            )


@functools.cache
def objective_presets() -> dict[str, dict[str, Any]]:
    """The rows of objectives.toml: settings, loss, source."""
    return tomllib.loads(OBJECTIVES.read_text(encoding="utf-8"))
