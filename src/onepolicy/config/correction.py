"""How rollout/trainer mismatch is corrected: one ratio, one weight, gates that reject, and what they leave alone."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from onepolicy.config.base import Frozen, Many
from onepolicy.config.near import did_you_mean

Ratio = Literal["old/rollout", "new/rollout"]
Term = Literal["kl", "entropy", "value"]
TERMS: tuple[Term, ...] = ("kl", "entropy", "value")

# name: (smallest value, value where both engines agree, largest value); None: unbounded, or no fixed value
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
TABLE = Path(__file__).with_name("corrections.toml")
ALIASES = {"off": "recompute", "bypass": "ppo-is"}


class Bounds(Frozen):
    """Inclusive bounds; either may be missing. Bounds of a ratio are on rho itself, never on 1 / rho."""

    low: float | None = None
    high: float | None = None

    @property
    def bounded(self) -> bool:
        return self.low is not None or self.high is not None

    def _check(
        self, what: str, least: float | None, agree: float | None, most: float | None
    ) -> None:
        """Refuse bounds that reject everything, nothing, or engines that agree exactly."""
        low, high = self.low, self.high
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"{what}: low {low} is above high {high}, so nothing is inside; swap them"
            )
        if low is not None and least is not None and low <= least:
            raise ValueError(
                f"{what}: low {low} has no effect, the value is never below {least:g}; leave it out"
            )
        if high is not None and most is not None and high >= most:
            raise ValueError(
                f"{what}: high {high} has no effect, the value is never above {most:g}; leave it out"
            )
        if agree is not None and (
            (low is not None and low > agree) or (high is not None and high < agree)
        ):
            raise ValueError(
                f"{what}: bounds [{low}, {high}] leave out {agree:g}, the value where both engines agree; widen them"
            )


class Weight(Bounds):
    """What the surrogate of a slot is multiplied by. Sequence: the product of the ratios; geometric: their mean in
    log space, a length-invariant score and not an importance weight."""

    level: Literal["none", "token", "turn", "geometric", "sequence"] = "none"
    outside: Literal["clip", "zero"] = "clip"
    """A weight outside the bounds is moved to the nearest one, or its slots are rejected."""

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        if self.level == "none" and self.bounded:
            raise ValueError(
                "correction.weight: low and high have no effect with level = none; set weight.level or a preset"
            )
        if self.outside == "zero" and not self.bounded:
            raise ValueError(
                "correction.weight: outside = zero has no effect without low or high; set a bound"
            )
        self._check("correction.weight", 0, 1, None)
        return self

    @property
    def rejects(self) -> bool:
        return self.outside == "zero"


class Gate(Bounds):
    """Rejects slots whose statistic is out of bounds. Evaluated on the original mask; all gates must pass.

    With l = log rho and p, q the probabilities of the trainer and the rollout engine: ratio (aggregated in log space),
    k1 = -l, k2 = l^2 / 2, k3 = rho - 1 - l, exp_abs = exp |l|, prob_diff = p - q, tv = |p - q|, binary_kl =
    KL(Bernoulli(q) || Bernoulli(p)), binary_kl_sym = the larger of both directions, trainer_prob = p.
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
    aggregate: Literal["none", "mean", "sum", "max", "min", "budget"] = "none"
    """How a turn or sequence is summed up. Budget (M2PO): reject the largest values of the step until the mean of the
    rest is at most `high`."""
    scope: Literal["token", "turn", "sequence"] = "token"
    """What is accepted or rejected as one."""
    when: Literal["always", "negative", "positive", "toward"] = "always"
    """Only where the (mean) advantage is negative or positive; toward: `high` where positive, `low` where negative."""
    ratio: Ratio | None = None
    """Unset: that of the correction."""

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        what = f"correction.gates {self.label}"
        if not self.bounded:
            raise ValueError(f"{what}: has neither low nor high, so it rejects nothing; set one")
        if (self.scope == "token") != (self.aggregate in ("none", "budget")):
            raise ValueError(
                f"{what}: scope = {self.scope} does not go with aggregate = {self.aggregate}; a token has nothing to "
                "aggregate (none, or budget over the step), a turn or sequence needs mean, sum, max or min"
            )
        if self.when == "toward" and self.statistic not in ("ratio", "prob_diff"):
            raise ValueError(f"{what}: when = toward needs a signed statistic, ratio or prob_diff")
        if self.aggregate == "budget" and (
            STATISTICS[self.statistic][0] != 0 or self.low is not None or self.when != "always"
        ):
            raise ValueError(
                f"{what}: a budget is a bound `high` on the mean of a non-negative statistic, always"
            )
        least, agree, most = STATISTICS[self.statistic]
        if self.aggregate == "sum":
            if self.statistic in ("exp_abs", "trainer_prob"):
                raise ValueError(
                    f"{what}: a sum of {self.statistic} only counts tokens; use mean, max or min"
                )
            most = None
        self._check(what, least, agree, most)
        return self

    @property
    def label(self) -> str:
        """Unique name of what is compared, used in metrics: k3.mean.sequence."""
        when = "" if self.when == "always" else f".{self.when}"
        parts = (
            [self.statistic, self.aggregate, self.scope]
            if self.aggregate != "none"
            else [self.statistic, "token"]
        )
        return ".".join(parts) + when + (".new" if self.ratio == "new/rollout" else "")


