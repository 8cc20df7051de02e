"""Rows whose two sides do not follow each other.

They hold the values of another row, or values that are not in the dump.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from onepolicy.notation import number
from onepolicy.verdict.scored_tokens import EXPLAINED, SURE, VISIBLE, Finding, Pairs

ENOUGH_TO_FOLLOW = 12
"""Fewest tokens of a row for a meaningful rank correlation."""
FOLLOWED = 3e-5
"""Nats: a slot counts if a side is farther from 0. Nearer, ranks are those of rounding."""
FOLLOWS, FOLLOWS_FEW, MANY = 0.6, 0.4, 20
"""Below this rank correlation the two sides of a row hardly follow each other: the second of a row
with fewer slots than the third, where one odd token takes away 0.4.
"""
FOLLOW_WELL = 0.85
"""Rank correlation of the median row from which rows below FOLLOWS are of another kind.

Below it all rows follow badly.
"""
CHANCE = 6.0
"""Standard errors of a row's rank correlation (Fisher's z) that chance alone may explain."""
SUSPECT = 3.0
"""The same for a row for which other rows' values are tried. It is lower because those must fit."""
NEARLY_ONE = 0.99
"""Rank correlation above which differences mean little: one or two tokens decide them."""
RANK_CORRELATION = 1.03
"""Standard error of Fisher's z of n ranks, times (n - 3)^0.5."""
MOST_SUSPECTS = 8
"""Largest number of rows for which all other rows are tried."""
FIT_BY_CHANCE = 1e-4
"""Probability that an unrelated row among all tried rows fits as well."""
FAR_ROW = 5.0
"""Factor above the median row's typical distance of a logit from which a row stands out."""
FEW, HELD = 0.25, 0.5
"""Largest share of the rows that are a few, and least share of k3 that they hold to be named."""
LISTED = 8
CLIP = 5.0
"""Nats: gaps are clipped to this in the search for shifts, so that no single token decides."""


def rows_of(pairs: Pairs) -> tuple[Tensor, int]:
    """Return [n] int64, the row of each slot, and the number of rows."""
    rows, index = pairs.segment.unique_consecutive(return_inverse=True)
    return index, len(rows)


def row_numbers(rows: Tensor) -> str:
    """Return the first numbers of some rows, [n] int64, as `rows 3, 7 and 12`."""
    shown = [str(row) for row in rows[:LISTED].tolist()]
    if len(rows) > LISTED:
        shown.append(f"{len(rows) - LISTED} others")
    if len(shown) == 1:
        return f"row {shown[0]}"
    return f"rows {', '.join(shown[:-1])} and {shown[-1]}"


def group_medians(values: Tensor, pairs: Pairs, index: Tensor, judged: Tensor) -> Tensor:
    """Return [R], the median value of the judged rows of each row's training step."""
    assert pairs.group is not None
    group = torch.zeros(len(values), dtype=torch.int64).index_copy(0, index, pairs.group)
    out = torch.zeros_like(values)
    for each in group.unique():
        chosen = (group == each) & judged
        if bool(chosen.any()):
            out[group == each] = values[chosen].median()
    return out


