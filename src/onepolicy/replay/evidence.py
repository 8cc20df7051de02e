"""The evidence that routes are wrong: beyond what rounding, near ties and one odd row do by chance.

Two statements are compared about some rows. *Right*: their experts are the router's own as often as
those of the other rows. *Wrong*: only a part as often. The evidence is the logarithm of how much
likelier the rows are if they are wrong (a likelihood ratio, in nats). Right routes reach EVIDENCE
less than once in exp(EVIDENCE) = 4e9 places. A row counts for a quarter of it at most, however many
layers it has: its layers share one hidden state, so an odd row differs in all of them. Where odd
rows are common in the other samples, it counts for less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from onepolicy.divergence.routing import row_words
from onepolicy.types import RoutingTrace

EVIDENCE = 22.0  # nats from which rows are wrong beyond chance
ROW_EVIDENCE = EVIDENCE / 4  # nats that one row counts for at most
MAX_EXPECTED = 0.99  # agreement that is expected at most: one lacking expert is no miracle
MIN_EXPECTED = 0.5  # and at least, where the rows of all samples are wrong
WRONG_PART = 0.25  # wrong routes agree this part as often as right ones, of all rows
LEAST_LACKING = 1 / (
    1 + math.log((1 - WRONG_PART * MAX_EXPECTED) / (1 - MAX_EXPECTED)) / -math.log(WRONG_PART)
)
"""Share of a row's experts that are lacking, below which it is no evidence: see `weigh`.

