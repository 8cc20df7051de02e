"""Corrections of the rollout/trainer mismatch: one ratio, one weight, and gates that reject."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from onepolicy.config.base import Frozen, LargeCount
from onepolicy.config.presets import merge, start_from, warn_translated

Ratio = Literal["old/rollout", "new/rollout"]
LossTerm = Literal["kl", "entropy", "value"]
LOSS_TERMS: tuple[LossTerm, ...] = ("kl", "entropy", "value")

# name: (smallest value, value where both engines agree, largest value); None: unbounded, or no
# fixed value
STATISTICS: dict[str, tuple[float | None, float | None, float | None]] = {
    "ratio": (0, 1, None),
    "k1": (None, 0, None),
    "k2": (0, 0, None),
    "k3": (0, 0, None),
    "exp_abs": (1, 1, None),
    "prob_diff": (-1, 0, 1),
    "tv": (0, 0, 1),
    "binary_kl": (0, 0, None),
    "binary_kl_sym": (0, 0, None),
    "trainer_prob": (0, None, 1),
}
HEAD_SIZE = 16


class Bounds(Frozen):
    """Inclusive bounds. Either may be missing. Bounds of a ratio are on rho itself, not 1 / rho."""

    low: float | None = None
    """Lower bound, inclusive. Unset: none."""
    high: float | None = None
    """Upper bound, inclusive. Unset: none."""

    @property
    def bounded(self) -> bool:
        return self.low is not None or self.high is not None

    def _check_bounds(
        self, setting: str, least: float | None, agree: float | None, most: float | None
    ) -> None:
        """Refuse bounds that reject everything, nothing, or engines that agree exactly.

        least, agree, most: smallest value, value where both engines agree, largest value.
        """
        low, high = self.low, self.high
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"{setting}: low {low} is above high {high}, so nothing is inside; swap them"
            )
        if low is not None and least is not None and low <= least:
            raise ValueError(
                f"{setting}: low {low} bounds nothing, the value is never below {least:g}; leave "
                "it out"
            )
        if high is not None and most is not None and high >= most:
            raise ValueError(
                f"{setting}: high {high} bounds nothing, the value is never above {most:g}; leave "
                "it out"
            )
        if agree is not None and not self._contains(agree):
            raise ValueError(
                f"{setting}: bounds [{low}, {high}] leave out {agree:g}, the value where both "
                "engines agree; widen them"
            )

    def _contains(self, value: float) -> bool:
        above = self.low is None or self.low <= value
        return above and (self.high is None or value <= self.high)


class Weight(Bounds):
    """The factor on a slot's surrogate.

    sequence: the product of the ratios. geometric: their mean in log space, a length-invariant
    score and not an importance weight.
    """

    level: Literal["none", "token", "turn", "geometric", "sequence"] = "none"
    """Weight of a slot: 1, its ratio, the product over its turn or sequence, or the sequence's
    geometric mean."""
    outside: Literal["clip", "zero"] = "clip"
    """A weight outside the bounds is moved to the nearest bound, or its slots are rejected."""

    @model_validator(mode="after")
    def _check_level(self) -> Self:
        if self.level == "none" and self.bounded:
            raise ValueError(
                "correction.weight: low and high bound a weight, but level = none; set "
                "weight.level or a preset, or leave them out"
            )
        if self.outside == "zero" and not self.bounded:
            raise ValueError(
                "correction.weight: outside = zero rejects nothing without low or high; set a bound"
            )
        self._check_bounds("correction.weight", 0, 1, None)
        return self

    @property
    def rejects(self) -> bool:
        return self.outside == "zero"


class Gate(Bounds):
    """A rule that rejects slots whose statistic is out of bounds.

    Gates are evaluated on the original mask, and a slot must pass all of them. With l = log rho and
    p, q the probabilities of the trainer and the rollout engine: ratio (aggregated in log space),
    k1 = -l, k2 = l^2 / 2, k3 = rho - 1 - l, exp_abs = exp |l|, prob_diff = p - q, tv = |p - q|,
    binary_kl = KL(Bernoulli(q) || Bernoulli(p)), binary_kl_sym = the larger of both directions,
    trainer_prob = p.
    """

    statistic: Literal[
        "ratio",
        "k1",
        "k2",
        "k3",
        "exp_abs",
        "prob_diff",
        "tv",
        "binary_kl",
        "binary_kl_sym",
        "trainer_prob",
    ]
    """Number that is compared with the bounds (docs/corrections.md has the formulas)."""
    aggregate: Literal["none", "mean", "sum", "max", "min", "budget"] = "none"
    """Aggregate of the statistic over a turn or sequence. budget (M2PO): reject the largest
    values of the step until the mean of the rest is at most `high`."""
    scope: Literal["token", "turn", "sequence"] = "token"
    """Unit that is accepted or rejected as one."""
    when: Literal["always", "negative", "positive", "toward"] = "always"
    """Apply it where the (mean) advantage is negative or positive only. toward: `high` where it is
    positive, `low` where it is negative."""
    ratio: Ratio | None = None
    """Ratio that the statistic is computed from. Unset: correction.ratio."""

    @model_validator(mode="after")
    def _check_gate(self) -> Self:
        setting = f"correction.gates {self.label}"
        if not self.bounded:
            raise ValueError(f"{setting}: has neither low nor high, so it rejects nothing; set one")
        self._check_scope(setting)
        least, agree, most = STATISTICS[self.statistic]
        if self.aggregate == "sum":
            if self.statistic in ("exp_abs", "trainer_prob"):
                raise ValueError(
                    f"{setting}: a sum of {self.statistic} only counts tokens; use mean, max or min"
                )
            most = None
        self._check_bounds(setting, least, agree, most)
        return self

    def _check_scope(self, setting: str) -> None:
        """Refuse a scope, aggregate and `when` that do not go together."""
        if (self.scope == "token") != (self.aggregate in ("none", "budget")):
            raise ValueError(
                f"{setting}: scope = {self.scope} does not go with aggregate = {self.aggregate}; a "
                "token has nothing to aggregate (none, or budget over the step), a turn or "
                "sequence needs mean, sum, max or min"
            )
        if self.when == "toward" and self.statistic not in ("ratio", "prob_diff"):
            raise ValueError(
                f"{setting}: when = toward needs a signed statistic, ratio or prob_diff"
            )
        smallest = STATISTICS[self.statistic][0]
        plain = smallest == 0 and self.low is None and self.when == "always"
        if self.aggregate == "budget" and not plain:
            raise ValueError(
                f"{setting}: a budget is a bound `high` on the mean of a non-negative statistic, "
                "always"
            )

    @property
    def label(self) -> str:
        """Unique name of the compared statistic, used in metrics: k3.mean.sequence."""
        parts: list[str] = [self.statistic, self.aggregate, self.scope]
        if self.aggregate == "none":
            parts = [self.statistic, "token"]
        if self.when != "always":
            parts.append(self.when)
        if self.ratio == "new/rollout":
            parts.append("new")
        return ".".join(parts)


class CorrectionConfig(Frozen):
    """loss = sum(keep * weight * surrogate) / denominator.

    `preset` names a row of corrections.toml to start from. Settings beside it replace single ones
    of that row. Without a preset nothing is weighted or rejected.
    """

    preset: str | None = None
    """Published correction to start from (`onepolicy config preset`). Unset: only what the settings
    beside it say."""
    ratio: Ratio = "old/rollout"
    """Probability that is divided by the rollout engine's. new/rollout (bypass): there is no old
    policy. Without a weight it is the PPO ratio, else the surrogate is weight * advantage * log
    p."""
    weight: Weight = Weight()
    """Factor on a slot's surrogate."""
    gates: tuple[Gate, ...] = ()
    """Rules that reject slots. A slot must pass all of them."""
    normalise: Literal["none", "self", "batch"] = "none"
    """self: scale the weights of the step to mean 1, rejected slots counted as 0. batch (batch
    normalisation of verl and miles): divide them by their mean before the gates reject."""
    denominator: Literal["original", "kept"] = "original"
    """Divide by the slots before rejection, or by those that are left."""
    protect: tuple[LossTerm, ...] = LOSS_TERMS
    """Terms of the loss that still see rejected slots."""
    max_nonfinite: float = Field(0.1, ge=0, le=1)
    """Largest share of a step's slots whose ratio may be not finite. These slots are rejected."""
    centering: Literal["none", "head", "support"] = "none"
    """Subtract the rollout policy's mean score (arXiv 2609.20807), from the sampler's likeliest
    tokens with a proportional tail (head), or from the whole vocabulary (support)."""
    head_size: LargeCount | None = None
    """Likeliest tokens of centering = head. Unset: 16. A vLLM server returns up to 19 by
    default."""

    @property
    def rejects(self) -> bool:
        """True if some slots may be rejected although their ratio is finite."""
        return bool(self.gates) or self.weight.rejects

    @property
    def scales(self) -> bool:
        """True if all weights get a factor that depends on the whole step."""
        return self.normalise != "none" or self.denominator == "kept"

    @property
    def live(self) -> bool:
        """True if some part needs the current policy, so that the loss must evaluate it."""
        return self.ratio == "new/rollout" or any(map(self._needs_current_policy, self.gates))

    @property
    def surrogate(self) -> Literal["any", "ppo", "pg"]:
        """Surrogate this goes with: ppo with the ratio new/rollout, or pg (weight * A * log p)."""
        if self.ratio == "old/rollout":
            return "any"
        return "ppo" if self.weight.level == "none" and self.centering == "none" else "pg"

    @property
    def fixed_part(self) -> CorrectionConfig:
        """The part that `reweight` evaluates once per step."""
        if self.ratio == "new/rollout":
            return CorrectionConfig(max_nonfinite=self.max_nonfinite)
        gates = tuple(gate for gate in self.gates if not self._needs_current_policy(gate))
        if gates == self.gates:
            return self
        return self.model_copy(update={"preset": None, "gates": gates})

    @property
    def live_part(self) -> CorrectionConfig | None:
        """The part that the loss evaluates per micro-batch, with ratio = new/rollout; or None."""
        if not self.live:
            return None
        if self.ratio == "new/rollout":
            return self
        gates = tuple(
            gate.model_copy(update={"ratio": None})
            for gate in self.gates
            if self._needs_current_policy(gate)
        )
        return CorrectionConfig(ratio="new/rollout", gates=gates, protect=self.protect)

    @property
    def name(self) -> str:
        """The preset, marked if settings differ from it; recompute or custom without one."""
        if self == self.of_preset():
            return self.preset or "recompute"
        return "custom" if self.preset is None else f"{self.preset} (changed)"

    def of_preset(self) -> CorrectionConfig:
        """Return the settings of this preset without changes, or the defaults without a preset."""
        return CorrectionConfig(preset=self.preset)

    def top_logprobs(self, vocabulary: int) -> int:
        """Return how many of the rollout's likeliest tokens centering needs at every slot."""
        sizes = {"none": 0, "head": self.head_size or HEAD_SIZE, "support": vocabulary}
        return sizes[self.centering]

    def _needs_current_policy(self, gate: Gate) -> bool:
        return (gate.ratio or self.ratio) == "new/rollout"

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("preset"), str):
            return data
        name, settings = start_from(data["preset"])
        if not cls.model_fields.keys() <= data.keys():  # a dump of settings has them all
            warn_translated(name)
        return merge(settings, data) | {"preset": name}

    @model_validator(mode="after")
    def _check_gates(self) -> Self:
        labels = [gate.label for gate in self.gates]
        repeated = {label for label in labels if labels.count(label) > 1}
        if repeated:
            raise ValueError(
                f"correction.gates: {', '.join(repeated)} is there twice; merge the bounds into "
                "one gate"
            )
        for gate in self.gates:
            self._check_gate_ratio(gate)
        return self

    @model_validator(mode="after")
    def _check_denominators(self) -> Self:
        if len(set(self.protect)) < len(self.protect):
            raise ValueError(
                f"correction.protect: {list(self.protect)} names a term twice; name it once"
            )
        if self.normalise != "none" and self.denominator == "kept":
            raise ValueError(
                f"correction.denominator: kept, but normalise = {self.normalise} is a factor on "
                "all weights already; leave one of the two out"
            )
        if self.live and self.scales:
            setting = "denominator = kept"
            if self.normalise != "none":
                setting = f"normalise = {self.normalise}"
            raise ValueError(
                f"correction: {setting} needs every weight of the step before the loss runs, but "
                "the new policy's ratio exists one micro-batch at a time; use old/rollout"
            )
        return self

    @model_validator(mode="after")
    def _check_centering(self) -> Self:
        if self.centering == "none":
            return self
        if self.ratio != "new/rollout":
            raise ValueError(
                "correction.centering: is a term of the score-function loss; it needs ratio = "
                "new/rollout"
            )
        if self.weight.level not in ("none", "token"):
            raise ValueError(
                "correction.centering: averages over the vocabulary of a slot; weight.level "
                f"{self.weight.level} does not exist there, use none or token"
            )
        for gate in self.gates:
            if gate.scope == "token":
                raise ValueError(
                    f"correction.gates {gate.label}: centering averages over the vocabulary, where "
                    "this gate would have to be evaluated too; use weight.low and weight.high with "
                    "outside = zero, or another scope"
                )
        return self

    def _check_gate_ratio(self, gate: Gate) -> None:
        if self.ratio == "new/rollout" and gate.ratio == "old/rollout":
            raise ValueError(
                f"correction.gates {gate.label}: ratio is old/rollout, but with correction.ratio = "
                "new/rollout there is no old policy; leave it out"
            )
        if gate.aggregate == "budget" and self._needs_current_policy(gate):
            raise ValueError(
                f"correction.gates {gate.label}: a budget ranks the whole step; it needs "
                "old/rollout"
            )
