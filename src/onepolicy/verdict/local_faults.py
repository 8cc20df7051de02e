"""Faults of a part of the slots: rows, runs of slots, first places.

Mismatch alone is spread over all parts evenly.

Distances of logits are compared by rank among tokens of about the same log-probability, certain
tokens too: in a trained policy they are the most. A rank is 0.5 on average
whatever the noise and its tails are, so the mean rank of a part has a known error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from onepolicy.notation import number
from onepolicy.verdict.declared import HARMLESS_KL, TOO_FAR
from onepolicy.verdict.engine_faults import temperature
from onepolicy.verdict.row_faults import (
    CHANCE,
    agreement_at_first,
    followed,
    group_medians,
    row_numbers,
    rows_of,
    rows_that_carry_the_gap,
    strange_rows,
    swapped_rows,
    typical_gaps,
)
from onepolicy.verdict.run_faults import partly_old, shifted_runs
from onepolicy.verdict.scale_faults import multiplied
from onepolicy.verdict.scored_tokens import (
    EXPLAINED,
    FEWEST,
    VISIBLE,
    Finding,
    Pairs,
    correlation,
    logit,
)

FEWEST_SLOTS = 6
"""Fewest tokens of a row that is judged."""
COPY_CHANCE = 1e-4
"""Chance of so many equal rows below which they are copies."""
FEWEST_ROWS = 12
"""Fewest rows that are compared with each other."""
RANK_ERROR = 12**-0.5
"""Standard deviation of a rank."""
BINS = 32
APART, APART_FEW = 4.0, 5.5
"""Least distance between two kinds of rows, in standard deviations inside the kinds.

The second number is for a kind that holds fewer than a tenth of the rows. The best split of a
normal distribution has 2.7, of a uniform one 3.5.
"""
OUTLIER = 5.0
"""Least distance of an odd row from the others, in robust standard deviations of mean ranks."""
CONTRAST = 0.15
"""Least difference between the mean ranks of two parts."""
SEPARATE = 5.0
"""Factor between the typical distances of two kinds of rows from which it decides on each row."""
PARTS = 16
"""Ranges of places, with equally many tokens, between which a jump is looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """Ranks of the logits' distances, among slots of about the same log-probability."""

    values: Tensor  # [n] float64, 0 to 1
    visible: Tensor  # [n] bool, slots that have a rank


