"""One side a multiple of the other: another base of the logarithm, or a division by a length."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onepolicy.notation import number
from onepolicy.verdict.scored_tokens import (
    FEWEST,
    FEWEST_OF_CLASS,
    LIKELY,
    SURE,
    UNLIKELY,
    VISIBLE,
    Finding,
    Pairs,
)

SURELY = 3.0
"""Standard errors by which whole numbers must be told from any."""
LEAST_GAP = 0.01
"""Nats: smallest mean |log rho| of uncertain tokens at which a factor is looked for."""
LEAST_FACTOR = 0.2
"""Smallest |logarithm| of a factor between the two sides' log-probabilities."""
ONE_FACTOR, ABOUT_ONE_FACTOR = 0.25, 0.45
"""Largest typical distance of a token's factor from the middle one, as a share of its logarithm.

Up to the second number it may be narrowed sampling as well.
"""
OF_CLASS = 0.25
"""Largest distance between the middle factors of likely, unlikely and rare tokens, likewise.
"""
MAGNITUDES = (-2.0, -0.5, -SURE, -1e-3, -1e-4)
"""Nats: borders between tokens of different probability, nearly certain ones too."""
OF_MAGNITUDE, MOST_OF_MAGNITUDE = 0.25, 0.2
"""Largest distance between the middle factors of these classes: as a share of the factor's
logarithm, and in itself. A temperature has another factor for each class.
"""
PART_OF_MAGNITUDE = 0.05
"""Least share of the tokens that a class holds if it is asked."""
OF_TOKEN = 0.75
"""Share of the spread of the factors' logarithms that the token, or the row, must explain."""
LENGTHS = (3.5, 6.0, 12.0)
"""Ranges of factors, up to these, in which whole numbers are told from any: the coarser the other
side's weights, the smaller.
"""
NO_FACTOR = 1.5
"""A factor below it says nothing: it is near 1."""
FEWEST_LENGTHS = 8
"""Fewest factors of such a range."""
SAME_LENGTH = 0.12
"""Largest |log ratio| of larger factors to the rows' lengths, typically."""
FEWEST_OF_GROUP = 5
"""Fewest factors of a token, or of a row, among which a middle one is sought."""
BASES = ((10.0, "base 10"), (2.0, "base 2"))
OTHER_BASE = ": another base, or a division by a length"


def multiplied(pairs: Pairs) -> Finding | None:
    """Return a finding if one side is a multiple of the other, whatever a token's probability.

    The cause is another base of the logarithm or a division.
    """
    if pairs.at(pairs.open).gap.nan_to_num().mean() < LEAST_GAP:
        return None
    return _multiple_of_all(pairs) or _multiple_of_uncertain(pairs)


def _multiple_of_all(pairs: Pairs) -> Finding | None:
    """Return a finding if tokens of every probability, nearly certain ones too, have one factor.

    Where most tokens are certain, these show it best.
    """
    pairs, factor = _factors(pairs, VISIBLE)
    if len(factor) < FEWEST:
        return None
    middle = float(factor.median())
    apart = float((factor - middle).abs().median())
    of = torch.bucketize(pairs.old, torch.tensor(MAGNITUDES, dtype=pairs.old.dtype))
    least = max(FEWEST_OF_CLASS, PART_OF_MAGNITUDE * len(factor))
    parts = [factor[of == each] for each in range(len(MAGNITUDES) + 1)]
    medians = [float(part.median()) for part in parts if len(part) >= least]
    uncertain = factor[pairs.old < -SURE]
    if abs(middle) <= LEAST_FACTOR or apart >= ONE_FACTOR * abs(middle) or len(medians) < 2:
        return None
    if len(uncertain) < FEWEST_OF_CLASS:
        return None
    medians.append(float(uncertain.median()))
    if max(medians) - min(medians) > min(OF_MAGNITUDE * abs(middle), MOST_OF_MAGNITUDE):
        return None
    named = _describe_base(math.exp(middle))
    return Finding(
        "scale",
        f"the trainer's log-probabilities are {number(math.exp(middle))} times the rollout's, "
        f"whatever the token's probability{named}",
        sure=len(parts[0]) + len(parts[1]) >= least or named != OTHER_BASE,
    )


