"""Statistics of two sides' log-probabilities, the same to the bit for any split and order of rows.

The tokens of a row are summed in their own order. The sums of rows are added up exactly, as whole
numbers of UNIT. So parts of a batch merge into the statistics of the whole, and memory does not
grow with the number of tokens. A row must not be in two parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

Array = np.ndarray
UNIT_BITS = 256
"""Sums are whole numbers of 2**-UNIT_BITS, 1e-77; what the sum of a row has below is cut off."""
UNIT = 1 << UNIT_BITS
DIGIT_BITS = 30
"""Bits of a value that are added up at a time: 2**22 of them have an exact sum in float64."""
MOST_ROWS = 2**22
BLOCK_TOKENS = 2**15
"""Tokens whose columns are in memory at once, approximately; a row is never divided."""
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
"""Means over tokens. excess is rho - 1."""
WITH_ERROR = ("k1", "k3", "f2", "excess")
"""Means whose standard error is computed."""
PAIRS = ("pp", "qq", "pq")
SUMS = (
    *MEANS,
    "sizes",  # n^2 of a row's n tokens
    *(f"{name}^2" for name in WITH_ERROR),  # of the sum over a row
    *(f"{name}*n" for name in WITH_ERROR),
    "ppl",  # exp(mean(-l)) of a row
    *("p", "q", "np", "nq"),  # sums of the deviations from a row's centre; n times the centre
    # sums of products: of deviations; of a deviation and a centre; n times that of the centres
    *(f"{part}{pair}" for part in ("d", "m", "c") for pair in PAIRS),
)
RHO_BITS = 64
"""rho is counted in 2**(RHO_BITS * k), near the row's largest, so that nothing overflows."""
MOST_NATS = 2.0**20
"""A log-ratio beyond it counts as this in ess. Some frameworks fill slots with float32's least."""
FORGOTTEN = 8
"""Steps of RHO_BITS below the largest rho at which rows no longer count in ess."""
Total = int | float
"""An exact sum in UNIT; a float if it is infinite or NaN."""


def k3_terms(log_rho: Array) -> Array:
    """Return rho - 1 - log rho [nats] (R3 paper, equation 2), of any shape."""
    with np.errstate(over="ignore"):  # inf says it
        terms: Array = np.expm1(log_rho) - log_rho
    return terms


