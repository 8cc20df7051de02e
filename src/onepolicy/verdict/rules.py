"""Advice on a gap: nothing to do, replay the routes, correct, or fix a bug; and its basis.

`onepolicy measure` and `onepolicy audit` both end here. docs/audit.md says where every
threshold comes from.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from onepolicy.correct.predict import NOMINAL_KL, predict
from onepolicy.correct.presets import preset
from onepolicy.notation import counted, number, with_error
from onepolicy.record.means import NO_TOKEN, Mean
from onepolicy.record.statistics import Statistics
from onepolicy.verdict.bug_signatures import Diagnosis
from onepolicy.verdict.declared import HARMLESS_KL, TOO_FAR, UNDECLARED, Action, Declared
from onepolicy.verdict.scored_tokens import CAUSES, FEWEST, Finding

QUIET_KL = NOMINAL_KL
"""k3 below which a gap needs nothing, if F(2) is below QUIET_F2 too."""
QUIET_F2 = 1e-3
"""Share of tokens off by more than a factor of 2."""
SMALL, TOLERABLE = "too small to matter", "no larger than in published dense models"
HEAVY_F5 = 1e-3
"""Share of tokens off by more than a factor of 5 from which icepop is recommended over tis.

It rejects such tokens instead of truncating their weights.
"""
REPLAY_HELPS = 1.5
"""Least factor by which replay must cut k3 to be recommended where it was measured."""
RECENT = 8
"""Tokens before a token whose routes must agree too for the token to count as one that agrees."""
RULE_OUT = (
    "weights that did not arrive (a sync, an adapter, a prefix cached from older weights), a model "
    "that is computed otherwise (attention sinks, rope, router), another prompt (template, a token "
    "lost or added), coarser weights than declared"
)
TELL_APART = "`onepolicy measure MODEL --engine-model ENGINE_MODEL` tells them apart"
FORECAST = ("tis", "icepop", "mis", "k3-rs", "geo-rs", "seq-tis", "trl-default")
R3 = "replay.mode=r3"
YOUNGER = "Let samples be fewer updates old (rollout.max_staleness), or lower the learning rate"
RHO_SLACK = (0.005, 0.25)
"""Allowed distance of mean rho from 1: a number, plus a share of k3.

It applies whatever the standard error is, because a sample sees the tail of rho too seldom.
"""
FEW_ROWS = 12
"""Fewest sequences among which a wrong part can be told from the rest."""
RAW_OR_PROCESSED = ("temperature", "support")
"""Causes that may be raw log-probabilities in the place of processed ones, or the reverse."""


def _off_one(found: Statistics) -> str:
    """Mark that mean rho is not 1; empty if it may be 1.

    Mismatch of any size has E[rho] = 1: both sides are distributions over the same tokens.
    """
    slack, error = RHO_SLACK[0] + RHO_SLACK[1] * found.k3, found.standard_error("excess")
    far = abs(found.mean_rho - 1) > max(6 * error, slack)  # false for NaN
    if not far or not math.isfinite(found.mean_rho):
        return ""
    return f"mean rho is {with_error(found.mean_rho, error)}; under mismatch alone it is 1"


def quiet(found: Statistics) -> bool:
    """Return True if the gap needs nothing."""
    return bool(size_in_words(found.k3, found.f2))


def _text(found: Statistics) -> str:
    """Return the distance in words."""
    return (
        f"k3 is {with_error(found.k3, found.standard_error('k3'))} nats a token over "
        f"{counted(found.tokens, 'token')} in {counted(found.sequences, 'sequence')}, F(2) is "
        f"{number(found.f2, share=True)}"
    )


def size_in_words(k3: float, f2: float) -> str:
    """Return the words for a gap that needs nothing, or "" for a gap that needs something.

    Runs, measurements and audits share them.
    """
    if k3 < HARMLESS_KL:
        return SMALL
    if k3 < QUIET_KL and f2 < QUIET_F2:
        return TOLERABLE
    return ""


@dataclass(frozen=True, slots=True)
class ByRoutes:
    """k3 of the tokens at which a route differs, and of those at which none does, nor did lately.

    A differing route reaches later tokens through attention, so recent ones must agree too.
    """

    differing: Mean = NO_TOKEN
    agreeing: Mean = NO_TOKEN

    @property
    def alike(self) -> bool:
        """True if routes surely do not explain the gap: it is as large where they agree."""
        if min(self.differing.tokens, self.agreeing.tokens) < FEWEST:
            return False
        more = self.differing.mean - REPLAY_HELPS * self.agreeing.mean
        error = math.hypot(self.differing.error, REPLAY_HELPS * self.agreeing.error)
        return more + 2 * error < 0

    def text(self) -> str:
        """Return both means in words; empty if one of them has too few tokens."""
        if min(self.differing.tokens, self.agreeing.tokens) < FEWEST:
            return ""
        found = [
            f"{with_error(each.mean, each.error)} nats at {counted(each.tokens, 'token')}"
            for each in (self.differing, self.agreeing)
        ]
        return (
            f"k3 is {found[0]} where a route differs, and {found[1]} where none differs, nor "
            f"does at the {RECENT} tokens before"
        )


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted effect of a preset on the remaining gap.

    The model is a normal log-ratio with KL = k3 and sequences of the mean length.
    """

    preset: str
    keep: float  # share of tokens left in the loss
    attenuation: float  # factor on the step


