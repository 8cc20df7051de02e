"""What to do about a gap: nothing, replay the routes, correct, or mend a bug; and what that rests on.

`onepolicy measure` and `onepolicy audit` both end here. docs/audit.md says where every threshold comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from onepolicy.correct.predict import NOMINAL_KL, predict
from onepolicy.correct.presets import preset
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.scored_tokens import FEWEST

Action = Literal["nothing", "replay", "correct", "bug", "unclear"]
HARMLESS_KL = 1e-4
"""k3 below which a gap is too small to matter: no cause is looked for, and no ratio of two such is shown [nats a
token]."""
QUIET_KL = NOMINAL_KL
"""k3 below which nothing needs to be done, if F(2) is below QUIET_F2 too."""
QUIET_F2 = 1e-3
"""Share of tokens off by more than a factor of 2."""
SMALL, TOLERABLE = "too small to matter", "as small as dense models train well with"
HEAVY_F5 = 1e-3
"""Share of tokens off by more than a factor of 5 from which rejecting them (icepop) is recommended over truncating."""
REPLAY_HELPS = 1.5
"""Least factor by which replay must cut k3 to be recommended where it was measured."""
TOO_FAR = 1.0
"""k3 above which no correction is recommended: two policies, not one with noise."""
FORECAST = ("tis", "icepop", "mis", "k3-rs", "geo-rs", "seq-tis", "trl-default")
YOUNGER = "Let samples be fewer updates old (rollout.max_staleness), or lower the learning rate"
RHO_SLACK = (0.005, 0.25)
"""Mean rho may be off 1 by this much, plus this share of k3, whatever its error: the tail of rho is seen too seldom."""
FEW_ROWS = 12
"""Sequences below which a part of them that is wrong cannot be told from the rest."""
CAUSES = {
    "fill": "missing log-probabilities are filled in, or prompts or padding are inside the mask",
    "not_log": "values are probabilities, not their logarithms",
    "constant": "one number stands in the place of a row's log-probabilities",
    "shift": "the two sides are a token or two apart",
    "retokenised": "the two sides scored different tokens",
    "scale": "one side's log-probabilities are multiples of the other's (another base, or divided by a length)",
    "temperature": "the engine samples at another temperature than the trainer scores at",
    "support": "sampling is narrowed (top-p, top-k, or a low temperature that is not reported)",
    "stale": "the engine holds other weights than the trainer",
    "rows": "values of some rows are those of other rows",
    "copy": "one side is a copy of the other in some rows",
    "context": "the two sides saw other prompts (system prompt, chat template)",
    "mask": "prompts are inside the mask",
    "routes": "the rollout's routes are not those of these tokens",
}


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the two sides are apart, on the tokens that both scored."""

    tokens: int
    sequences: int
    k3: float  # nats a token
    f2: float  # share of tokens off by more than a factor of 2
    f5: float
    max_dlogp: float  # largest |log rho| [nats]
    k3_error: float = math.nan  # standard error of k3; NaN: not known
    mean_rho: float = math.nan  # NaN: not known
    mean_rho_error: float = math.nan  # its standard error, by sequences

    @property
    def off_one(self) -> str:
        """The mark that mean rho is not 1; empty if it may be. Mismatch of any size has E[rho] = 1: both sides are
        distributions over the same tokens."""
        slack = RHO_SLACK[0] + RHO_SLACK[1] * self.k3
        if not (
            math.isfinite(self.mean_rho)
            and abs(self.mean_rho - 1) > max(6 * self.mean_rho_error, slack)
        ):
            return ""
        return f"mean rho is {self.mean_rho:.4f} +- {self.mean_rho_error:.2g}; under mismatch alone it is 1"

    @property
    def quiet(self) -> bool:
        return bool(size_in_words(self.k3, self.f2))

    def text(self) -> str:
        error = f" +- {self.k3_error:.2g}" if math.isfinite(self.k3_error) else ""
        return (
            f"k3 is {self.k3:.3g}{error} nats a token over {self.tokens:,} tokens in {self.sequences:,} sequences, "
            f"F(2) is {100 * self.f2:.3g}%"
        )


