"""Is the ratio a mismatch, or a bug that no correction repairs? Reads log-probabilities, changes nothing.

Under true mismatch both engines scored the same tokens under the same settings: the gap is noise, E[rho] = 1 and no
simple change of one side removes it. Each bug leaves a mark instead: a change that closes most of the gap (a shift by
one slot, another temperature, other weights, an aligned beginning), an impossible value, or E[rho] < 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.types import TokenBatch

Cause = Literal["fill", "not_log", "shift", "retokenised", "temperature", "support", "stale"]
EXPLAINED = 0.25
"""A change of one side explains the gap if less than this share of it is left."""
FEWEST = 32
"""Slots below which nothing but impossible values is named."""


@dataclass(frozen=True, slots=True)
class Finding:
    cause: Cause
    evidence: str  # with the numbers, and what to look at


@dataclass(frozen=True, slots=True)
class Diagnosis:
    gap: float  # mean |log rho| over finite slots [nats]
    findings: tuple[Finding, ...]

    @property
    def bug(self) -> bool:
        return bool(self.findings)

    def text(self) -> str:
        if not self.findings:
            return f"mean |log rho| {self.gap:.3g} nats: no known bug explains it, so it is mismatch"
        return "\n".join(f"{f.cause}: {f.evidence}" for f in self.findings)


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """n slots both engines scored."""

    old: Tensor  # [n] float64
    rollout: Tensor  # [n] float64
    segment: Tensor  # [n] int64
    slot: Tensor  # [n] int64, place in the batch

    @property
    def gap(self) -> Tensor:
        return (self.old - self.rollout).abs()


def preflight(batch: TokenBatch) -> Diagnosis:
    """`diagnose` of a scored step."""
    assert batch.logp_old is not None, "score() comes first"
    return diagnose(
        batch.logp_old,
        batch.logp_rollout,
        batch.trainable,
        segment=batch.segment,
        version=batch.version,
        entropy=batch.entropy,
    )


@torch.no_grad()
def diagnose(
    logp_trainer: Tensor,  # [T] float32
    logp_rollout: Tensor,  # [T] float32
    mask: Tensor,  # [T] bool, trainable slots
    *,
    segment: Tensor,  # [T] int64, sequence of each slot, in order
    tokens: Tensor | None = None,  # [T] int, what the trainer scored
    tokens_rollout: Tensor | None = None,  # [T] int, what the engine sampled
    version: Tensor | None = None,  # [T] int, weight version that sampled each slot
    logp_previous: Tensor | None = None,  # [T] float32, the trainer's score under its previous weights
    entropy: Tensor | None = None,  # [T] float32, of the trainer's distribution [nats]
) -> Diagnosis:
    """Name the bugs that the log-probabilities give away; none on plain mismatch. Raises UsageError on an empty mask.

    Not visible without `entropy`: another temperature, and sampling that was narrowed but reported as if not.
    """
    if not mask.any():
        raise UsageError(f"diagnose: the mask selects none of {mask.numel()} slots")
    slot = mask.nonzero()[:, 0]
    pairs = _Pairs(logp_trainer[slot].double(), logp_rollout[slot].double(), segment[slot].long(), slot)
    findings, good = _impossible(pairs)
    pairs = _Pairs(*(x[good] for x in (pairs.old, pairs.rollout, pairs.segment, pairs.slot)))
    gap = float(pairs.gap.mean()) if len(pairs.old) else float("nan")
    if len(pairs.old) >= FEWEST:
        picked = {
            "version": None if version is None else version[pairs.slot],
            "previous": None if logp_previous is None else logp_previous[pairs.slot].double(),
            "entropy": None if entropy is None else entropy[pairs.slot].double(),
        }
        differ = None
        if tokens is not None and tokens_rollout is not None:
            differ = tokens[pairs.slot] != tokens_rollout[pairs.slot]
        misplaced = _shift(pairs) or _retokenised(pairs, differ)
        if misplaced is not None:  # the other marks mean nothing on tokens that are not the same
            findings.append(misplaced)
        else:
            stale = _stale(pairs, picked["version"], picked["previous"])
            scaled = None if stale else _temperature(pairs, picked["entropy"]) or _support(pairs, picked["entropy"])
            findings += [found for found in (stale, scaled) if found is not None]
    return Diagnosis(gap, tuple(findings))


def _impossible(pairs: _Pairs) -> tuple[list[Finding], Tensor]:
    """Values no log-probability has; and [n] bool, which slots are left to look at."""
    n, findings = len(pairs.old), []
    bad = ~(pairs.old.isfinite() & pairs.rollout.isfinite())
    if count := int(bad.sum()):
        findings.append(Finding("fill", f"{count} of {n} log-probabilities are NaN or infinite; missing values"))
    positive = ~bad & ((pairs.rollout > 1e-3) | (pairs.old > 1e-3))
    if count := int(positive.sum()):
        findings.append(Finding("not_log", f"{count} of {n} are above 0; probabilities instead of their logarithms?"))
    zero = ~bad & ((pairs.rollout == 0) ^ (pairs.old == 0)) & (pairs.gap > 0.1)
    if (count := int(zero.sum())) > max(2, 0.005 * n):
        findings.append(Finding("fill", f"{count} of {n} are exactly 0 on one side only; zeros filled in for missing"))
        return findings, ~bad & ~positive & ~zero
    return findings, ~bad & ~positive


def _shift(pairs: _Pairs) -> Finding | None:
    """Does the trainer's value at a slot equal the engine's at the slot before or after?"""
    neighbours = (pairs.slot[1:] == pairs.slot[:-1] + 1) & (pairs.segment[1:] == pairs.segment[:-1])
    if int(neighbours.sum()) < FEWEST:
        return None
    here = float(pairs.gap.mean())
    later = (pairs.old[:-1] - pairs.rollout[1:]).abs()[neighbours].mean()
    earlier = (pairs.old[1:] - pairs.rollout[:-1]).abs()[neighbours].mean()
    for name, value in (("next", float(later)), ("previous", float(earlier))):
        if here > 0.05 and value < EXPLAINED * here:
            return Finding(
                "shift",
                f"mean |log rho| is {here:.3g} nats, but {value:.3g} against the engine's value of the {name} slot; "
                "the two sides are one token apart",
            )
    return None


def _retokenised(pairs: _Pairs, differ: Tensor | None) -> Finding | None:
    """Aligned up to a point of a sequence, and unrelated after it."""
    if differ is not None and bool(differ.any()):
        first = int(pairs.slot[differ][0])
        return Finding(
            "retokenised",
            f"{int(differ.sum())} of {len(differ)} trained tokens are not those that were sampled, first slot {first}; "
            "text was decoded and encoded again, or changed",
        )
    gap, count = pairs.gap, int(pairs.segment.max()) + 1
    place = torch.arange(len(gap), device=gap.device)
    end = len(gap)
    first_bad = torch.full((count,), end, device=gap.device).scatter_reduce(
        0, pairs.segment, torch.where(gap > 3, place, end), "amin"
    )
    tail = place >= first_bad[pairs.segment]
    inside, outside = gap[tail], gap[~tail]
    if len(inside) < max(FEWEST // 2, 0.01 * end) or len(outside) < 0.1 * end:
        return None
    if inside.mean() > 1 and inside.mean() > 10 * outside.mean() and (inside > 0.5).double().mean() > 0.5:
        rows = int((first_bad < end).sum())
        return Finding(
            "retokenised",
            f"in {rows} of {count} sequences the engines agree up to a point ({float(outside.mean()):.2g} nats) and "
            f"not after it ({float(inside.mean()):.2g} nats): from there on they scored different tokens",
        )
    return None


def _stale(pairs: _Pairs, version: Tensor | None, previous: Tensor | None) -> Finding | None:
    here = float(pairs.gap.mean())
    if previous is not None and here > 1e-3:
        there = float((previous - pairs.rollout).abs().mean())
        if there < EXPLAINED * here:
            return Finding(
                "stale",
                f"mean |log rho| is {here:.3g} nats, but {there:.3g} against the trainer's previous weights; the "
                "engine did not take the last weight update",
            )
    if version is not None and int(version.min()) < int(version.max()):
        old = version < version.max()
        before, now = float(pairs.gap[old].mean()), float(pairs.gap[~old].mean())
        if before > 1e-3 and now < EXPLAINED * before:
            return Finding(
                "stale",
                f"{int(old.sum())} slots were sampled by older weights, with mean |log rho| {before:.3g} nats against "
                f"{now:.3g} of the newest",
            )
    return None


def _temperature(pairs: _Pairs, entropy: Tensor | None) -> Finding | None:
    """Another temperature moves log p by e (log p + H) to first order in its change e, H the entropy: log rho is then
    linear in the log-probability of either side and the entropy. Noise on one side is linear in that side at most."""
    log_ratio = pairs.old - pairs.rollout
    if entropy is None or log_ratio.abs().mean() < 0.01:
        return None
    slope, of_rollout = _linear(log_ratio, pairs.rollout, entropy)
    explained = min(of_rollout, _linear(log_ratio, pairs.old, entropy)[1])
    if explained < 0.5 or abs(slope) < 0.05:
        return None
    return Finding(
        "temperature",
        f"{explained:.0%} of the variance of log rho is linear in log-probability and entropy: the engine's "
        f"temperature is about {1 + slope:.2f} times the trainer's",
    )


def _linear(values: Tensor, feature: Tensor, entropy: Tensor) -> tuple[float, float]:
    """Slope on `feature`, and the share of variance of [n] that feature, entropy and a constant explain together."""
    design = torch.stack([feature, entropy, torch.ones_like(values)], dim=1)
    gram = design.T @ design + 1e-9 * torch.eye(3, dtype=values.dtype, device=values.device)
    fit = torch.linalg.solve(gram, design.T @ values)
    left = (values - design @ fit).square().sum() / (values - values.mean()).square().sum()
    return float(fit[0]), 1 - float(left)


def _support(pairs: _Pairs, entropy: Tensor | None) -> Finding | None:
    """E[rho] is the trainer's mass on what the engine can sample: 1, or less if the engine renormalised a part."""
    log_ratio = pairs.old - pairs.rollout
    rho = log_ratio.clamp(max=20).exp()
    n = len(rho)
    mean, error = float(rho.mean()), float(rho.std() / n**0.5)
    k1, k2 = float(-log_ratio.mean()), float(log_ratio.square().mean() / 2)
    if mean < 0.98 and 1 - mean > 6 * error and k1 > 1.25 * k2:  # mismatch has k1 about k2 or less
        return Finding(
            "support",
            f"mean rho is {mean:.3f} +- {error:.3f}, not 1: the engine's log-probabilities are renormalised over a "
            "part of the vocabulary (top-p or top-k) that holds about this share of the trainer's mass",
        )
    if entropy is not None:
        surplus = -pairs.old - entropy  # 0 on average if the tokens were drawn from the trainer's distribution
        mean, error = float(surplus.mean()), float(surplus.std() / n**0.5)
        if mean < -0.1 * float(entropy.mean()) - k2 and mean < -6 * error:
            return Finding(
                "support",
                f"the sampled tokens are {-mean:.3g} +- {error:.2g} nats likelier than draws from the reported "
                "distribution: sampling was narrowed (temperature, top-p, top-k) but the log-probabilities are not",
            )
    return None