@dataclass(frozen=True, slots=True)
class Verdict:
    """Advice on a gap."""

    action: Action
    causes: tuple[str, ...]  # of a bug: names from CAUSES; else routing, numerics, age or none
    sentence: str
    setting: str  # the setting to make; empty if none
    basis: tuple[str, ...]  # measurements that the advice rests on
    forecasts: tuple[Forecast, ...] = ()
    effect: str = ""  # predicted effect of the correction that is named; empty if none is

    def text(self) -> str:
        """Return sentence, setting, predicted effect and basis, one a line."""
        lines = [self.sentence]
        if self.setting:
            lines.append(f"Set {self.setting}.")
        lines += [*filter(None, [self.effect]), *self.basis]
        return "\n".join(lines)


def verdict(
    gap: Statistics,  # without replay, or as the run was trained
    diagnosis: Diagnosis,
    *,
    replayed: Statistics | None = None,  # of the same tokens, with the rollout's routes replayed
    routers: float | None = None,  # share of routes that differ; None: not known
    by_routes: ByRoutes | None = None,  # k3 where routes differ and where not; None: not known
    routes: str = "",  # reason why the routes do not belong to these tokens; empty if they do
    sets: str = "",  # the same of the sampling supports
    since: str = "",  # part of a run that is judged, as in ` from step 20 on`
    aged: bool = False,  # most of the gap is declared staleness
    declared: Declared = UNDECLARED,
    unchecked: Sequence[str] = (),  # possible causes that were not looked for, with the remedy
    copies: bool = False,  # equal sides may be copies: onepolicy did not compute them
) -> Verdict:
    """Return the first advice that holds.

    The order is: bug, too few tokens, a copy, a mark without a name, a cause that was not looked
    for, nothing to do, above the ceiling of the format, replay, correct.
    """
    marks = _marks(diagnosis, gap, replayed)
    found = [*diagnosis.findings]
    found += [Finding(name, text) for name, text in (("routes", routes), ("sets", sets)) if text]
    basis = [_text(gap)]
    if replayed is not None:
        basis.append(f"with the rollout's routes replayed {_text(replayed)}")
    if found:
        return _bug(found, since, basis)
    causes: tuple[str, ...] = ()
    if aged:
        causes = ("age",)
    doubt = _doubt(gap, marks, replayed, since, list(unchecked), copies=copies)
    if doubt:
        return Verdict("unclear", causes, doubt, "", (*marks, *basis))
    if gap.max_dlogp == 0:
        sentence = f"Nothing to do: both sides agree on every token{since} to the bit."
        return Verdict("nothing", (), sentence, "", ())
    remaining, helps = gap, False
    if replayed is not None and gap.k3 > REPLAY_HELPS * replayed.k3:
        remaining, helps = replayed, True
    forecasts = _forecasts(remaining)
    if quiet(gap):
        return _quiet(gap, remaining, since, basis, forecasts)
    if not remaining.k3 <= declared.ceiling:
        return _above_ceiling(remaining, declared, since, basis, aged=aged, helps=helps)
    if aged:
        return _correct_age(gap, since, basis, forecasts)
    if helps:
        return _replay(gap, remaining, since, basis, forecasts)
    if replayed is not None:
        routers = 0.0
    return _correct(gap, since, basis, forecasts, routers, by_routes or ByRoutes())


