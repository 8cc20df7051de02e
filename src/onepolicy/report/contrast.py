"""Runs of one recipe in several arms, in numbers (comparison.py has the words).

Every arm is compared with the first one, step by step: with the same seed both have the same
problems in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onepolicy.config import UsageError
from onepolicy.config.json_shapes import Summary, read_json_object
from onepolicy.record.intervals import FEWEST_UNITS, Interval, bootstrap_tail
from onepolicy.report.jsonl import read_metrics
from onepolicy.report.run import SUMMARY_FIX
from onepolicy.report.run_summary import unlearnt
from onepolicy.report.words import Tree
from onepolicy.verdict.rules import QUIET_KL

LONGEST_BLOCK = 10  # steps
FEWEST_STEPS = 4 * FEWEST_UNITS
DRAWS, DRAWN_AT_ONCE = 5000, 2**22  # resamplings; blocks of them in memory
Array = np.ndarray


@dataclass(frozen=True)
class ArmRun:
    """The measured steps of one arm with one seed."""

    name: str
    seed: int
    rows: list[Tree]
    label: str = ""  # "without replay" or "with replay", where that is how the arms differ
    unlearnt: str = ""  # the run's own sentence if its rewards taught nothing or little

    @classmethod
    def read(cls, name: str, seed: int, folder: Path, label: str = "") -> ArmRun:
        """Return the run in this folder.

        Raises UsageError if its log is missing, or if the log or the summary is damaged.
        """
        rows = read_metrics(folder)
        if not any("train/reward" in row for row in rows):
            raise UsageError(f"{folder}: its log has no step; is it the folder of a finished run?")
        summary = folder / "summary.json"
        if not summary.is_file():
            return cls(name, seed, rows, label)
        idle = unlearnt(read_json_object(summary, Summary, SUMMARY_FIX))
        if idle is None:
            return cls(name, seed, rows, label)
        return cls(name, seed, rows, label, idle.verdict)

    @property
    def phrase(self) -> str:
        """Return the arm as a sentence names it, after a number."""
        return self.label or f"in {self.name}"

    @property
    def steps(self) -> list[int]:
        """Return the numbers of its steps. A log may have gaps."""
        return [row["step"] for row in self.rows if "train/reward" in row]

    def values(self, metric: str, steps: Collection[int] | None = None) -> Array:
        """Return a metric of every step, or of these. [steps] float64, NaN for none."""
        rows = [row for row in self.rows if "train/reward" in row]
        found = [row.get(metric) for row in rows if steps is None or row["step"] in steps]
        return np.array([math.nan if value is None else value for value in found], dtype=float)

    def accuracies(self, metric: str) -> list[float]:
        """Return the held-out accuracies of the evaluations: of "eval/avg@" or "eval/greedy".

        NaN where an evaluation has none.
        """
        found = [row[name] for row in self.rows for name in row if name.startswith(metric)]
        return [math.nan if value is None else value for value in found]


@dataclass(frozen=True)
class Contrast:
    """One arm against the first one, with the same seed. Means of nothing are NaN."""

    first: str
    other: str
    seed: int
    phrases: tuple[str, str]  # the arms as a sentence names them
    lengths: tuple[int, int]  # steps of the first arm and of the other
    steps: int  # that both have. Only those are compared
    without_k3: int  # steps of both of which one has no finite k3
    k3: tuple[float, float]  # means over all steps, of the first arm and of the other
    k3_ratio: Interval  # first / other
    k3_median: tuple[float, float]  # of the same steps
    k3_above: tuple[int, int]  # how many of the same steps are above QUIET_KL
    reward: tuple[float, float]  # means over the second half of the steps
    reward_difference: Interval  # other - first


def contrasts(runs: Sequence[ArmRun]) -> list[Contrast]:
    """Compare every arm with the first one of its seed.

    runs: arms of the same seeds, the first arm's first.
    """
    first = {run.seed: run for run in reversed(runs) if run.name == runs[0].name}
    return [contrast(first[run.seed], run) for run in runs if run is not first[run.seed]]


def contrast(first: ArmRun, other: ArmRun) -> Contrast:
    """Compare two runs of the same seed over the steps that both have."""
    steps = common_steps([first, other])
    k3 = _measured(first, other, "mismatch/k3", steps)
    half = _measured(first, other, "train/reward", steps[len(steps) // 2 :])
    return Contrast(
        first.name,
        other.name,
        first.seed,
        (first.phrase, other.phrase),
        (len(first.steps), len(other.steps)),
        len(steps),
        len(steps) - k3.shape[1],
        _means(k3),
        _interval(k3, lambda means: means[0] / means[1]),
        _medians(k3),
        _above(k3),
        _means(half),
        _interval(half, lambda means: means[1] - means[0]),
    )


def common_steps(runs: Sequence[ArmRun]) -> list[int]:
    """Return the steps that all of these runs have."""
    return sorted(set(runs[0].steps).intersection(*(run.steps for run in runs)))


def _measured(first: ArmRun, other: ArmRun, metric: str, steps: list[int]) -> Array:
    """Return the metric at the steps where both runs have a number. [2, steps] float64."""
    chosen = set(steps)
    both = np.stack([first.values(metric, chosen), other.values(metric, chosen)])
    return both[:, np.isfinite(both).all(axis=0)]


def _means(pairs: Array) -> tuple[float, float]:
    return mean_of(pairs[0]), mean_of(pairs[1])


def _medians(pairs: Array) -> tuple[float, float]:
    if not pairs.shape[1]:
        return math.nan, math.nan
    first, other = np.median(pairs, axis=1).tolist()
    return first, other


def _above(pairs: Array) -> tuple[int, int]:
    """Return how many steps of each arm are above QUIET_KL."""
    first, other = (pairs > QUIET_KL).sum(axis=1).tolist()
    return first, other


def finite(values: Array) -> Array:
    """Return the values that are finite."""
    return values[np.isfinite(values)]


def mean_of(values: Array) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    known = finite(values)
    if not known.size:
        return math.nan
    return float(known.mean())


def _interval(pairs: Array, statistic: Callable[[Array], Array]) -> Interval:
    if not pairs.shape[1]:
        return Interval(math.nan, math.nan, math.nan)
    return interval(pairs, statistic)


def interval(pairs: Array, statistic: Callable[[Array], Array]) -> Interval:
    """Return statistic(means [2]) with its 95% interval.

    Blocks of consecutive steps are drawn, the same in both runs. A block may go on from the last
    step to the first, so every step is drawn equally often (circular block bootstrap, Politis and
    Romano 1992), with the tails of bootstrap_tail.

    pairs: [2, steps] float64, finite. statistic: takes means [2, ...], returns [...].
    """
    steps = pairs.shape[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(pairs.mean(axis=1)))
        if steps < FEWEST_STEPS:
            return Interval(value, math.nan, math.nan)
        block = min(LONGEST_BLOCK, steps // FEWEST_UNITS)
        at = (np.arange(steps)[:, None] + np.arange(block)) % steps
        blocks = pairs[:, at].mean(axis=2)  # [2, steps]: means of the blocks from every step on
        count = round(steps / block)
        rng, left = np.random.default_rng(0), DRAWS
        means = []
        while left:  # all draws of a long run at once would be gigabytes
            drawn = rng.integers(0, steps, (min(left, max(1, DRAWN_AT_ONCE // count)), count))
            means.append(blocks[:, drawn].mean(axis=2))
            left -= len(drawn)
        found = statistic(np.concatenate(means, axis=1))  # [DRAWS]
        tail = bootstrap_tail(count)
        # no value between two draws: one of them may be infinite
        low, high = np.nanquantile(found, [tail, 1 - tail], method="nearest")
    return Interval(value, float(low), float(high))
