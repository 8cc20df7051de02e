"""Diagnosis of a gap: mismatch, or a bug that no correction repairs.

It only reads log-probabilities.

Under true mismatch both engines scored the same tokens with the same settings: the gap is noise,
E[rho] = 1, no simple change of one side removes it, and it is spread over all rows and places. A
bug leaves a sign instead: a change that closes most of the gap (a shift by one slot, another
temperature, another base, other weights), a part of the slots that is far apart while the rest is
near, an impossible value, or E[rho] < 1. A gap that is unlike mismatch and has no known cause gets
a mark, which forbids a recommendation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import overload

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.correct.reweight import any_layout
from onepolicy.nonfinite import LeftOut, Nonfinite, apply_rule
from onepolicy.notation import number
from onepolicy.types import TokenBatch
from onepolicy.verdict.engine_faults import (
    as_drawn,
    renormalised,
    weights_and_sampling,
)
from onepolicy.verdict.local_faults import local, unlike_parts
from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST, Finding, Pairs, contexts, correlation
from onepolicy.verdict.support_faults import over_other_sets
from onepolicy.verdict.value_faults import FEWEST_ALIKE, impossible, missing

ONE_SIDED = 0.93
"""Largest share of the uncertain tokens with rho on one side of 1; noise has half on each side."""
LIKELY_ROW = -12.0
"""Nats: log-probability of a row above which two siblings may draw it by chance."""
LOOKED_FOR_BY = {
    "entropy": "another temperature, and narrowed sampling (top-p, top-k) reported as if not",
    "version": "stale weights by version",
    "logp_previous": "an update the engine did not take",
    "logp_base": "an adapter the engine does not apply",
}
"""What is given -> the faults that are looked for by it."""
WITHOUT_ENTROPY = (
    "before any correction: without it another temperature, and sampling narrowed but not so "
    "reported, look like no gap or like mismatch"
)
ANOTHER_MODEL = Finding(
    "stale", "weights that are far from the trainer's leave the same marks", sure=False
)
APART = {1: "one token", 2: "two tokens"}
SHIFTS = ((1, "next"), (-1, "previous"), (2, "next but one"), (-2, "last but one"))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Bugs found in a gap, or the marks that no known bug explains."""

    gap: float  # mean |log rho| over the slots left [nats]
    findings: tuple[Finding, ...]
    marks: tuple[str, ...] = ()  # signs against mismatch that no finding explains
    nonfinite: LeftOut = field(default_factory=LeftOut)  # slots left out before anything is judged
    not_given: tuple[str, ...] = ()  # of LOOKED_FOR_BY, so these faults were not looked for

    @property
    def bug(self) -> bool:
        """True if a bug was found."""
        return bool(self.findings)

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """Return the diagnosis in words, with what was not looked for."""
        lines = [f"{found.cause}: {found.evidence}" for found in self.findings]
        size, marks = f"mean |log rho| {number(self.gap)} nats", "; ".join(self.marks)
        if not lines and marks:
            lines = [f"{size}, and no cause is known of this: {marks}"]
        elif not lines and "entropy" in self.not_given:
            lines = [f"{size}: unclear. Give the trainer's entropy {WITHOUT_ENTROPY}"]
        elif not lines:
            lines = [f"{size}: no known bug explains it, so it is mismatch"]
        if not self.findings and self.not_given:
            unseen = "; ".join(f"{LOOKED_FOR_BY[name]} ({name})" for name in self.not_given)
            lines.append(f"not looked for: {unseen}")
        if self.nonfinite.count:
            lines.append(str(self.nonfinite))
        return "\n".join(lines)


def diagnose_batch(batch: TokenBatch) -> Diagnosis:
    """Return the diagnosis of a scored step."""
    assert batch.logp_old is not None, "the scorer must score the batch first"
    return diagnose(
        batch.logp_old,
        batch.logp_rollout,
        batch.trainable,
        segment=batch.segment,
        tokens=batch.target_ids,
        version=batch.version,
        entropy=batch.entropy,
        logp_vocabulary=batch.logp_vocabulary,
    )