def size_in_words(k3: float, f2: float) -> str:
    """What a gap is that needs nothing done about it; empty if it does. Of runs, measurements and audits."""
    if k3 < HARMLESS_KL:
        return SMALL
    return TOLERABLE if k3 < QUIET_KL and f2 < QUIET_F2 else ""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a preset would do to the gap that is left: a normal log-ratio with KL = k3, sequences of the mean length."""

    preset: str
    keep: float  # share of tokens left in the loss
    attenuation: float  # what the step is multiplied by


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Action
    causes: tuple[str, ...]  # of a bug: names from CAUSES; else routing, numerics, age or none
    sentence: str
    setting: str  # what to set; empty if nothing
    basis: tuple[str, ...]  # the measurements it rests on
    forecasts: tuple[Forecast, ...] = ()

    def text(self) -> str:
        lines = [self.sentence, *([f"Set {self.setting}."] if self.setting else []), *self.basis]
        return "\n".join(lines)


def verdict(
    gap: Gap,  # without replay, or as the run was trained
    diagnosis: Diagnosis,
    *,
    replayed: Gap
    | None = None,  # of the same tokens with the rollout's routes replayed; None: not measured
    routers: float
    | None = None,  # share of routers that differ; 0: none do or there are none; None: not known
    routes: str = "",  # why the routes do not belong to these tokens; empty if they do
    since: str = "",  # which part of a run was judged, as in ` from step 20 on`
    aged: bool = False,  # most of the gap is that older weights sampled, as is declared
    unchecked: Sequence[
        str
    ] = (),  # causes that could be there and were not looked for, and what it would take
    copies: bool = False,  # equal sides may be copies: nobody has seen them computed
) -> Verdict:
    """The first that holds: bug, too few tokens, a copy, a mark without a name, a cause that was not looked for,
    nothing to do, too far for mismatch, replay, correct."""
    marks = _marks(diagnosis, gap, replayed)
    found = {f.cause: f.evidence for f in diagnosis.findings} | (
        {"routes": routes} if routes else {}
    )
    basis = [gap.text()]
    if replayed is not None:
        basis.append(f"with the rollout's routes replayed {replayed.text()}")
    if found:
        named = "; ".join(CAUSES[cause] for cause in found)
        sentence = f"A bug, not mismatch{since}: {named}. Mend it; no correction repairs it."
        evidence = (f"{cause}: {text}" for cause, text in found.items())
        return Verdict("bug", tuple(found), sentence, "", (*evidence, *basis))
    doubt = _doubt(gap, marks, replayed, since, [] if aged else list(unchecked), copies=copies)
    if doubt:
        return Verdict("unclear", ("age",) if aged else (), doubt, "", (*marks, *basis))
    if gap.max_dlogp == 0:
        return Verdict(
            "nothing",
            (),
            f"Nothing to do: both sides agree on every token{since} to the bit.",
            "",
            (),
        )
    helps = replayed is not None and gap.k3 > REPLAY_HELPS * replayed.k3
    left = replayed if replayed is not None and helps else gap
    forecasts = _forecasts(left)
    if gap.quiet:
        small = f"Nothing to do: the gap{since} is {size_in_words(gap.k3, gap.f2)}."
        return Verdict("nothing", (), small, "", tuple(basis), forecasts)
    if not left.k3 <= TOO_FAR and aged:
        far = f"Tokens are too old: {left.k3:.3g} nats a token{since}. {YOUNGER}."
        return Verdict("unclear", ("age",), far, "", tuple(basis))
    if not left.k3 <= TOO_FAR:
        far = f"Unclear: no known bug, but {left.k3:.3g} nats a token{since} is more than mismatch. Look for a bug."
        return Verdict("unclear", (), far, "replay.mode=r3" if helps else "", tuple(basis))
    if aged:
        return _mend_age(gap, since, basis, forecasts)
    if replayed is not None:
        routers = None if helps else 0.0
    return _mend(gap, left, since, basis, forecasts, measured=helps, routers=routers)


def _marks(diagnosis: Diagnosis, gap: Gap, replayed: Gap | None) -> tuple[str, ...]:
    """What mismatch alone does not do. Any of them forbids a recommendation."""
    if diagnosis.marks:
        return diagnosis.marks
    if gap.off_one:
        return (gap.off_one,)
    if replayed is not None and replayed.off_one:
        return (f"with the rollout's routes replayed {replayed.off_one}",)
    return ()


def _doubt(
    gap: Gap,
    marks: tuple[str, ...],
    replayed: Gap | None,
    since: str,
    unchecked: list[str],
    *,
    copies: bool,
) -> str:
    """Why nothing may be recommended though no bug was found; empty if it may."""
    if gap.tokens < FEWEST:
        return f"Unclear: only {gap.tokens} tokens{since} are too few for a verdict, which needs {FEWEST} or more."
    if replayed is not None and not math.isfinite(replayed.k3):
        return (
            f"Unclear: k3 with the rollout's routes replayed is {replayed.k3:.3g}{since}. Look for a bug in that "
            "scoring."
        )
    if gap.max_dlogp == 0 and copies:
        return (
            f"Unclear: both sides agree on every token{since} to the bit. Is one a copy of the other? Engines whose "
            "numerics are not made equal on purpose differ in the last bits."
        )
    if marks:
        return (
            f"Unclear{since}: this is not what mismatch alone does, and no known cause explains it. Look for a bug "
            "before any correction."
        )
    if not unchecked:
        return ""
    state = "the two sides' numbers agree" if gap.quiet else f"{gap.k3:.3g} nats a token{since}"
    return (
        f"Unclear: {state}, but what could be wrong was not all looked for. {'; '.join(unchecked)}."
    )


def _mend(
    gap: Gap,
    left: Gap,
    since: str,
    basis: list[str],
    forecasts: tuple[Forecast, ...],
    *,
    measured: bool,
    routers: float | None,
) -> Verdict:
    """Of a gap that needs something done. measured: `left` is what a replay was measured to leave."""
    first = f"Mismatch{since}, {1 - left.k3 / gap.k3:.0%} of it from routing: replay the rollout's routes (R3)"
    if measured and left.quiet:
        sentence = f"{first}; what is left needs no correction."
        return Verdict("replay", ("routing",), sentence, "replay.mode=r3", tuple(basis), forecasts)
    name, correct, predicted = _correction(left, forecasts)
    basis = [*basis, predicted]
    if measured:
        sentence = f"{first}, and correct the {left.k3:.3g} nats a token that are left with {name}."
        return Verdict(
            "correct", ("routing",), sentence, f"replay.mode=r3 {correct}", tuple(basis), forecasts
        )
    size = f"Mismatch{since}, {gap.k3:.3g} nats a token"
    if routers:
        sentence = (
            f"{size}, and {100 * routers:.3g}% of the routers differ: replay the rollout's routes (R3). "
            f"If that cannot be had, correct with {name}."
        )
        return Verdict("replay", ("routing",), sentence, "replay.mode=r3", tuple(basis), forecasts)
    unknown = (
        " If the model is a mixture of experts, replay its routes (R3) first."
        if routers is None
        else ""
    )
    causes = ("numerics",) if routers is not None else ()
    return Verdict(
        "correct",
        causes,
        f"{size}: correct it with {name}.{unknown}",
        correct,
        tuple(basis),
        forecasts,
    )


def _mend_age(gap: Gap, since: str, basis: list[str], forecasts: tuple[Forecast, ...]) -> Verdict:
    name, correct, predicted = _correction(gap, forecasts)
    sentence = (
        f"{gap.k3:.3g} nats a token{since}, most of it because older weights sampled: correct it with {name}. If "
        f"training suffers: {YOUNGER[0].lower()}{YOUNGER[1:]}."
    )
    return Verdict("correct", ("age",), sentence, correct, (*basis, predicted), forecasts)


def _correction(gap: Gap, forecasts: tuple[Forecast, ...]) -> tuple[str, str, str]:
    """Preset for a gap, its setting, and what it is predicted to do."""
    name = "icepop" if gap.f5 > HEAVY_F5 else "tis"
    kept = next(f for f in forecasts if f.preset == name)
    keeps = f"{name} is predicted to keep {kept.keep:.1%} of these tokens"
    return (
        name,
        f"correction.preset={name}",
        f"{keeps} and to multiply the step by {kept.attenuation:.3f}",
    )


def _forecasts(gap: Gap) -> tuple[Forecast, ...]:
    if not 0 < gap.k3 <= TOO_FAR:
        return ()
    length = max(1, round(gap.tokens / gap.sequences))
    found = {name: predict(preset(name), gap.k3, length) for name in FORECAST}
    return tuple(Forecast(name, each.keep, each.attenuation) for name, each in found.items())
