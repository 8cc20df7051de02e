"""Runs of one recipe in several arms: what they have in numbers, in sentences and as one picture.

Every arm is compared with the first one, step by step: with the same seed both have the same
problems in a step. An interval is a 95% percentile bootstrap over blocks of consecutive steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from onepolicy.config import UsageError
from onepolicy.files import write_text_atomically
from onepolicy.report.figure import (
    DENSE,
    NEUTRAL,
    REPLAY,
    TRAINER,
    Figure,
    LineStyle,
    LogScale,
    Spec,
    axis,
    line,
)
from onepolicy.report.jsonl import read_metrics
from onepolicy.report.page import render
from onepolicy.report.words import Tree, nats, number
from onepolicy.verdict.rules import HARMLESS_KL, SMALL

BLOCK, DRAWS = 10, 2000  # steps of a block, draws of a bootstrap
FEWEST_STEPS = 20  # for an interval
STYLES = (TRAINER, REPLAY, DENSE, NEUTRAL)
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
        """Return the accuracies of the evaluations, sampled answers before greedy ones."""
        for start in ("eval/avg@", "eval/greedy"):
            found = [
                value
                for row in self.rows
                for name, value in row.items()
                if name.startswith(start) and value is not None
            ]
            if found:
                return found
        return []


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval; NaN where there are too few steps for one."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Contrast:
    """One arm against the first one, with the same seed."""

    first: str
    other: str
    seed: int
    k3: tuple[float, float]  # means over all steps, of the first arm and of the other
    k3_ratio: Interval  # first / other
    reward: tuple[float, float]  # means over the second half of the steps
    reward_difference: Interval  # other - first

    def sentences(self) -> list[str]:
        """Return the result in words."""
        return [_k3_sentence(self), _reward_sentence(self)]


def contrast(first: ArmRun, other: ArmRun) -> Contrast:
    """Compare two runs of the same seed over the steps that both have."""
    k3 = _pair(first, other, "mismatch/k3")
    reward = _pair(first, other, "train/reward")
    half = reward[:, reward.shape[1] // 2 :]
    return Contrast(
        first.name,
        other.name,
        first.seed,
        (float(k3[0].mean()), float(k3[1].mean())),
        _interval(k3, lambda drawn: drawn[0] / drawn[1]),
        (float(half[0].mean()), float(half[1].mean())),
        _interval(half, lambda drawn: drawn[1] - drawn[0]),
    )


def _pair(first: ArmRun, other: ArmRun, metric: str) -> Array:  # [2, steps] float64
    series = first.values(metric), other.values(metric)
    shared = min(len(values) for values in series)
    both = np.stack([values[:shared] for values in series])
    measured = both[:, ~np.isnan(both).any(axis=0)]
    if not measured.shape[1]:
        raise UsageError(f"{metric}: no step has it in both {first.name} and {other.name}")
    return measured


def _interval(pairs: Array, statistic: object) -> Interval:
    """Return statistic(means [2]) with its interval over blocks of steps.

    The same blocks are drawn in both runs. pairs: [2, steps].
    """
    assert callable(statistic)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(pairs.mean(axis=1)))
        steps = pairs.shape[1]
        if steps < FEWEST_STEPS:
            return Interval(value, math.nan, math.nan)
        block = min(BLOCK, steps // 4)
        random = np.random.default_rng(0)
        starts = random.integers(0, steps - block + 1, (DRAWS, -(-steps // block)))
        drawn = (starts[:, :, None] + np.arange(block)).reshape(DRAWS, -1)[:, :steps]
        means = pairs[:, drawn].mean(axis=2)  # [2, DRAWS]
        low, high = np.nanpercentile(statistic(means), [2.5, 97.5])
    return Interval(value, float(low), float(high))


def _k3_sentence(found: Contrast) -> str:
    before, after = found.k3
    start = f"k3 is {nats(before)} in {found.first} and {nats(after)} in {found.other}"
    if before < HARMLESS_KL and after < HARMLESS_KL:
        return f"{start}: both are {SMALL}."
    ratio, low, high = found.k3_ratio.value, found.k3_ratio.low, found.k3_ratio.high
    if not math.isfinite(ratio):
        return f"{start}."
    words = "times smaller"
    if ratio < 1:
        ratio, low, high, words = 1 / ratio, 1 / high, 1 / low, "times larger"
    interval = ""
    if not math.isnan(low):
        interval = f" (95% interval over batches {number(low)} to {number(high)})"
    return f"{start}: {number(ratio)} {words}{interval}."


def _reward_sentence(found: Contrast) -> str:
    before, after = found.reward
    gap = found.reward_difference
    start = (
        f"Reward, second half: {before:.2f} in {found.first}, {after:.2f} in {found.other}, "
        f"a difference of {_signed(gap.value)}"
    )
    if math.isnan(gap.low):
        return f"{start}; too few steps to say more."
    start += f" ({_signed(gap.low)} to {_signed(gap.high)})"
    if not gap.excludes_zero:
        return f"{start}: no difference seen."
    more = found.other if gap.value > 0 else found.first
    return f"{start}: {more} earned more with this seed."


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "\N{MINUS SIGN}")


def rows_of_table(runs: Sequence[ArmRun]) -> list[tuple[str, ...]]:
    """Return a row of HEADER for every run: arm and seed, then what CAPTION explains."""
    return [_row(run) for run in runs]


def _row(run: ArmRun) -> tuple[str, ...]:
    reward, k3, norm = (
        run.values(name) for name in ("train/reward", "mismatch/k3", "train/grad_norm")
    )
    tenth = max(1, len(reward) // 10)
    held_out = ""
    if run.held_out:
        held_out = f"{run.held_out[0]:.2f} \N{RIGHTWARDS ARROW} {run.held_out[-1]:.2f}"
    return (
        f"{run.name}, {run.seed}",
        f"{reward[:tenth].mean():.2f} \N{RIGHTWARDS ARROW} {reward[-tenth:].mean():.2f}",
        held_out,
        nats(float(np.nanmean(k3))),
        nats(float(np.nanmean(k3[-tenth:]))),
        number(float(np.nanmedian(norm))),
        number(float(np.nanmax(norm))),
    )


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
    return Figure("comparison", title, note, data, layout, width="wide", height=760)


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
    return [float(values[max(0, at - 9) : at + 1].mean()) for at in range(len(values))]


def write_comparison(out: Path, title: str, runs: Sequence[ArmRun], *, png: bool) -> list[Contrast]:
    """Write OUT/comparison.html and comparison.json, and return what was compared.

    runs: arms of the same seeds, the first arm's first. png: OUT/comparison.png too. Raises
    UsageError if plotly, jinja2 or the browser of a PNG is missing.
    """
    from onepolicy.report.png import write_figures

    found = contrasts(runs)
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
    )
    write_text_atomically(out / "comparison.html", page)
    write_text_atomically(out / "comparison.json", json.dumps(tree, indent=1) + "\n")
    if png:
        write_figures(out, [figure], png=True)
    return found


def contrasts(runs: Sequence[ArmRun]) -> list[Contrast]:
    """Compare every arm with the first one of its seed."""
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
