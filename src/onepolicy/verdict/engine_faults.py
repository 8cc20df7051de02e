"""Signs of an engine with other weights than the trainer's, or other sampling than it reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST, SURE, VISIBLE, Finding, Pairs, logit

SURELY = 4.0
"""Standard errors by which two parts of the pairs must differ."""
LEAST_GAP, LEAST_LOGIT = 0.01, 0.05
"""Nats: smallest mean |log rho| of uncertain tokens at which a base is looked for, and smallest
median distance of a logit at which a temperature is.
"""
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97)
"""Temperatures that are tried first, and their inverses; the best is then refined."""
TEMPERATURE_EXPLAINS, OF_CERTAIN = 0.45, 0.8
"""Share of the median distance of the logits that one temperature must explain to be named; the
second number if there are too few uncertain tokens to confirm it.
"""
TEMPERATURE_ALONE = 0.7
"""The same share from which no other weights are named beside it. Planted temperatures explain 84%
and more, weights that are 10% less certain on average at most 56% (docs/detectors.md).
"""
SAME_TEMPERATURE = 0.08
"""Largest |log ratio| between the temperatures of certain, likely and unlikely tokens, or 0.3 of
that of the temperature. Weights that are more or less certain have another one for each.
"""
NEARLY_ALL, ABOUT_SAME = 0.7, 0.2
"""The same, and 0.7, if each explains more than the first number: far temperatures are not exact.
"""
NEARLY_EXACT = 0.9
"""The same share from which a class that its own temperature explains badly has no say: there the
formula is inexact, because the others of its tokens are not alike.
"""
LEAST_TEMPERATURE = 0.05
"""Smallest |logarithm| of a temperature that is named. Coarse weights make a policy flatter, too.
"""
LEAST_FACTOR = 0.2
"""Smallest |logarithm| of a factor between the two sides' log-probabilities."""
ONE_FACTOR, ABOUT_ONE_FACTOR = 0.25, 0.45
"""Largest typical distance of a token's factor from the middle one, as a share of its logarithm.

Up to the second number it may be narrowed sampling as well.
"""
OF_CLASS = 0.25
"""Largest distance between the middle factors of likely, unlikely and rare tokens, likewise.
"""
OF_TOKEN = 0.75
"""Share of the spread of the factors' logarithms that the token, or the row, must explain."""
MOST_WHOLE, FROM_WHOLE = 12.0, 0.12
"""Lengths up to the first number are told from any numbers: those are 0.25 from a whole one on
average, and lengths at most the second.
"""
FEWEST_OF_GROUP = 5
"""Fewest factors of a token, or of a row, among which a middle one is sought."""
FEWEST_OF_CLASS = 8
"""Fewest likely, and fewest unlikely, tokens for a statement about them."""
MAGNITUDES = (-2.0, -0.5, -SURE, -1e-3, -1e-4)
"""Nats: borders between tokens of different probability, nearly certain ones too."""
OF_MAGNITUDE, MOST_OF_MAGNITUDE = 0.25, 0.2
"""Largest distance between the middle factors of these classes: as a share of the factor's
logarithm, and in itself. A temperature has another factor for each class.
"""
PART_OF_MAGNITUDE = 0.05
"""Least share of the tokens that a class holds if it is asked."""
LIKELY, UNLIKELY = -0.5, -1.0
"""Nats: log-probabilities of the trainer above which a token was likely, below which unlikely."""
MOST_RHO = 20.0
"""rho is clipped to this in means, so that no single token decides."""


LESS_CERTAIN = Finding(
    "stale",
    "weights that are more or less certain of everything look alike: were the last weights, or the "
    "adapter, taken?",
    sure=False,
)


