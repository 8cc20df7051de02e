"""Statistics of a stream of token pairs in constant memory. Those of two parts can be merged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

TAUS = (1.25, 2.0, 5.0)
MEANS = (
    "k1",
    "k2",
    "k3",
    "chi2",
    "mean_dlogp",
    "mean_dp",
    "excess",
    *(f"f{tau:g}" for tau in TAUS),
)
WITH_ERROR = ("k1", "k3", "f2", "excess")
"""Means whose standard error is computed. excess is mean rho - 1."""


@dataclass(frozen=True, slots=True)
class StreamingStats:
    """Statistics of rho = p_trainer / p_rollout (l = log rho) over the tokens of some sequences.

    The quantities are those of divergence.logprob.Mismatch. Their size does not depend on the
    number of tokens.
    """

    tokens: int
    differing: int  # tokens whose two log-probabilities are not the same number
    sequences: int
    sums: tuple[float, ...]  # over tokens, of MEANS
    # over sequences of n tokens: the sum of n^2; then, for each of WITH_ERROR, with s its sum over
    # the sequence, the sums of s^2 and of s n
    moments: tuple[float, ...]
    ppl: float  # sum over sequences of exp(mean(-l))
    largest_l: float
    scaled: tuple[float, float]  # sums of exp(l - largest_l) and of its square: cannot overflow
    max_dlogp: float
    max_dp: float
    means: tuple[float, float]  # of the trainer's and the rollout's probability
    # sums of squares and of the product of the deviations from these means
    comoments: tuple[float, float, float]

    @classmethod
    def from_tokens(cls, trainer: Tensor, rollout: Tensor, segment: Tensor) -> Self:
        """Compute the statistics of finite log-probabilities, [n] float64 with n > 0.

        segment: [n] int64, the sequence of each token, ascending.
        """
        l = trainer - rollout  # noqa: E741 (the field's name)
        p, q = trainer.exp(), rollout.exp()
        dp, dlogp = (p - q).abs(), l.abs()
        excess = l.expm1()
        k3 = excess - l
        columns = [-l, l.square() / 2, k3, (2 * l).expm1(), dlogp, dp, excess]
        columns += [(dlogp > math.log(tau)).double() for tau in TAUS]
        index, counts = segment.unique_consecutive(return_inverse=True, return_counts=True)[1:]
        sizes, moments = counts.double(), [float(counts.double().square().sum())]
        for name in WITH_ERROR:
            sequence_sum = torch.zeros_like(sizes).index_add(0, index, columns[MEANS.index(name)])
            moments += [float(sequence_sum.square().sum()), float(sequence_sum @ sizes)]
        mean_l = l.new_zeros(len(counts)).index_add(0, index, l) / counts
        largest = l.max()
        scaled = (l - largest).exp()
        deviation_p, deviation_q = p - p.mean(), q - q.mean()
        return cls(
            tokens=len(l),
            differing=int((trainer != rollout).sum()),
            sequences=len(counts),
            sums=tuple(torch.stack([column.sum() for column in columns]).tolist()),
            moments=tuple(moments),
            ppl=float((-mean_l).exp().sum()),
            largest_l=float(largest),
            scaled=(float(scaled.sum()), float(scaled.square().sum())),
            max_dlogp=float(dlogp.max()),
            max_dp=float(dp.max()),
            means=(float(p.mean()), float(q.mean())),
            comoments=(
                float(deviation_p @ deviation_p),
                float(deviation_q @ deviation_q),
                float(deviation_p @ deviation_q),
            ),
        )

    def merge(self, other: StreamingStats) -> StreamingStats:
        """Return the statistics of both parts together. No sequence may be in both."""
        n, m = self.tokens, other.tokens
        largest = max(self.largest_l, other.largest_l)
        self_scale = math.exp(self.largest_l - largest)
        other_scale = math.exp(other.largest_l - largest)
        dp, dq = (b - a for a, b in zip(self.means, other.means, strict=True))
        share = n * m / (n + m)  # Chan et al.: the parts' means differ
        return StreamingStats(
            tokens=n + m,
            differing=self.differing + other.differing,
            sequences=self.sequences + other.sequences,
            sums=_add(self.sums, other.sums),
            moments=_add(self.moments, other.moments),
            ppl=self.ppl + other.ppl,
            largest_l=largest,
            scaled=(
                self.scaled[0] * self_scale + other.scaled[0] * other_scale,
                self.scaled[1] * self_scale**2 + other.scaled[1] * other_scale**2,
            ),
            max_dlogp=max(self.max_dlogp, other.max_dlogp),
            max_dp=max(self.max_dp, other.max_dp),
            means=(self.means[0] + dp * m / (n + m), self.means[1] + dq * m / (n + m)),
            comoments=(
                self.comoments[0] + other.comoments[0] + dp * dp * share,
                self.comoments[1] + other.comoments[1] + dq * dq * share,
                self.comoments[2] + other.comoments[2] + dp * dq * share,
            ),
        )

    def statistics(self) -> dict[str, float]:
        """Return every statistic under the name that Mismatch gives it.

        Also return mean_rho, and NAME_error: the standard error of some means.
        """
        n = self.tokens
        values = {name: total / n for name, total in zip(MEANS, self.sums, strict=True)}
        errors = {
            f"{name}_error": self._standard_error(i, values[name])
            for i, name in enumerate(WITH_ERROR)
        }
        values["mean_rho"] = 1 + values.pop("excess")
        errors["mean_rho_error"] = errors.pop("excess_error")
        return {
            "tokens": n,
            "differing": self.differing,
            "sequences": self.sequences,
            **values,
            "ess": self.scaled[0] ** 2 / (n * self.scaled[1]),
            "max_dlogp": self.max_dlogp,
            "max_dp": self.max_dp,
            "pearson": self._pearson(),
            "ppl_ratio": self.ppl / self.sequences,
            **errors,
        }

    def _standard_error(self, index: int, mean: float) -> float:
        """Return the standard error of mean `index` of WITH_ERROR; NaN for one sequence.

        Sequences are drawn independently, the tokens of a sequence are not.
        """
        if self.sequences < 2:
            return math.nan
        sizes, (squares, products) = self.moments[0], self.moments[1 + 2 * index : 3 + 2 * index]
        spread = squares - 2 * mean * products + mean * mean * sizes
        return math.sqrt(max(spread, 0.0) * self.sequences / (self.sequences - 1)) / self.tokens

    def _pearson(self) -> float:
        pp, qq, pq = self.comoments
        if self.max_dp == 0:
            return 1.0
        rounding = [1e-24 * self.tokens * mean * mean for mean in self.means]
        if pp <= rounding[0] or qq <= rounding[1]:
            return math.nan  # one side is constant
        return max(-1.0, min(1.0, pq / math.sqrt(pp) / math.sqrt(qq)))


def _add(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