@overload
def diagnose(
    logp_trainer: Tensor,
    logp_rollout: Tensor,
    mask: Tensor,
    *,
    segment: Tensor | None = None,
    tokens: Tensor | None = None,
    tokens_rollout: Tensor | None = None,
    version: Tensor | None = None,
    logp_previous: Tensor | None = None,
    logp_base: Tensor | None = None,
    entropy: Tensor | None = None,
    logp_vocabulary: Tensor | None = None,
    turn: Tensor | None = None,
    group: Tensor | None = None,
    nonfinite: Nonfinite = "skip",
) -> Diagnosis: ...
@overload
def diagnose(
    logp_trainer: Sequence[Tensor],
    logp_rollout: Sequence[Tensor],
    mask: Sequence[Tensor],
    *,
    tokens: Sequence[Tensor] | None = None,
    tokens_rollout: Sequence[Tensor] | None = None,
    version: Sequence[Tensor] | None = None,
    logp_previous: Sequence[Tensor] | None = None,
    logp_base: Sequence[Tensor] | None = None,
    entropy: Sequence[Tensor] | None = None,
    logp_vocabulary: Sequence[Tensor] | None = None,
    turn: Sequence[Tensor] | None = None,
    group: Sequence[Tensor] | None = None,
    nonfinite: Nonfinite = "skip",
) -> Diagnosis: ...
@any_layout
@torch.no_grad()
def diagnose(
    logp_trainer: Tensor,  # [T] float32
    logp_rollout: Tensor,  # [T] float32
    mask: Tensor,  # [T] bool, trainable slots
    *,
    segment: Tensor,  # [T] int64, sequence of each slot, in order
    tokens: Tensor | None = None,  # [T] int, tokens that the trainer scored
    tokens_rollout: Tensor | None = None,  # [T] int, tokens that the engine sampled
    version: Tensor | None = None,  # [T] int, weight version that sampled each slot
    logp_previous: Tensor | None = None,  # [T] float32, trainer with its previous weights
    logp_base: Tensor | None = None,  # [T] float32, trainer with its adapter off
    entropy: Tensor | None = None,  # [T] float32, of the trainer's distribution [nats]
    # [T] float32, trainer over the whole vocabulary, where logp_trainer is over supports
    logp_vocabulary: Tensor | None = None,
    turn: Tensor | None = None,  # [T] int
    group: Tensor | None = None,  # [T] int, training step of each row; rows of a step are compared
    nonfinite: Nonfinite = "skip",  # leave out slots with a value that is not finite, or raise
) -> Diagnosis:
    """Name the bugs that the log-probabilities show. Plain mismatch gives none.

    All fields may also be [B, T], or lists of one [T_i] per sequence. [T] without `segment` is one.
    Without `entropy` two bugs stay invisible: another temperature, and narrowed sampling that is
    reported as if it were not narrowed. The result says what was not looked for (`not_given`).
    Many slots without finite log-probabilities are a finding too. Raises UsageError if the mask is
    empty, or if a value is not finite and `nonfinite` is "raise".
    """
    if not mask.any():
        raise UsageError(f"diagnose: the mask selects none of {mask.numel()} slots")
    values = {
        "logp_trainer": logp_trainer,
        "logp_rollout": logp_rollout,
        "entropy": entropy,
        "logp_previous": logp_previous,
        "logp_base": logp_base,
        "logp_vocabulary": logp_vocabulary,
    }
    mask, left = apply_rule("diagnose", nonfinite, mask, values)
    slot = mask.cpu().nonzero()[:, 0]
    old, rollout, which = logp_trainer.cpu()[slot], logp_rollout.cpu()[slot], segment.cpu()[slot]
    given = Pairs(
        old.double(),
        rollout.double(),
        which.long(),
        slot,
        version=_at(version, slot, torch.float64),
        previous=_at(logp_previous, slot, torch.float64),
        base=_at(logp_base, slot, torch.float64),
        entropy=_at(entropy, slot, torch.float64),
        turn=_at(turn, slot),
        group=_at(group, slot),
        context=contexts(_cpu(tokens), segment.cpu(), mask.cpu(), old, rollout),
        token=_at(tokens, slot),
        vocabulary=_at(logp_vocabulary, slot, torch.float64),
    )
    lacking = missing(left)
    if left.count == left.tokens and lacking is None:
        raise UsageError(f"diagnose: {left}; fix these values, or leave the argument out")
    found = _judged(given, tokens, tokens_rollout)
    if lacking is not None:
        found = replace(found, findings=(lacking, *found.findings))
    return replace(found, nonfinite=left, not_given=_not_given(given))


