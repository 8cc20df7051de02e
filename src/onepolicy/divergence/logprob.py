"""Mismatch between the log-probabilities that two engines give to the same sampled tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.layout import Layout, flatten_arguments, slot_index
from onepolicy.nonfinite import LeftOut, Nonfinite, apply_rule, refuse_probabilities


@dataclass(frozen=True, slots=True, eq=False)
class Mismatch:
    """Statistics of rho = pi_trainer / pi_rollout over n tokens that the rollout engine sampled.

    l = log rho, in nats. k1 and k3 both estimate KL(rollout || trainer) without bias; k3 is never
    negative and far less noisy.
    """

    tokens: int  # n
    differing: int  # of these, tokens whose two log-probabilities are different numbers
    k1: float  # mean(-l)
    k3: float  # mean(rho - 1 - l); R3 paper eq. 2
    chi2: float  # mean(rho^2) - 1
    ess: float  # (sum rho)^2 / (n sum rho^2): effective sample size, as a share of the tokens
    mean_dlogp: float  # mean |l|
    max_dlogp: float  # max |l|
    mean_dp: float  # mean |p_trainer - p_rollout|
    max_dp: float  # max |p_trainer - p_rollout|
    pearson: float  # of the probabilities; 1 if all are equal, nan if one side is constant
    ppl_ratio: float  # mean over samples of exp(mean(-l)), trainer / rollout
    # [n] float64, |l| ascending, for the binary search of `extreme`
    abs_log_ratio: Tensor = field(repr=False)
    nonfinite: LeftOut = field(default_factory=LeftOut)  # tokens that are not among the n

    @overload
    def extreme(self, tau: float) -> float: ...
    @overload
    def extreme(self, tau: Sequence[float]) -> list[float]: ...
    def extreme(self, tau: float | Sequence[float]) -> float | list[float]:
        """Return F(tau), the share of tokens with max(rho, 1 / rho) > tau (R3 paper, equation 3).

        Takes one tau or a sequence of them. Raises UsageError if one is below 1.
        """
        if isinstance(tau, int | float):
            return self.extreme([tau])[0]
        taus = list(tau)
        for value in taus:
            if not value >= 1:
                raise UsageError(
                    f"extreme: tau = {value}, but max(rho, 1/rho) is never below 1; give tau >= 1"
                )
        logs = self.abs_log_ratio.new_tensor([math.log(value) for value in taus])
        within = torch.searchsorted(self.abs_log_ratio, logs, right=True)
        shares: list[float] = ((self.tokens - within).double() / self.tokens).tolist()
        return shares

    @property
    def f2(self) -> float:
        """F(2), by which verdicts and advice judge beside k3."""
        return self.extreme(2)

    def metrics(self, prefix: str = "mismatch") -> dict[str, float]:
        """Return the statistics by metric name, `prefix/k3` and so on."""
        names = ["k1", "k3", "chi2", "ess", "max_dp", "mean_dp", "max_dlogp", "mean_dlogp"]
        names += ["pearson", "ppl_ratio"]
        numbers = {f"{prefix}/{name}": getattr(self, name) for name in names}
        numbers[f"{prefix}/differing"] = float(self.differing)
        taus = (1.25, 2, 5)
        return numbers | {
            f"{prefix}/f{tau}": share for tau, share in zip(taus, self.extreme(taus), strict=True)
        }


def mismatch(
    logp_old: Layout,  # [T] float32, trainer; or [B, T], or a list of [T_i]
    logp_rollout: Layout,  # the same, rollout engine
    mask: Layout,  # bool, the sampled tokens; the other slots may hold anything
    *,
    segment: Layout | None = None,  # int64, sample of each slot; None: [T] is one sample
    nonfinite: Nonfinite = "skip",  # leave out slots whose values are not finite, or raise
) -> Mismatch:
    """Compare both engines on the masked-in slots, in float64.

    Raises UsageError if no slot is left, if probabilities stand for their logarithms, or if
    a value is not finite and `nonfinite` is "raise".
    """
    given = {"logp_old": logp_old, "logp_rollout": logp_rollout, "mask": mask}
    flat = flatten_arguments("mismatch", {**given, "segment": segment})
    return compare_tokens(*_masked(flat, mask, nonfinite))


def compare_tokens(
    old: Tensor,  # [n] float64, trainer
    rollout: Tensor,  # [n] float64, rollout engine
    samples: Tensor,  # [n] int64, sample of each token
    left: LeftOut | None = None,  # tokens that are not among the n
) -> Mismatch:
    """Compare the log-probabilities of n > 0 tokens."""
    log_rho = old - rollout
    shifted = (log_rho - log_rho.max()).exp()  # the scale of rho cancels in ess; no overflow
    dp = (old.exp() - rollout.exp()).abs()
    dlogp = log_rho.abs().sort().values
    numbers = {
        "k1": (rollout - old).mean(),
        "k3": (log_rho.expm1() - log_rho).mean(),
        "chi2": (2 * log_rho).expm1().mean(),
        "ess": shifted.sum().square() / (len(log_rho) * shifted.square().sum()),
        "mean_dlogp": dlogp.mean(),
        "max_dlogp": dlogp[-1],
        "mean_dp": dp.mean(),
        "max_dp": dp.max(),
        "pearson": _pearson(old.exp(), rollout.exp()),
        "ppl_ratio": _ppl_ratio(log_rho, samples),
    }
    values = torch.stack(list(numbers.values())).tolist()
    found = dict(zip(numbers, values, strict=True))
    differing = int((old != rollout).sum())
    skipped = left or LeftOut()
    return Mismatch(len(log_rho), differing, **found, abs_log_ratio=dlogp, nonfinite=skipped)


def _masked(
    flat: dict[str, Tensor | None], like: Layout, nonfinite: Nonfinite
) -> tuple[Tensor, Tensor, Tensor, LeftOut]:
    """Return both sides [n] float64 and samples [n] of the slots left, and the others' count."""
    old, rollout, mask, segment = flat.values()
    assert old is not None
    assert rollout is not None
    assert mask is not None
    sides = {"logp_old": old, "logp_rollout": rollout}
    place = functools.partial(slot_index, like=like)
    kept, left = apply_rule("mismatch", nonfinite, mask, sides, place=place)
    if not left.tokens:
        raise UsageError(
            f"mismatch: the mask selects none of {mask.numel()} slots; there is nothing to compare"
        )
    if left.count == left.tokens:
        raise UsageError(f"mismatch: {left}; there is nothing to compare")
    refuse_probabilities("mismatch", kept, sides, place=place)
    if segment is None:
        segment = torch.zeros_like(kept, dtype=torch.int64)
    return old.detach()[kept].double(), rollout.detach()[kept].double(), segment[kept], left


def _pearson(x: Tensor, y: Tensor) -> Tensor:
    """Return the correlation: 1 if x == y everywhere, else nan if one is constant."""
    dx, dy = x - x.mean(), y - y.mean()
    correlation = ((dx @ dy) / (dx.norm() * dy.norm())).clamp(-1, 1)
    constant = (x.min() == x.max()) | (y.min() == y.max())
    return torch.where((x == y).all(), 1.0, torch.where(constant, math.nan, correlation))


def _ppl_ratio(log_rho: Tensor, segment: Tensor) -> Tensor:
    samples, index = segment.unique(return_inverse=True)
    total = log_rho.new_zeros(len(samples)).index_add(0, index, log_rho)
    mean = total / torch.bincount(index)
    return (-mean).exp().mean()
