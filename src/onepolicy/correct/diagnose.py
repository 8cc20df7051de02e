"""Is the ratio a mismatch, or a bug that no correction repairs? Reads log-probabilities, changes nothing.

Under true mismatch both engines scored the same tokens under the same settings: the gap is noise, E[rho] = 1 and no
simple change of one side removes it. Each bug leaves a mark instead: a change that closes most of the gap (a shift by
one slot, another temperature, other weights, an aligned beginning), an impossible value, or E[rho] < 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.correct.engine_marks import renormalised, weights_and_sampling
from onepolicy.correct.pairs import EXPLAINED, FEWEST, Finding, Pairs
from onepolicy.correct.slots import any_layout
from onepolicy.types import TokenBatch


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


@any_layout
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

    All fields may be [B, T] too, or lists of one [T_i] per sequence; their sequences need no `segment`. Not visible
    without `entropy`: another temperature, and sampling that was narrowed but reported as if not.
    """
    if not mask.any():
        raise UsageError(f"diagnose: the mask selects none of {mask.numel()} slots")
    slot = mask.nonzero()[:, 0]
    picked = (None if x is None else x[slot] for x in (version, logp_previous, entropy))
    version, previous, entropy = (None if x is None else x.double() for x in picked)
    given = Pairs(
        logp_trainer[slot].double(), logp_rollout[slot].double(), segment[slot].long(), slot, version, previous, entropy
    )
    findings, good = _impossible(given)
    pairs = given.at(good)
    if pairs.entropy is not None and (count := int((~pairs.entropy.isfinite()).sum())):
        raise UsageError(
            f"diagnose: entropy is NaN or infinite in {count} of {len(pairs.old)} slots, so it says nothing of "
            "temperature and sampling; mend it, or leave it out"
        )
    gap = float(pairs.gap.mean()) if len(pairs.old) else float("nan")
    if len(pairs.old) < FEWEST:
        return Diagnosis(gap, tuple(findings))
    differ = None
    if tokens is not None and tokens_rollout is not None:
        differ = tokens[pairs.slot] != tokens_rollout[pairs.slot]
    if (shift := _shift(pairs)) is not None:
        findings.append(shift[0])
        pairs = shift[1]
    elif (other := _retokenised(pairs, differ)) is not None:  # the other marks mean nothing on other tokens
        return Diagnosis(gap, (*findings, other))
    return Diagnosis(gap, (*findings, *weights_and_sampling(pairs)))


def _impossible(pairs: Pairs) -> tuple[list[Finding], Tensor]:
    """Values no log-probability has; and [n] bool, which slots are left to look at."""
    n, findings = len(pairs.old), []
    bad = ~(pairs.old.isfinite() & pairs.rollout.isfinite())
    if count := int(bad.sum()):
        findings.append(Finding("fill", f"{count} of {n} log-probabilities are NaN or infinite; missing values"))
    positive = ~bad & ((pairs.rollout > 1e-3) | (pairs.old > 1e-3))
    if count := int(positive.sum()):
        findings.append(Finding("not_log", f"{count} of {n} are above 0; probabilities instead of their logarithms?"))
    zero = ~bad & ((pairs.rollout == 0) ^ (pairs.old == 0)) & (pairs.gap > 0.1)
    if (count := int(zero.sum())) > max(2, 0.005 * n) and not _only_choice(pairs, zero, ~bad & ~positive & ~zero):
        findings.append(Finding("fill", f"{count} of {n} are exactly 0 on one side only; zeros filled in for missing"))
        return findings, ~bad & ~positive & ~zero
    return findings, ~bad & ~positive


def _only_choice(pairs: Pairs, zero: Tensor, rest: Tensor) -> bool:
    """Are the zeros the engine's own? Where top-p leaves one token, its log-probability is 0 and the trainer's that of
    the mass that was kept, as elsewhere in the batch; behind a filled-in zero is a token of any probability."""
    if bool((pairs.old[zero] == 0).any()) or renormalised(pairs.at(rest)) is None:
        return False
    return float(pairs.gap[zero].max()) < 1.5 * float(pairs.gap[rest].max())


def _shift(pairs: Pairs) -> tuple[Finding, Pairs] | None:
    """Does the trainer's value at a slot equal the engine's at the slot before or after, or follow that one much more
    closely (with another bug beside the shift it equals none)? And the pairs put right."""
    neighbours = (pairs.slot[1:] == pairs.slot[:-1] + 1) & (pairs.segment[1:] == pairs.segment[:-1])
    if int(neighbours.sum()) < FEWEST:
        return None
    here, correlated = float(pairs.gap.mean()), _correlation(pairs.old, pairs.rollout)
    surely = max(0.3, 8 / len(pairs.old) ** 0.5)
    first, second = slice(None, -1), slice(1, None)
    for name, of_trainer, of_rollout in (("next", first, second), ("previous", second, first)):
        moved = _moved(pairs, of_trainer, of_rollout).at(neighbours)
        value, followed = float(moved.gap.mean()), _correlation(moved.old, moved.rollout)
        follows = value < here and followed > 0.5 and followed - correlated > surely
        if here > 0.05 and (value < EXPLAINED * here or follows):
            finding = Finding(
                "shift",
                f"mean |log rho| is {here:.3g} nats, but {value:.3g} against the engine's value of the {name} slot "
                f"(correlation {correlated:.2f} and {followed:.2f}); the two sides are one token apart",
            )
            return finding, moved
    return None


def _correlation(x: Tensor, y: Tensor) -> float:
    """-1 if one of them is constant."""
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1].nan_to_num(-1.0))


def _moved(pairs: Pairs, of_trainer: slice, of_rollout: slice) -> Pairs:
    """Entropy may be in step with either side: it is taken where it goes with the trainer's log-probabilities."""
    old, entropy = pairs.old[of_trainer], None
    if pairs.entropy is not None:
        both = pairs.entropy[of_trainer], pairs.entropy[of_rollout]
        entropy = max(both, key=lambda h: _correlation(h, -old))
    return Pairs(
        old,
        pairs.rollout[of_rollout],
        pairs.segment[of_rollout],
        pairs.slot[of_rollout],
        None if pairs.version is None else pairs.version[of_rollout],
        None if pairs.previous is None else pairs.previous[of_trainer],
        entropy,
    )


def _retokenised(pairs: Pairs, differ: Tensor | None) -> Finding | None:
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
    point = first_bad[pairs.segment]
    inside, outside = gap[place >= point], gap[(place < point) & (point < end)]  # of the same sequences
    if len(inside) < max(FEWEST // 2, 0.01 * end) or len(outside) < max(FEWEST // 2, 0.1 * len(inside)):
        return None
    agreed = outside.median()  # not the mean: the first tokens behind the point may be near by chance
    if inside.mean() > 1 and inside.mean() > 10 * agreed and (inside > 0.5).double().mean() > 0.5:
        rows = int((first_bad < end).sum())
        return Finding(
            "retokenised",
            f"in {rows} of {count} sequences the engines agree up to a point ({float(agreed):.2g} nats) and "
            f"not after it ({float(inside.mean()):.2g} nats): from there on they scored different tokens",
        )
    return None