def _bug(found: Sequence[Finding], since: str, basis: list[str]) -> Verdict:
    """Return the verdict on bugs: those that hold, then those of which one may."""
    causes = {each.cause: False for each in found} | {
        each.cause: True for each in found if each.sure
    }
    named = "; ".join(CAUSES[cause] for cause, sure in causes.items() if sure)
    perhaps = "; or ".join(CAUSES[cause] for cause, sure in causes.items() if not sure)
    tell = ""
    if perhaps:
        tell = f" {TELL_APART[0].upper()}{TELL_APART[1:]}."
    if named and perhaps:
        perhaps = f"perhaps also {perhaps}"
    named = "; ".join(filter(None, [named, perhaps]))
    sentence = f"A bug, not mismatch{since}: {named}. Fix it; no correction repairs it.{tell}"
    evidence = (f"{each.cause}: {each.evidence}" for each in found)
    return Verdict("bug", tuple(causes), sentence, "", (*evidence, *basis))


def _marks(diagnosis: Diagnosis, gap: Statistics, replayed: Statistics | None) -> tuple[str, ...]:
    """Return signs against mismatch. Any of them forbids a recommendation."""
    if diagnosis.marks:
        return diagnosis.marks
    if _off_one(gap):
        return (_off_one(gap),)
    if replayed is not None and _off_one(replayed):
        return (f"with the rollout's routes replayed {_off_one(replayed)}",)
    return ()


def _doubt(
    gap: Statistics,
    marks: tuple[str, ...],
    replayed: Statistics | None,
    since: str,
    unchecked: list[str],
    *,
    copies: bool,
) -> str:
    """Return the reason why nothing may be recommended though no bug was found; empty if none."""
    if gap.tokens < FEWEST:
        return (
            f"Unclear: only {counted(gap.tokens, 'token')}{since}, too few for a verdict, which "
            f"needs {FEWEST} or more."
        )
    if replayed is not None and not math.isfinite(replayed.k3):
        return (
            f"Unclear: k3 with the rollout's routes replayed is {number(replayed.k3)}{since}. Look "
            "for a bug in that scoring."
        )
    if gap.max_dlogp == 0 and copies:
        return (
            f"Unclear: both sides agree on every token{since} to the bit. Is one a copy of the "
            "other? Engines whose numerics are not made equal on purpose differ in the last bits."
        )
    if marks:
        return (
            f"Unclear{since}: this is not what mismatch alone does, and no known cause explains "
            f"it. Look for a bug before any correction: rule out {RULE_OUT}; {TELL_APART}."
        )
    if not unchecked:
        return ""
    state = f"{number(gap.k3)} nats a token{since}"
    if quiet(gap):
        state = "the two sides' numbers agree"
    reasons = "; ".join(unchecked)
    return f"Unclear: {state}, but what could be wrong was not all looked for. {reasons}."


def _quiet(
    gap: Statistics,
    remaining: Statistics,
    since: str,
    basis: list[str],
    forecasts: tuple[Forecast, ...],
) -> Verdict:
    """Return the verdict on a gap that needs nothing, and what replay was measured to take off."""
    size = size_in_words(gap.k3, gap.f2)
    sentence = f"Nothing to do: the gap{since} is {size}."
    causes: tuple[str, ...] = ()
    if size != SMALL and remaining is not gap:
        causes = ("routing",)
        sentence += (
            f" Replaying the rollout's routes (R3) takes off {1 - remaining.k3 / gap.k3:.0%}."
        )
    return Verdict("nothing", causes, sentence, "", tuple(basis), forecasts)


def _above_ceiling(
    remaining: Statistics,
    declared: Declared,
    since: str,
    basis: list[str],
    *,
    aged: bool,
    helps: bool,
) -> Verdict:
    """Return the verdict on a gap that no correction should close before it is looked into."""
    size = f"{number(remaining.k3)} nats a token{since}, above {declared.text()}"
    if aged:
        sentence = f"Tokens are too old: {size}. {YOUNGER}."
        return Verdict("unclear", ("age",), sentence, "", tuple(basis))
    sentence = (
        f"Look first: no known bug, but the gap is {size}. Rule out {RULE_OUT}; {TELL_APART}."
    )
    setting = ""
    if helps:
        setting = R3
    return Verdict("unclear", (), sentence, setting, tuple(basis))


