"""Corrections of the rollout/trainer mismatch: one ratio, one weight, and gates that reject."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, model_validator

from onepolicy.config.base import Frozen, LargeCount
from onepolicy.config.presets import merge, start_from, warn_translated
from onepolicy.config.rules import Rule, error

Ratio = Literal["old/rollout", "new/rollout"]
LossTerm = Literal["kl", "entropy", "value"]
LOSS_TERMS: tuple[LossTerm, ...] = ("kl", "entropy", "value")


class Limits(NamedTuple):
    """Values that a statistic can take. None: unbounded, or no fixed value."""

    least: float | None
    agree: float | None  # where both engines agree
    most: float | None


class Statistic(NamedTuple):
    """A statistic of gates, as rules and docs see it. correct/statistics.py computes it."""

    limits: Limits
    formula: str
    signed: bool = False  # above `agree` the trainer is surer, below it the engine
    sums: bool = True  # a sum over slots says more than their number


STATISTICS = {
    "ratio": Statistic(Limits(0, 1, None), "rho", signed=True),
    "k1": Statistic(Limits(None, 0, None), "-log rho"),
    "k2": Statistic(Limits(0, 0, None), "(log rho)^2 / 2"),
    "k3": Statistic(Limits(0, 0, None), "rho - 1 - log rho"),
    "exp_abs": Statistic(Limits(1, 1, None), "exp |log rho|", sums=False),
    "prob_diff": Statistic(Limits(-1, 0, 1), "p_trainer - p_rollout", signed=True),
    "tv": Statistic(Limits(0, 0, 1), "|p_trainer - p_rollout|"),
    "binary_kl": Statistic(Limits(0, 0, None), "KL(Bern(p_rollout) || Bern(p_trainer))"),
    "binary_kl_sym": Statistic(Limits(0, 0, None), "max of both KL(Bern || Bern)"),
    "trainer_prob": Statistic(Limits(0, None, 1), "p_trainer", sums=False),
}
if TYPE_CHECKING:
    StatisticName = str
else:
    StatisticName = Literal[tuple(STATISTICS)]
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

    @property
    def setting(self) -> str:
        """The path of these bounds."""
        raise NotImplementedError

    @property
    def limits(self) -> Limits:
        """Values that the bounded quantity can take."""
        raise NotImplementedError

    @property
    def ordered(self) -> bool:
        """False if the bounds are in the wrong order, so that nothing is inside."""
        return self.low is None or self.high is None or self.low <= self.high

    def contains(self, value: float) -> bool:
        """Return whether the value is inside."""
        above = self.low is None or self.low <= value
        return above and (self.high is None or value <= self.high)


# Bounds may not reject everything, nothing, or engines that agree exactly.
BOUNDS_RULES: tuple[Rule[Bounds], ...] = (
    error(
        "{setting}: low {low} is above high {high}, so nothing is inside; swap them",
        lambda bounds: not bounds.ordered,
    ),
    error(
        "{setting}: low {low} bounds nothing, the value is never below {limits.least:g}; leave it "
        "out",
        lambda bounds: _at_most(bounds.low, bounds.limits.least),
    ),
    error(
        "{setting}: high {high} bounds nothing, the value is never above {limits.most:g}; leave "
        "it out",
        lambda bounds: _at_most(bounds.limits.most, bounds.high),
    ),
    error(
        "{setting}: bounds [{low}, {high}] leave out {limits.agree:g}, the value where both "
        "engines agree; widen them",
        lambda bounds: (
            bounds.ordered
            and bounds.limits.agree is not None
            and not bounds.contains(bounds.limits.agree)
        ),
    ),
)


def _at_most(value: float | None, limit: float | None) -> bool:
    return value is not None and limit is not None and value <= limit


WEIGHT_RULES: tuple[Rule[Weight], ...] = (
    error(
        "correction.weight: low and high bound a weight, but level = none; set weight.level or a "
        "preset, or leave them out",
        lambda weight: weight.level == "none" and weight.bounded,
    ),
    error(
        "correction.weight: outside = zero rejects nothing without low or high; set a bound",
        lambda weight: weight.outside == "zero" and not weight.bounded,
    ),
)


class Weight(Bounds):
    """The factor on a slot's surrogate.

    sequence: the product of the ratios. geometric: their mean in log space, a length-invariant
    score and not an importance weight.
    """

    level: Literal["none", "token", "turn", "geometric", "sequence"] = "none"
    """Weight of a slot: 1, its ratio, the product over its turn or sequence, or the sequence's
    geometric mean."""
    outside: Literal["clip", "zero"] = "clip"
    """Move a weight outside the bounds to the nearest one, or reject its slots."""

    rules: ClassVar = (*WEIGHT_RULES, *BOUNDS_RULES)

    @property
    def setting(self) -> str:
        return "correction.weight"

    @property
    def limits(self) -> Limits:
        return STATISTICS["ratio"].limits


GATE_RULES: tuple[Rule[Gate], ...] = (
    error(
        "{setting}: has neither low nor high, so it rejects nothing; set one",
        lambda gate: not gate.bounded,
    ),
    error(
        "{setting}: scope = {scope} does not go with aggregate = {aggregate}; a token has nothing "
        "to aggregate (none, or budget over the step), a turn or sequence needs mean, sum, max or "
        "min",
        lambda gate: (gate.scope == "token") != (gate.aggregate in ("none", "budget")),
    ),
    error(
        "{setting}: when = toward needs a signed statistic; use ratio or prob_diff",
        lambda gate: gate.when == "toward" and not STATISTICS[gate.statistic].signed,
    ),
    error(
        "{setting}: a budget is a bound `high` on the mean of a statistic without a sign, such as "
        "k2; set high alone, when = always, and such a statistic",
        lambda gate: gate.aggregate == "budget" and not gate.bounds_a_mean,
    ),
    error(
        "{setting}: a sum of {statistic} only counts tokens; use mean, max or min",
        lambda gate: gate.aggregate == "sum" and not STATISTICS[gate.statistic].sums,
    ),
)


class Gate(Bounds):
    """A rule that rejects slots whose statistic is out of bounds.

    Gates are evaluated on the original mask, and a slot must pass all of them. With l = log rho and
    p, q the probabilities of the trainer and the rollout engine: ratio (aggregated in log space),
    k1 = -l, k2 = l^2 / 2, k3 = rho - 1 - l, exp_abs = exp |l|, prob_diff = p - q, tv = |p - q|,
    binary_kl = KL(Bernoulli(q) || Bernoulli(p)), binary_kl_sym = the larger of both directions,
    trainer_prob = p.
    """

    statistic: StatisticName
    """Number that is compared with the bounds."""
    aggregate: Literal["none", "mean", "sum", "max", "min", "budget"] = "none"
    """Aggregate of the statistic over a turn or sequence. budget (M2PO): reject the largest
    values of the step until the mean of the rest is at most `high`."""
    scope: Literal["token", "turn", "sequence"] = "token"
    """Unit that is accepted or rejected as one."""
    when: Literal["always", "negative", "positive", "toward"] = "always"
    """Apply it where the (mean) advantage is negative, or positive. toward: `high` where positive,
    `low` where negative."""
    ratio: Ratio | None = None
    """Ratio that the statistic is computed from. Unset: correction.ratio."""

    rules: ClassVar = (*GATE_RULES, *BOUNDS_RULES)

    def __str__(self) -> str:
        return self.label

    @property
    def setting(self) -> str:
        return f"correction.gates {self.label}"

    @property
    def limits(self) -> Limits:
        limits = STATISTICS[self.statistic].limits
        if self.aggregate == "sum":
            return limits._replace(most=None)
        return limits

    @property
    def bounds_a_mean(self) -> bool:
        """True if it is a bound `high` alone, always, on a statistic that is 0 or more.

        Of `ratio` the mean would be of log rho, which is not.
        """
        unsigned = self.limits.least == 0 and not STATISTICS[self.statistic].signed
        return unsigned and self.low is None and self.when == "always"

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


CORRECTION_RULES: tuple[Rule[CorrectionConfig], ...] = (
    Rule(
        "correction.gates",
        lambda config: bool(_repeated(config.gates)),
        lambda config: f"{', '.join(_repeated(config.gates))} is there twice",
        "merge the bounds into one gate",
    ),
    Rule(
        "correction.gates",
        lambda config: bool(config.bypass and _labels(config, _of_old)),
        lambda config: (
            f"the ratio of {_labels(config, _of_old)} is old/rollout, but with correction.ratio = "
            "new/rollout there is no old policy"
        ),
        "leave it out",
    ),
    Rule(
        "correction.gates",
        lambda config: bool(_labels(config, _live_budget)),
        lambda config: (
            f"the budget of {_labels(config, _live_budget)} ranks the whole step, but the new "
            "policy's ratio exists one micro-batch at a time"
        ),
        "use old/rollout",
    ),
    error(
        "correction.protect: {protect} names a term twice; name it once",
        lambda config: len(set(config.protect)) < len(config.protect),
    ),
    error(
        "correction.denominator: kept, but normalise = {normalise} is a factor on all weights "
        "already; leave one of the two out",
        lambda config: config.normalise != "none" and config.denominator == "kept",
    ),
    error(
        "correction.normalise: {normalise} needs every weight of the step before the loss runs, "
        "but the new policy's ratio exists one micro-batch at a time; use old/rollout",
        lambda config: config.live and config.normalise != "none",
    ),
    error(
        "correction.denominator: kept needs every weight of the step before the loss runs, but "
        "the new policy's ratio exists one micro-batch at a time; use old/rollout",
        lambda config: config.live and config.denominator == "kept",
    ),
    error(
        "correction.centering: is a term of the score-function loss; it needs ratio = new/rollout",
        lambda config: config.centering != "none" and not config.bypass,
    ),
    error(
        "correction.centering: averages over the vocabulary of a slot, where weight.level "
        "{weight.level} does not exist; use none or token",
        lambda config: config.centering != "none" and config.weight.level not in ("none", "token"),
    ),
    Rule(
        "correction.gates",
        lambda config: bool(config.centering != "none" and _labels(config, _of_tokens)),
        lambda config: (
            "centering averages over the vocabulary, where "
            f"{_labels(config, _of_tokens)} would have to be evaluated too"
        ),
        "use weight.low and weight.high with outside = zero, or another scope",
    ),
)


def _repeated(gates: tuple[Gate, ...]) -> list[str]:
    labels = [gate.label for gate in gates]
    return sorted({label for label in labels if labels.count(label) > 1})


def _labels(config: CorrectionConfig, which: Callable[[CorrectionConfig, Gate], bool]) -> str:
    return ", ".join(gate.label for gate in config.gates if which(config, gate))


def _of_old(_: CorrectionConfig, gate: Gate) -> bool:
    return gate.ratio == "old/rollout"


def _of_tokens(_: CorrectionConfig, gate: Gate) -> bool:
    return gate.scope == "token"


def _live_budget(config: CorrectionConfig, gate: Gate) -> bool:
    return gate.aggregate == "budget" and config.needs_current_policy(gate)


class CorrectionConfig(Frozen):
    """loss = sum(keep * weight * surrogate) / denominator.

    `preset` names a row of corrections.toml to start from. Settings beside it replace single ones
    of that row. Without a preset nothing is weighted or rejected.
    """

    rules: ClassVar = CORRECTION_RULES

    preset: str | None = None
    """Published correction to start from (`onepolicy config preset`). Unset: none."""
    ratio: Ratio = "old/rollout"
    """Ratio to the rollout engine's probability. new/rollout (bypass) has no old policy: it is the
    PPO ratio, or with a weight the surrogate is weight * advantage * log p."""
    weight: Weight = Weight()
    """Factor on a slot's surrogate."""
    gates: tuple[Gate, ...] = ()
    """Rules that reject slots. A slot must pass all of them."""
    normalise: Literal["none", "self", "batch"] = "none"
    """self: scale the step's weights to mean 1, rejected slots counted as 0. batch (verl, miles):
    divide them by their mean before the gates reject."""
    denominator: Literal["original", "kept"] = "original"
    """Divide by the slots before rejection, or by those that are left."""
    protect: tuple[LossTerm, ...] = LOSS_TERMS
    """Terms of the loss that still see rejected slots."""
    max_nonfinite: float = Field(0.1, ge=0, le=1)
    """Largest share of a step's slots whose ratio may be not finite; they are rejected. A run of
    `onepolicy train` stops at the first."""
    centering: Literal["none", "head", "support"] = "none"
    """Subtract the rollout policy's mean score (arXiv 2609.20807), of its likeliest tokens with a
    proportional tail (head) or of every token that it may sample (support): the whole vocabulary,
    or what top_p, top_k and min_p kept."""
    head_size: LargeCount | None = None
    """Likeliest tokens of centering = head. Unset: 16."""

    @property
    def bypass(self) -> bool:
        """True if there is no old policy, and so no scoring before the update."""
        return self.ratio == "new/rollout"

    @property
    def rejects(self) -> bool:
        """True if some slots may be rejected although their ratio is finite."""
        return bool(self.gates) or self.weight.outside == "zero"

    @property
    def scales(self) -> bool:
        """True if all weights get a factor that depends on the whole step."""
        return self.normalise != "none" or self.denominator == "kept"

    @property
    def live(self) -> bool:
        """True if some part needs the current policy, so that the loss must evaluate it."""
        return self.ratio == "new/rollout" or any(map(self.needs_current_policy, self.gates))

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
        gates = tuple(gate for gate in self.gates if not self.needs_current_policy(gate))
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
            if self.needs_current_policy(gate)
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

    def usual(self, name: str) -> Any:
        return getattr(self.of_preset(), name)

    def top_logprobs(self, vocabulary: int) -> int:
        """Return how many of the rollout's likeliest tokens centering needs at every slot."""
        sizes = {"none": 0, "head": self.head_size or HEAD_SIZE, "support": vocabulary}
        return sizes[self.centering]

    def needs_current_policy(self, gate: Gate) -> bool:
        """Return whether the gate's ratio is new/rollout."""
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