def _multiple_of_uncertain(pairs: Pairs) -> Finding | None:
    """Return a finding if likely, unlikely and rare tokens have one factor."""
    pairs, factor = _factors(pairs, 4 * SURE)
    if len(factor) < FEWEST:
        return None
    middle = float(factor.median())
    if abs(middle) <= LEAST_FACTOR:
        return None
    apart = float((factor - middle).abs().median())
    far = pairs.old < 2 * UNLIKELY
    kinds = (pairs.old > LIKELY, (pairs.old < UNLIKELY) & ~far, far)
    parts = [factor[kind] for kind in kinds if int(kind.sum()) >= FEWEST_OF_CLASS]
    if len(parts) < 2 or apart >= ABOUT_ONE_FACTOR * abs(middle):
        return None
    medians = [float(part.median()) for part in parts]
    if max(medians) - min(medians) > OF_CLASS * abs(middle):
        return None
    return Finding(
        "scale",
        f"the trainer's log-probabilities are {number(math.exp(middle))} times the rollout's, "
        f"those of likely and of unlikely tokens{_describe_base(math.exp(middle))}",
        sure=apart < ONE_FACTOR * abs(middle),
    )


def _factors(pairs: Pairs, least: float) -> tuple[Pairs, Tensor]:
    """Return the contexts in which a factor between the sides shows, and its logarithm there.

    least: nats that a token's log-probabilities are from 0.
    """
    visible = (pairs.old < -least) & (pairs.rollout < -least)
    pairs = pairs.at(visible & pairs.distinct)
    return pairs, (pairs.old / pairs.rollout).log()


def divided(pairs: Pairs) -> Finding | None:
    """Return a finding if each token of the vocabulary, or each row, has a factor of its own.

    It is 1 over the token's characters, or over the row's length.
    """
    if pairs.at(pairs.open).gap.nan_to_num().mean() < LEAST_GAP:
        return None
    pairs, factor = _factors(pairs, VISIBLE)
    if len(factor) < FEWEST or abs(float(factor.median())) <= LEAST_FACTOR:
        return None
    for of, what, group in (
        ("token of the vocabulary", "its characters", pairs.token),
        ("row", "its length", pairs.segment),
    ):
        if group is None:
            continue
        share = _between(factor, group)
        if share > OF_TOKEN and _are_lengths(factor, group):
            return Finding(
                "scale",
                f"one side's log-probabilities are multiples of the other's, with a factor for "
                f"each {of} ({share:.0%} of the factors' spread): divided by {what}?",
            )
    return None


def _are_lengths(factor: Tensor, group: Tensor) -> bool:
    """Return whether the groups' factors are whole numbers, or 1 over them, as lengths are.

    In a policy whose tokens come in few contexts, other weights and other sampling too have a
    factor for each token. It is any number. Large ones must be proportional to the group's size.
    """
    _, index = group.unique(return_inverse=True)
    medians, size = _medians(factor, index)
    enough = size >= FEWEST_OF_GROUP
    number, size = medians[enough].abs().exp(), size[enough]
    if int((number < LENGTHS[-1]).sum()) < len(number) / 2:
        apart = (number / size).log()
        return float((apart - apart.median()).abs().median()) < SAME_LENGTH
    for most in LENGTHS:
        small = number[(number > NO_FACTOR) & (number < most)]
        # Of any numbers the distance to the nearest whole one is 0.25 +- 0.144.
        chance = 0.25 - SURELY * 0.144 / max(1, len(small)) ** 0.5
        distance = (small - small.round()).abs()
        if len(small) >= FEWEST_LENGTHS and float(distance.mean()) < chance:
            return True
    return False


def _medians(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return [G], the median of each group, and the groups' sizes. index [n]: 0 to G - 1."""
    size = torch.bincount(index)
    order = values.argsort(stable=True)
    order = order[index[order].argsort(stable=True)]
    return values[order][size.cumsum(0) - (size + 1) // 2], size


def _between(values: Tensor, group: Tensor) -> float:
    """Return the share of the spread of [n] values that lies between groups; 0 if too few.

    The spread is the square of the median distance from the median, so that a few far values do
    not hide it. Groups of fewer than FEWEST_OF_GROUP values are left out.
    """
    _, index, size = group.unique(return_inverse=True, return_counts=True)
    values, group = (each[size[index] >= FEWEST_OF_GROUP] for each in (values, group))
    groups, index = group.unique(return_inverse=True)
    if len(values) < FEWEST or len(groups) < 2:
        return 0.0
    medians, _ = _medians(values, index)
    inside = float((values - medians[index]).abs().median()) ** 2
    return 1 - inside / max(float((values - values.median()).abs().median()) ** 2, 1e-12)


def _describe_base(factor: float) -> str:
    for base, name in BASES:
        for side, value in (("rollout", math.log(base)), ("trainer", 1 / math.log(base))):
            if abs(factor / value - 1) < 0.05:
                return f": the {side}'s are logarithms to {name}"
    return OTHER_BASE