class CorrectionConfig(Frozen):
    """loss = sum(keep * weight * surrogate) / denominator. `preset` names a row of corrections.toml to start from;
    settings beside it replace single ones of that row. Without a preset nothing is weighted or rejected."""

    preset: str | None = None
    ratio: Ratio = "old/rollout"
    """Whose probability is divided by the rollout engine's. new/rollout: there is no old policy (bypass); evaluated in
    the loss. Without a weight it is the PPO ratio itself; with one the surrogate is weight * advantage * log p."""
    weight: Weight = Weight()
    gates: tuple[Gate, ...] = ()
    normalise: Literal["none", "self"] = "none"
    """self: scale the weights of the step to mean 1, rejected slots counted as 0 (self-normalised)."""
    denominator: Literal["original", "kept"] = "original"
    """kept: divide by what is left after rejection, so that rejecting some makes the others louder."""
    protect: tuple[Term, ...] = TERMS
    """Terms of the loss that still see rejected slots."""
    max_nonfinite: float = Field(0.1, ge=0, le=1)
    """A slot whose ratio is not finite is rejected and counted; a larger share of the step than this is an error."""
    centering: Literal["none", "head", "support"] = "none"
    """Subtract the rollout policy's mean score (arXiv 2609.20807): from the log-probabilities of the sampler's
    likeliest tokens with a proportional tail (head), or of the whole vocabulary (support)."""
    head_size: Many | None = None
    """Tokens of centering = head. Unset: 16 (a vLLM server returns up to 19 unless it is told otherwise)."""

    @model_validator(mode="before")
    @classmethod
    def _start_from_preset(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("preset"), str):
            return data
        name = ALIASES.get(data["preset"], data["preset"])
        if name not in presets():
            known = f"there are {', '.join(presets())}{did_you_mean(name, presets())}"
            raise ValueError(f"correction.preset: none is called {name!r}; {known}")
        merged = dict(presets()[name].get("settings", {}))
        for key, value in data.items():
            base = merged.get(key)
            merged[key] = (
                base | value if isinstance(base, dict) and isinstance(value, dict) else value
            )
        return merged | {"preset": name}

    @model_validator(mode="after")
    def _takes_effect(self) -> Self:
        labels = [gate.label for gate in self.gates]
        if repeated := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(
                f"correction.gates: {', '.join(repeated)} is there twice; merge the bounds into one gate"
            )
        if len(set(self.protect)) < len(self.protect):
            raise ValueError(f"correction.protect: {list(self.protect)} names a term twice")
        rejects = bool(self.gates) or self.weight.rejects
        if not rejects and set(self.protect) != set(TERMS):
            raise ValueError(
                "correction.protect: nothing is rejected, so there is nothing to protect; leave it out"
            )
        if not rejects and self.denominator == "kept":
            raise ValueError(
                "correction.denominator: kept has no effect, nothing is rejected; add a gate or a bound"
            )
        if self.normalise == "self" and self.weight.level == "none" and not self.gates:
            raise ValueError(
                "correction.normalise: all weights are 1 already; set weight.level or leave it out"
            )
        if self.normalise == "self" and self.denominator == "kept":
            raise ValueError(
                "correction.denominator: self-normalised weights already add up to the original count"
            )
        self._check_live()
        return self

    def _check_live(self) -> None:
        """What needs the ratio of the whole step cannot use a ratio that exists one micro-batch at a time."""
        if self.centering != "none" and self.ratio != "new/rollout":
            raise ValueError(
                "correction.centering: is a term of the score-function loss; it needs ratio = new/rollout"
            )
        if self.head_size is not None and self.centering != "head":
            raise ValueError(
                f"correction.head_size: no effect with centering = {self.centering}; it is of head"
            )
        if self.centering != "none" and self.weight.level not in ("none", "token"):
            raise ValueError(
                f"correction.centering: averages over the vocabulary of a slot; weight.level {self.weight.level} does "
                "not exist there, use none or token"
            )
        for gate in self.gates:
            if self.centering != "none" and gate.scope == "token":
                raise ValueError(
                    f"correction.gates {gate.label}: the mean score is over the vocabulary, where this gate would have "
                    "to be evaluated too; use weight.low and weight.high with outside = zero, or another scope"
                )
            if self.ratio == "new/rollout" and gate.ratio == "old/rollout":
                raise ValueError(
                    f"correction.gates {gate.label}: with ratio = new/rollout there is no old policy"
                )
            if gate.ratio == self.ratio:
                raise ValueError(
                    f"correction.gates {gate.label}: ratio is {gate.ratio} anyway; leave it out"
                )
            if gate.aggregate == "budget" and self._is_live(gate):
                raise ValueError(
                    f"correction.gates {gate.label}: a budget ranks the whole step; it needs old/rollout"
                )
        if self.live and self.scales:
            name = "normalise = self" if self.normalise == "self" else "denominator = kept"
            raise ValueError(
                f"correction: {name} needs every weight of the step before the loss runs, but the new policy's ratio "
                "exists one micro-batch at a time; use old/rollout"
            )

    def _is_live(self, gate: Gate) -> bool:
        return (gate.ratio or self.ratio) == "new/rollout"

    @property
    def rejects(self) -> bool:
        return bool(self.gates) or self.weight.rejects

    @property
    def scales(self) -> bool:
        """Whether all weights get a factor that depends on the whole step."""
        return self.normalise == "self" or self.denominator == "kept"

    @property
    def live(self) -> bool:
        """Whether some part needs the policy that is being trained, so that the loss must evaluate it."""
        return self.ratio == "new/rollout" or any(self._is_live(gate) for gate in self.gates)

    @property
    def surrogate(self) -> Literal["any", "ppo", "pg"]:
        """The surrogate this goes with: ppo anchored on the rollout, or pg (weight * advantage * log p)."""
        if self.ratio == "old/rollout":
            return "any"
        return "ppo" if self.weight.level == "none" and self.centering == "none" else "pg"

    def top_logprobs(self, vocabulary: int) -> int:
        """How many of the rollout's likeliest tokens centering needs at every slot."""
        return {"none": 0, "head": self.head_size or HEAD_SIZE, "support": vocabulary}[
            self.centering
        ]

    @property
    def fixed_part(self) -> CorrectionConfig:
        """What `reweight` evaluates once per step."""
        if self.ratio == "new/rollout":
            return CorrectionConfig(max_nonfinite=self.max_nonfinite)
        gates = tuple(gate for gate in self.gates if not self._is_live(gate))
        return self if gates == self.gates else self._without_preset(gates=gates)

    @property
    def live_part(self) -> CorrectionConfig | None:
        """What the loss evaluates per micro-batch, with ratio = new/rollout; None if nothing."""
        if not self.live:
            return None
        if self.ratio == "new/rollout":
            return self
        gates = tuple(g.model_copy(update={"ratio": None}) for g in self.gates if self._is_live(g))
        return CorrectionConfig(ratio="new/rollout", gates=gates, protect=self.protect)

    def _without_preset(self, gates: tuple[Gate, ...]) -> CorrectionConfig:
        protect = self.protect if gates or self.weight.rejects else TERMS
        return self.model_copy(update={"preset": None, "gates": gates, "protect": protect})

    @property
    def name(self) -> str:
        """The preset, marked if settings differ from it; custom without one."""
        if self.preset is None:
            return "recompute" if self == CorrectionConfig() else "custom"
        return (
            self.preset
            if self == CorrectionConfig(preset=self.preset)
            else f"{self.preset} (changed)"
        )


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """The rows of corrections.toml: settings, source, and the settings of other frameworks that mean the same."""
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))