def weights_and_sampling(pairs: Pairs) -> list[Finding]:
    """Return findings about the engine's weights and sampling.

    Looks for another base of the logarithm; else for stale weights, another temperature, or both.
    Each of the two is looked for in the part of the gap that the other does not explain. Beside a
    temperature, narrowed sampling is looked for too.
    """
    scale = divided(pairs) or multiplied(pairs)
    if scale is not None and _other_weights(pairs) is None:
        narrowed = None if scale.sure else renormalised(pairs)
        return [each for each in (scale, narrowed) if each is not None]
    stale = _stale(pairs)
    parts = [pairs]  # subsets in which the temperature may be the only fault
    if stale is not None:
        parts = [stale[1]]
    elif pairs.version is not None and bool((pairs.version < pairs.version.max()).any()):
        parts.append(pairs.newest())
    if stale is None:
        parts += [pairs.under(other) for other in (pairs.previous, pairs.base) if other is not None]
    findings = []
    fits = [fit for fit in map(temperature, parts) if fit is not None]
    if fits:
        best = max(fits, key=lambda fit: fit.explained)
        stale = stale or _stale(pairs, best)
        findings.append(best.finding)
        if stale is None and not best.finding.sure:
            findings.append(LESS_CERTAIN)
        narrowed = renormalised(pairs)  # mean rho is 1 at any temperature
        if narrowed is not None:
            findings.append(narrowed)
    if stale is not None:
        findings.insert(0, stale[0])
    return findings


def _stale(pairs: Pairs, beside: Fit | None = None) -> tuple[Finding, Pairs] | None:
    """Return the finding of stale weights and the pairs that other weights do not explain.

    `beside` is a temperature whose part of the gap is subtracted first.
    """

    def unexplained(part: Pairs) -> Tensor:
        if beside is None:
            return part.gap
        return (part.old - part.rollout - beside.expected(part)).abs()

    known = _other_weights(pairs, unexplained)
    if known is not None:
        return known
    version = pairs.version
    if version is None or int(version.min()) == int(version.max()):
        return None
    old, gaps = version < version.max(), unexplained(pairs)
    parts = int(old.sum()), int((~old).sum())
    older, now = float(gaps[old].mean()), float(gaps[~old].mean())
    # Standard error of the difference, if both parts were alike.
    error = float(gaps.std()) * sum(1 / n for n in parts) ** 0.5
    if min(parts) < FEWEST or older <= 1e-3 or older - now <= SURELY * error:
        return None
    if now >= EXPLAINED * older and not _typically_larger(gaps, old, pairs.open):
        return None
    finding = Finding(
        "stale",
        f"{parts[0]} slots were sampled by older weights, with mean |log rho| {older:.3g} nats "
        f"against {now:.3g} of the newest",
    )
    return finding, pairs.newest()


def _other_weights(
    pairs: Pairs, gap: Callable[[Pairs], Tensor] = lambda part: part.gap
) -> tuple[Finding, Pairs] | None:
    """Return the finding of weights whose score is a column, and the pairs under them.

    gap: the part of |log rho| that nothing explains yet.
    """
    current = float(gap(pairs).mean())
    for other, what in (
        (pairs.previous, "previous weights; the engine did not take the last weight update"),
        (pairs.base, "weights without the adapter; the engine does not apply it"),
    ):
        if other is None or current <= 1e-3:
            continue
        under = pairs.under(other)
        explained = float(gap(under).mean())
        if explained < EXPLAINED * current:
            finding = Finding(
                "stale",
                f"mean |log rho| is {current:.3g} nats, but {explained:.3g} against the trainer's "
                f"{what}",
            )
            return finding, under
    return None


def _typically_larger(gaps: Tensor, old: Tensor, uncertain: Tensor) -> bool:
    """Return whether the uncertain tokens of older weights have larger gaps in median and mean.

    Other weights put noise on all of them, not only on a few.
    """
    one, other = gaps[old & uncertain], gaps[~old & uncertain]
    if min(len(one), len(other)) < FEWEST:
        return False
    larger_median = float(one.median()) > 2 * float(other.median())
    return larger_median and float(one.mean()) > 1.3 * float(other.mean())


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """The temperature of the engine that explains log rho best."""

    finding: Finding
    explained: float  # share of the typical distance of a logit
    temperature: float  # the engine's over the trainer's

    def expected(self, pairs: Pairs) -> Tensor:
        """Return [n], the log rho that this temperature has."""
        assert pairs.entropy is not None
        return pairs.old - at_temperature(pairs.old, pairs.entropy, self.temperature)


def at_temperature(logp: Tensor, entropy: Tensor, temperature: float) -> Tensor:
    """Return [n], log-probabilities as they are at another temperature.

    logp [n] and entropy [n] are of the distribution at temperature 1. Beside the token it is taken
    to have m tokens of one probability, m such that the entropy is right. Then the first order in
    1 / temperature - 1, which is logp + entropy, is right for every distribution.
    """
    beta = 1 / temperature
    rest = (-logp.expm1()).clamp(min=1e-12)
    log_m = ((entropy + logp.exp() * logp + rest * rest.log()) / rest).clamp(0, 14)
    others = beta * rest.log() + (1 - beta) * log_m
    return beta * logp - torch.logaddexp(beta * logp, others)