def typical_gaps(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return [R], the log of each row's median distance of a logit, and [R] bool, if it has one.

    It has none with too few visible slots. The median of a row is not that of a few tokens with
    other experts. Rows of a training step are compared with its median row.
    """
    index, count = rows_of(pairs)
    visible = pairs.visible
    gap, row = pairs.logit_gap[visible], index[visible]
    order = torch.from_numpy(np.lexsort((gap.numpy(), row.numpy())))
    size = torch.bincount(row, minlength=count)
    middle = size.cumsum(0) - size + size // 2
    judged = size >= ENOUGH_TO_FOLLOW
    out = torch.zeros(count, dtype=torch.float64)
    out[judged] = gap[order[middle[judged]]].clamp(min=VISIBLE).log()
    if pairs.group is not None:
        out = out - group_medians(out, pairs, index, judged)
    return out, judged


class MarkOfRows(str):
    """A mark of a few rows, which may be those whose routes differ most."""

    __slots__ = ()


def rows_that_carry_the_gap(pairs: Pairs) -> MarkOfRows | None:
    """Return a mark if a few rows are far apart at most of their tokens and hold most of k3.

    The rows of a sound dump may differ in noise, so ranks of the tokens do not tell.
    """
    index, count = rows_of(pairs)
    typical, judged = typical_gaps(pairs)
    if not bool(judged.any()):
        return None
    far = judged & (typical - typical[judged].median() > math.log(FAR_ROW))
    log_ratio = (pairs.old - pairs.rollout).clamp(max=20)
    k3 = torch.zeros(count, dtype=torch.float64).index_add(0, index, log_ratio.expm1() - log_ratio)
    held = float(k3[far].sum() / k3.sum())
    if held < HELD or int(far.sum()) > FEW * count:
        return None
    size = torch.bincount(index, minlength=count)
    rest = number(float(k3[~far].sum() / size[~far].sum()))
    which = row_numbers(pairs.segment.unique_consecutive()[far])
    return MarkOfRows(
        f"{int(far.sum())} of {count} rows hold {held:.0%} of k3, which is {rest} nats a token in "
        f"the others: {which}, at least {FAR_ROW:g} times farther apart than the middle row. Were "
        "they sampled by other weights, or with another prompt (padding, attention mask)?"
    )


def agreement_at_first(pairs: Pairs) -> float:
    """Return the rank correlation of the two sides in the first tokens of the rows.

    Twice the correlation that chance has in so few tokens is subtracted.
    """
    first = pairs.at(pairs.open & (pairs.place < 8))
    if len(first.old) < 3:
        return 0.0
    ranked = torch.stack([side.argsort().argsort().double() for side in (first.old, first.rollout)])
    by_chance: float = 2 / len(first.old) ** 0.5
    return float(torch.corrcoef(ranked)[0, 1].nan_to_num(0.0)) - by_chance


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """Rank correlations between the two sides of each row, over its visible slots."""

    segment: Tensor  # [R] int64, of rows that have such slots
    size: Tensor  # [R] float64, such slots
    correlation: Tensor  # [R] float64, of the ranks within the row
    usual: float  # rank correlation of the median row

    @property
    def below(self) -> Tensor:
        """[R] standard errors below the median row; 0 for a row with too few slots."""
        away = _fisher(torch.tensor(self.usual, dtype=torch.float64)) - _fisher(self.correlation)
        errors = away * (self.size - 3).clamp(min=0).sqrt() / RANK_CORRELATION
        return torch.where(self.size >= ENOUGH_TO_FOLLOW, errors, 0.0)

    def strange(self, errors: float) -> Tensor:
        """Return [R] bool: rows whose sides hardly follow each other, beyond chance."""
        least = torch.where(self.size >= MANY, FOLLOWS, FOLLOWS_FEW)
        return (self.correlation < least) & (self.below > errors)


def _fisher(correlation: Tensor) -> Tensor:
    """Return Fisher's z, whose error hardly depends on the correlation."""
    return correlation.clamp(-NEARLY_ONE, NEARLY_ONE).atanh()


def _rank_correlation(x: Tensor, y: Tensor, index: Tensor, count: int) -> Tensor:
    """Return [count], the rank correlation of each row; `index` [n] int64 is the slots' row."""
    size = torch.bincount(index, minlength=count).double()
    centred = []
    for side in (x, y):
        order = torch.from_numpy(np.lexsort((side.numpy(), index.numpy())))
        first = (size.cumsum(0) - size)[index[order]]
        rank = torch.empty(len(side), dtype=torch.float64)
        rank[order] = torch.arange(len(side), dtype=torch.float64) - first
        centred.append(rank - ((size - 1) / 2)[index])
    product = torch.zeros(count, dtype=torch.float64).index_add(0, index, centred[0] * centred[1])
    return product * 12 / (size * (size.square() - 1)).clamp(min=1)


def followed(pairs: Pairs) -> Followed | None:
    """Return the rank correlations of the rows; None if no row has enough slots.

    Certain tokens count too: other weights leave them certain, another row's values do not.
    """
    visible = pairs.at(torch.minimum(pairs.old, pairs.rollout) < -FOLLOWED)
    index, count = rows_of(visible)
    size = torch.bincount(index, minlength=count).double()
    judged = size >= ENOUGH_TO_FOLLOW
    if not bool(judged.any()):
        return None
    old, rollout = (side.clamp(max=-VISIBLE) for side in (visible.old, visible.rollout))
    correlation = _rank_correlation(old, rollout, index, count)
    usual = float(correlation[judged].median())
    return Followed(visible.segment.unique_consecutive(), size, correlation, usual)


def swapped_rows(pairs: Pairs) -> Finding | None:
    """Find rows that hold the values of another row.

    Their two sides do not follow each other, and the values of the other row fit.
    """
    rows = followed(pairs)
    if rows is None:
        return None
    suspects = rows.strange(SUSPECT).nonzero()[:, 0]
    suspects = suspects[rows.correlation[suspects].argsort()][:MOST_SUSPECTS]
    tried = 2 * len(suspects) * rows_of(pairs)[1]
    fits = [_other_row_that_fits(pairs, int(rows.segment[suspect]), tried) for suspect in suspects]
    found = [fit for fit in fits if fit is not None]
    if not found:
        return None
    before, after = (float(np.mean(values)) for values in zip(*found, strict=True))
    return Finding(
        "rows",
        f"{len(found)} of {len(suspects)} rows whose two sides do not follow each other hold the "
        f"values of another row: {number(before)} nats apart as they are, {number(after)} against "
        "that row",
    )


def _other_row_that_fits(pairs: Pairs, segment: int, tried: int) -> tuple[float, float] | None:
    """Return the mean gap of the row as it is, and with the other row that fits best.

    One side of the row is compared with the other side of every other row. None if no row fits
    better than the best of `tried` unrelated rows would by chance.
    """
    index, count = rows_of(pairs)
    slots = (pairs.segment == segment).nonzero()[:, 0]
    this, place = int(index[slots[0]]), pairs.place
    both = place < len(slots)
    index, slot_of_row = index[both], slots[place[both]]
    gap_of_row = pairs.gap.clamp(max=CLIP)[slot_of_row]
    needed, best = NormalDist().inv_cdf(1 - FIT_BY_CHANCE / tried), None
    for side, other_side in ((pairs.old, pairs.rollout), (pairs.rollout, pairs.old)):
        x, y = side[slot_of_row], other_side[both]
        open_ = (x + y) / 2 < -SURE
        size = torch.bincount(index[open_], minlength=count).double()
        gap = (x - y).abs().clamp(max=CLIP)
        after, before = (
            torch.zeros(count, dtype=torch.float64).index_add(0, index, each)
            for each in (gap, gap_of_row)
        )
        correlation = _rank_correlation(x[open_], y[open_], index[open_], count)
        surely = _fisher(correlation) * (size - 3).clamp(min=0).sqrt() / RANK_CORRELATION
        fits = (size >= ENOUGH_TO_FOLLOW) & (after < EXPLAINED * before) & (surely > needed)
        fits[this] = False
        for row in fits.nonzero()[:, 0].tolist():
            n = int((index == row).sum())
            if best is None or surely[row] > best[0]:
                best = float(surely[row]), float(before[row]) / n, float(after[row]) / n
    if best is None:
        return None
    return best[1:]


def strange_rows(pairs: Pairs) -> Finding | None:
    """Find rows whose two sides do not follow each other, by rank correlation, while others do."""
    rows = followed(pairs)
    if rows is None:
        return None
    strange = rows.strange(CHANCE)
    if int(strange.sum()) < 2 or rows.usual < FOLLOW_WELL:
        return None
    part = pairs.at(torch.isin(pairs.segment, rows.segment[strange]))
    if agreement_at_first(part) >= 0.3:  # they agree at first: a tail
        return None
    return Finding(
        "rows",
        f"in {int(strange.sum())} of {len(rows.size)} rows the two sides do not follow each other "
        f"(rank correlation {number(float(rows.correlation[strange].mean()))}, "
        f"{number(rows.usual)} in the middle row): the values are of other rows or of another "
        "model",
        sure=False,
    )
