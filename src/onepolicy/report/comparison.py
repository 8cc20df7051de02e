"""Runs of one recipe in several arms: what they have in numbers, in sentences and as one picture.

Every arm is compared with the first one, step by step: with the same seed both have the same
problems in a step. report/block_bootstrap.py has the intervals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from onepolicy.config import UsageError
from onepolicy.files import write_text_atomically
from onepolicy.report.block_bootstrap import Interval, interval
from onepolicy.report.figure import (
    DENSE,
    NEUTRAL,
    REPLAY,
    ROLLOUT,
    SOFT,
    TRAINER,
    Figure,
    LineStyle,
    LogScale,
    Spec,
    axis,
    line,
)
from onepolicy.report.jsonl import read_metrics
from onepolicy.report.page import plain, render
from onepolicy.report.words import ARROW, DASH, Tree, nats, number
from onepolicy.verdict.rules import HARMLESS_KL, SMALL

STYLES = (TRAINER, REPLAY, DENSE, NEUTRAL, ROLLOUT, SOFT)
FOOTER = "An arm has one colour and one dash in all three panels."
HEADER = ("run", "reward", "held-out", "k3", "k3, end", "norm", "largest")
CAPTION = (
    "run: arm and seed; reward: first and last tenth of the steps; held-out: accuracy before and "
    "after training; k3: mean of all steps and of the last tenth; norm: gradient norm, median and "
    "largest of the steps"
)
Array = np.ndarray


@dataclass(frozen=True)
class ArmRun:
    """The measured steps of one arm with one seed."""

    name: str
    seed: int
    rows: list[Tree]

    @classmethod
    def read(cls, name: str, seed: int, folder: Path) -> ArmRun:
        """Return the run in this folder. Raises UsageError if its log is missing or damaged."""
        rows = read_metrics(folder)
        if not any("train/reward" in row for row in rows):
            raise UsageError(f"{folder}: its log has no step; is it the folder of a finished run?")
        return cls(name, seed, rows)

    def values(self, metric: str) -> Array:  # [steps] float64, NaN where a step has none
        """Return a metric of every step."""
        steps = [row for row in self.rows if "train/reward" in row]
        found = [row.get(metric) for row in steps]
        return np.array([math.nan if value is None else value for value in found], dtype=float)

    @property
    def held_out(self) -> list[float]:
        """Return the accuracies of the evaluations, sampled answers before greedy ones.

        NaN where an evaluation has none.
        """
        for start in ("eval/avg@", "eval/greedy"):
            found = [row[name] for row in self.rows for name in row if name.startswith(start)]
            if found:
                return [math.nan if value is None else value for value in found]
        return []


@dataclass(frozen=True)
class Contrast:
    """One arm against the first one, with the same seed. Means of nothing are NaN."""

    first: str
    other: str
    seed: int
    lengths: tuple[int, int]  # steps of the first arm and of the other
    without_k3: int  # steps of both of which one has no finite k3
    k3: tuple[float, float]  # means over all steps, of the first arm and of the other
    k3_ratio: Interval  # first / other
    reward: tuple[float, float]  # means over the second half of the steps
    reward_difference: Interval  # other - first

    @property
    def steps(self) -> int:
        """Return how many steps both have. Only those are compared."""
        return min(self.lengths)

    def sentences(self) -> list[str]:
        """Return the result in words."""
        found = [_k3_sentence(self), _reward_sentence(self)]
        if self.lengths[0] != self.lengths[1]:
            found.insert(
                0,
                f"{self.first} has {self.lengths[0]} steps, {self.other} {self.lengths[1]}: only "
                f"the first {self.steps} of both are compared.",
            )
        return found


def contrast(first: ArmRun, other: ArmRun) -> Contrast:
    """Compare two runs of the same seed over the steps that both have."""
    lengths = len(first.values("train/reward")), len(other.values("train/reward"))
    steps = min(lengths)
    k3 = _measured(first, other, "mismatch/k3", slice(steps))
    half = _measured(first, other, "train/reward", slice(steps // 2, steps))
    return Contrast(
        first.name,
        other.name,
        first.seed,
        lengths,
        steps - k3.shape[1],
        _means(k3),
        _interval(k3, lambda means: means[0] / means[1]),
        _means(half),
        _interval(half, lambda means: means[1] - means[0]),
    )


def _measured(first: ArmRun, other: ArmRun, metric: str, steps: slice) -> Array:
    """Return the metric at the steps where both runs have a number. [2, steps] float64."""
    both = np.stack([first.values(metric)[steps], other.values(metric)[steps]])
    return both[:, np.isfinite(both).all(axis=0)]


def _means(pairs: Array) -> tuple[float, float]:
    return _mean(pairs[0]), _mean(pairs[1])


def _mean(values: Array) -> float:
    """Return the mean of the finite values, NaN if there are none."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return math.nan
    return float(finite.mean())