It is where the evidence is 0 with the highest expected agreement, and more are needed with a lower.
"""
MIN_ROWS = 8  # of a layer: fewer rows of it say nothing
# Odd rows that right routes of any model may have, as if that many rows had been seen before
ODD_ROWS, PRIOR_ROWS = 0.01, 100
NEW_ROWS = 0.4  # a sample repeats itself if less of its rows are different ones


@dataclass(frozen=True, slots=True)
class WrongRows:
    """Rows of one sample that are wrong beyond chance."""

    sample: int
    first: int  # row of the trace
    last: int  # inclusive
    agreement: float  # at least this share of their experts is the routers' own
    column: int | None = None  # of the one layer that is wrong; None: all layers


def weigh(lacking: Tensor, compared: Tensor | float, expected: Tensor) -> Tensor:
    """Return the evidence in nats that experts agree WRONG_PART as often as expected.

    With p the expected agreement it is the logarithm of a ratio of binomial likelihoods,

        lacking * log((1 - WRONG_PART * p) / (1 - p)) + (compared - lacking) * log(WRONG_PART)

    Args:
        lacking: experts that are not the router's own.
        compared: experts that were compared.
        expected: p, in 0..1.
    """
    p = expected.clamp(max=MAX_EXPECTED)
    against = ((1 - WRONG_PART * p) / (1 - p)).log()
    return lacking * against + (compared - lacking) * math.log(WRONG_PART)


def chernoff(share: Tensor, count: Tensor | int, expected: Tensor | float) -> Tensor:
    """Return -log of a bound on the chance that `share` or more extreme is found.

    It is n times the Kullback-Leibler divergence of two coins (Chernoff's bound), in nats.

    Args:
        share: found among the count.
        count: n, independent ones.
        expected: share of right routes.
    """
    p, q = share.clamp(1e-9, 1 - 1e-9), torch.as_tensor(expected).clamp(1e-9, 1 - 1e-9)
    return count * (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log())


class Comparison:
    """All rows of a forward, compared with what its routers' scores say of them.

    A sample is wrong if one of these is beyond chance:
    - a run of rows over all layers. The run with the most evidence is found by its cumulative sum
      (Page's CUSUM, Biometrika 1954).
    - the number of its odd rows, wherever they are, against that of the other samples.
    - one layer over all of its rows.

    In a sample that repeats itself, a row that an earlier one is equal to counts only if hardly any
    of its experts is right: such a text comes to few hidden states, and one near tie then shows
    again and again.
    """

    def __init__(self, lacking: Tensor, trace: RoutingTrace, bounds: Tensor) -> None:
        """Weigh the rows.

        Args:
            lacking: [T, L] float32, `ReplayHandle.lacking_experts` of every row and layer.
            trace: the routes [T, L, K]. Only valid rows count.
            bounds: [S + 1] int64 on the CPU, first row of every sample, then T.
        """
        self._trace, self._top_k, self._bounds = trace, trace.top_k, bounds
        self._rows = trace.valid.nonzero()[:, 0]
        if len(self._rows) < len(lacking):
            lacking = lacking.index_select(0, self._rows)
        self._lacking = lacking  # [n, L]
        self._counts = _counts(self._rows, bounds)  # [S]

    @cached_property
    def _expected(self) -> Tensor:
        """[L]: the agreement of all rows of a layer."""
        return (1 - self._lacking.mean(0) / self._top_k).clamp(min=MIN_EXPECTED)

    @cached_property
    def _evidence(self) -> Tensor:
        """[n]: of a row, over all layers."""
        return weigh(self._lacking, self._top_k, self._expected).sum(1)

    def suspicious(self) -> bool:
        """Return whether any sample can be wrong. Most forwards are done here.

        The few rows that lack more than LEAST_LACKING have no more evidence than ROW_EVIDENCE each.
        """
        experts = self._lacking.shape[1] * self._top_k
        odd = self._lacking.sum(1) > LEAST_LACKING * experts
        if int(odd.sum()) * ROW_EVIDENCE > EVIDENCE:
            evidence = self._evidence.clamp(0, ROW_EVIDENCE).sum()
            if bool(evidence > EVIDENCE):
                return True
        return bool(self._wrong_layers(self._lacking).any())

    def wrong_rows(self) -> list[WrongRows]:
        """Return the samples with rows that are wrong beyond chance, in their order."""
        is_new = new_rows(self._trace, self._bounds)[self._rows]  # [n]
        near_tie = ~is_new & (self._evidence < ROW_EVIDENCE)
        evidence = torch.where(near_tie, self._evidence.clamp(max=0), self._evidence)
        odd_rows = _sums((evidence >= ROW_EVIDENCE)[:, None], self._counts)[:, 0]
        usual = _usual_share(odd_rows, self._counts)
        most = (-usual.log()).clamp(max=ROW_EVIDENCE).repeat_interleave(self._counts)
        evidence = evidence.cpu().clamp(min=-ROW_EVIDENCE).minimum(most)
        runs = _runs(evidence, self._counts)
        share = odd_rows / self._counts.clamp(min=1)
        odd = (chernoff(share, self._counts, usual) > EVIDENCE) & (share > usual)
        layers = self._wrong_layers(self._lacking * is_new[:, None], is_new)
        found, start = [], 0
        for sample, count in enumerate(self._counts.tolist()):
            first, last, of_run = runs[sample]
            column = None
            if layers[sample].any():
                column = int(layers[sample].int().argmax())
            if of_run > EVIDENCE:
                found.append(self._wrong(sample, first, last, None))
            elif odd[sample] or column is not None:
                found.append(self._wrong(sample, start, start + count - 1, column))
            start += count
        return found

    def _wrong(self, sample: int, first: int, last: int, column: int | None) -> WrongRows:
        lacking = self._lacking[first : last + 1]
        if column is not None:
            lacking = lacking[:, column]
        agreement = 1 - float(lacking.mean()) / self._top_k
        return WrongRows(sample, int(self._rows[first]), int(self._rows[last]), agreement, column)

    def _wrong_layers(self, lacking: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return [S, L] bool: the layers that are wrong in a sample, against the other samples.

        Their experts must also be the router's own less than half as often as expected, because a
        long sample of older weights has much evidence of little.

        Args:
            lacking: [n, L].
            counted: [n] bool, the rows that count; None for all.
        """
        if len(self._counts) == 1:
            return torch.zeros(1, lacking.shape[1], dtype=torch.bool)
        rows = self._counts[:, None].float()
        if counted is not None:
            rows = _sums(counted[:, None], self._counts)
        missing, experts = _sums(lacking, self._counts), rows * self._top_k
        few = missing > 0.5 * experts  # most forwards end here: no layer needs fewer
        if not few.any():
            return few
        p = self._expected.cpu()
        few = missing > (1 - 0.5 * p) * experts
        evidence = weigh(missing, experts, p).minimum(rows * ROW_EVIDENCE)
        return few & (evidence > EVIDENCE) & (rows >= MIN_ROWS)


def _counts(rows: Tensor, bounds: Tensor) -> Tensor:
    """Return [S] int64 on the CPU: the number of the rows [n], ascending, in each sample."""
    at = torch.searchsorted(rows.cpu(), bounds)
    return at.diff()


def _sums(values: Tensor, counts: Tensor) -> Tensor:
    """Return [S, L] float32 on the CPU: the sums of values [n, L] over each sample's rows."""
    lengths = counts.to(values.device)
    return torch.segment_reduce(values.float(), "sum", lengths=lengths, axis=0).cpu()


def new_rows(trace: RoutingTrace, bounds: Tensor) -> Tensor:
    """Return [T] bool: the rows that say something new.

    In a sample that repeats itself, these are the rows whose experts no earlier row of it has in
    all layers; in others all rows. Rows are compared by a hash of 64 bits.
    """
    words = row_words(trace.ids).flatten(1).to(torch.int64)
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-(2**62), 2**62, (words.shape[1] + 1,), generator=generator) * 2 + 1
    sample = torch.arange(len(bounds) - 1).repeat_interleave(bounds.diff())
    found = (words * odd[1:].to(words.device)).sum(1) + sample.to(words.device) * odd[0]
    ordered, rows = found.sort(stable=True)
    is_new = torch.ones_like(trace.valid)
    is_new[rows[1:][ordered[1:] == ordered[:-1]]] = False
    lengths = bounds.diff()
    repeats = _sums(is_new[:, None], lengths)[:, 0] < NEW_ROWS * lengths
    return is_new | ~repeats.repeat_interleave(lengths).to(is_new.device)


def _runs(evidence: Tensor, counts: Tensor) -> list[tuple[int, int, float]]:
    """Return each sample's run with the most evidence: its first and last row, and that evidence.

    The sum is taken over all samples at once, with a step down in front of each, from which every
    run must begin anew.
    """
    samples = torch.arange(len(counts)).repeat_interleave(counts)
    places = torch.arange(len(samples)) + samples + 1
    values = torch.full((len(samples) + len(counts),), -1e6, dtype=torch.float64)
    values[places] = evidence.double()
    total = values.cumsum(0)
    lowest, before = total.cummin(0)
    grown, runs, first = total - lowest, [], 0
    for sample, count in enumerate(counts.tolist()):
        best = 0.0
        start = stop = first
        if count:
            part = grown[first + sample + 1 : first + sample + 1 + count]
            last = int(part.argmax())
            best = float(part[last])
            start = int(before[first + sample + 1 + last]) - sample
            stop = first + last
        runs.append((start, stop, best))
        first += count
    return runs


def _usual_share(odd: Tensor, counts: Tensor) -> Tensor:
    """Return [S]: the share of odd rows that right routes of a sample may have.

    It is that of the other samples, and of PRIOR_ROWS more rows. odd [S]: odd rows of each sample.
    """
    others = counts.sum() - counts + PRIOR_ROWS
    return (odd.sum() - odd + PRIOR_ROWS * ODD_ROWS) / others
