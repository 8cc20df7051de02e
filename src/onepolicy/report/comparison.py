"""`onepolicy compare`: the arms of contrast.py in sentences, in the terminal and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from onepolicy.console import Console, print_text
from onepolicy.files import write_text_atomically
from onepolicy.notation import DASH, counted, number
from onepolicy.record.intervals import Interval
from onepolicy.report.contrast import (
    ArmRun,
    Array,
    Contrast,
    common_steps,
    contrasts,
    finite,
    mean_of,
)
from onepolicy.report.figures import steps
from onepolicy.report.figures.parts import ARMS, Figure, Series
from onepolicy.report.page import Card, Page, Section, plain, write_page
from onepolicy.report.page import Table as Told
from onepolicy.report.png import write_figures
from onepolicy.report.words import ARROW
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.rules import QUIET_KL, SMALL

FOOTER = "An arm has one colour in all panels."
HEADER = (
    "run",
    "reward",
    "held-out, sampled",
    "held-out, greedy",
    "k3, mean",
    "k3, median",
    "steps above 1e-3",
    "largest norm",
)
CAPTION = (
    "run: arm and seed. reward: mean of the first and of the last tenth of the steps. held-out: "
    "accuracy before and after training, of sampled and of greedy answers. k3: of all steps, in "
    "nats per token; above 1e-3 a gap needs replay or a correction. norm: of the gradient, before "
    "clipping"
)


def _k3_sentence(found: Contrast) -> str:
    before, after = found.k3
    first, other = found.phrases
    if math.isnan(before):
        return f"No step has a k3 in both arms, {found.first} and {found.other}."
    measured = found.steps - found.without_k3
    start = f"ean k3 is {number(before)} {first} and {number(after)} {other}"
    if found.without_k3:
        start = (
            f"Over the {measured} of {counted(found.steps, 'step')} that have one in both, m{start}"
        )
    else:
        start = f"M{start}"
    if before < HARMLESS_KL and after < HARMLESS_KL:
        return f"{start}: both are {SMALL}."
    if before and after:
        start = f"{start}: {_in_times(found.k3_ratio)}"
    medians, above = (f"{a} and {b}" for a, b in (map(number, found.k3_median), found.k3_above))
    return (
        f"{start}. The median step has {medians}; {above} of {counted(measured, 'step')} are above "
        f"{number(QUIET_KL)}."
    )


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
    first, other = found.phrases
    gap = found.reward_difference
    if math.isnan(before):
        return f"No step of the second half has a reward in both {found.first} and {found.other}."
    digits = _decimals(gap)
    start = (
        f"Reward, second half: {before:.{digits}f} {first}, {after:.{digits}f} {other}, a "
        f"difference of {_signed(gap.value, digits)}"
    )
    if math.isnan(gap.low):
        return f"{start}; too few steps to say more."
    start += f" ({_signed(gap.low, digits)} to {_signed(gap.high, digits)})"
    if not gap.excludes(0):
        return f"{start}: no difference seen."
    more = first
    if gap.value > 0:
        more = other
    return f"{start}: more {more} with this seed."


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
        finite(run.values(name)) for name in ("train/reward", "mismatch/k3", "train/grad_norm")
    )
    tenth = max(1, len(reward) // 10)
    median = above = largest = DASH
    if k3.size:
        median, above = number(float(np.median(k3))), f"{(k3 > QUIET_KL).sum()} of {k3.size}"
    if norm.size:
        largest = number(float(norm.max()))
    sampled, greedy = (run.accuracies(name) for name in ("eval/avg@", "eval/greedy"))
    return (
        f"{run.name}, {run.seed}",
        _from_to(mean_of(reward[:tenth]), mean_of(reward[-tenth:])),
        *(_from_to(*each[:1], *each[1:][-1:]) for each in (sampled, greedy)),
        number(mean_of(k3)),
        median,
        above,
        largest,
    )


def _from_to(*values: float) -> str:
    return ARROW.join(DASH if math.isnan(value) else f"{value:.2f}" for value in values)


def headline(runs: Sequence[ArmRun]) -> str:
    """Return the title of page and picture: how often k3 is large in each arm.

    Only the steps that all arms of a seed have are counted.
    """
    arms: dict[str, list[Array]] = {}
    for run in runs:
        steps = set(common_steps([each for each in runs if each.seed == run.seed]))
        arms.setdefault(run.phrase, []).append(run.values("mismatch/k3", steps))
    found = {phrase: np.concatenate(parts) for phrase, parts in arms.items()}
    k3 = {phrase: finite(values) for phrase, values in found.items()}
    if not all(values.size for values in k3.values()):
        return f"Arms compared: {', '.join(dict.fromkeys(run.name for run in runs))}"
    lacking = {phrase: values.size - k3[phrase].size for phrase, values in found.items()}
    unknown = ", ".join(f"{counted(n, 'step')} {phrase}" for phrase, n in lacking.items() if n)
    if unknown:
        return f"{_largeness(k3, found, runs)}; without a finite k3: {unknown}"
    return _largeness(k3, found, runs)


def _largeness(k3: dict[str, Array], found: dict[str, Array], runs: Sequence[ArmRun]) -> str:
    """Return how often k3 is large. k3: the finite ones of `found`, by the phrase of the arm."""
    above = {phrase: int((values > QUIET_KL).sum()) for phrase, values in k3.items()}
    limit, every = number(QUIET_KL), "every step of every arm"
    if any(k3[phrase].size < values.size for phrase, values in found.items()):
        every = "every other step of every arm"
    if all(values.max() <= HARMLESS_KL for values in k3.values()):
        return f"k3 is at most {number(HARMLESS_KL)} in {every}, {SMALL}"
    if not any(above.values()):
        return f"k3 is at most {limit} in {every}"
    (phrase, first), *others = above.items()
    counts = [f"{first} of {counted(found[phrase].size, 'step')} above {limit} {phrase}"]
    counts += [f"{count} {phrase}" for phrase, count in others]
    text = ", ".join(counts)
    if any(run.label for run in runs):
        return f"Replay: {text.replace(' replay', '')}"
    return f"k3: {text}"


def show_comparison(
    arms: Sequence[tuple[str, int, Path, str]], out: Path, *, recipe: str, png: bool
) -> None:
    """Print the comparison, then draw it. arms: name, seed, folder and label of each run."""
    runs = [ArmRun.read(*each) for each in arms]
    found, rows = contrasts(runs), rows_of_table(runs)
    console = Console()
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column(HEADER[0], overflow="fold")  # a long name goes on in the next line
    for at, name in enumerate(HEADER[1:], 1):
        table.add_column(name, min_width=max(map(len, [*name.split(), *(row[at] for row in rows)])))
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)
    console.print_line(f"{CAPTION}.", style="dim")
    console.print()
    for text in warnings_of(runs):
        console.print_line(text, style="bold red")
    for text in (headline(runs) + ".", *sentences_of(found)):
        console.print_line(text)
    console.print_line(caution(runs))
    write_comparison(out, runs, found, recipe=recipe, png=png)
    print_text(f"picture: {out / 'comparison.html'}")


def write_comparison(
    out: Path, runs: Sequence[ArmRun], found: Sequence[Contrast], *, recipe: str, png: bool
) -> None:
    """Write OUT/comparison.html and comparison.json.

    recipe: its name. found: contrasts(runs). png: OUT/figures/NAME.png and its data too.
    Raises UsageError if plotly, jinja2 or the browser of a PNG is missing.
    """
    told, drawn = sentences_of(found), figures(runs)
    sentences, title = [*warnings_of(runs), *told], headline(runs)
    tree = {
        "title": title,
        "recipe": recipe,
        "contrasts": [asdict(each) for each in found],
        "sentences": sentences,
    }
    question = "A curve is a run. Runs of one arm have the same colour."
    numbers = Told(HEADER, rows_of_table(runs), note=f"{CAPTION}.")
    card = Card(f"{title}.", lines=[*told, caution(runs)])
    page = Page(
        title,
        recipe,
        f"onepolicy compare: {', '.join(dict.fromkeys(run.phrase for run in runs))}",
        [card],
        [Section("Mismatch, reward, gradient", question, drawn), Section("Numbers", "", [numbers])],
        notices=warnings_of(runs),
        footer=FOOTER,
    )
    write_page(out / "comparison.html", page)
    text = json.dumps(plain(tree), indent=1, allow_nan=False) + "\n"
    write_text_atomically(out / "comparison.json", text)
    if png:
        write_figures(out / "figures", drawn, png=True)


def figures(runs: Sequence[ArmRun]) -> list[Figure]:
    """Draw k3, reward and gradient norm by step, of all runs."""
    styles = dict(zip(dict.fromkeys(run.name for run in runs), ARMS * len(runs), strict=False))

    def series(metric: str) -> list[Series]:
        return [
            Series(run.label or run.name, styles[run.name], run.values(metric).tolist(), run.steps)
            for run in runs
        ]

    k3, rewards, norms = map(series, ("mismatch/k3", "train/reward", "train/grad_norm"))
    course = [f"{mean_of(finite(np.array(each.y))):.2f} {each.label}" for each in rewards]
    largest = [(max((v for v in each.y if v > 0), default=0.0), each.label) for each in norms]
    title = f"Largest gradient norm: {', '.join(f'{number(v)} {label}' for v, label in largest)}"
    note = "Before clipping; a tick at the lower edge is a step without a gradient."
    reward = f"Reward, mean of all steps: {', '.join(course)}"
    how = "Sampled at the training temperature."
    means = [f"{number(mean_of(np.array(each.y)))} {each.label}" for each in k3]
    return [
        steps.k3(k3, f"Mean k3: {', '.join(means)}"),
        steps.over_steps("reward", reward, how, rewards, "reward", width="half"),
        steps.over_steps("grad_norm", title, note, norms, "norm", log=True, width="half"),
    ]


def warnings_of(runs: Sequence[ArmRun]) -> list[str]:
    """Return the sentences of runs whose rewards taught nothing or little."""
    warned: dict[str, list[str]] = {}
    for run in runs:
        if run.unlearnt:
            warned.setdefault(run.unlearnt, []).append(f"{run.name}, seed {run.seed}")
    found = []
    for text, names in warned.items():
        where = "; ".join(names)
        if len(names) == len(runs):
            where = "Every run"
        found.append(f"{where}: {text}")
    return found


def sentences_of(found: Sequence[Contrast]) -> list[str]:
    """Return the results in words, with the seed in front where there are several."""
    several = len({each.seed for each in found}) > 1
    texts = []
    for each in found:
        told = [_k3_sentence(each), _reward_sentence(each)]
        if each.steps < max(each.lengths):
            (one, other), both = each.lengths, each.steps
            told.insert(
                0,
                f"{each.first} has {counted(one, 'step')}, {each.other} {other}: only the {both} "
                f"of both are compared, {each.first} lacks {other - both} and {each.other} "
                f"{one - both}.",
            )
        texts += [f"Seed {each.seed}: {text}" if several else text for text in told]
    return texts


def caution(runs: Sequence[ArmRun]) -> str:
    """Return the sentence about what so few seeds do not say."""
    seeds = len({run.seed for run in runs})
    if seeds > 1:
        return (
            f"{seeds} seeds an arm. Look at every seed before you believe a difference in reward."
        )
    return (
        "Each arm ran with one seed: this shows how these runs went, not which setting learns "
        "better."
    )
