"""Signs of an engine with other weights than the trainer's, or other sampling than it reports."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.verdict.scored_tokens import EXPLAINED, FEWEST, Finding, Pairs

SURELY = 4.0
"""Standard errors by which two parts of the pairs must differ."""
LEAST_GAP = 0.01
"""Nats: smallest mean |log rho| of uncertain tokens at which a temperature or base is looked for.
"""
LEAST_SLOPE, LEAST_SHARE = 0.04, 0.08
"""Smallest slope of log rho on either side's log-probability at the same entropy, and smallest
share of the variance that it explains. Plain noise of up to 1 nat a logit has measured shares of at
most 0.02.
"""
PROPORTIONAL = 0.7
"""Share of the squares of log rho that one factor must explain on at least one side to name a base.
"""
ONE_FACTOR = 0.9
"""The same share on both sides, if the factor is the same for all tokens."""
BINS = 24
"""Largest number of bins of the entropy."""


def weights_and_sampling(pairs: Pairs) -> list[Finding]:
    """Return findings about the engine's weights and sampling.

    Looks for another base of the logarithm; else for stale weights, another temperature, or both.
    Each of the two is looked for in the part of the gap that the other does not explain. Beside a
    temperature, narrowed sampling is looked for too.
    """
    scale = proportional(pairs)
    if scale is not None:
        return [scale]
    stale = _stale(pairs)
    parts = [pairs]  # subsets in which the temperature may be the only fault
    if stale is not None:
        parts = [stale[1]]
    elif pairs.version is not None and bool((pairs.version < pairs.version.max()).any()):
        parts.append(pairs.newest())
    if stale is None and pairs.previous is not None:
        parts.append(pairs.before_update())
    findings = []
    fits = [fit for fit in map(temperature, parts) if fit is not None]
    if fits:
        best = max(fits, key=lambda fit: fit.explained)
        stale = stale or _stale(pairs, best)
        findings.append(best.finding)
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

    current = float(unexplained(pairs).mean())
    if pairs.previous is not None and current > 1e-3:
        before = pairs.before_update()
        earlier = float(unexplained(before).mean())
        if earlier < EXPLAINED * current:
            finding = Finding(
                "stale",
                f"mean |log rho| is {current:.3g} nats, but {earlier:.3g} against the trainer's "
                "previous weights; the engine did not take the last weight update",
            )
            return finding, before
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
    """log rho as a linear function of the rollout's log-probability at the same entropy."""

    finding: Finding
    explained: float  # share of the variance at the same entropy
    slope: float
    edges: Tensor  # [bins - 1] of the entropy
    centre: Tensor  # [bins] mean log-probability of the rollout
    level: Tensor  # [bins] mean log rho

    def expected(self, pairs: Pairs) -> Tensor:
        """Return [n], the log rho that the fit predicts."""
        assert pairs.entropy is not None
        index = torch.bucketize(pairs.entropy, self.edges)
        return self.level[index] + self.slope * (pairs.rollout - self.centre[index])


