"""Is the ratio a mismatch, or a bug that no correction repairs? Reads log-probabilities, changes nothing.

Under true mismatch both engines scored the same tokens under the same settings: the gap is noise, E[rho] = 1, no
simple change of one side removes it, and all rows and places have their part of it. Each bug leaves a mark instead: a
change that closes most of the gap (a shift by one slot, another temperature, another base, other weights), a part of
the slots that is far apart where the rest is near, an impossible value, or E[rho] < 1. What is unlike mismatch but has
no cause that we know is a mark too: it has no name, and forbids a recommendation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.correct.slots import any_layout
from onepolicy.types import TokenBatch
from onepolicy.verdict.engine_faults import (
    as_drawn,
    proportional,
    renormalised,
    weights_and_sampling,
)
from onepolicy.verdict.local_faults import local, unlike_parts
from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST, Finding, Pairs
from onepolicy.verdict.value_faults import FEWEST_ALIKE, impossible

ONE_SIDED = 0.93
"""Share of the uncertain tokens with rho on one side of 1: noise has about a half on each."""
APART = {1: "one token", 2: "two tokens"}
SHIFTS = ((1, "next"), (-1, "previous"), (2, "next but one"), (-2, "last but one"))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    gap: float  # mean |log rho| over finite slots [nats]
    findings: tuple[Finding, ...]
    marks: tuple[str, ...] = ()  # what mismatch alone does not do, where no finding explains it

    @property
    def bug(self) -> bool:
        return bool(self.findings)

    def text(self) -> str:
        if self.findings:
            return "\n".join(f"{f.cause}: {f.evidence}" for f in self.findings)
        if self.marks:
            return f"mean |log rho| {self.gap:.3g} nats, and no cause is known of this: {'; '.join(self.marks)}"
        return f"mean |log rho| {self.gap:.3g} nats: no known bug explains it, so it is mismatch"


def preflight(batch: TokenBatch) -> Diagnosis:
    """`diagnose` of a scored step."""
    assert batch.logp_old is not None, "score() comes first"
    return diagnose(
        batch.logp_old,
        batch.logp_rollout,
        batch.trainable,
        segment=batch.segment,
        version=batch.version,
        entropy=batch.entropy,
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
    entropy: Tensor | None = None,
    turn: Tensor | None = None,
    group: Tensor | None = None,
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
    entropy: Sequence[Tensor] | None = None,
    turn: Sequence[Tensor] | None = None,
    group: Sequence[Tensor] | None = None,
) -> Diagnosis: ...
@any_layout
@torch.no_grad()
def diagnose(
    logp_trainer: Tensor,  # [T] float32
    logp_rollout: Tensor,  # [T] float32
    mask: Tensor,  # [T] bool, trainable slots
    *,
    segment: Tensor,  # [T] int64, sequence of each slot, in order
    tokens: Tensor | None = None,  # [T] int, what the trainer scored
    tokens_rollout: Tensor | None = None,  # [T] int, what the engine sampled
    version: Tensor | None = None,  # [T] int, weight version that sampled each slot
    logp_previous: Tensor
    | None = None,  # [T] float32, the trainer's score under its previous weights
    entropy: Tensor | None = None,  # [T] float32, of the trainer's distribution [nats]
    turn: Tensor | None = None,  # [T] int
    group: Tensor | None = None,  # [T] int, rows that are compared with each other: of one step
) -> Diagnosis:
    """Name the bugs that the log-probabilities give away; none on plain mismatch. Raises UsageError on an empty mask.

    All fields may be [B, T] too, or lists of one [T_i] per sequence; their sequences need no `segment`. Not visible
    without `entropy`: another temperature, and sampling that was narrowed but reported as if not.
    """
    if not mask.any():
        raise UsageError(f"diagnose: the mask selects none of {mask.numel()} slots")
    mask = mask.cpu()
    slot = mask.nonzero()[:, 0]
    old, rollout, which = logp_trainer.cpu()[slot], logp_rollout.cpu()[slot], segment.cpu()[slot]
    picked = (
        None if x is None else x.cpu()[slot] for x in (version, logp_previous, entropy, turn, group)
    )
    version, previous, entropy, turn, group = picked
    version, previous, entropy = (
        None if x is None else x.double() for x in (version, previous, entropy)
    )
    given = Pairs(
        old.double(),
        rollout.double(),
        which.long(),
        slot,
        version,
        previous,
        entropy,
        turn=turn,
        group=group,
    )
    findings, good, chosen = impossible(given)
    pairs = given.at(good)
    if pairs.entropy is not None and (count := int((~pairs.entropy.isfinite()).sum())):
        raise UsageError(
            f"diagnose: entropy is NaN or infinite in {count} of {len(pairs.old)} slots, so it says nothing of "
            "temperature and sampling; mend it, or leave it out"
        )
    gap = float(pairs.gap.mean()) if len(pairs.old) else float("nan")
    if len(pairs.old) < FEWEST:
        return Diagnosis(gap, tuple(findings))
    if tokens is not None and tokens_rollout is not None:
        other = _other_tokens(pairs.slot, tokens.cpu(), tokens_rollout.cpu())
        if other is not None:  # the other marks mean nothing on other tokens
            return Diagnosis(gap, (*findings, other))
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


def _explanations(pairs: Pairs, *, chosen: bool) -> list[Finding]:
    """What explains the gap: changes of a whole side before faults of a part, and those before what is left to be
    said of the sampler."""
    findings = []
    if (shift := _shift(pairs)) is not None:
        findings, pairs = [shift[0]], shift[1]
    whole = weights_and_sampling(pairs)
    if whole or findings:
        return [*findings, *whole]
    part = local(pairs) or proportional(pairs, one_factor=False)
    if not chosen:
        part = part or renormalised(pairs)
    return [] if part is None else [part]


def _other_tokens(slot: Tensor, tokens: Tensor, tokens_rollout: Tensor) -> Finding | None:
    differ = tokens[slot] != tokens_rollout[slot]
    if not bool(differ.any()):
        return None
    return Finding(
        "retokenised",
        f"{int(differ.sum())} of {len(differ)} trained tokens are not those that were sampled, first slot "
        f"{int(slot[differ][0])}; text was decoded and encoded again, or changed",
    )


def _marks(pairs: Pairs) -> list[str]:
    """What plain mismatch does not do."""
    out = unlike_parts(pairs)
    uncertain = pairs.at(pairs.open)
    log_ratio = uncertain.old - uncertain.rollout
    if len(log_ratio) >= FEWEST:
        above, below = (
            float((log_ratio > 0).double().mean()),
            float((log_ratio < 0).double().mean()),
        )
        if max(above, below) > ONE_SIDED:
            side = "above" if above > below else "below"
            out.append(
                f"rho is {side} 1 at {max(above, below):.0%} of the uncertain tokens; noise is on both sides"
            )
    twice = _repeated_rows(pairs)
    if twice:
        out.append(f"{twice} rows are there twice, with the same values")
    return out


def _repeated_rows(pairs: Pairs) -> int:
    """Rows whose values on both sides are those of an earlier one; certain ones may well be."""
    sizes = pairs.segment.unique_consecutive(return_counts=True)[1].tolist()
    seen, twice = set[bytes](), 0
    for old, rollout in zip(pairs.old.split(sizes), pairs.rollout.split(sizes), strict=True):
        if int(((old + rollout) / 2 < -0.05).sum()) < FEWEST_ALIKE or float(old.sum()) > -3:
            continue
        key = old.numpy().tobytes() + rollout.numpy().tobytes()
        twice += key in seen
        seen.add(key)
    return twice if twice >= 2 else 0


def _shift(pairs: Pairs) -> tuple[Finding, Pairs] | None:
    """Does the trainer's value at a slot equal the engine's at a slot beside, or follow that one much more closely
    (with another bug beside the shift it equals none)? And the pairs put right."""
    here, correlated = float(pairs.gap.mean()), _correlation(pairs.old, pairs.rollout)
    if here <= 0.05:
        return None
    surely = max(0.3, 8 / len(pairs.old) ** 0.5)
    for by, name in SHIFTS:
        moved = _moved(pairs, by)
        if len(moved.old) < FEWEST:
            continue
        value, followed = float(moved.gap.mean()), _correlation(moved.old, moved.rollout)
        follows = value < here and followed > 0.5 and followed - correlated > surely
        if value < EXPLAINED * here or follows:
            finding = Finding(
                "shift",
                f"mean |log rho| is {here:.3g} nats, but {value:.3g} against the engine's value of the {name} slot "
                f"(correlation {correlated:.2f} and {followed:.2f}); the two sides are {APART[abs(by)]} apart",
            )
            return finding, moved
    return None


def _correlation(x: Tensor, y: Tensor) -> float:
    """-1 if one of them is constant."""
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1].nan_to_num(-1.0))


def _moved(pairs: Pairs, by: int) -> Pairs:
    """The trainer's value at a slot beside the engine's `by` slots on. Entropy may be in step with either side: it is
    taken where it goes with the trainer's log-probabilities."""
    n, size = len(pairs.old), abs(by)
    ahead, behind = slice(None, max(0, n - size)), slice(size, None)
    of_trainer, of_rollout = (ahead, behind) if by > 0 else (behind, ahead)
    near = (pairs.slot[behind] == pairs.slot[ahead] + size) & (
        pairs.segment[behind] == pairs.segment[ahead]
    )
    old, entropy = pairs.old[of_trainer], None
    if pairs.entropy is not None and len(old) > 1:
        both = pairs.entropy[of_trainer], pairs.entropy[of_rollout]
        entropy = max(both, key=lambda h: _correlation(h, -old))
    moved = Pairs(
        old,
        pairs.rollout[of_rollout],
        pairs.segment[of_rollout],
        pairs.slot[of_rollout],
        None if pairs.version is None else pairs.version[of_rollout],
        None if pairs.previous is None else pairs.previous[of_trainer],
        entropy,
        None if pairs.turn is None else pairs.turn[of_rollout],
        None if pairs.group is None else pairs.group[of_rollout],
    )
    return moved.at(near)