def ranks(pairs: Pairs) -> Ranks:
    """Return the ranks of all slots; 0.5 where nothing is visible."""
    visible, values = pairs.visible, torch.full_like(pairs.old, 0.5)
    size = int(visible.sum())
    bins = max(1, min(BINS, size // 40))
    middle = (pairs.old + pairs.rollout)[visible]
    bin_of = torch.empty(size, dtype=torch.int64)
    bin_of[middle.argsort()] = torch.arange(size) * bins // max(1, size)
    generator = torch.Generator().manual_seed(0)
    jitter = torch.rand(size, generator=generator, dtype=torch.float64)  # orders equal gaps
    order = np.lexsort((jitter.numpy(), pairs.logit_gap[visible].numpy(), bin_of.numpy()))
    counts = torch.bincount(bin_of, minlength=bins)
    before = counts.cumsum(0) - counts
    place = torch.empty(size, dtype=torch.float64)
    place[torch.from_numpy(order)] = torch.arange(size, dtype=torch.float64)
    values[visible] = (place - before[bin_of] + 0.5) / counts[bin_of]
    return Ranks(values, visible)


def local(pairs: Pairs) -> Finding | None:
    """Return the finding about a part of the slots, or None.

    The most specific explanation comes first: a change of the part that makes both sides agree
    comes before rows or places that are merely farther apart than the rest.
    """
    if len(pairs.old) < FEWEST:
        return None
    moved = shifted_runs(pairs)
    if moved is not None:
        return moved
    if _k3(pairs) < HARMLESS_KL:
        return copies(pairs)
    detectors = (copies, partly_old, unrelated, swapped_rows, strange_rows, odd_rows)
    for detect in (*detectors, unrelated_tails, first_places):
        found = detect(pairs)
        if found is not None:
            return found
    return None


def _k3(pairs: Pairs) -> float:
    log_ratio = pairs.old - pairs.rollout
    return float((log_ratio.clamp(max=20).expm1() - log_ratio).mean())


def _row_means(values: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the number of values of each of `count` rows."""
    size = torch.bincount(index, minlength=count).double()
    total = torch.zeros(count, dtype=torch.float64).index_add(0, index, values)
    return total / size.clamp(min=1), size


def copies(pairs: Pairs) -> Finding | None:
    """Find rows that agree to the bit while others do not, more of them than chance makes.

    Values with few bits agree often, and siblings that share a prefix agree together.
    """
    index, count = rows_of(pairs)
    open_ = pairs.open
    equal, _ = _row_means((pairs.old == pairs.rollout)[open_].double(), index[open_], count)
    own = index[open_ & pairs.distinct]
    size = torch.bincount(own, minlength=count).double()
    judged = size >= FEWEST_SLOTS
    same = judged & (equal == 1)
    others = judged & ~same
    if int(same.sum()) < 2 or not bool(others.any()):
        return None
    share = float(equal[others].mean())
    expected = float((share ** size[judged]).sum())
    if share > 0.5 or _chance_of(int(same.sum()), expected) > COPY_CHANCE:
        return None
    return Finding(
        "copy",
        f"{int(same.sum())} of {count} rows agree to the bit at every token, the others at "
        f"{share:.0%}: one side was copied from the other there",
    )


def _chance_of(seen: int, expected: float) -> float:
    """Return a bound on the chance of `seen` rare events or more (Chernoff's, of Poisson's law)."""
    if seen <= expected:
        return 1.0
    if not expected:
        return 0.0
    return math.exp(seen - expected + seen * math.log(expected / seen))


def odd_rows(pairs: Pairs) -> Finding | None:
    """Find rows of two kinds, near and far, and the fault of the far ones.

    What siblings share counts for the first of them only.
    """
    rank, (index, count) = ranks(pairs), rows_of(pairs)
    own = rank.visible & pairs.distinct
    means, size = _row_means(rank.values[own], index[own], count)
    judged = size >= FEWEST_SLOTS
    if int(judged.sum()) < FEWEST_ROWS:
        return None
    if pairs.group is not None:  # steps of a run differ in size
        means = means - group_medians(means, pairs, index, judged)
    found = split(means[judged], size[judged])
    if found is None:
        far_rows = _outliers(means, size, judged)
    else:
        far_rows = _nearer_to_far(pairs, judged & (means > found), judged)
    near_rows = judged & ~far_rows
    # One quiet row is no evidence against all others: the last request of a batch runs alone.
    if not bool(far_rows.any()) or int(near_rows.sum()) < 2:
        return None
    far = far_rows[index]
    near = judged[index] & ~far
    ratio = _mean_ratio(pairs.logit_gap, far & rank.visible, near & rank.visible)
    if ratio < 1.5:
        return None
    text = (
        f"about {int(far_rows.sum())} of {count} rows are {number(ratio)} times farther apart in "
        f"logits than the others ({row_numbers(pairs.segment.unique_consecutive()[far_rows])})"
    )
    return _fault_of_part(pairs, far, near, text)


def _nearer_to_far(pairs: Pairs, far: Tensor, judged: Tensor) -> Tensor:
    """Return [R] bool: rows whose typical distance is nearer to the far kind's than the near one's.

    By ranks, which saturate, some near rows with more noise count as far. Kinds less than SEPARATE
    apart are left as they are.
    """
    typical, known = typical_gaps(pairs)
    for _ in range(3):
        kinds = far & known, judged & known & ~far
        if not all(bool(kind.any()) for kind in kinds):
            return far
        of_far, of_near = (typical[kind].median() for kind in kinds)
        if of_far - of_near < math.log(SEPARATE):
            return far
        far = torch.where(known, judged & (typical > (of_far + of_near) / 2), far)
    return far


def _mean_ratio(gap: Tensor, far: Tensor, near: Tensor) -> float:
    """Return the mean gap of the far slots over that of the near ones."""
    return float(gap[far].mean() / gap[near].mean().clamp(min=1e-12))


def _outliers(means: Tensor, size: Tensor, judged: Tensor) -> Tensor:
    """Return [R] bool: rows far beyond chance and the spread of the others.

    A single such row does not count.
    """
    middle = means[judged].median()
    spread = 1.5 * float((means[judged] - middle).abs().median())
    error = RANK_ERROR / size.clamp(min=1).sqrt()
    far = judged & (means - middle > 6 * error) & (means - middle > OUTLIER * max(spread, 0.02))
    if int(far.sum()) < 2:
        return torch.zeros_like(far)
    return far


def split(values: Tensor, size: Tensor) -> float | None:
    """Return the border between two kinds of [n] mean ranks; None if they are of one kind.

    `size` is the number of slots of each mean.
    """
    ordered = values.sort().values
    n = len(ordered)
    spread = float(((values - values.mean()).square() * size).sum()) / RANK_ERROR**2 / (n - 1)
    if spread < 1 + 5 * (2 / n) ** 0.5:  # ranks of so few slots have this by chance
        return None
    low = torch.arange(1, n, dtype=torch.float64)
    total, squares = ordered.cumsum(0), ordered.square().cumsum(0)
    inside_low = squares[:-1] - total[:-1].square() / low
    inside_high = (squares[-1] - squares[:-1]) - (total[-1] - total[:-1]).square() / (n - low)
    inside = inside_low + inside_high
    best = int(inside.argmin())
    apart = float((total[-1] - total[best]) / (n - best - 1) - total[best] / (best + 1))
    deviation = float((inside[best].clamp(min=0) / max(1, n - 2)).sqrt())
    least = APART
    if min(best + 1, n - best - 1) < 0.1 * n:
        least = APART_FEW
    if apart < CONTRAST or apart < least * max(deviation, 1e-3):
        return None
    return float((ordered[best] + ordered[best + 1]) / 2)


def _fault_of_part(pairs: Pairs, far: Tensor, near: Tensor, text: str) -> Finding:
    """Return the finding about the far slots; `text` describes them."""
    part = pairs.at(far)
    scale = multiplied(part)
    if scale is not None:
        return Finding("scale", f"{text}; there {scale.evidence}")
    hot = temperature(part)
    if hot is not None and hot.finding.sure:
        return Finding("temperature", f"{text}; there {hot.finding.evidence}")
    of_far, of_near = (_logits_follow(pairs.at(which & pairs.visible)) for which in (far, near))
    if of_far < 0.3 and of_near - of_far > 0.3 and agreement_at_first(part) < 0.3:
        return Finding(
            "rows",
            f"{text}, and the two sides do not follow each other there (correlation "
            f"{number(of_far)}, {number(of_near)} in the others): the values are of other rows or "
            "of another model",
            sure=False,
        )
    tail = unrelated_tails(part)
    if tail is not None:
        return Finding(tail.cause, f"{text}; {tail.evidence}")
    text = f"{text}: a replica that holds other weights, or weights of another step, sampled them"
    if pairs.version is not None:
        text = f"{text}; the column version does not say so"
    return Finding("stale", text)


def unrelated(pairs: Pairs) -> Finding | None:
    """Find two sides that do not follow each other anywhere, from the first tokens on."""
    known = pairs.at(pairs.open)
    values = correlation(known.old, known.rollout), agreement_at_first(pairs)
    if _k3(pairs) < TOO_FAR or max(values) >= 0.3:
        return None
    return Finding(
        "rows",
        f"the two sides do not follow each other (correlation {number(values[0])}, "
        f"{number(values[1])} in the first tokens of the rows): the values are of other rows or "
        "of another model",
        sure=False,
    )


def _logits_follow(pairs: Pairs) -> float:
    old, rollout = (logit(side.clamp(max=-VISIBLE)) for side in (pairs.old, pairs.rollout))
    return correlation(old, rollout)


def first_places(pairs: Pairs) -> Finding | None:
    """Find first tokens that are far apart while later ones are not: another prompt."""
    if rows_of(pairs)[1] < FEWEST_ROWS:
        return None
    distinct = pairs.distinct
    place, pairs = pairs.place[distinct], pairs.at(distinct)
    rank, best = ranks(pairs), None
    for many in (1, 2, 4, 8, 16):
        ahead, behind = rank.visible & (place < many), rank.visible & (place >= max(2 * many, 8))
        if int(ahead.sum()) < FEWEST or int(behind.sum()) < FEWEST:
            continue
        contrast = float(rank.values[ahead].mean() - rank.values[behind].mean())
        surely = contrast / (RANK_ERROR * (1 / int(ahead.sum()) + 1 / int(behind.sum())) ** 0.5)
        ratio = _mean_ratio(pairs.logit_gap, ahead, behind)
        if contrast > 0.2 and surely > 8 and ratio > 1.5 and (best is None or surely > best[0]):
            best = surely, many, ratio
    if best is None:
        return None
    return Finding(
        "context",
        f"the first {best[1]} tokens of the rows are {number(best[2])} times farther apart than "
        "later ones: one side saw another prompt (system prompt, chat template, first token)",
    )


def unlike_parts(pairs: Pairs) -> list[str]:
    """Return marks of rows, places and stretches that are farther apart for no known cause."""
    if rows_of(pairs)[1] < FEWEST_ROWS or _k3(pairs) < HARMLESS_KL:
        return []
    out = []
    rows = followed(pairs)
    if rows is not None and bool(rows.strange(CHANCE).any()):
        strange = int(rows.strange(CHANCE).sum())
        out.append(
            f"in {strange} of {len(rows.size)} rows the two sides do not follow each other as they "
            "do in the others"
        )
    carried = rows_that_carry_the_gap(pairs)
    if carried is not None:
        out.append(carried)
    distinct = pairs.distinct
    place, last, pairs = pairs.place[distinct], pairs.last[distinct], pairs.at(distinct)
    rank = ranks(pairs)
    values = rank.values[rank.visible]
    jump = _jump(place[rank.visible], values)
    if jump is not None:
        out.append(jump)
    stretches = values[: len(values) // 16 * 16].reshape(-1, 16).mean(1)
    comparable = len(stretches) >= 2 * FEWEST_ROWS and pairs.group is None
    if comparable and split(stretches, torch.full_like(stretches, 16.0)) is not None:
        out.append("stretches of rows are of two kinds, near and far")
    last &= rank.visible
    many = int(last.sum())
    if many >= 8:
        contrast = float(rank.values[last].mean()) - 0.5
        far = _mean_ratio(pairs.logit_gap, last, rank.visible & ~last)
        if contrast > 0.25 and contrast > 6 * RANK_ERROR / many**0.5 and far > 3:
            out.append(
                f"the last tokens of the rows are {number(far)} times farther apart than the others"
            )
    return out


def _jump(place: Tensor, values: Tensor) -> str | None:
    """Return a mark if the gap falls along the rows, or jumps at one place. `values` are ranks.

    A gap that grows along the answer is what rounding and other experts do in long contexts.
    """
    if len(place) < 8 * FEWEST:
        return None
    parts = place.argsort(stable=True).chunk(PARTS)
    y = torch.stack([values[each].mean() for each in parts])
    x = torch.stack([place[each].double().mean() for each in parts]).log1p()
    error = RANK_ERROR / len(parts[-1]) ** 0.5
    least = max(0.25, 6 * error)
    if float(y.max() - y[-1]) > least:
        return f"the gap falls along the rows (mean ranks by {number(float(y.max() - y[-1]))})"
    steps = [
        (float(y[k:].mean() - y[:k].mean()), float(_squares(y[:k]) + _squares(y[k:])), k)
        for k in range(1, PARTS)
    ]
    height, around_step, k = min(steps, key=lambda each: each[1])
    slopes = (torch.stack([x, y]), torch.stack([x.expm1(), y]))  # by its logarithm, or the place
    around_line = min(
        float(_squares(y)) * (1 - float(torch.corrcoef(each)[0, 1].nan_to_num()) ** 2)
        for each in slopes
    )
    noise = PARTS * error**2
    if height < least or around_line < noise + 3 * around_step:
        return None
    at = int(place[parts[k][0]])
    return f"the gap jumps at place {at} of the rows (mean ranks by {number(height)})"


def _squares(values: Tensor) -> Tensor:
    return (values - values.mean()).square().sum()


def unrelated_tails(pairs: Pairs) -> Finding | None:
    """Find sequences that agree up to a point and are far apart after it."""
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
    enough = len(inside) >= max(FEWEST // 2, 0.01 * end)
    if not enough or len(outside) < max(FEWEST // 2, 0.1 * len(inside)):
        return None
    agreed = float(
        outside.median()
    )  # the mean may hold tokens behind the point that are near by chance
    if inside.mean() <= max(1, 10 * agreed) or (inside > 0.5).double().mean() <= 0.5:
        return None
    rows = int((first_bad < end).sum())
    text = (
        f"in {rows} of {count} sequences the engines agree up to a point ({number(agreed)} "
        f"nats) and not after it ({number(float(inside.mean()))} nats)"
    )
    if correlation(pairs.old[behind], pairs.rollout[behind]) > EXPLAINED:
        return Finding(
            "stale",
            f"{text}, where they still follow each other: other weights sampled from there on",
        )
    return Finding(
        "retokenised",
        f"{text}: from there on they scored different tokens, or with far other weights",
    )
