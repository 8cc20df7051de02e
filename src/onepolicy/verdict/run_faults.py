"""Runs of slots in which another alignment, or the previous weights, explain the gap."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from onepolicy.notation import number
from onepolicy.verdict.row_faults import CLIP, rows_of
from onepolicy.verdict.scored_tokens import EXPLAINED, Finding, Pairs

FEWEST_SLOTS = 6
"""Fewest tokens of a run from older weights."""
SHIFTS = (1, -1, 2, -2)
MOST = 0.4
"""Least share of the far slots' nats that lies in runs which agree once they are shifted."""

Run = tuple[float, int, int, int]
"""A run of slots: fall of the gap if it is shifted, first slot, last slot, shift."""


def partly_old(pairs: Pairs) -> Finding | None:
    """Find runs of slots where the engine's values are those of the trainer's previous weights.

    The engine took the update late: in some of its replicas, or in the middle of requests.
    """
    if pairs.previous is None:
        return None
    index, count = rows_of(pairs)
    gap, old_gap = _seen_gap(pairs), _seen_gap(pairs.under(pairs.previous))
    runs = _best_runs(index, gap, {0: old_gap})
    found = [run for run in runs if _is_old(pairs, gap, old_gap, run)]
    if len(found) < max(2, 0.02 * count):
        return None
    inside = np.zeros(len(gap), bool)
    for _, first, last, _ in found:
        inside[first : last + 1] = True
    before, after = float(gap[inside].mean()), float(old_gap[inside].mean())
    if gap[inside].sum() < MOST * gap.sum():
        return None
    return Finding(
        "stale",
        f"in {len(found)} of {count} rows the logits of the two sides are {number(before)} apart "
        f"over {int(inside.sum()):,} tokens, and {number(after)} against the trainer's previous "
        "weights: the engine took the last weight update late there",
    )


def _is_old(pairs: Pairs, gap: np.ndarray, old_gap: np.ndarray, run: Run) -> bool:
    """Return whether enough slots of a run have their gap from old weights."""
    _, first, last, _ = run
    seen = int(pairs.visible[first : last + 1].sum())
    before, after = gap[first : last + 1].sum(), old_gap[first : last + 1].sum()
    return seen >= FEWEST_SLOTS and after < EXPLAINED * before


def shifted_runs(pairs: Pairs) -> Finding | None:
    """Find runs of slots where the trainer's values equal the engine's one or two slots away."""
    index, count = rows_of(pairs)
    gap = _seen_gap(pairs)
    moved_gap = {by: _moved_gap(pairs, by) for by in SHIFTS}
    runs = [run for run in _best_runs(index, gap, moved_gap) if _is_shift(gap, moved_gap, run)]
    if len(runs) < max(2, 0.02 * count):
        return None
    slots = np.concatenate([np.arange(first, last + 1) for _, first, last, _ in runs])
    moved = np.concatenate([moved_gap[by][first : last + 1] for _, first, last, by in runs])
    inside = np.zeros(len(gap), bool)
    inside[slots] = True
    before, after = float(gap[slots].mean()), float(np.nanmean(moved))
    far = gap > 1
    if after > 0.35 * before or gap[far & inside].sum() < MOST * gap[far].sum():
        return None
    by = max(SHIFTS, key=lambda each: sum(run[3] == each for run in runs))
    length = np.median([last - first + 1 for _, first, last, _ in runs])
    text = (
        f"in {len(runs)} of {count} rows the logits of the two sides are {number(before)} apart "
        f"over runs of {length:.0f} tokens, and {number(after)} if moved by {by:+d}"
    )
    if _starts_together(pairs, runs, moved_gap):
        return Finding("shift", f"{text}; from a turn or a fixed place on they are not in step")
    return Finding(
        "retokenised", f"{text}: from there on a token was merged, split or lost on one side"
    )


def _best_runs(index: Tensor, gap: np.ndarray, moved_gap: dict[int, np.ndarray]) -> list[Run]:
    """Return the run of each row that gains most by a shift."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(index.numpy())) + 1, [len(index)]])
    runs = []
    for start, end in itertools.pairwise(starts.tolist()):
        row = slice(start, end)
        found = [(*_best_run(gap[row], moved_gap[by][row]), by) for by in moved_gap]
        gain, first, last, by = max(found)
        if gain > 0:
            runs.append((gain, start + first, start + last, by))
    return runs


def _seen_gap(pairs: Pairs) -> np.ndarray:
    """Return [n], the distance of the logits, clipped; 0 where nothing is visible."""
    return torch.where(pairs.visible, pairs.logit_gap, 0.0).clamp(max=CLIP).numpy()


def _moved_gap(pairs: Pairs, by: int) -> np.ndarray:
    """Return [n], the distance of the trainer's logit to the engine's `by` slots later, clipped.

    NaN off the row, and where nothing is visible.
    """
    n = len(pairs.old)
    later = torch.arange(n) + by
    inside = (later >= 0) & (later < n)
    later = later.clamp(0, n - 1)
    inside &= (pairs.segment[later] == pairs.segment) & (pairs.slot[later] == pairs.slot + by)
    moved = replace(pairs, rollout=pairs.rollout[later])
    return np.where((inside & moved.visible).numpy(), _seen_gap(moved), np.nan)


def _best_run(gap: np.ndarray, moved_gap: np.ndarray) -> tuple[float, int, int]:
    """Return gain, first and last slot of the run whose gap falls most.

    The largest sum of a run is the largest difference between a cumulative sum and an earlier one.
    """
    gain = np.nan_to_num(gap - moved_gap, nan=0.0)
    total = np.concatenate([[0.0], gain.cumsum()])
    lowest = np.minimum.accumulate(total)
    rise = total - lowest
    last = int(rise.argmax())
    if rise[last] <= 0:
        return 0.0, 0, 0
    first = int(np.flatnonzero(total[:last] == lowest[last])[-1])
    return float(rise[last]), first, last - 1


def _is_shift(gap: np.ndarray, moved_gap: dict[int, np.ndarray], run: Run) -> bool:
    gain, first, last, by = run
    before, after = gap[first : last + 1].sum(), np.nansum(moved_gap[by][first : last + 1])
    return last - first + 1 >= 8 and gain >= 6.0 and after < 0.35 * before


def _starts_together(pairs: Pairs, runs: list[Run], moved_gap: dict[int, np.ndarray]) -> bool:
    """Return whether most runs start with their row or turn, or at one place of all rows."""
    slot, segment = pairs.slot.numpy(), pairs.segment.numpy()
    fresh = np.ones(len(slot), bool)
    fresh[1:] = (slot[1:] != slot[:-1] + 1) | (segment[1:] != segment[:-1])
    if pairs.turn is not None:
        fresh[1:] |= np.diff(pairs.turn.numpy()) != 0
    borders, place = np.flatnonzero(fresh), pairs.place.numpy()
    at_border = 0
    for _, first, _, by in runs:
        border = int(borders[np.searchsorted(borders, first, side="right") - 1])
        # The slots between the border and the run agree too, once they are shifted.
        at_border += bool(np.nansum(moved_gap[by][border:first]) < 1.0)
    starts = np.array([place[first] for _, first, _, _ in runs])
    near = np.abs(starts - np.median(starts)) <= 2
    return at_border > 0.6 * len(runs) or (len(runs) >= 4 and near.mean() > 0.8)