def _interval(pairs: Array, statistic: Callable[[Array], Array]) -> Interval:
    if not pairs.shape[1]:
        return Interval(math.nan, math.nan, math.nan)
    return interval(pairs, statistic)


def _k3_sentence(found: Contrast) -> str:
    before, after = found.k3
    if math.isnan(before):
        return f"No step has a k3 in both {found.first} and {found.other}."
    start = f"k3 is {nats(before)} in {found.first} and {nats(after)} in {found.other}"
    if found.without_k3:
        measured = found.steps - found.without_k3
        start = f"Over the {measured} of {found.steps} steps that have one in both, {start}"
    if before < HARMLESS_KL and after < HARMLESS_KL:
        return f"{start}: both are {SMALL}."
    if not before or not after:
        return f"{start}."
    return f"{start}: {_in_times(found.k3_ratio)}."


def _in_times(ratio: Interval) -> str:
    """Return a ratio above 0 in words."""
    value, low, high, words = ratio.value, ratio.low, ratio.high, "times smaller"
    has_interval = not math.isnan(low)
    if has_interval and not ratio.excludes(1):
        ends = _ends(low, high)
        return f"no difference seen (ratio {number(value)}, 95% interval over batches {ends})"
    if value < 1:
        low, high = (math.inf if not end else 1 / end for end in (high, low))
        value, words = 1 / value, "times larger"
    if not has_interval:
        return f"{number(value)} {words}; too few steps for an interval"
    return f"{number(value)} {words} (95% interval over batches {_ends(low, high)})"


def _ends(low: float, high: float) -> str:
    if math.isinf(high):
        return f"at least {number(low)}"
    return f"{number(low)} to {number(high)}"


def _reward_sentence(found: Contrast) -> str:
    before, after = found.reward
    gap = found.reward_difference
    if math.isnan(before):
        return f"No step of the second half has a reward in both {found.first} and {found.other}."
    digits = _decimals(gap)
    start = (
        f"Reward, second half: {before:.{digits}f} in {found.first}, {after:.{digits}f} in "
        f"{found.other}, a difference of {_signed(gap.value, digits)}"
    )
    if math.isnan(gap.low):
        return f"{start}; too few steps to say more."
    start += f" ({_signed(gap.low, digits)} to {_signed(gap.high, digits)})"
    if not gap.excludes(0):
        return f"{start}: no difference seen."
    more = found.first
    if gap.value > 0:
        more = found.other
    return f"{start}: {more} earned more with this seed."


def _decimals(gap: Interval) -> int:
    """Return the decimals that show two digits of the farthest end, at least 2."""
    farthest = max(abs(end) for end in (gap.value, gap.low, gap.high) if not math.isnan(end))
    if not farthest:
        return 2
    return min(9, max(2, 1 - math.floor(math.log10(farthest))))


def _signed(value: float, digits: int) -> str:
    value = round(value, digits) or 0.0  # no minus before a zero
    return f"{value:+.{digits}f}".replace("-", "\N{MINUS SIGN}")


def rows_of_table(runs: Sequence[ArmRun]) -> list[tuple[str, ...]]:
    """Return a row of HEADER for every run: arm and seed, then what CAPTION explains."""
    return [_row(run) for run in runs]


