"""Impossible log-probabilities: missing and fill values, floors, one number for a whole row."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from onepolicy.nonfinite import KINDS, LeftOut, no_logarithms
from onepolicy.verdict.engine_faults import renormalised
from onepolicy.verdict.scored_tokens import FEWEST, SURE, VISIBLE, Finding, Pairs

MISSING = 0.01
"""Largest share of the slots that may lack a finite log-probability: single tokens."""
OFTEN = 0.002
"""Least share of the slots on exactly one number for it to be examined as a fill value."""
IMPROBABLE = -50.0
"""Nats: below it a sampled token has no log-probability, so no share of the slots is needed."""
LOOKED_AT = 5
"""Most frequent numbers of each side that are examined."""
FEWEST_ALIKE = 6
"""Fewest slots on one number, or of a row, that are not chance."""
NEVER_ZERO = 1e-3
"""Nats: where one side is exactly 0 and the other farther from it than this, no rounding did it."""
LITTLE_NOISE = 5.0
"""99% of the distances of the logits are below it where none is 10 by chance, as there."""
ONE_LEFT, MOST_LEFT = 0.99, 0.9
"""Probability above which a token is the only one that narrowed sampling leaves, and the least
share of such tokens that are exactly 0.
"""
MOST_PADDING = 0.8
"""Share of such a run that is one token from which it is padding, not certain words."""
EDGE = 3.0
"""Slots: mean length of a run of zeros at an end of the rows that certain tokens do not reach."""


def missing(left: LeftOut) -> Finding | None:
    """Return a finding if more than single tokens lack a finite log-probability on a side."""
    share = left.share("logp_trainer", "logp_rollout", "logp_native")
    count = round(share * left.tokens)
    if share <= MISSING or count < min(FEWEST_ALIKE, left.tokens):
        return None
    text = (
        f"{count:,} of {left.tokens:,} log-probabilities are {KINDS}, more than single tokens "
        f"({MISSING:.0%}); the engine is broken, or values are missing"
    )
    return Finding("fill", text)


def impossible(pairs: Pairs) -> tuple[list[Finding], Tensor, bool]:
    """Return findings, the remaining slots [n] bool, and whether their value selected them.

    A floor selects slots by their value. The remaining slots then say nothing about the sampler.
    """
    n, findings, chosen = len(pairs.old), list[Finding](), False
    whole = torch.ones(n, dtype=torch.bool)
    positive = no_logarithms(whole, pairs.rollout) | no_logarithms(whole, pairs.old)
    count = int(positive.sum())
    if count:
        text = f"{count} of {n} are above 0; probabilities instead of their logarithms?"
        findings.append(Finding("not_log", text))
    good = ~positive
    for detect in (_one_sided_zeros, _zeros_of_both, _constant_rows, _piled):
        found = detect(pairs, good)
        if found is not None:
            findings.append(found[0])
            good = good & ~found[1]
            chosen |= detect is _piled
    return findings, good, chosen


def _one_sided_zeros(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """Find zeros that fill one side. Certain tokens are sometimes 0 on either side."""
    no_rounding = (pairs.old + pairs.rollout) < -NEVER_ZERO
    zeros = (pairs.old == 0) | (pairs.rollout == 0)
    far = good & (pairs.gap > 0.1)
    seen = good
    gaps = pairs.logit_gap[good & pairs.visible & ~zeros]
    if len(gaps) and np.quantile(gaps.numpy(), 0.99) < LITTLE_NOISE:
        far |= good & zeros & no_rounding
        seen = good & no_rounding  # where a zero can be told from a certain token
    side, zero, other = pairs.rollout, far & (pairs.rollout == 0), far & (pairs.old == 0)
    if int(zero.sum()) < int(other.sum()):
        side, zero, other = pairs.old, other, zero
    n, count = len(pairs.old), int(zero.sum())
    last = pairs.last & good
    ends = int((zero & last).sum())
    at_ends = ends > max(2, 0.2 * int(last.sum())) and ends > 0.5 * count
    if count - 2 * int(other.sum()) <= max(2, 0.005 * int(seen.sum())) and not at_ends:
        return None
    near, certain = good & ~far, 0.0
    if bool(near.any()):
        certain = float((side[near] == 0).double().mean())
    rest = far & ~zero
    least = max(1.0, 0.3 * float(pairs.gap[zero].median()))
    as_far = bool(rest.any()) and float(pairs.gap[rest].median()) > least
    # Zeros as frequent as elsewhere are certain tokens of another text.
    if as_far and count < 2 * certain * int(far.sum()):
        return None
    narrowed = _only_token_left(pairs, side, good)
    if narrowed is not None:
        return narrowed, zero
    if _only_choice(pairs, zero, good & ~zero):
        return None
    where = ""
    if at_ends:
        where = f", {ends} of them at the last token of a row"
    text = f"{count} of {n} are exactly 0 on one side only{where}; zeros filled in for missing"
    return Finding("fill", text), zero


def _only_token_left(pairs: Pairs, side: Tensor, good: Tensor) -> Finding | None:
    """Return a finding if one side is 0 at nearly every token that the other finds likely.

    Narrowed sampling that leaves one token gives it the probability 1. Values filled in for missing
    ones are not at likely tokens alone.
    """
    other = pairs.rollout if side is pairs.old else pairs.old
    likely = good & (other < -VISIBLE) & (other > math.log(ONE_LEFT))
    count = int((likely & (side == 0)).sum())
    if count < FEWEST or count < MOST_LEFT * int(likely.sum()):
        return None
    return Finding(
        "support",
        f"{count} of {int(likely.sum())} tokens whose probability is above {ONE_LEFT:g} on one "
        "side are exactly 0 on the other: sampling left one token (top-p, top-k 1, temperature 0), "
        "and the log-probabilities are processed",
    )


def _only_choice(pairs: Pairs, zero: Tensor, rest: Tensor) -> bool:
    """Return whether the zeros are the engine's own.

    If top-p leaves one token, its log-probability is 0, and the trainer's is that of the kept mass,
    as elsewhere in the batch. A token behind a fill value has any probability.
    """
    if bool((pairs.old[zero] == 0).any()) or renormalised(pairs.at(rest)) is None:
        return False
    return float(pairs.gap[zero].max()) < 1.5 * float(pairs.gap[rest].max())


def _zeros_of_both(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """Find zeros of prompts and padding, which are at an end of their rows.

    Zeros of certain tokens have no entropy, and occur anywhere.
    """
    zero = good & (pairs.old == 0) & (pairs.rollout == 0)
    n, count = len(pairs.old), int(zero.sum())
    if count <= max(2, 0.001 * n):
        return None
    if pairs.entropy is not None:
        uncertain = int((zero & (pairs.entropy > 0.01)).sum())
        if uncertain > max(2, 0.001 * n):
            return _outside(uncertain, n, "0 on both sides though their entropy is not"), zero
    start, end = _leading(pairs, zero), _leading(pairs, zero, backward=True)
    for name, run in (("start", start), ("end", end)):
        rows, inside = len(pairs.segment.unique()), int(run.sum())
        share = min((count - inside) / max(1, n - inside), 0.99)  # of certain tokens elsewhere
        if inside / rows > EDGE + 3 * share / (1 - share) and not _certain(pairs, run, zero):
            return _outside(inside, n, f"0 on both sides in a run at the {name} of their rows"), run
    return None


def _certain(pairs: Pairs, run: Tensor, zero: Tensor) -> bool:
    """Return whether a run of zeros may be certain tokens: an answer's first or last words.

    They have no entropy, where padding may have none either: but it is one token.
    Without entropy, certain tokens elsewhere must be exactly 0 as well.
    """
    if pairs.token is not None:
        most = int(pairs.token[run].unique(return_counts=True)[1].max())
        if most > MOST_PADDING * int(run.sum()):
            return False
    if pairs.entropy is not None:
        return True
    elsewhere = ~run & (pairs.old > -NEVER_ZERO) & (pairs.rollout > -NEVER_ZERO)
    return bool(elsewhere.any()) and float(zero[elsewhere].double().mean()) > MOST_LEFT


def _outside(count: int, n: int, value: str) -> Finding:
    text = f"{count} of {n} are exactly {value}: prompts or padding inside the mask"
    return Finding("fill", text)


def _leading(pairs: Pairs, flag: Tensor, *, backward: bool = False) -> Tensor:
    """Return [n] bool: slots of each row up to the first one without the flag.

    With `backward` rows are read from their ends.
    """
    if backward:
        flipped = replace(pairs, segment=pairs.segment.flip(0))
        return _leading(flipped, flag.flip(0)).flip(0)
    segment = pairs.segment
    missing = (~flag).long().cumsum(0)
    starts = torch.ones_like(flag)
    starts[1:] = segment[1:] != segment[:-1]
    before = (missing - (~flag).long())[starts]
    return missing - before[starts.long().cumsum(0) - 1] == 0


def _constant_rows(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """Find rows with one number at every slot while the other side's values differ."""
    usable = good & pairs.open
    rows, index = pairs.segment.unique_consecutive(return_inverse=True)
    count = torch.zeros(len(rows)).index_add(0, index, usable.float())
    lows, highs = [], []
    for side in (pairs.old, pairs.rollout):
        low = torch.full((len(rows),), torch.inf, dtype=side.dtype)
        high = torch.full((len(rows),), -torch.inf, dtype=side.dtype)
        lows.append(low.scatter_reduce(0, index, torch.where(usable, side, torch.inf), "amin"))
        highs.append(high.scatter_reduce(0, index, torch.where(usable, side, -torch.inf), "amax"))
    for name, this, other in (("trainer", 0, 1), ("rollout", 1, 0)):
        varies = highs[other] - lows[other] > 0.1
        constant = (count >= FEWEST_ALIKE) & (highs[this] == lows[this]) & varies
        if int(constant.sum()) >= 2:
            text = (
                f"in {int(constant.sum())} of {len(rows)} rows all values of the {name} are one "
                "number: a mean or a sum of the row in place of its tokens"
            )
            return Finding("constant", text), constant[index] & good
    return None