def temperature(pairs: Pairs) -> Fit | None:
    """Return a fit of another temperature, or None.

    Temperature T has log p_T = log p / T minus a number of the whole distribution. So at the same
    entropy log rho is linear in the log-probability of either side, with one sign. Noise on one
    side is linear in that side at most, and noise on both sides has opposite signs.
    """
    if pairs.entropy is None:
        return None
    pairs = pairs.at(pairs.open)
    if len(pairs.old) < FEWEST or pairs.gap.mean() < LEAST_GAP:
        return None
    log_ratio = pairs.old - pairs.rollout
    bins = max(1, min(BINS, len(log_ratio) // 40))
    assert pairs.entropy is not None
    edges = pairs.entropy.sort().values[torch.arange(1, bins) * len(log_ratio) // bins]
    index = torch.bucketize(pairs.entropy, edges)
    size = torch.bincount(index, minlength=bins).to(log_ratio.dtype).clamp(min=1)

    def means(values: Tensor) -> Tensor:
        return torch.zeros(bins, dtype=values.dtype).index_add(0, index, values) / size

    level = means(log_ratio)
    apart = log_ratio - level[index]
    slopes, shares = [], []
    for side in (pairs.rollout, pairs.old):
        centred = side - means(side)[index]
        slope = float(apart @ centred) / max(float(centred @ centred), 1e-12)
        slopes.append(slope)
        unexplained = float((apart - slope * centred).square().sum())
        shares.append(1 - unexplained / max(float(apart @ apart), 1e-12))
    same_sign = slopes[0] * slopes[1] > 0
    if not (same_sign and min(map(abs, slopes)) >= LEAST_SLOPE and min(shares) >= LEAST_SHARE):
        return None
    if min(shares) ** 0.5 * len(log_ratio) ** 0.5 < SURELY:  # chance correlates so few as much
        return None
    finding = Finding(
        "temperature",
        f"at the same entropy {min(shares):.0%} of the variance of log rho is linear in the "
        "log-probability of either side: the engine's temperature is about "
        f"{1 + slopes[0]:.2f} times the trainer's",
    )
    fit = Fit(finding, min(shares), slopes[0], edges, means(pairs.rollout), level)
    residual = log_ratio - fit.expected(pairs)
    if residual.abs().median() > 0.9 * pairs.gap.median():  # it explains only a few far tokens
        return None
    return fit


BASES = ((10.0, "base 10"), (2.0, "base 2"))


def proportional(pairs: Pairs, *, one_factor: bool = True) -> Finding | None:
    """Return a finding if one side is a multiple of the other, whatever the entropy.

    The cause is another base of the logarithm or a division. With `one_factor` the factor must be
    the same for all tokens.
    """
    pairs = pairs.at(pairs.open)
    if len(pairs.old) < FEWEST or pairs.gap.mean() < LEAST_GAP:
        return None
    log_ratio = pairs.old - pairs.rollout
    squares = float(log_ratio @ log_ratio)
    slopes, shares = [], []
    for side in (pairs.rollout, pairs.old):
        slope = float(log_ratio @ side) / max(float(side @ side), 1e-12)
        slopes.append(slope)
        shares.append(1 - float((log_ratio - slope * side).square().sum()) / squares)
    best = max(shares)
    if slopes[0] * slopes[1] <= 0 or min(map(abs, slopes)) < 0.1 or best < PROPORTIONAL:
        return None
    factor = float((pairs.old @ pairs.rollout) / (pairs.rollout @ pairs.rollout).clamp(min=1e-12))
    if min(shares) < ONE_FACTOR:
        if one_factor or pairs.entropy is None or _by_entropy(pairs) > best + 0.08:
            return None
        return Finding(
            "scale",
            f"{best:.0%} of the squares of log rho are one side's log-probability times a factor "
            "that differs from token to token: divided by a number of characters or tokens?",
        )
    return Finding(
        "scale",
        f"the trainer's log-probabilities are {factor:.3f} times the rollout's ({min(shares):.0%} "
        f"of the squares of log rho){_describe_base(factor)}",
    )


def _describe_base(factor: float) -> str:
    for base, name in BASES:
        for side, value in (("rollout", math.log(base)), ("trainer", 1 / math.log(base))):
            if abs(factor / value - 1) < 0.05:
                return f": the {side}'s are logarithms to {name}"
    return ": another base, or a division by a length"


def _by_entropy(pairs: Pairs) -> float:
    """Return the share of log rho's squares that entropy and one log-probability explain."""
    assert pairs.entropy is not None
    log_ratio = pairs.old - pairs.rollout
    bins = max(1, min(BINS, len(log_ratio) // 40))
    order = pairs.entropy.argsort()
    index = torch.empty_like(order)
    index[order] = torch.arange(len(order)) * bins // len(order)
    size = torch.zeros(bins, dtype=log_ratio.dtype).index_add(0, index, torch.ones_like(log_ratio))

    def centred(values: Tensor) -> Tensor:
        means = torch.zeros(bins, dtype=values.dtype).index_add(0, index, values) / size
        return values - means[index]

    best, ratio = 0.0, centred(log_ratio)
    for side in map(centred, (pairs.rollout, pairs.old)):
        slope = float(ratio @ side) / max(float(side @ side), 1e-12)
        unexplained = float((ratio - slope * side).square().sum())
        best = max(best, 1 - unexplained / float(log_ratio @ log_ratio))
    return best


def renormalised(pairs: Pairs) -> Finding | None:
    """Return a finding if the engine's log-probabilities are renormalised over a part.

    E[rho] is the trainer's mass on the tokens that the engine can sample: 1, or less if the engine
    renormalises a part of the vocabulary.
    """
    n, log_ratio = len(pairs.old), pairs.old - pairs.rollout
    if n < FEWEST:
        return None
    rho = log_ratio.clamp(max=20).exp()
    mean, error = float(rho.mean()), float(rho.std() / n**0.5)
    k1, k2 = float(-log_ratio.mean()), float(log_ratio.square().mean() / 2)
    if mean >= 0.98 or 1 - mean <= 6 * error or k1 <= 1.25 * k2:  # mismatch has k1 about k2 or less
        return _all_below(pairs)
    return Finding(
        "support",
        f"mean rho is {mean:.3f} +- {error:.3f}, not 1: the engine's log-probabilities are "
        "renormalised over a part of the vocabulary (top-p or top-k) that holds about this share "
        "of the trainer's mass",
    )


def _all_below(pairs: Pairs) -> Finding | None:
    """Return a finding if rho is below 1 almost everywhere.

    A renormalised engine is above the trainer at every uncertain token, even if little was cut.
    """
    pairs = pairs.at(pairs.open)
    n, log_ratio = len(pairs.old), pairs.old - pairs.rollout
    if n < FEWEST:
        return None
    rho = log_ratio.clamp(max=20).exp()
    mean, error = float(rho.mean()), float(rho.std() / n**0.5)
    below = float((log_ratio < 0).double().mean())
    if below < 0.75 or mean >= 0.98 or 1 - mean <= 6 * error:
        return None
    return Finding(
        "support",
        f"{below:.0%} of the uncertain tokens have rho below 1 and their mean is {mean:.3f} +- "
        f"{error:.3f}: the engine's log-probabilities are renormalised over a part of the "
        "vocabulary (top-p or top-k)",
    )


def as_drawn(pairs: Pairs) -> Finding | str | None:
    """Compare the sampled tokens' log-probability with the entropy.

    Likelier tokens mean that sampling was narrowed without being reported. Unlikelier tokens mean
    that the engine did not sample them, or that something widened its sampling: a mark without a
    name, which is returned as text.
    """
    if pairs.entropy is None or len(pairs.old) < FEWEST:
        return None
    k2 = float((pairs.old - pairs.rollout).square().mean() / 2)
    # 0 on average if the tokens were drawn from the trainer's distribution.
    surplus = -pairs.old - pairs.entropy
    mean, error = float(surplus.mean()), float(surplus.std() / len(surplus) ** 0.5)
    expected = float(pairs.entropy.mean())
    if mean < -0.1 * expected - k2 and mean < -6 * error:
        return Finding(
            "support",
            f"the sampled tokens are {-mean:.3g} +- {error:.2g} nats likelier than draws from the "
            "reported distribution: sampling was narrowed (temperature, top-p, top-k) but the "
            "log-probabilities are not",
        )
    if not (mean > 0.1 * expected + 2 * k2 and mean > 6 * error):
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


def places(pairs: Pairs) -> Tensor:
    """Return [n] int64, the place of each slot in its row."""
    starts = torch.ones(len(pairs.segment), dtype=torch.bool)
    starts[1:] = pairs.segment[1:] != pairs.segment[:-1]
    first = starts.nonzero()[:, 0]
    return torch.arange(len(starts)) - first[starts.long().cumsum(0) - 1]