def _row(run: ArmRun) -> tuple[str, ...]:
    reward, k3, norm = (
        run.values(name) for name in ("train/reward", "mismatch/k3", "train/grad_norm")
    )
    tenth = max(1, len(reward) // 10)
    return (
        f"{run.name}, {run.seed}",
        _from_to(_mean(reward[:tenth]), _mean(reward[-tenth:])),
        _from_to(*run.held_out[:1], *run.held_out[1:][-1:]),
        nats(_mean(k3)),
        nats(_mean(k3[-tenth:])),
        *map(number, _median_and_largest(norm)),
    )


def _from_to(*values: float) -> str:
    return f" {ARROW} ".join(DASH if math.isnan(value) else f"{value:.2f}" for value in values)


def _median_and_largest(values: Array) -> tuple[float, float]:
    """Return both of the finite values, NaN if there are none."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return math.nan, math.nan
    return float(np.median(finite)), float(finite.max())


def picture(runs: Sequence[ArmRun], title: str) -> Figure:
    """Draw reward, k3 and gradient norm of the runs over steps, one panel below the other."""
    k3, norms = ([run.values(name) for run in runs] for name in ("mismatch/k3", "train/grad_norm"))
    scales = LogScale.of(*k3), LogScale.of(*norms)
    names = list(dict.fromkeys(run.name for run in runs))
    data: list[Spec] = []
    for run in runs:
        style = STYLES[names.index(run.name) % len(STYLES)]
        first = next(each for each in runs if each.name == run.name) is run
        data += _lines(run, style, scales, shown=first)
    layout = {
        "xaxis": axis("step") | {"anchor": "y3"},
        "yaxis": axis("reward") | {"domain": [0.72, 1]},
        "yaxis2": scales[0].axis("k3, nats per token", steps=4) | {"domain": [0.36, 0.66]},
        "yaxis3": scales[1].axis("gradient norm", steps=4) | {"domain": [0, 0.3]},
    }
    note = (
        "Reward is the mean of ten steps. k3 estimates KL(rollout, trainer) per token; the "
        "gradient norm is before clipping."
    )
    return Figure("curves", title, note, data, layout, width="wide", height=760)


def _lines(
    run: ArmRun, style: LineStyle, scales: tuple[LogScale, LogScale], *, shown: bool
) -> list[Spec]:
    reward = run.values("train/reward")
    steps = list(range(1, len(reward) + 1))
    shared = {"legendgroup": run.name, "opacity": 0.85}
    return [
        line(run.name, steps, _smooth(reward), style, showlegend=shown, **shared),
        *(
            line(
                run.name,
                steps,
                scale.lift(run.values(metric).tolist()),
                style,
                yaxis=which,
                showlegend=False,
                **shared,
            )
            for metric, scale, which in (
                ("mismatch/k3", scales[0], "y2"),
                ("train/grad_norm", scales[1], "y3"),
            )
        ),
    ]


def _smooth(values: Array) -> list[float]:
    """Return the mean of each value and up to nine before it."""
    return [_mean(values[max(0, at - 9) : at + 1]) for at in range(len(values))]


def write_comparison(
    out: Path, title: str, runs: Sequence[ArmRun], found: Sequence[Contrast], *, png: bool
) -> None:
    """Write OUT/comparison.html and comparison.json.

    found: contrasts(runs). png: OUT/curves.png and its data too.
    Raises UsageError if plotly, jinja2 or the browser of a PNG is missing.
    """
    from onepolicy.report.png import write_figures

    sentences = sentences_of(found)
    figure = picture(runs, title)
    tree = {"title": title, "contrasts": [asdict(each) for each in found], "sentences": sentences}
    page = render(
        "comparison.html",
        title,
        [figure],
        sentences=sentences,
        caution=caution(runs),
        figure=figure,
        header=HEADER,
        rows=rows_of_table(runs),
        caption=CAPTION,
        footer=FOOTER,
    )
    text = json.dumps(plain(tree), indent=1, allow_nan=False) + "\n"
    write_text_atomically(out / "comparison.html", page)
    write_text_atomically(out / "comparison.json", text)
    if png:
        write_figures(out, [figure], png=True)


def contrasts(runs: Sequence[ArmRun]) -> list[Contrast]:
    """Compare every arm with the first one of its seed.

    runs: arms of the same seeds, the first arm's first.
    """
    first = {run.seed: run for run in reversed(runs) if run.name == runs[0].name}
    return [contrast(first[run.seed], run) for run in runs if run is not first[run.seed]]


def sentences_of(found: Sequence[Contrast]) -> list[str]:
    """Return the results in words, with the seed in front where there are several."""
    several = len({each.seed for each in found}) > 1
    texts = []
    for each in found:
        for text in each.sentences():
            if several:
                text = f"Seed {each.seed}: {text}"
            texts.append(text)
    return texts


def caution(runs: Sequence[ArmRun]) -> str:
    """Return the sentence about what so few seeds do not say."""
    seeds = len({run.seed for run in runs})
    if seeds > 1:
        return (
            f"{seeds} seeds an arm. Look at every seed before you believe a difference in reward."
        )
    return "One seed an arm says how these runs went, not which setting learns better."