def _piled(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """Find many slots on one number that the other side does not have.

    It is a fill value, or a floor that values were clipped to.
    """
    usable = good & pairs.open
    n = int(usable.sum())
    if n < FEWEST_ALIKE:
        return None
    sides = (("rollout", pairs.rollout, pairs.old), ("trainer", pairs.old, pairs.rollout))
    for name, side, other in sides:
        values, counts = side[usable].unique(return_counts=True)
        for place in counts.argsort(descending=True)[:LOOKED_AT].tolist():
            value, count = float(values[place]), int(counts[place])
            fewest = FEWEST_ALIKE if value < IMPROBABLE else max(FEWEST_ALIKE, OFTEN * n)
            if count < fewest or value > -SURE:  # float32 is coarse near 0
                continue
            piled = usable & (side == value)
            if int(pairs.at(piled).distinct.sum()) < FEWEST_ALIKE:  # siblings have equal values
                continue
            also = int((usable & (other == value)).sum())  # a grid has its numbers on both sides
            found = _fault_of_pile(pairs, side, usable, piled, also)
            if found == "fill":
                text = _describe_pile(pairs, usable, piled, name, side)
                return Finding("fill", text), piled
            if found == "outside":
                text = f"{value:.6g} on both sides, which differ elsewhere"
                return _outside(count, len(pairs.old), text), piled
    return None


def _fault_of_pile(pairs: Pairs, side: Tensor, usable: Tensor, piled: Tensor, also: int) -> str:
    """Return "fill", "outside" (the mask) or "" for slots where `side` is one number.

    `also` is the number of slots where the other side has the same number.
    """
    gap, equal, count = pairs.gap, pairs.old == pairs.rollout, int(piled.sum())
    rest, typical = usable & ~piled, 0.0
    if int(rest.sum()) >= FEWEST_ALIKE:
        typical = float(gap[rest].median())
    value = float(side[piled][0])
    like = rest & ((side - value).abs() < 0.05 + 0.2 * abs(value))
    if int(like.sum()) >= FEWEST_ALIKE:
        typical = max(typical, float(gap[like].median()))
        if 3 * int(side[like].unique(return_counts=True)[1].max()) > count:
            return ""  # a coarse grid: its other numbers are as frequent
    far = float(gap[piled].median()) > max(0.1, 5 * typical)
    if far and count > max(FEWEST_ALIKE, 3 * also):
        return "fill"
    same = bool(rest.any()) and float(equal[piled].double().mean()) > 0.9
    if same and count > 4 * FEWEST_ALIKE and float(equal[rest].double().mean()) < 0.3:
        return "outside"
    return ""


def _describe_pile(pairs: Pairs, usable: Tensor, piled: Tensor, name: str, side: Tensor) -> str:
    count, value = int(piled.sum()), float(side[piled][0])
    text = f"{count} values of the {name} are exactly {value:.6g}"
    at_end = int((piled & pairs.last).sum())
    if at_end > count / 2:
        text += f", {at_end} of them at the last token of a row"
    text += ", far from the other side's: a fill value"
    if value <= float(side[usable].min()):
        text += ", or the floor they were clipped to"
    return text