def exact_sums(values: Array) -> list[Total]:
    """Return the exact sum of each row of values, [C, n] float64."""
    if values.shape[1] > MOST_ROWS:
        parts = np.array_split(values, -(-values.shape[1] // MOST_ROWS), axis=1)
        return [sum_of_totals(totals) for totals in zip(*map(exact_sums, parts), strict=True)]
    whole = np.isfinite(values).all(1)
    rest = np.where(whole[:, None], values, 0.0)
    totals: list[Total] = [0] * len(values)
    while True:
        exponent = math.frexp(float(np.abs(rest).max(initial=0.0)))[1]
        bits = max(exponent - DIGIT_BITS, -UNIT_BITS)  # the digit of this round begins here
        digits = np.trunc(np.ldexp(rest, -bits))
        sums = digits.sum(1).tolist()
        totals = [
            total + (int(each) << (bits + UNIT_BITS))
            for total, each in zip(totals, sums, strict=True)
        ]
        if bits == -UNIT_BITS:
            break
        rest -= np.ldexp(digits, bits)
        if not rest.any():
            break
    for i in np.flatnonzero(~whole):
        totals[i] = float(values[i].sum())
    return totals


def sum_of_totals(totals: Iterable[Total]) -> Total:
    """Add up totals. An int may not fit into a float, so it is not added to one."""
    totals = list(totals)
    return sum([total for total in totals if isinstance(total, float)] or totals)


def ratio(total: Total, by: int) -> float:
    """Return total / by, rounded once."""
    if isinstance(total, float):
        return total
    try:
        return total / by
    except OverflowError:
        return math.inf


def row_starts(row: Array) -> Array:
    """Return the first place of each row that has a token. row: [n] int64, ascending, n > 0."""
    return np.flatnonzero(np.diff(row, prepend=row[0] - 1))


class RowSums(NamedTuple):
    """Sums over the tokens of each of S rows."""

    tokens: Array  # [S] int64
    differing: Array  # [S] int64
    sums: Array  # [len(SUMS), S] float64
    scale: Array  # [S] int64: rho is counted in 2**(RHO_BITS * scale)
    rho: Array  # [2, S] float64, sums of rho and of its square
    # [6, S] float64: |log rho|, |p - q|, p, q, -p, -q
    largest: Array

    @classmethod
    def of(cls, trainer: Array, rollout: Array, row: Array) -> RowSums:
        """Sum finite log-probabilities, [n] float64 with n > 0. row: [n] int64, ascending."""
        starts = row_starts(row)
        first = np.searchsorted(starts, np.arange(0, len(row), BLOCK_TOKENS))  # row of each block
        cuts = [*starts[np.unique(first[first < len(starts)])].tolist(), len(row)]
        parts = [
            cls._of_block(trainer[a:b], rollout[a:b], row[a:b]) for a, b in itertools.pairwise(cuts)
        ]
        return cls(*(np.concatenate(each, axis=-1) for each in zip(*parts, strict=True)))

    @classmethod
    def _of_block(cls, trainer: Array, rollout: Array, row: Array) -> RowSums:
        """Sum whole rows whose columns fit into a processor's cache."""
        starts = row_starts(row)
        counts = np.diff(starts, append=len(row))
        l = trainer - rollout  # noqa: E741 (the field's name)
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN say it
            p, q = np.exp(trainer), np.exp(rollout)
            columns = _token_columns(l, p, q)
            of_rows = np.add.reduceat(columns, starts, axis=1)
            means = dict(zip(MEANS, of_rows, strict=True))
            n = counts.astype(np.float64)
            sums = [*of_rows, np.square(n)]
            sums += [np.square(means[name]) for name in WITH_ERROR]
            sums += [means[name] * n for name in WITH_ERROR]
            sums.append(np.exp(means["k1"] / n))
            sums += _comoments(p, q, starts, n)
        scale, rho = _scaled(l, starts, counts)
        dlogp, dp = columns[MEANS.index("mean_dlogp")], columns[MEANS.index("mean_dp")]
        largest = [np.maximum.reduceat(each, starts) for each in (dlogp, dp, p, q)]
        largest += [-np.minimum.reduceat(each, starts) for each in (p, q)]
        differing = np.add.reduceat((trainer != rollout).astype(np.int64), starts)
        return cls(counts, differing, np.stack(sums), scale, rho, np.stack(largest))

    def at(self, which: Array) -> RowSums:
        """Return the rows that `which`, [S] bool or indices, selects."""
        return RowSums(*(each[..., which] for each in self))


def _token_columns(l: Array, p: Array, q: Array) -> Array:  # noqa: E741
    """Return [len(MEANS), n], the value of each token of which MEANS are the means."""
    columns = np.empty((len(MEANS), len(l)))
    k1, k2, k3, chi2, dlogp, dp, excess, *beyond = columns
    np.negative(l, out=k1)
    np.abs(l, out=dlogp)
    np.multiply(l, l, out=k2)
    k2 /= 2
    np.expm1(l, out=excess)
    np.subtract(excess, l, out=k3)
    np.expm1(2 * l, out=chi2)
    np.abs(p - q, out=dp)
    for each, tau in zip(beyond, TAUS, strict=True):
        each[:] = dlogp > math.log(tau)
    return columns


def _scaled(l: Array, starts: Array, counts: Array) -> tuple[Array, Array]:  # noqa: E741
    """Return the scale [S] of each row's rho, and the sums [2, S] of rho and rho^2 in it."""
    nats = RHO_BITS * math.log(2)
    l = l.clip(-MOST_NATS, MOST_NATS)  # noqa: E741
    scale = np.rint(np.maximum.reduceat(l, starts) / nats).astype(np.int64)
    if scale.any():
        l = l - np.repeat(scale * nats, counts)  # noqa: E741
    rho = np.empty((2, len(l)))
    np.exp(l, out=rho[0])
    np.multiply(rho[0], rho[0], out=rho[1])
    return scale, np.add.reduceat(rho, starts, axis=1)


def _comoments(p: Array, q: Array, starts: Array, n: Array) -> list[Array]:
    """Return the sums of a row, [S] each, from which the correlation of p and q is computed.

    Deviations are from a row's centre, its mean in 16 bits: n times a product of two of them is
    exact, so nothing is lost where all probabilities are nearly equal.
    """
    counts = n.astype(np.int64)
    centres = []
    for side in (p, q):
        mantissa, exponent = np.frexp(np.add.reduceat(side, starts) / n)
        centres.append(np.ldexp(np.rint(np.ldexp(mantissa, 16)), exponent - 16))
    deviations = np.empty((5, len(p)))
    for each, side, centre in zip(deviations, (p, q), centres, strict=False):
        np.subtract(side, np.repeat(centre, counts), out=each)
    for each, (a, b) in zip(deviations[2:], ((0, 0), (1, 1), (0, 1)), strict=True):
        np.multiply(deviations[a], deviations[b], out=each)
    dp, dq, *products = np.add.reduceat(deviations, starts, axis=1)
    cp, cq = centres
    mixed = [2 * cp * dp, 2 * cq * dq, cp * dq + cq * dp]
    return [dp, dq, n * cp, n * cq, *products, *mixed, n * cp * cp, n * cq * cq, n * cp * cq]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Statistics:
    """Statistics of rho = pi_trainer / pi_rollout over n tokens that the rollout engine sampled.

    l = log rho, in nats. k1 and k3 both estimate KL(rollout || trainer) without bias; k3 is never
    negative and far less noisy.
    """

    tokens: int  # n
    differing: int  # of these, tokens whose two log-probabilities are different numbers
    sequences: int
    totals: tuple[Total, ...]  # of SUMS
    rho: Mapping[int, tuple[Total, Total]]  # by scale, sums of rho and of its square
    largest: tuple[float, ...]  # as of RowSums

    @classmethod
    def of(cls, trainer: Array, rollout: Array, row: Array, **more: Any) -> Self:
        """Compare finite log-probabilities, [n] float64 with n > 0. row: [n] int64, any numbers.

        more: fields of a subclass.
        """
        if (np.diff(row) < 0).any():
            order = row.argsort(kind="stable")
            trainer, rollout, row = trainer[order], rollout[order], row[order]
        return cls.of_rows(RowSums.of(trainer, rollout, row), **more)

    @classmethod
    def of_rows(cls, rows: RowSums, **more: Any) -> Self:
        """Add up the sums of S > 0 rows."""
        rho = {}
        for scale in np.unique(rows.scale)[-FORGOTTEN:].tolist():
            first, second = exact_sums(rows.rho[:, rows.scale == scale])
            rho[scale] = first, second
        return cls(
            tokens=int(rows.tokens.sum()),
            differing=int(rows.differing.sum()),
            sequences=len(rows.tokens),
            totals=tuple(exact_sums(rows.sums)),
            rho=_largest_only(rho),
            largest=tuple(rows.largest.max(1).tolist()),
            **more,
        )

    def __add__(self, other: Statistics) -> Statistics:
        """Return the statistics of both parts together. No sequence may be in both."""
        rho = dict(self.rho)
        for scale, sums in other.rho.items():
            first, second = map(sum_of_totals, zip(rho.get(scale, (0, 0)), sums, strict=True))
            rho[scale] = first, second
        return Statistics(
            tokens=self.tokens + other.tokens,
            differing=self.differing + other.differing,
            sequences=self.sequences + other.sequences,
            totals=tuple(map(sum_of_totals, zip(self.totals, other.totals, strict=True))),
            rho=_largest_only(rho),
            largest=tuple(map(max, self.largest, other.largest)),
        )

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name}={value:.6g}" for name, value in self.statistics().items())
        return f"{type(self).__name__}({numbers})"

    @property
    def k1(self) -> float:
        """mean(-l)."""
        return self._mean("k1")

    @property
    def k2(self) -> float:
        """mean(l^2) / 2."""
        return self._mean("k2")

    @property
    def k3(self) -> float:
        """mean(rho - 1 - l); R3 paper, equation 2."""
        return self._mean("k3")

    @property
    def chi2(self) -> float:
        """mean(rho^2) - 1."""
        return self._mean("chi2")

    @property
    def mean_rho(self) -> float:
        return 1 + self._mean("excess")

    @property
    def mean_dlogp(self) -> float:
        """Mean |l|."""
        return self._mean("mean_dlogp")

    @property
    def max_dlogp(self) -> float:
        """Max |l|."""
        return self.largest[0]

    @property
    def mean_dp(self) -> float:
        """Mean |p_trainer - p_rollout|."""
        return self._mean("mean_dp")

    @property
    def max_dp(self) -> float:
        """Max |p_trainer - p_rollout|."""
        return self.largest[1]

    @property
    def f2(self) -> float:
        """F(2), the share of tokens with max(rho, 1 / rho) > 2 (R3 paper, equation 3)."""
        return self._mean("f2")

    @property
    def f5(self) -> float:
        return self._mean("f5")

    @property
    def ess(self) -> float:
        """(sum rho)^2 / (n sum rho^2): effective sample size, as a share of the tokens."""
        lowest = min(self.rho)
        first = second = 0
        for scale, (one, two) in self.rho.items():
            assert isinstance(one, int)
            assert isinstance(two, int)
            first += one << RHO_BITS * (scale - lowest)
            second += two << 2 * RHO_BITS * (scale - lowest)
        return first * first / (self.tokens * second * UNIT)

    @property
    def pearson(self) -> float:
        """The correlation of the probabilities: 1 if all are equal, NaN if one side is constant.

        It is NaN too if a side has no probability above e^-88: squares of its deviations are below
        UNIT. Nobody samples such tokens, and a scale of their own would cost every other dump time.
        """
        _, most, *ends = self.largest
        if most == 0:
            return 1.0
        if ends[0] == -ends[2] or ends[1] == -ends[3]:
            return math.nan
        pp, qq, pq = map(self._comoment, PAIRS)
        if not (pp > 0 and qq > 0):
            return math.nan
        return max(-1.0, min(1.0, pq / math.sqrt(pp) / math.sqrt(qq)))

    @property
    def ppl_ratio(self) -> float:
        """Mean over sequences of exp(mean(-l)), perplexity of the trainer / the rollout."""
        return ratio(self._total("ppl"), self.sequences * UNIT)

    def statistics(self) -> dict[str, float]:
        """Return every statistic by name. NAME_error: the standard error of NAME, by sequences."""
        values = {name: self._mean(name) for name in MEANS if name != "excess"}
        errors = {f"{name}_error": self.standard_error(name) for name in WITH_ERROR}
        errors["mean_rho_error"] = errors.pop("excess_error")
        names = ("mean_rho", "ess", "max_dlogp", "max_dp", "pearson", "ppl_ratio")
        return {
            "tokens": self.tokens,
            "differing": self.differing,
            "sequences": self.sequences,
            **values,
            **{name: getattr(self, name) for name in names},
            **errors,
        }

    def standard_error(self, name: str) -> float:
        """Return the standard error of a mean of WITH_ERROR; NaN for one sequence.

        Sequences are drawn independently, the tokens of a sequence are not.
        """
        parts = [self._total(each) for each in (name, f"{name}^2", f"{name}*n", "sizes")]
        if self.sequences < 2 or not all(isinstance(part, int) for part in parts):
            return math.nan
        total, squares, products, sizes = map(int, parts)
        n = self.tokens * UNIT
        # The sum over sequences of (their sum - n times the mean)^2, times n^2 UNIT.
        spread = squares * n * n - 2 * total * products * n + total * total * sizes
        variance = ratio(max(0, spread), n * n * UNIT) * self.sequences / (self.sequences - 1)
        return math.sqrt(variance) / self.tokens

    def _comoment(self, pair: str) -> float:
        """Return the sum over tokens of the product of two sides' deviations from their means."""
        products = sum_of_totals(self._total(f"{part}{pair}") for part in "dmc")
        sums = [sum_of_totals([self._total(side), self._total(f"n{side}")]) for side in pair]
        if not all(isinstance(each, int) for each in (products, *sums)):
            return math.nan
        return ratio(products * self.tokens * UNIT - math.prod(sums), self.tokens * UNIT * UNIT)

    def _mean(self, name: str) -> float:
        return ratio(self._total(name), self.tokens * UNIT)

    def _total(self, name: str) -> Total:
        return self.totals[SUMS.index(name)]


def _largest_only(rho: dict[int, tuple[Total, Total]]) -> dict[int, tuple[Total, Total]]:
    """Return the sums of the largest ratios, beside which those that are left out are nothing."""
    most = max(rho)
    return {scale: sums for scale, sums in sorted(rho.items()) if scale > most - FORGOTTEN}
