"""Statistics of the log-probabilities that two engines give to the same sampled tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.nonfinite import LeftOut
from onepolicy.record.statistics import Statistics

METRICS = (
    *("k1", "k3", "chi2", "ess", "max_dp", "mean_dp", "max_dlogp", "mean_dlogp", "pearson"),
    *("ppl_ratio", "differing", "f1.25", "f2", "f5"),
)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Mismatch(Statistics):
    """Statistics of tokens that are kept, so that F(tau) is known for every tau."""

    # [n] float64, |l| ascending, for the binary search of `extreme`
    abs_log_ratio: Tensor
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

    def metrics(self, prefix: str = "mismatch") -> dict[str, float]:
        """Return the statistics by metric name, `prefix/k3` and so on."""
        numbers = self.statistics()
        return {f"{prefix}/{name}": float(numbers[name]) for name in METRICS}


def compare_tokens(
    old: Tensor,  # [n] float64, trainer
    rollout: Tensor,  # [n] float64, rollout engine
    samples: Tensor,  # [n] int64, sample of each token
    left: LeftOut | None = None,  # tokens that are not among the n
) -> Mismatch:
    """Compare the log-probabilities of n > 0 tokens."""
    sides = (each.detach().cpu().numpy() for each in (old, rollout, samples))
    dlogp = (old - rollout).abs().sort().values
    return Mismatch.of(*sides, abs_log_ratio=dlogp, nonfinite=left or LeftOut())
