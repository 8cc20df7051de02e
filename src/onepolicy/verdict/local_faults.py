"""Faults of a part of the slots: rows, runs of slots, first places. Mismatch alone lies on all parts alike.

Sizes are compared by rank among tokens of about the same log-probability: a rank is 0.5 on average whatever the noise
and its tails are, so that the rank's mean over a part has a known error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onepolicy.verdict.engine_faults import places, proportional, temperature
from onepolicy.verdict.row_faults import (
    CHANCE,
    CLIP,
    agreement_at_first,
    followed,
    rows_of,
    strange_rows,
    swapped_rows,
)
from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST, Finding, Pairs

HARMLESS_K3 = 1e-4
"""Nats a token: below, rows of real runs differ threefold and nothing follows from it."""
TOO_FAR = 1.0
"""Nats a token: above, two sides may be unrelated."""
FEWEST_OPEN = 6
"""Uncertain tokens of a row below which nothing is said of it."""
FEWEST_ROWS = 12
"""Rows below which they are not compared."""
RANK_ERROR = 12**-0.5
"""Standard deviation of a rank."""
BINS = 32
APART, APART_FEW = 4.0, 5.5
"""Distance of two groups of rows in standard deviations inside them, from which rows are of two kinds; and where fewer
than a tenth of the rows is one group. The best split of a normal distribution is at 2.7, of a uniform one at 3.5."""
OUTLIER = 5.0
"""Robust standard deviations of the rows' mean ranks from which a row is unlike the others."""
CONTRAST = 0.15
"""Least difference of the mean ranks of two parts."""
SHIFTS = (1, -1, 2, -2)
MOST = 0.4
"""Least share of the nats of far slots that runs must hold which meet once they are moved."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """Of |log rho| of every uncertain slot, among slots of about the same log-probability."""

    values: Tensor  # [n] float64, 0 to 1
    open: Tensor  # [n] bool


def ranks(pairs: Pairs) -> Ranks:
    open_, values = pairs.open, torch.full_like(pairs.old, 0.5)
    size = int(open_.sum())
    bins = max(1, min(BINS, size // 40))
    middle = (pairs.old + pairs.rollout)[open_]
    bin_of = torch.empty(size, dtype=torch.int64)
    bin_of[middle.argsort()] = torch.arange(size) * bins // max(1, size)
    jitter = torch.rand(
        size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )  # between equals
    order = np.lexsort((jitter.numpy(), pairs.gap[open_].numpy(), bin_of.numpy()))
    counts = torch.bincount(bin_of, minlength=bins)
    before = counts.cumsum(0) - counts
    place = torch.empty(size, dtype=torch.float64)
    place[torch.from_numpy(order)] = torch.arange(size, dtype=torch.float64)
    values[open_] = (place - before[bin_of] + 0.5) / counts[bin_of]
    return Ranks(values, open_)


def local(pairs: Pairs) -> Finding | None:
    """What is wrong with a part of the slots. The most specific explanation first: a change of that part that makes
    both sides meet, before rows or places that are merely farther apart than the rest."""
    if len(pairs.old) < FEWEST:
        return None
    moved = shifted_runs(pairs)
    if moved is not None:
        return moved
    if _k3(pairs) < HARMLESS_K3:
        return copies(pairs)
    for look in (
        copies,
        unrelated,
        swapped_rows,
        strange_rows,
        odd_rows,
        unrelated_tails,
        first_places,
    ):
        found = look(pairs)
        if found is not None:
            return found
    return None


def _k3(pairs: Pairs) -> float:
    log_ratio = pairs.old - pairs.rollout
    return float((log_ratio.clamp(max=20).expm1() - log_ratio).mean())


def _row_means(values: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    size = torch.zeros(count, dtype=torch.float64).index_add(0, index, torch.ones_like(values))
    return torch.zeros(count, dtype=torch.float64).index_add(0, index, values) / size.clamp(
        min=1
    ), size


def copies(pairs: Pairs) -> Finding | None:
    """Rows that agree to the bit where others do not."""
    index, count = rows_of(pairs)
    open_ = pairs.open
    equal, size = _row_means((pairs.old == pairs.rollout)[open_].double(), index[open_], count)
    judged = size >= FEWEST_OPEN
    same = judged & (equal == 1)
    others = judged & ~same
    if int(same.sum()) < 2 or not bool(others.any()) or float(equal[others].mean()) > 0.5:
        return None
    return Finding(
        "copy",
        f"{int(same.sum())} of {count} rows agree to the bit at every token, the others at "
        f"{float(equal[others].mean()):.0%}: one side was copied from the other there",
    )


def odd_rows(pairs: Pairs) -> Finding | None:
    """Rows of two kinds, near and far; and what is wrong with the far ones."""
    rank, (index, count) = ranks(pairs), rows_of(pairs)
    means, size = _row_means(rank.values[rank.open], index[rank.open], count)
    judged = size >= FEWEST_OPEN
    if int(judged.sum()) < FEWEST_ROWS:
        return None
    if pairs.group is not None:  # steps of a run differ in size
        means = means - _group_medians(means, pairs, index, judged)
    found = split(means[judged], size[judged])
    far_rows = judged & (means > found) if found is not None else _outliers(means, size, judged)
    near_rows = judged & ~far_rows
    # One quiet row is no evidence against all others: the last request of a batch runs alone.
    if not bool(far_rows.any()) or int(near_rows.sum()) < 2:
        return None
    far = far_rows[index]
    near = judged[index] & ~far
    ratio = float(
        pairs.gap[far & rank.open].mean() / pairs.gap[near & rank.open].mean().clamp(min=1e-12)
    )
    if ratio < 1.5:
        return None
    text = (
        f"{int(far_rows.sum())} of {count} rows are {ratio:.3g} times farther apart than the others"
    )
    return _of_part(pairs, far, near, text)


def _outliers(means: Tensor, size: Tensor, judged: Tensor) -> Tensor:
    """[R] bool: rows, two at least, far beyond what chance and the spread of the others give them."""
    middle = means[judged].median()
    spread = 1.5 * float((means[judged] - middle).abs().median())
    error = RANK_ERROR / size.clamp(min=1).sqrt()
    far = judged & (means - middle > 6 * error) & (means - middle > OUTLIER * max(spread, 0.02))
    return far if int(far.sum()) >= 2 else torch.zeros_like(far)


def _group_medians(means: Tensor, pairs: Pairs, index: Tensor, judged: Tensor) -> Tensor:
    assert pairs.group is not None
    group = torch.zeros(len(means), dtype=torch.int64).index_copy(0, index, pairs.group)
    out = torch.zeros_like(means)
    for each in group.unique():
        chosen = (group == each) & judged
        if bool(chosen.any()):
            out[group == each] = means[chosen].median()
    return out


def split(values: Tensor, size: Tensor) -> float | None:
    """The border between two kinds of [n] mean ranks, each of `size` slots; None if they are of one kind."""
    ordered = values.sort().values
    n = len(ordered)
    spread = float(((values - values.mean()).square() * size).sum()) / RANK_ERROR**2 / (n - 1)
    if spread < 1 + 5 * (2 / n) ** 0.5:  # what ranks of so few slots have by chance
        return None
    low = torch.arange(1, n, dtype=torch.float64)
    total, squares = ordered.cumsum(0), ordered.square().cumsum(0)
    inside_low = squares[:-1] - total[:-1].square() / low
    inside_high = (squares[-1] - squares[:-1]) - (total[-1] - total[:-1]).square() / (n - low)
    inside = inside_low + inside_high
    best = int(inside.argmin())
    apart = float((total[-1] - total[best]) / (n - best - 1) - total[best] / (best + 1))
    deviation = float((inside[best].clamp(min=0) / max(1, n - 2)).sqrt())
    few = min(best + 1, n - best - 1) < 0.1 * n
    if apart < CONTRAST or apart < (APART_FEW if few else APART) * max(deviation, 1e-3):
        return None
    return float((ordered[best] + ordered[best + 1]) / 2)


def _of_part(pairs: Pairs, far: Tensor, near: Tensor, text: str) -> Finding:
    """What is wrong with the far slots."""
    part = pairs.at(far)
    scale = proportional(part)
    if scale is not None:
        return Finding("scale", f"{text}; there {scale.evidence}")
    hot = temperature(part)
    if hot is not None and hot.explained > 0.3:
        return Finding("temperature", f"{text}; there {hot.finding.evidence}")
    there, here = (_correlation(pairs.at(which & pairs.open)) for which in (far, near))
    if there < 0.3 and here - there > 0.3 and agreement_at_first(part) < 0.3:
        return Finding(
            "rows",
            f"{text}, and the two sides do not follow each other there (correlation {there:.2f}, {here:.2f} in the "
            "others): the values are of other rows or of another model",
        )
    tail = unrelated_tails(part)
    if tail is not None:
        return Finding(tail.cause, f"{text}; {tail.evidence}")
    declared = "" if pairs.version is None else "; the column version does not say so"
    return Finding(
        "stale",
        f"{text}: a replica that holds other weights, or weights of another step, sampled them{declared}",
    )


def unrelated(pairs: Pairs) -> Finding | None:
    """Sides that do not follow each other anywhere, from the first tokens on."""
    values = _correlation(pairs.at(pairs.open)), agreement_at_first(pairs)
    if _k3(pairs) < TOO_FAR or max(values) >= 0.3:
        return None
    return Finding(
        "rows",
        f"the two sides do not follow each other (correlation {values[0]:.2f}, {values[1]:.2f} in the first tokens of "
        "the rows): the values are of other rows or of another model",
    )


def _correlation(pairs: Pairs) -> float:
    if len(pairs.old) < 3:
        return 0.0
    return float(torch.corrcoef(torch.stack([pairs.old, pairs.rollout]))[0, 1].nan_to_num(0.0))


def first_places(pairs: Pairs) -> Finding | None:
    """First tokens of the rows that are far apart where later ones are not: another prompt."""
    rank, place = ranks(pairs), places(pairs)
    if rows_of(pairs)[1] < FEWEST_ROWS:
        return None
    best = None
    for many in (1, 2, 4, 8, 16):
        ahead, behind = rank.open & (place < many), rank.open & (place >= max(2 * many, 8))
        if int(ahead.sum()) < FEWEST or int(behind.sum()) < FEWEST:
            continue
        contrast = float(rank.values[ahead].mean() - rank.values[behind].mean())
        surely = contrast / (RANK_ERROR * (1 / int(ahead.sum()) + 1 / int(behind.sum())) ** 0.5)
        ratio = float(pairs.gap[ahead].mean() / pairs.gap[behind].mean().clamp(min=1e-12))
        if contrast > 0.2 and surely > 8 and ratio > 1.5 and (best is None or surely > best[0]):
            best = surely, many, ratio
    if best is None:
        return None
    return Finding(
        "context",
        f"the first {best[1]} tokens of the rows are {best[2]:.3g} times farther apart than later ones: one side saw "
        "another prompt (system prompt, chat template, first token)",
    )


def shifted_runs(pairs: Pairs) -> Finding | None:
    """Runs of slots, in some rows, where the trainer's values are the engine's of a slot or two beside."""
    index, count = rows_of(pairs)
    starts = np.concatenate([[0], np.flatnonzero(np.diff(index.numpy())) + 1, [len(index)]])
    here = pairs.gap.clamp(max=CLIP).numpy()
    best: list[
        tuple[float, int, int, int]
    ] = []  # gain, first and last slot of the run, shift; of each row
    there = {by: _moved_gap(pairs, by) for by in SHIFTS}
    for row in range(count):
        span = slice(int(starts[row]), int(starts[row + 1]))
        found = [(*_best_run(here[span], there[by][span]), by) for by in SHIFTS]
        gain, first, last, by = max(found)
        if gain > 0:
            best.append((gain, span.start + first, span.start + last, by))
    runs = [run for run in best if _is_shift(here, there[run[3]], run)]
    if len(runs) < max(2, 0.02 * count):
        return None
    slots = np.concatenate([np.arange(first, last + 1) for _, first, last, _ in runs])
    moved = np.concatenate([there[by][first : last + 1] for _, first, last, by in runs])
    inside = np.zeros(len(here), bool)
    inside[slots] = True
    before, after = float(here[slots].mean()), float(np.nanmean(moved))
    far = here > 1
    if after > 0.35 * before or here[far & inside].sum() < MOST * here[far].sum():
        return None
    by = max(SHIFTS, key=lambda each: sum(run[3] == each for run in runs))
    text = (
        f"in {len(runs)} of {count} rows the two sides are {before:.3g} nats apart over runs of "
        f"{np.median([last - first + 1 for _, first, last, _ in runs]):.0f} slots, and {after:.3g} if moved by {by:+d}"
    )
    if _starts_together(pairs, runs, there):
        return Finding("shift", f"{text}; from a turn or a fixed place on they are not in step")
    return Finding(
        "retokenised", f"{text}: from there on a token was merged, split or lost on one side"
    )


def _moved_gap(pairs: Pairs, by: int) -> np.ndarray:
    """[n] |trainer's value - the engine's `by` slots on|, clipped; NaN where the row has none."""
    n = len(pairs.old)
    there = torch.arange(n) + by
    inside = (there >= 0) & (there < n)
    there = there.clamp(0, n - 1)
    inside &= (pairs.segment[there] == pairs.segment) & (pairs.slot[there] == pairs.slot + by)
    gap = (pairs.old - pairs.rollout[there]).abs().clamp(max=CLIP)
    return np.where(inside.numpy(), gap.numpy(), np.nan)


def _best_run(here: np.ndarray, there: np.ndarray) -> tuple[float, int, int]:
    """(gain, first, last): the run of slots whose gap falls most. Largest sum of a run: a sum less an earlier one."""
    gain = np.nan_to_num(here - there, nan=0.0)
    total = np.concatenate([[0.0], gain.cumsum()])
    lowest = np.minimum.accumulate(total)
    rise = total - lowest
    last = int(rise.argmax())
    if rise[last] <= 0:
        return 0.0, 0, 0
    first = int(np.flatnonzero(total[:last] == lowest[last])[-1])
    return float(rise[last]), first, last - 1


def _is_shift(here: np.ndarray, there: np.ndarray, run: tuple[float, int, int, int]) -> bool:
    gain, first, last, _ = run
    before, after = here[first : last + 1].sum(), np.nansum(there[first : last + 1])
    return last - first + 1 >= 8 and gain >= 6.0 and after < 0.35 * before


def _starts_together(
    pairs: Pairs, runs: list[tuple[float, int, int, int]], there: dict[int, np.ndarray]
) -> bool:
    """Most runs start with their row or turn, or at one place of all rows."""
    slot, segment = pairs.slot.numpy(), pairs.segment.numpy()
    fresh = np.ones(len(slot), bool)
    fresh[1:] = (slot[1:] != slot[:-1] + 1) | (segment[1:] != segment[:-1])
    if pairs.turn is not None:
        fresh[1:] |= np.diff(pairs.turn.numpy()) != 0
    borders, place = np.flatnonzero(fresh), places(pairs).numpy()
    at_border = 0
    for _, first, _, by in runs:
        border = int(borders[np.searchsorted(borders, first, side="right") - 1])
        at_border += bool(
            np.nansum(there[by][border:first]) < 1.0
        )  # moved, the slots ahead of it meet too
    starts = np.array([place[first] for _, first, _, _ in runs])
    near = np.abs(starts - np.median(starts)) <= 2
    return at_border > 0.6 * len(runs) or (len(runs) >= 4 and near.mean() > 0.8)


def unlike_parts(pairs: Pairs) -> list[str]:
    """Places and stretches of rows that are farther apart than others, where no cause was found for it."""
    rank, (index, count) = ranks(pairs), rows_of(pairs)
    if count < FEWEST_ROWS or _k3(pairs) < HARMLESS_K3:
        return []
    out = []
    rows = followed(pairs)
    strange = 0 if rows is None else int(rows.strange(CHANCE).sum())
    if strange:
        out.append(
            f"in {strange} of {count} rows the two sides do not follow each other as they do in the others"
        )
    place = places(pairs)[rank.open]
    values = rank.values[rank.open]
    if len(place) >= 8 * FEWEST:
        order = place.argsort(stable=True)
        parts = [values[each].mean() for each in order.chunk(8)]
        contrast = float(max(parts) - min(parts))
        if contrast > 0.25:
            out.append(
                f"the gap depends on the place in the row (mean ranks differ by {contrast:.2f})"
            )
    run = torch.arange(len(values)) // 16
    means, size = _row_means(values, run, int(run[-1]) + 1 if len(run) else 0)
    full = means[size == 16]
    if (
        len(full) >= 2 * FEWEST_ROWS
        and pairs.group is None
        and split(full, torch.full_like(full, 16.0)) is not None
    ):
        out.append("stretches of rows are of two kinds, near and far")
    last = rank.open.clone()
    last[:-1] &= index[1:] != index[:-1]
    if int(last.sum()) >= 8:
        contrast = float(rank.values[last].mean()) - 0.5
        far = float(pairs.gap[last].mean() / pairs.gap[rank.open & ~last].mean().clamp(min=1e-12))
        if contrast > 0.25 and contrast > 6 * RANK_ERROR / int(last.sum()) ** 0.5 and far > 3:
            out.append(
                f"the last tokens of the rows are {far:.3g} times farther apart than the others"
            )
    return out


def unrelated_tails(pairs: Pairs) -> Finding | None:
    """Aligned up to a point of a sequence, and far apart after it."""
    if not len(pairs.old):
        return None
    gap, (index, count) = pairs.gap, rows_of(pairs)
    place = torch.arange(len(gap))
    end = len(gap)
    first_bad = torch.full((count,), end).scatter_reduce(
        0, index, torch.where(gap > 3, place, end), "amin"
    )
    point = first_bad[index]
    behind, ahead = place >= point, (place < point) & (point < end)  # of the same sequences
    inside, outside = gap[behind], gap[ahead]
    if len(inside) < max(FEWEST // 2, 0.01 * end) or len(outside) < max(
        FEWEST // 2, 0.1 * len(inside)
    ):
        return None
    agreed = (
        outside.median()
    )  # not the mean: the first tokens behind the point may be near by chance
    if not (
        inside.mean() > 1 and inside.mean() > 10 * agreed and (inside > 0.5).double().mean() > 0.5
    ):
        return None
    rows = int((first_bad < end).sum())
    text = (
        f"in {rows} of {count} sequences the engines agree up to a point ({float(agreed):.2g} nats) and "
        f"not after it ({float(inside.mean()):.2g} nats)"
    )
    if _correlation(pairs.at(behind)) > EXPLAINED:
        return Finding(
            "stale",
            f"{text}, where they still follow each other: other weights sampled from there on",
        )
    return Finding(
        "retokenised",
        f"{text}: from there on they scored different tokens, or with far other weights",
    )