def _not_given(pairs: Pairs) -> tuple[str, ...]:
    fields = (pairs.entropy, pairs.version, pairs.previous, pairs.base)
    return tuple(n for n, field in zip(LOOKED_FOR_BY, fields, strict=True) if field is None)


def _judged(given: Pairs, tokens: Tensor | None, tokens_rollout: Tensor | None) -> Diagnosis:
    """Return the diagnosis of slots whose values are finite."""
    findings, good, chosen = impossible(given)
    pairs = given.at(good)
    gap = math.nan
    if len(pairs.old):
        gap = float(pairs.gap.mean())
    if len(pairs.old) < FEWEST:
        return Diagnosis(gap, tuple(findings))
    if tokens is not None and tokens_rollout is not None:
        retokenised = _other_tokens(pairs.slot, tokens.cpu(), tokens_rollout.cpu())
        if retokenised is not None:  # no other sign means anything on other tokens
            return Diagnosis(gap, (*findings, retokenised))
    findings += _explanations(pairs, chosen=chosen)
    if findings:
        return Diagnosis(gap, tuple(findings))
    drawn = as_drawn(pairs)
    if isinstance(drawn, Finding):
        return Diagnosis(gap, (drawn,))
    marks = _marks(pairs)
    if drawn is not None:
        marks.append(drawn)
    return Diagnosis(gap, (), tuple(marks))


def _at(field: Tensor | None, slot: Tensor, dtype: torch.dtype | None = None) -> Tensor | None:
    """Return the values at these slots, on the CPU."""
    if field is None:
        return None
    return field.cpu()[slot].to(dtype)


def _cpu(field: Tensor | None) -> Tensor | None:
    return None if field is None else field.cpu()


def _explanations(pairs: Pairs, *, chosen: bool) -> list[Finding]:
    """Return the findings that explain the gap.

    Changes of a whole side are tried first, then faults of a part, then narrowed sampling.
    """
    findings = []
    shift = _shift(pairs)
    if shift is not None:
        findings, pairs = [shift[0]], shift[1]
    whole = weights_and_sampling(pairs)
    if whole or findings:
        return [*findings, *whole]
    part = over_other_sets(pairs) or local(pairs)
    if not chosen:
        part = part or renormalised(pairs)
    if part is None:
        return []
    if part.cause == "rows" and not part.sure:
        return [part, ANOTHER_MODEL]
    return [part]


def _other_tokens(slot: Tensor, tokens: Tensor, tokens_rollout: Tensor) -> Finding | None:
    differ = tokens[slot] != tokens_rollout[slot]
    if not bool(differ.any()):
        return None
    return Finding(
        "retokenised",
        f"{int(differ.sum())} of {len(differ)} trained tokens are not the sampled ones, first at "
        f"slot {int(slot[differ][0])}; text was decoded and encoded again, or changed",
    )