def _replay(
    gap: Statistics,
    remaining: Statistics,
    since: str,
    basis: list[str],
    forecasts: tuple[Forecast, ...],
) -> Verdict:
    """Return the verdict on a gap that replay was measured to reduce to `remaining`."""
    removed = 1 - remaining.k3 / gap.k3
    sentence = (
        f"Mismatch{since}, {removed:.0%} of it from routing: replay the rollout's routes (R3)"
    )
    if quiet(remaining):
        sentence = f"{sentence}; what is left needs no correction."
        return Verdict("replay", ("routing",), sentence, R3, tuple(basis), forecasts)
    name, setting, predicted = _correction(remaining, forecasts)
    left = f"the {number(remaining.k3)} nats a token that are left"
    sentence = f"{sentence}, and correct {left} with {name}."
    setting = f"{R3} {setting}"
    return Verdict("correct", ("routing",), sentence, setting, tuple(basis), forecasts, predicted)


def _correct(
    gap: Statistics,
    since: str,
    basis: list[str],
    forecasts: tuple[Forecast, ...],
    routers: float | None,
    by_routes: ByRoutes,
) -> Verdict:
    """Return the verdict on a gap that replay does not reduce, or was not measured to reduce."""
    name, setting, predicted = _correction(gap, forecasts)
    basis = [*basis, *filter(None, [by_routes.text()])]
    size = f"Mismatch{since}, {number(gap.k3)} nats a token"
    if routers and not by_routes.alike:
        sentence = (
            f"{size}, and {number(routers, share=True)} of the routes differ: replay the "
            f"rollout's routes (R3). If that cannot be had, correct with {name}."
        )
        return Verdict("replay", ("routing",), sentence, R3, tuple(basis), forecasts, predicted)
    sentence = f"{size}: correct it with {name}."
    causes: tuple[str, ...] = ("numerics",)
    if routers:
        sentence += (
            f" {number(routers, share=True)} of the routes differ, but the gap is as large where "
            "they agree, so replay would leave it."
        )
    if routers is None:
        sentence += " If the model is a mixture of experts, replay its routes (R3) first."
        causes = ()
    return Verdict("correct", causes, sentence, setting, tuple(basis), forecasts, predicted)


def _correct_age(
    gap: Statistics, since: str, basis: list[str], forecasts: tuple[Forecast, ...]
) -> Verdict:
    """Return the verdict on a gap that is mostly staleness."""
    name, setting, predicted = _correction(gap, forecasts)
    sentence = (
        f"{number(gap.k3)} nats a token{since}, most of it because older weights sampled: correct "
        f"it with {name}. If training suffers: {YOUNGER[0].lower()}{YOUNGER[1:]}. If this run does "
        "not sample while it learns, a server missed updates."
    )
    return Verdict("correct", ("age",), sentence, setting, tuple(basis), forecasts, predicted)


def correction_for(f5: float) -> str:
    """Return the preset for a gap with this F(5)."""
    if f5 > HEAVY_F5:
        return "icepop"
    return "tis"


def _correction(gap: Statistics, forecasts: tuple[Forecast, ...]) -> tuple[str, str, str]:
    """Return the preset for a gap, its setting and its predicted effect."""
    name = correction_for(gap.f5)
    kept = next(forecast for forecast in forecasts if forecast.preset == name)
    effect = (
        f"{name} would keep {number(kept.keep, share=True)} of these tokens and multiply the step "
        f"by {number(kept.attenuation)}, if log-ratios are normal with this k3."
    )
    return name, f"correction.preset={name}", effect


def mean_length(found: Statistics) -> int:
    """Return the mean number of tokens of a sequence, at least 1."""
    return max(1, round(found.tokens / found.sequences))


def _forecasts(gap: Statistics) -> tuple[Forecast, ...]:
    if not 0 < gap.k3 <= TOO_FAR:
        return ()
    found = {name: predict(preset(name), gap.k3, mean_length(gap)) for name in FORECAST}
    return tuple(Forecast(name, each.keep, each.attenuation) for name, each in found.items())
