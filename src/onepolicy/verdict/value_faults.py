"""Values that no log-probability of this token has: missing ones filled in, floors, one number for a whole row."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.verdict.engine_faults import renormalised
from onepolicy.verdict.scored_tokens import SURE, Finding, Pairs

OFTEN = 0.002
"""Share of the slots on exactly one number from which it is looked at as a value that was filled in."""
LOOKED_AT = 5
"""Numbers of each side, the most frequent first."""
FEWEST_ALIKE = 6
"""Slots on one number, or slots of a row, below which that may be chance."""
EDGE = 3.0
"""Slots: mean length of a run of zeros at an end of the rows from which it is no run of certain tokens."""


def impossible(pairs: Pairs) -> tuple[list[Finding], Tensor, bool]:
    """Findings; [n] bool, which slots are left to look at; and whether these were chosen by their value, as where a
    floor took the others: then they say nothing of the sampler."""
    n, findings, chosen = len(pairs.old), list[Finding](), False
    bad = ~(pairs.old.isfinite() & pairs.rollout.isfinite())
    if count := int(bad.sum()):
        findings.append(
            Finding("fill", f"{count} of {n} log-probabilities are NaN or infinite; missing values")
        )
    positive = ~bad & ((pairs.rollout > 1e-3) | (pairs.old > 1e-3))
    if count := int(positive.sum()):
        findings.append(
            Finding(
                "not_log", f"{count} of {n} are above 0; probabilities instead of their logarithms?"
            )
        )
    good = ~bad & ~positive
    for look in (_one_sided_zeros, _zeros_of_both, _constant_rows, _piled):
        found = look(pairs, good)
        if found is not None:
            findings.append(found[0])
            good = good & ~found[1]
            chosen |= look is _piled
    return findings, good, chosen


def _one_sided_zeros(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """Certain tokens are 0 now and then on either side; zeros filled in are on one."""
    far = good & (pairs.gap > 0.1)
    here, there = far & (pairs.rollout == 0), far & (pairs.old == 0)
    zero = here if int(here.sum()) >= int(there.sum()) else there
    other = there if zero is here else here
    n, count = len(pairs.old), int(zero.sum())
    last = _last(pairs, good)
    ends = int((zero & last).sum())
    at_ends = ends > max(2, 0.2 * int(last.sum())) and ends > 0.5 * count
    if count - 2 * int(other.sum()) <= max(2, 0.005 * n) and not at_ends:
        return None
    near, side = good & ~far, pairs.rollout if zero is here else pairs.old
    certain = float((side[near] == 0).double().mean()) if bool(near.any()) else 0.0
    rest = far & ~zero
    as_far = bool(rest.any()) and float(pairs.gap[rest].median()) > max(
        1.0, 0.3 * float(pairs.gap[zero].median())
    )
    if as_far and count < 2 * certain * int(
        far.sum()
    ):  # as many as elsewhere: certain tokens of another text
        return None
    if _only_choice(pairs, zero, good & ~zero):
        return None
    where = f", {ends} of them at the last slot of a row" if at_ends else ""
    text = f"{count} of {n} are exactly 0 on one side only{where}; zeros filled in for missing"
    return Finding("fill", text), zero


def _only_choice(pairs: Pairs, zero: Tensor, rest: Tensor) -> bool:
    """Are the zeros the engine's own? Where top-p leaves one token, its log-probability is 0 and the trainer's that of
    the mass that was kept, as elsewhere in the batch; behind a filled-in zero is a token of any probability."""
    if bool((pairs.old[zero] == 0).any()) or renormalised(pairs.at(rest)) is None:
        return False
    return float(pairs.gap[zero].max()) < 1.5 * float(pairs.gap[rest].max())


def _zeros_of_both(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """A certain token has no entropy, and stands anywhere; prompts and padding stand at an end of their rows."""
    zero = good & (pairs.old == 0) & (pairs.rollout == 0)
    n, count = len(pairs.old), int(zero.sum())
    if count <= max(2, 0.001 * n):
        return None
    if pairs.entropy is not None:
        uncertain = zero & (pairs.entropy > 0.01)
        if int(uncertain.sum()) > max(2, 0.001 * n):
            return _outside(
                int(uncertain.sum()), n, "0 on both sides though their entropy is not"
            ), zero
    for name, run in (
        ("start", _leading(pairs, zero)),
        ("end", _leading(pairs, zero, backward=True)),
    ):
        rows, inside = len(pairs.segment.unique()), int(run.sum())
        share = min((count - inside) / max(1, n - inside), 0.99)  # of certain tokens elsewhere
        if inside / rows > EDGE + 3 * share / (1 - share):
            return _outside(inside, n, f"0 on both sides in a run at the {name} of their rows"), run
    return None


def _outside(count: int, n: int, what: str) -> Finding:
    return Finding("fill", f"{count} of {n} are exactly {what}: prompts or padding inside the mask")


def _leading(pairs: Pairs, flag: Tensor, *, backward: bool = False) -> Tensor:
    """[n] bool: slots of each row up to the first one without the flag (from the end: backward)."""
    flag, segment = (flag.flip(0), pairs.segment.flip(0)) if backward else (flag, pairs.segment)
    missing = (~flag).long().cumsum(0)
    starts = torch.ones_like(flag)
    starts[1:] = segment[1:] != segment[:-1]
    before = (missing - (~flag).long())[starts]
    run = missing - before[starts.long().cumsum(0) - 1] == 0
    return run.flip(0) if backward else run


def _last(pairs: Pairs, good: Tensor) -> Tensor:
    last = torch.ones_like(good)
    last[:-1] = pairs.segment[1:] != pairs.segment[:-1]
    return last & good


def _constant_rows(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """One number at every slot of a row, where the other side's values differ."""
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
                f"in {int(constant.sum())} of {len(rows)} rows all values of the {name} are one number: a mean or a "
                "sum of the row in place of its tokens"
            )
            return Finding("constant", text), constant[index] & good
    return None


