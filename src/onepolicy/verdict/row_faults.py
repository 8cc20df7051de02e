"""Rows whose two sides do not follow each other: they hold the values of another row, or of nothing in the dump."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from onepolicy.verdict.engine_faults import places
from onepolicy.verdict.scored_tokens import EXPLAINED, SURE, Finding, Pairs

ENOUGH_TO_FOLLOW = 12
"""Uncertain tokens of a row from which its rank correlation means something."""
FOLLOWS = 0.4
"""Rank correlation of a row's two sides below which they hardly follow each other."""
FOLLOW_WELL = 0.85
"""The same of the middle row, from which rows that hardly follow are of another kind: below, all follow badly."""
CHANCE = 6.0
"""Standard errors of a row's rank correlation (Fisher's z) that chance alone may take it from the others'."""
SUSPECT = 3.0
"""The same, of a row for which another row's values are tried. Those must fit: so less is asked of the row."""
NEARLY_ONE = 0.99
"""Rank correlation above which differences mean little: a token or two decide."""
RANK_CORRELATION = 1.03
"""Standard error of Fisher's z of n ranks, times (n - 3)^0.5."""
MOST_SUSPECTS = 8
"""Rows for which all other rows are tried."""
FIT_BY_CHANCE = 1e-4
"""Chance that any of the other rows tried fits as well, if it has nothing to do with the row."""
CLIP = 5.0
"""Nats: farther counts as this far where shifts are looked for, so that single tokens do not decide."""


def rows_of(pairs: Pairs) -> tuple[Tensor, int]:
    """[n] int64 index of each slot's row, and how many there are."""
    rows, index = pairs.segment.unique_consecutive(return_inverse=True)
    return index, len(rows)


def agreement_at_first(pairs: Pairs) -> float:
    """Rank correlation of the two sides in the first tokens of the rows, less twice what chance has in so few."""
    first = pairs.at(pairs.open & (places(pairs) < 8))
    if len(first.old) < 3:
        return 0.0
    ranked = torch.stack([side.argsort().argsort().double() for side in (first.old, first.rollout)])
    by_chance: float = 2 / len(first.old) ** 0.5
    return float(torch.corrcoef(ranked)[0, 1].nan_to_num(0.0)) - by_chance


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """How well the two sides of each row follow each other, among its uncertain slots."""

    segment: Tensor  # [R] int64, of rows that have uncertain slots
    size: Tensor  # [R] float64, uncertain slots
    correlation: Tensor  # [R] float64, of the ranks within the row
    usual: float  # of the middle row

    @property
    def below(self) -> Tensor:
        """[R] standard errors by which a row follows less than the middle one; 0 of too few slots."""
        away = _fisher(torch.tensor(self.usual, dtype=torch.float64)) - _fisher(self.correlation)
        errors = away * (self.size - 3).clamp(min=0).sqrt() / RANK_CORRELATION
        return torch.where(self.size >= ENOUGH_TO_FOLLOW, errors, 0.0)

    def strange(self, errors: float) -> Tensor:
        """[R] bool: rows whose sides hardly follow each other, which chance does not explain."""
        return (self.correlation < FOLLOWS) & (self.below > errors)


def _fisher(correlation: Tensor) -> Tensor:
    """Of about the same error whatever the correlation is."""
    return correlation.clamp(-NEARLY_ONE, NEARLY_ONE).atanh()


def _rank_correlation(x: Tensor, y: Tensor, index: Tensor, count: int) -> Tensor:
    """[count] of the n slots of each row: `index` [n] int64, in order."""
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
    """None: no row has enough uncertain slots."""
    uncertain = pairs.at(pairs.open)
    index, count = rows_of(uncertain)
    size = torch.bincount(index, minlength=count).double()
    judged = size >= ENOUGH_TO_FOLLOW
    if not bool(judged.any()):
        return None
    correlation = _rank_correlation(uncertain.old, uncertain.rollout, index, count)
    usual = float(correlation[judged].median())
    return Followed(uncertain.segment.unique_consecutive(), size, correlation, usual)


def swapped_rows(pairs: Pairs) -> Finding | None:
    """Rows that hold the values of another row of these: their sides do not follow each other, and that row's fit."""
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
        f"{len(found)} of {len(suspects)} rows whose two sides do not follow each other hold the values of another "
        f"row: {before:.3g} nats apart as they stand, {after:.3g} against that row",
    )


def _other_row_that_fits(pairs: Pairs, segment: int, tried: int) -> tuple[float, float] | None:
    """Mean gap of the row as it stands, and of one side of it against the other side of that row of all others which
    fits best. None if no row fits, or no better than the best of `tried` rows does by chance."""
    index, count = rows_of(pairs)
    slots = (pairs.segment == segment).nonzero()[:, 0]
    this, place = int(index[slots[0]]), places(pairs)
    both = place < len(slots)
    index, own_slot = index[both], slots[place[both]]
    stands = pairs.gap.clamp(max=CLIP)[own_slot]
    needed, best = NormalDist().inv_cdf(1 - FIT_BY_CHANCE / tried), None
    for mine, other in ((pairs.old, pairs.rollout), (pairs.rollout, pairs.old)):
        x, y = mine[own_slot], other[both]
        open_ = (x + y) / 2 < -SURE
        size = torch.bincount(index[open_], minlength=count).double()
        gap = (x - y).abs().clamp(max=CLIP)
        after, before = (
            torch.zeros(count, dtype=torch.float64).index_add(0, index, each)
            for each in (gap, stands)
        )
        correlation = _rank_correlation(x[open_], y[open_], index[open_], count)
        surely = _fisher(correlation) * (size - 3).clamp(min=0).sqrt() / RANK_CORRELATION
        fits = (size >= ENOUGH_TO_FOLLOW) & (after < EXPLAINED * before) & (surely > needed)
        fits[this] = False
        for row in fits.nonzero()[:, 0].tolist():
            slots_of_row = int((index == row).sum())
            if best is None or surely[row] > best[0]:
                best = (
                    float(surely[row]),
                    float(before[row]) / slots_of_row,
                    float(after[row]) / slots_of_row,
                )
    return None if best is None else best[1:]


def strange_rows(pairs: Pairs) -> Finding | None:
    """Rows whose two sides do not follow each other, by ranks within the row, where those of the others do."""
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
        f"in {int(strange.sum())} of {len(rows.size)} rows the two sides do not follow each other (rank correlation "
        f"{float(rows.correlation[strange].mean()):.2f}, {rows.usual:.2f} in the middle row): the values are of other "
        "rows or of another model",
    )
