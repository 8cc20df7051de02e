"""Statistics of a stream of token pairs in constant memory: sketches of parts merge into that of the whole."""

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
"""Means whose standard error is kept; excess is mean rho - 1."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """Of rho = p_trainer / p_rollout (l = log rho) over n tokens in some sequences. The quantities are those of
    measure.logprob.Mismatch; nothing here grows with n."""

    tokens: int
    differing: int  # tokens whose log-probabilities are not the same number
    sequences: int
    sums: tuple[float, ...]  # over tokens, of MEANS
    moments: tuple[
        float, ...
    ]  # over sequences: of n^2, and of s^2 and s n, s each of WITH_ERROR summed over n tokens
    ppl: float  # sum over sequences of exp(mean(-l))
    largest_l: float
    scaled: tuple[float, float]  # sums of exp(l - largest_l) and of its square: cannot overflow
    max_dlogp: float
    max_dp: float
    means: tuple[float, float]  # of the trainer's and the rollout's probability
    comoments: tuple[
        float, float, float
    ]  # sums of squares and product of deviations from these means

    @classmethod
    def of(cls, trainer: Tensor, rollout: Tensor, segment: Tensor) -> Self:
        """Of finite log-probabilities [n] float64, n > 0; `segment` [n] int64: sequence of each token, ascending."""
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
            of_sequence = torch.zeros_like(sizes).index_add(0, index, columns[MEANS.index(name)])
            moments += [float(of_sequence.square().sum()), float(of_sequence @ sizes)]
        per_sequence = l.new_zeros(len(counts)).index_add(0, index, l) / counts
        largest = l.max()
        scaled = (l - largest).exp()
        dev_p, dev_q = p - p.mean(), q - q.mean()
        return cls(
            tokens=len(l),
            differing=int((trainer != rollout).sum()),
            sequences=len(counts),
            sums=tuple(torch.stack([column.sum() for column in columns]).tolist()),
            moments=tuple(moments),
            ppl=float((-per_sequence).exp().sum()),
            largest_l=float(largest),
            scaled=(float(scaled.sum()), float(scaled.square().sum())),
            max_dlogp=float(dlogp.max()),
            max_dp=float(dp.max()),
            means=(float(p.mean()), float(q.mean())),
            comoments=(float(dev_p @ dev_p), float(dev_q @ dev_q), float(dev_p @ dev_q)),
        )

    def merge(self, other: Sketch) -> Sketch:
        """Of both parts together; sequences must not be split between them."""
        n, m = self.tokens, other.tokens
        largest = max(self.largest_l, other.largest_l)
        mine, theirs = math.exp(self.largest_l - largest), math.exp(other.largest_l - largest)
        dp, dq = (b - a for a, b in zip(self.means, other.means, strict=True))
        share = n * m / (n + m)  # Chan et al.: the parts' means differ
        return Sketch(
            tokens=n + m,
            differing=self.differing + other.differing,
            sequences=self.sequences + other.sequences,
            sums=tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)),
            moments=tuple(a + b for a, b in zip(self.moments, other.moments, strict=True)),
            ppl=self.ppl + other.ppl,
            largest_l=largest,
            scaled=(
                self.scaled[0] * mine + other.scaled[0] * theirs,
                self.scaled[1] * mine**2 + other.scaled[1] * theirs**2,
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

    def numbers(self) -> dict[str, float]:
        """Every statistic by the name Mismatch gives it; mean_rho; and NAME_error, the standard error of some."""
        n = self.tokens
        values = {name: total / n for name, total in zip(MEANS, self.sums, strict=True)}
        errors = {
            f"{name}_error": self._error(i, values[name]) for i, name in enumerate(WITH_ERROR)
        }
        values["mean_rho"], errors["mean_rho_error"] = (
            1 + values.pop("excess"),
            errors.pop("excess_error"),
        )
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

    def _error(self, place: int, mean: float) -> float:
        """Of a mean over tokens that are drawn by the sequence: its tokens are not independent. NaN of one sequence."""
        if self.sequences < 2:
            return math.nan
        sizes, (squares, products) = self.moments[0], self.moments[1 + 2 * place : 3 + 2 * place]
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