def temperature(pairs: Pairs) -> Fit | None:
    """Return a fit of another temperature, or None.

    A temperature moves every token by a known amount, certain tokens too. Other weights and other
    experts move tokens either way, so no temperature explains the most of that. Distances are of
    logits, log p - log(1 - p), in which a certain token counts as much as an uncertain one.
    """
    if pairs.entropy is None:
        return None
    visible = torch.maximum(pairs.old, pairs.rollout) < -VISIBLE
    pairs = pairs.at(visible & pairs.distinct)
    best, explained = _best_temperature(pairs)
    if explained < TEMPERATURE_EXPLAINS or abs(math.log(best)) < LEAST_TEMPERATURE:
        return None
    likely = pairs.old > UNLIKELY
    confirmed = explained > OF_CERTAIN
    for part in (~pairs.open, pairs.open & likely, ~likely):
        own, own_explained = _best_temperature(pairs.at(part))
        inexact = explained > NEARLY_EXACT and own_explained < NEARLY_ALL
        if own_explained > 0.1 and not inexact:
            same = max(SAME_TEMPERATURE, 0.3 * abs(math.log(best)))
            if min(explained, own_explained) > NEARLY_ALL:
                same = max(ABOUT_SAME, 0.7 * abs(math.log(best)))
            if abs(math.log(own / best)) > same:
                return None
            confirmed |= not bool((~pairs.open & part).any())
    if not confirmed:
        return None
    finding = Finding(
        "temperature",
        f"one temperature explains {explained:.0%} of what a token's logit differs by: the "
        f"engine's temperature is about {best:.2f} times the trainer's, or its logprobs_mode is "
        "raw, or a factor in one of the models differs (norm_topk_prob, a scale of the logits, a "
        "padded vocabulary)",
        sure=explained > TEMPERATURE_ALONE,
    )
    return Fit(finding, explained, best)


def _best_temperature(pairs: Pairs) -> tuple[float, float]:
    """Return the temperature that explains the logits best, and the share that it explains.

    The share is of their median distance. (1, 0) if they are too few, or too near.
    """
    entropy, engine = pairs.entropy, logit(pairs.rollout)
    assert entropy is not None

    def left(temperature: float) -> float:
        expected = at_temperature(pairs.old, entropy, temperature)
        return float((engine - logit(expected)).abs().median())

    if len(pairs.old) < FEWEST or left(1.0) < LEAST_LOGIT:
        return 1.0, 0.0
    tried = {t: left(t) for low in TEMPERATURES for t in (low, 1 / low)}
    best = min(tried, key=tried.__getitem__)
    tried |= {t: left(t) for step in range(-6, 7) if (t := best * 1.01**step) != best}
    best = min(tried, key=tried.__getitem__)
    return best, 1 - tried[best] / left(1.0)


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
        f"the trainer's log-probabilities are {math.exp(middle):.3f} times the rollout's, whatever "
        f"the token's probability{named}",
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
        f"the trainer's log-probabilities are {math.exp(middle):.3f} times the rollout's, those of "
        f"likely and of unlikely tokens{_describe_base(math.exp(middle))}",
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
    small = number[number < MOST_WHOLE]
    if len(small) < max(FEWEST_OF_GROUP, len(number) / 2):
        apart = (number / size).log()
        return float((apart - apart.median()).abs().median()) < FROM_WHOLE
    return float((small - small.round()).abs().mean()) < FROM_WHOLE


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