def _piled(pairs: Pairs, good: Tensor) -> tuple[Finding, Tensor] | None:
    """Many slots on one number that is not the other side's: a fill value, or a floor that values were clipped to."""
    usable = good & pairs.open
    n = int(usable.sum())
    if n < FEWEST_ALIKE:
        return None
    gap, equal = pairs.gap, pairs.old == pairs.rollout
    sides = (("rollout", pairs.rollout, pairs.old), ("trainer", pairs.old, pairs.rollout))
    for name, side, other in sides:
        values, counts = side[usable].unique(return_counts=True)
        for place in counts.argsort(descending=True)[:LOOKED_AT].tolist():
            value, count = float(values[place]), int(counts[place])
            if (
                count < max(FEWEST_ALIKE, OFTEN * n) or value > -SURE
            ):  # near 0 float32 has few numbers
                continue
            here = usable & (side == value)
            rest = usable & ~here
            typical = float(gap[rest].median()) if int(rest.sum()) >= FEWEST_ALIKE else 0.0
            also = int(
                (usable & (other == value)).sum()
            )  # a number that both sides have often is one of their grid
            same = bool(rest.any()) and float(equal[here].double().mean()) > 0.9
            if float(gap[here].median()) > max(0.1, 5 * typical) and count > max(
                FEWEST_ALIKE, 3 * also
            ):
                end = int((here & _last(pairs, good)).sum())
                where = f", {end} of them at the last slot of a row" if end > count / 2 else ""
                lowest = value <= float(side[usable].min())
                what = (
                    "a fill value, or the floor they were clipped to" if lowest else "a fill value"
                )
                text = f"{count} values of the {name} are exactly {value:.6g}{where}, far from the other side's: {what}"
                return Finding("fill", text), here
            if same and count > 4 * FEWEST_ALIKE and float(equal[rest].double().mean()) < 0.3:
                text = f"{value:.6g} on both sides, which differ elsewhere"
                return _outside(count, len(pairs.old), text), here
    return None