def _marks(pairs: Pairs) -> list[str]:
    """Return the signs against plain mismatch."""
    out = unlike_parts(pairs)
    uncertain = pairs.at(pairs.open)
    log_ratio = uncertain.old - uncertain.rollout
    if len(log_ratio) >= FEWEST:
        shares = {
            "above": float((log_ratio > 0).double().mean()),
            "below": float((log_ratio < 0).double().mean()),
        }
        side = max(shares, key=lambda name: shares[name])
        if shares[side] > ONE_SIDED:
            out.append(
                f"rho is {side} 1 at {shares[side]:.0%} of the uncertain tokens; noise is on both "
                "sides"
            )
    twice = _repeated_rows(pairs)
    if twice:
        out.append(f"{twice} rows are there twice, with the same values")
    return out


def _repeated_rows(pairs: Pairs) -> int:
    """Return the number of rows whose values on both sides repeat those of an earlier row.

    Rows of certain tokens are left out: siblings draw them twice by chance. A single repeated row
    does not count.
    """
    sizes = pairs.segment.unique_consecutive(return_counts=True)[1].tolist()
    seen, twice = set[bytes](), 0
    for old, rollout in zip(pairs.old.split(sizes), pairs.rollout.split(sizes), strict=True):
        if int(((old + rollout) / 2 < -0.05).sum()) < FEWEST_ALIKE or float(old.sum()) > LIKELY_ROW:
            continue
        key = old.numpy().tobytes() + rollout.numpy().tobytes()
        twice += key in seen
        seen.add(key)
    if twice < 2:
        return 0
    return twice


def _shift(pairs: Pairs) -> tuple[Finding, Pairs] | None:
    """Return the finding of a shift and the pairs with it undone.

    Under a shift the trainer's value at a slot equals the engine's at a neighbouring slot. With
    another bug beside the shift it only follows that value much more closely.
    """
    unmoved, correlated = float(pairs.gap.mean()), correlation(pairs.old, pairs.rollout, -1.0)
    if unmoved <= 0.05:
        return None
    surely = max(0.3, 8 / len(pairs.old) ** 0.5)
    for by, name in SHIFTS:
        moved = _moved(pairs, by)
        if len(moved.old) < FEWEST:
            continue
        value, followed = float(moved.gap.mean()), correlation(moved.old, moved.rollout, -1.0)
        follows = value < unmoved and followed > 0.5 and followed - correlated > surely
        if value < EXPLAINED * unmoved or follows:
            finding = Finding(
                "shift",
                f"mean |log rho| is {number(unmoved)} nats, but {number(value)} against the "
                f"engine's value of the {name} token (correlation {number(correlated)} and "
                f"{number(followed)}); the two sides are {APART[abs(by)]} apart",
            )
            return finding, moved
    return None


def _moved(pairs: Pairs, by: int) -> Pairs:
    """Return pairs of the trainer's value at a slot with the engine's `by` slots later.

    The entropy may be in step with either side. The alignment that correlates better with the
    trainer's log-probabilities is used.
    """
    n, size = len(pairs.old), abs(by)
    ahead, behind = slice(None, max(0, n - size)), slice(size, None)
    of_trainer, of_rollout = ahead, behind
    if by < 0:
        of_trainer, of_rollout = behind, ahead
    near = (pairs.slot[behind] == pairs.slot[ahead] + size) & (
        pairs.segment[behind] == pairs.segment[ahead]
    )
    old, entropy = pairs.old[of_trainer], None
    if pairs.entropy is not None and len(old) > 1:
        both = pairs.entropy[of_trainer], pairs.entropy[of_rollout]
        entropy = max(both, key=lambda h: correlation(h, -old, -1.0))
    of_other = {
        name: other[of_trainer]
        for name in ("previous", "base", "vocabulary")
        if (other := getattr(pairs, name)) is not None
    }
    every = torch.arange(n)[of_rollout]
    return replace(pairs.at(every), old=old, entropy=entropy, **of_other).at(near)
