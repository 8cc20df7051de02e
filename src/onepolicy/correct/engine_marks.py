"""Marks of an engine that holds other weights than the trainer, or samples with other settings than it says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.correct.pairs import EXPLAINED, FEWEST, Finding, Pairs

SURELY = 4.0
"""Standard errors by which two parts of the pairs must differ."""


def weights_and_sampling(pairs: Pairs) -> list[Finding]:
    """Stale weights; another temperature; narrowed sampling. Where weights and temperature are both wrong, each is
    looked for behind what the other explains."""
    stale = _stale(pairs)
    parts = [pairs]  # where the temperature could be all that is wrong
    if stale is not None:
        parts = [stale[1]]
    elif pairs.version is not None and bool((pairs.version < pairs.version.max()).any()):
        parts.append(pairs.newest())
    if stale is None and pairs.previous is not None:
        parts.append(pairs.before_update())
    fits = [fit for part in parts if (fit := _temperature(part)) is not None]
    if not fits:
        found = stale[0] if stale is not None else _support(pairs)
        return [found] if found is not None else []
    best = max(fits, key=lambda fit: fit.explained)
    stale = stale or _stale(pairs, best)
    narrowed = renormalised(pairs)  # mean rho is 1 at any temperature
    return [*([stale[0]] if stale else []), best.finding, *([narrowed] if narrowed else [])]


def _stale(pairs: Pairs, beside: _Fit | None = None) -> tuple[Finding, Pairs] | None:
    """And the part of the pairs that other weights do not explain. beside: a temperature whose part is taken out."""

    def left(of: Pairs) -> Tensor:
        return of.gap if beside is None else (of.old - of.rollout - beside.expected(of)).abs()

    here = float(left(pairs).mean())
    if pairs.previous is not None and here > 1e-3:
        before = pairs.before_update()
        if (there := float(left(before).mean())) < EXPLAINED * here:
            finding = Finding(
                "stale",
                f"mean |log rho| is {here:.3g} nats, but {there:.3g} against the trainer's previous weights; the "
                "engine did not take the last weight update",
            )
            return finding, before
    version = pairs.version
    if version is not None and int(version.min()) < int(version.max()):
        old, gaps = version < version.max(), left(pairs)
        older, now = float(gaps[old].mean()), float(gaps[~old].mean())
        parts = int(old.sum()), int((~old).sum())
        error = float(gaps.std()) * sum(1 / n for n in parts) ** 0.5  # of the difference, were both alike
        if older > 1e-3 and now < EXPLAINED * older and min(parts) >= FEWEST and older - now > SURELY * error:
            finding = Finding(
                "stale",
                f"{int(old.sum())} slots were sampled by older weights, with mean |log rho| {older:.3g} nats against "
                f"{now:.3g} of the newest",
            )
            return finding, pairs.newest()
    return None


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """log rho as a linear function of the rollout's log-probability, the entropy and a constant."""

    finding: Finding
    explained: float  # share of the variance
    weights: Tensor  # [3] float64

    def expected(self, pairs: Pairs) -> Tensor:
        return _design(pairs, pairs.rollout) @ self.weights


def _temperature(pairs: Pairs) -> _Fit | None:
    """Another temperature moves log p by e (log p + H) to first order in its change e, H the entropy: log rho is then
    linear in the log-probability of either side and the entropy. Noise on one side is linear in that side at most."""
    if pairs.entropy is None or len(pairs.old) < FEWEST or pairs.gap.mean() < 0.01:
        return None
    (weights, of_rollout), (_, of_old) = _linear(pairs, pairs.rollout), _linear(pairs, pairs.old)
    explained, slope = min(of_rollout, of_old), float(weights[0])
    if not (explained >= 0.5 and abs(slope) >= 0.05):
        return None
    left = pairs.old - pairs.rollout - _design(pairs, pairs.rollout) @ weights
    if left.abs().median() > 0.8 * pairs.gap.median():  # it explains a few far tokens only
        return None
    finding = Finding(
        "temperature",
        f"{explained:.0%} of the variance of log rho is linear in log-probability and entropy: the engine's "
        f"temperature is about {1 + slope:.2f} times the trainer's",
    )
    return _Fit(finding, explained, weights)


def _linear(pairs: Pairs, feature: Tensor) -> tuple[Tensor, float]:
    """Weights of the fit to log rho, and the share of its variance that they explain."""
    values, design = pairs.old - pairs.rollout, _design(pairs, feature)
    gram = design.T @ design + 1e-9 * torch.eye(3, dtype=values.dtype, device=values.device)
    fit = torch.linalg.solve(gram, design.T @ values)
    left = (values - design @ fit).square().sum() / (values - values.mean()).square().sum()
    return fit, 1 - float(left)


def _design(pairs: Pairs, feature: Tensor) -> Tensor:  # -> [n, 3]
    assert pairs.entropy is not None
    return torch.stack([feature, pairs.entropy, torch.ones_like(feature)], dim=1)


def renormalised(pairs: Pairs) -> Finding | None:
    """E[rho] is the trainer's mass on what the engine can sample: 1, or less if the engine renormalised a part."""
    n, log_ratio = len(pairs.old), pairs.old - pairs.rollout
    if n < FEWEST:
        return None
    rho = log_ratio.clamp(max=20).exp()
    mean, error = float(rho.mean()), float(rho.std() / n**0.5)
    k1, k2 = float(-log_ratio.mean()), float(log_ratio.square().mean() / 2)
    if mean >= 0.98 or 1 - mean <= 6 * error or k1 <= 1.25 * k2:  # mismatch has k1 about k2 or less
        return None
    return Finding(
        "support",
        f"mean rho is {mean:.3f} +- {error:.3f}, not 1: the engine's log-probabilities are renormalised over a "
        "part of the vocabulary (top-p or top-k) that holds about this share of the trainer's mass",
    )


def _support(pairs: Pairs) -> Finding | None:
    """Narrowed sampling, by the ratio; or, where that is right, by tokens likelier than the entropy says."""
    if (found := renormalised(pairs)) is not None or pairs.entropy is None:
        return found
    k2 = float((pairs.old - pairs.rollout).square().mean() / 2)
    surplus = -pairs.old - pairs.entropy  # 0 on average if the tokens were drawn from the trainer's distribution
    mean, error = float(surplus.mean()), float(surplus.std() / len(surplus) ** 0.5)
    if mean >= -0.1 * float(pairs.entropy.mean()) - k2 or mean >= -6 * error:
        return None
    return Finding(
        "support",
        f"the sampled tokens are {-mean:.3g} +- {error:.2g} nats likelier than draws from the reported "
        "distribution: sampling was narrowed (temperature, top-p, top-k) but the log-probabilities are not",
    )