def renormalised(pairs: Pairs) -> Finding | None:
    """Return a finding if the engine's log-probabilities are renormalised over a part.

    The mean rho of a kind of tokens is the trainer's probability of the kind over the engine's. So
    of two engines that can sample the same tokens it is above 1 for likely tokens or for unlikely
    ones. If the engine renormalises a part of the vocabulary, it is below 1 for both.
    """
    pairs = pairs.at(pairs.open & pairs.distinct)
    rho = (pairs.old - pairs.rollout).clamp(max=20).exp()
    found = []
    for kind, least in ((pairs.old > LIKELY, 0.002), (pairs.old < UNLIKELY, 0.01)):
        n = int(kind.sum())
        if n < FEWEST_OF_CLASS:
            return None
        mean, error = float(rho[kind].mean()), float(rho[kind].std() / n**0.5)
        if 1 - mean <= max(least, SURELY * error):
            return None
        found.append(f"{mean:.3f} +- {error:.3f}")
    return Finding(
        "support",
        f"mean rho is {found[0]} of likely tokens and {found[1]} of unlikely ones, where one of "
        "the two should be above 1: the engine's log-probabilities are processed (logprobs_mode): "
        "renormalised over a part of the vocabulary (top-p or top-k)",
    )


def as_drawn(pairs: Pairs) -> Finding | str | None:
    """Compare the sampled tokens' log-probability with the entropy.

    The surplus is -log p of the trainer minus its entropy. If the engine drew the tokens from the
    probabilities that it reports, the mean of rho times the surplus is 0, whatever its weights are:
    it is the trainer's own mean. Below 0 sampling was narrowed without being reported. Above 0 the
    engine did not sample the tokens, or something widened its sampling: a mark without a name,
    which is returned as text.
    """
    if pairs.entropy is None or len(pairs.old) < FEWEST:
        return None
    log_ratio = pairs.old - pairs.rollout
    k2 = float(log_ratio.square().mean() / 2)
    surplus = -pairs.old - pairs.entropy
    weighted = log_ratio.exp().clamp(max=MOST_RHO) * surplus
    mean, expected = float(weighted.mean()), float(pairs.entropy.mean())
    spread = max(float(weighted.var()), float(_varentropy(pairs.entropy).mean())) ** 0.5
    error = spread / int(pairs.distinct.sum()) ** 0.5
    narrower = (
        f"the sampled tokens are {-mean:.3g} +- {error:.2g} nats likelier than draws from the "
        "reported distribution"
    )
    if mean < -max(6 * error, 0.05 * expected):
        return Finding(
            "support",
            f"{narrower}: sampling was narrowed (temperature, top-p, top-k) but the "
            "log-probabilities are not: their logprobs_mode is raw",
        )
    if mean < -max(6 * error, 0.01 * expected + k2):
        return f"{narrower}, a little: was sampling narrowed (top-p, top-k, min-p)?"
    if mean <= max(6 * error, 0.1 * expected + 2 * k2):
        return None
    first = places(pairs) < 4
    ahead, behind = float(surplus[first].mean()), float(surplus[~first].mean())
    if ahead > 2 * expected + 1 and ahead > 3 * behind:
        return Finding(
            "mask",
            f"the first tokens of the rows are {ahead:.3g} nats unlikelier than draws from the "
            f"reported distribution, the later ones {behind:.3g}: no engine sampled them, so "
            "prompts are inside the mask",
        )
    return (
        f"the sampled tokens are {mean:.3g} +- {error:.2g} nats unlikelier than draws from the "
        "reported distribution: the engine sampled at a higher temperature than it reports, or did "
        "not sample them, or the entropy belongs to other tokens"
    )


def _varentropy(entropy: Tensor) -> Tensor:
    """Return [n], the variance of the log-probability of two tokens that have this entropy.

    A sample of a certain policy may hold none of the rare tokens, so its own variance is too small.
    """
    h = entropy.clamp(1e-9, 0.69)
    log_q = (h / (1 - h.log())).log()  # of the rarer token, refined by Newton's method
    for _ in range(8):
        q = log_q.exp().clamp(max=0.4999)
        value = -(q * q.log() + (1 - q) * (-q).log1p()) - h
        slope = q * ((1 - q) / q).log().clamp(min=1e-3)
        log_q = (log_q - value / slope).clamp(max=-0.6935)
    q = log_q.exp()
    return q * (1 - q) * ((1 - q) / q).log().square()


def places(pairs: Pairs) -> Tensor:
    """Return [n] int64, the place of each slot in its row."""
    starts = torch.ones(len(pairs.segment), dtype=torch.bool)
    starts[1:] = pairs.segment[1:] != pairs.segment[:-1]
    first = starts.nonzero()[:, 0]
    return torch.arange(len(starts)) - first[starts.long().cumsum(0) - 1]
