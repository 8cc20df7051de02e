"""Signs of an engine with other weights than the trainer's, or other sampling than it reports."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.notation import number, with_error
from onepolicy.verdict.scale_faults import divided, multiplied
from onepolicy.verdict.scored_tokens import (
    EXPLAINED,
    FEWEST,
    FEWEST_OF_CLASS,
    LIKELY,
    UNLIKELY,
    VISIBLE,
    Finding,
    Pairs,
    logit,
)

SURELY = 4.0
"""Standard errors by which two parts of the pairs must differ."""
LEAST_LOGIT = 0.05
"""Nats: smallest median distance of a logit at which a temperature is looked for."""
TEMPERATURES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.94, 0.97)
"""Temperatures that are tried first, and their inverses; the best is then refined."""
TEMPERATURE_EXPLAINS, OF_CERTAIN = 0.45, 0.8
"""Share of the median distance of the logits that one temperature must explain to be named; the
second number if there are too few uncertain tokens to confirm it.
"""
TEMPERATURE_ALONE = 0.7
"""The same share from which no other weights are named beside it. Planted temperatures explain 84%
and more, weights that are 10% less certain on average at most 56% (docs/audit.md).
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
    scale = divided(pairs)
    fit = None if scale is None else temperature(pairs)
    if fit is not None and fit.explained > NEARLY_EXACT:
        scale = None  # a number for each token, because each has few contexts
    scale = scale or multiplied(pairs)
    if scale is not None and _other_weights(pairs) is None:
        narrowed = None if scale.sure else renormalised(pairs)
        return [each for each in (scale, narrowed) if each is not None]
    stale = _stale(pairs)
    parts = [pairs]  # subsets in which the temperature may be the only fault
    if stale is not None:
        parts = [stale[1]]
    elif pairs.version is not None and bool((pairs.version < pairs.version.max()).any()):
        parts.append(pairs.newest())
    findings = []
    fits = [fit for fit in map(temperature, parts) if fit is not None]
    if stale is None:
        fits += _fits_under_other_weights(pairs)
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


def _fits_under_other_weights(pairs: Pairs) -> list[Fit]:
    """Return the temperatures between the engine and other weights that explain the gap.

    They leave less unexplained than the trainer's own weights do: else the engine has those.
    """
    found = []
    for other in (pairs.previous, pairs.base):
        if other is None:
            continue
        part = pairs.under(other)
        fit = temperature(part)
        if fit is None:
            continue
        left = (part.old - part.rollout - fit.expected(part)).abs()
        if left.mean() < pairs.gap.mean():
            found.append(fit)
    return found


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
        f"{parts[0]:,} tokens were sampled by older weights, with mean |log rho| {number(older)} "
        f"nats against {number(now)} of the newest",
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
                f"mean |log rho| is {number(current)} nats, but {number(explained)} against the "
                f"trainer's {what}",
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
    engine = f"the engine's temperature is about {number(best)} times the trainer's"
    raw = "its log-probabilities are raw, as before its own temperature"
    first, then = engine, raw
    if best > 1:  # runs sample at 1 and below it: raw values are those of a higher temperature
        first, then = raw.replace("its", "the engine's", 1), engine
    finding = Finding(
        "temperature",
        f"one temperature explains {explained:.0%} of what a token's logit differs by: {first}, "
        f"or {then}, or a factor in one of the models differs (norm_topk_prob, a scale of the "
        "logits, a padded vocabulary)",
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
        found.append(with_error(mean, error))
    return Finding(
        "support",
        f"mean rho is {found[0]} of likely tokens and {found[1]} of unlikely ones, where one of "
        "the two should be above 1: the engine's log-probabilities are processed: renormalised "
        "over a part of the vocabulary (top-p or top-k)",
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
        f"the sampled tokens are {with_error(-mean, error)} nats likelier than draws from the "
        "reported distribution"
    )
    if mean < -max(6 * error, 0.05 * expected):
        return Finding(
            "support",
            f"{narrower}: sampling was narrowed (temperature, top-p, top-k) but the "
            "log-probabilities are not: they are raw",
        )
    if mean < -max(6 * error, 0.01 * expected + k2):
        return f"{narrower}, a little: was sampling narrowed (top-p, top-k, min-p)?"
    wider = (
        f"the sampled tokens are {with_error(mean, error)} nats unlikelier than draws from the "
        "reported distribution"
    )
    if mean <= max(6 * error, 0.02 * expected + 2 * k2):
        return None
    if mean <= 0.1 * expected + 2 * k2:
        return f"{wider}, a little: did the engine sample at a higher temperature than it reports?"
    first = pairs.place < 4
    ahead, behind = float(surplus[first].mean()), float(surplus[~first].mean())
    if ahead > 2 * expected + 1 and ahead > 3 * behind:
        return Finding(
            "mask",
            f"the first tokens of the rows are {number(ahead)} nats unlikelier than draws from the "
            f"reported distribution, the later ones {number(behind)}: no engine sampled them, so "
            "prompts are inside the mask",
        )
    return (
        f"{wider}: the engine sampled at a higher temperature than it reports, or did not sample "
        "them, or the entropy belongs to other tokens"
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
