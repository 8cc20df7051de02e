"""summary.json in words: sentences and table rows that the HTML report and the terminal share.

Keys used, all optional except `steps`: steps, reward_first, reward_last, reward_error (standard
error of their difference), score (metric name); eval_first, eval_last, eval_best {step, value}, and
sampled_first, sampled_last, sampled_answers (how many) beside a greedy score; crash_step, replay,
mismatch {metric: mean over all steps}; probe_steps, mismatch_at_probes and mismatch_without_replay
{metric: mean over the probe steps, with and without replay}, k3_cuts [without / with of each probe
step, ascending]; groups_without_signal (share at the end); asynchronous {staleness_mean,
staleness_max, spanning, learner_busy, sampler_busy}; time {part: seconds}, tokens_per_second,
parent {run, step}, run and report (paths); planned (steps, of a run that was stopped earlier);
nothing_learnt {learnt (nothing or little), verdict, why [sentences], silent and steps (counts)},
only where the rewards taught nothing or little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.config import UsageError
from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.notation import DASH, counted, number
from onepolicy.verdict.rules import SMALL, size_in_words

Tree = dict[str, Any]

ARROW = "\N{RIGHTWARDS ARROW}"
TIMES = "\N{MULTIPLICATION SIGN}"

WOULD = "routes that would differ"
RAN = "experts that ran"
"""Experts that compute under replay: the rollout's, whatever the trainer's router would choose."""
ROLLOUTS_OWN = "100% the rollout's"
WHOLE = ("r3", "weights")
"""Modes of replay in which only the rollout's experts compute."""
FEWEST_PROBES = 3
"""Fewest probes for an interval of the factor by which replay cuts k3.

k3 is heavy-tailed: one probe can be most of a mean.
"""
STEADY, STRAYS = 0.1, 2.0
"""A curve is level if its ends differ by at most the first share and no value is beyond them by the
second factor."""
LEAST_CHANGE = 0.02
"""Smallest change of a reward or score, as a share of the larger of first, last and 1."""
FEWEST_POINTS = 10
"""Fewest values of a curve whose ends show a direction."""
QUANTITIES = {  # metric -> (name, is a share)
    "mismatch/k3": ("k3, nats per token", False),
    "mismatch/k3_error": ("its standard error (by sequences)", False),
    "mismatch/k1": ("k1 = mean -log rho, nats per token", False),
    "mismatch/k2": ("k2, nats\N{SUPERSCRIPT TWO} per token", False),
    "mismatch/chi2": ("chi2", False),
    "mismatch/ess": ("Effective share of tokens", True),
    "mismatch/mean_rho": ("Mean rho", False),
    "mismatch/f1.25": ("F(1.25), tokens off by more than 1.25" + TIMES, True),
    "mismatch/f2": ("F(2), tokens off by more than 2" + TIMES, True),
    "mismatch/f5": ("F(5), tokens off by more than 5" + TIMES, True),
    "mismatch/max_dp": ("Largest difference of probability", False),
    "mismatch/max_dlogp": ("Largest |log rho|, nats", False),
    "mismatch/pearson": ("Correlation of probabilities", False),
    "mismatch/ppl_ratio": ("Perplexity, trainer / rollout", False),
    "routing/routers": (WOULD.capitalize(), True),
    "routing/tokens": ("Tokens with such a route", True),
    "routing/sequence": ("Such routes per token", False),
}
"""Every quantity of a gap, as all pages and tables name it, in their order."""
COMPARED = ("mismatch/k3", "mismatch/f2", "routing/routers", "routing/tokens", "routing/sequence")
"""The quantities that a run's page compares with and without replay."""
BADGES = {  # action of a verdict -> badge
    "bug": "bug",
    "nothing": "nothing to do",
    "replay": "replay the routes",
    "correct": "correct it",
    "unclear": "unclear: look first",
}
ALARMING = ("bug", "unclear")
"""Actions of a verdict that are shown in red."""
NEAR_ONE = ("mismatch/mean_rho", "mismatch/pearson", "mismatch/ppl_ratio")
HOW_FAR = "How far apart are the engine that samples and the one that learns?"
WHERE_ROUTES = "Where do the two choose different experts?"
FORECAST_HEADER = ("Preset", "Tokens kept", "Step multiplied by")


def show(metric: str, value: float | None) -> str:
    """Return a value of one of QUANTITIES as text."""
    if value is not None and metric in NEAR_ONE:
        return f"{value:.4f}"
    return number(value, share=QUANTITIES[metric][1])


def forecast_rows(forecasts: Sequence[Tree]) -> list[tuple[str, str, str]]:
    """Return the rows under FORECAST_HEADER: predicted effects of presets on the gap."""
    return [
        (each["preset"], number(each["keep"], share=True), number(each["attenuation"]))
        for each in forecasts
    ]


def factor(ratio: float | None) -> str:
    """Return a ratio as a factor, such as 2.5\u00d7; a dash if there is none."""
    if ratio is None:
        return DASH
    return f"{number(ratio)}{TIMES}"


def accuracy(score: str | None) -> str:
    """Return a metric of the evaluations, such as "eval/greedy", as a sentence names it."""
    name = (score or "").removeprefix("eval/")
    if name == "greedy":
        return "greedy held-out accuracy"
    if name.startswith("avg@"):
        return f"sampled held-out accuracy ({name})"
    return f"held-out {name or 'score'}"


@dataclass(frozen=True)
class Unlearnt:
    """A run whose rewards taught nothing or little. Reports say this first."""

    learnt: str
    verdict: str
    why: list[str]
    silent: int
    steps: int


def unlearnt(summary: Tree) -> Unlearnt | None:
    """Return the reasons if the rewards taught nothing or little.

    Returns None if they taught something, or if the summary's entry is damaged.
    """
    found = summary.get("nothing_learnt")
    if not isinstance(found, dict) or not isinstance(found.get("why"), list):
        return None
    texts = [found.get("learnt"), found.get("verdict"), *found["why"]]
    silent, steps = found.get("silent"), found.get("steps")
    if not all(isinstance(text, str) for text in texts):
        return None
    if type(silent) is not int or type(steps) is not int:
        return None
    return Unlearnt(str(texts[0]), str(texts[1]), found["why"], silent, steps)


def verdict(summary: Tree) -> list[str]:
    """Return a sentence each on reward, evaluation, crash and replay."""
    out = []
    parent = summary.get("parent")
    if parent is not None:
        out.append(f"Continued from {parent['run']} at step {parent['step']}.")
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and summary["steps"] == 1:
        out.append(f"Reward was {number(first)} in the only step.")
    elif first is not None and last is not None:
        out.append(f"Reward {moved(first, last)} over {counted(summary['steps'], 'step')}.")
    out += _evaluation_sentences(summary)
    silent = no_signal(summary)
    if silent:
        out.append(f"Groups without signal: {silent}.")
    overlap = summary.get("asynchronous")
    if overlap is not None:
        out.append(f"Sampled while learning: {describe_overlap(overlap)}.")
    return [*out, _replay_sentence(summary)]


def hardly_differs(first: float, last: float) -> bool:
    """Return whether two values are as good as equal; True too if one of them is NaN."""
    return not abs(last - first) >= LEAST_CHANGE * max(1.0, abs(first), abs(last))


def moved(first: float, last: float) -> str:
    """Return the words for the way from the first value to the last."""
    if first == last:
        return f"stayed at {number(last)}"
    if hardly_differs(first, last):
        return f"stayed near {number(last)}"
    verb = "fell"
    if last > first:
        verb = "rose"
    return f"{verb} from {number(first)} to {number(last)}"


def _evaluation_sentences(summary: Tree) -> list[str]:
    best, crash = summary.get("eval_best"), summary.get("crash_step")
    if best is None:  # evaluations detect a crash
        return ["No evaluation was run, so a crash would not have been seen."]
    name = accuracy(summary.get("score"))
    crashed = "It did not crash."
    if crash is not None:
        crashed = f"It crashed at step {crash}."
    return [f"The best {name} is {number(best['value'])}, at step {best['step']}.", crashed]


def course(values: Sequence[float], unit: str = "") -> str:
    """Describe a curve in the words that follow its name in a title.

    First and last are means of the same windows as in the summary.
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "is not known"
    of_unit = ""
    if unit:
        of_unit = f" {unit}"
    low, high = min(known), max(known)
    if len(known) == 1:
        return f"is {number(low)}{of_unit}, measured once"
    if low == high:
        return f"is {number(low)}{of_unit} throughout"
    window = max(1, min(5, len(known) // 2))
    first, last = statistics.fmean(known[:window]), statistics.fmean(known[-window:])
    ends = sorted((first, last))
    if ends[1] - ends[0] <= STEADY * max(abs(first), abs(last)):
        if high > STRAYS * ends[1] or low < ends[0] / STRAYS:
            return (
                f"ends where it began, near {number(last)}{of_unit}, but was {number(low)} to "
                f"{number(high)} between"
            )
        return f"stays near {number(last)}{of_unit}"
    if len(known) < FEWEST_POINTS:
        return f"goes from {number(known[0])} to {number(known[-1])}{of_unit}"
    verb, times = "falls", ""
    if last > first:
        verb = "rises"
    if ends[0] > 0 and ends[1] >= STRAYS * ends[0]:
        times = f" {number(ends[1] / ends[0])}-fold,"
    return f"{verb}{times} from {number(first)} to {number(last)}{of_unit}"


def describe_overlap(overlap: Tree) -> str:
    """Describe summary["asynchronous"]."""
    mean, oldest = number(overlap.get("staleness_mean")), number(overlap.get("staleness_max"))
    spanning, learner, sampler = (
        number(overlap.get(key), share=True) for key in ("spanning", "learner_busy", "sampler_busy")
    )
    return (
        f"tokens were {mean} updates old on average, the oldest {oldest}; {spanning} of the "
        f"samples span an update; the learner was busy {learner} of the time, the sampler {sampler}"
    )


def _replay_sentence(summary: Tree) -> str:
    found = {entry.metric: entry for entry in compared(summary)}
    k3 = found.get("mismatch/k3")
    if k3 is None:
        return "The mismatch of rollout and trainer was not measured."
    average = f"k3 averaged {number(k3.trained)}"
    if too_small(k3):
        average = f"{average}, {SMALL}"
    if summary.get("replay") not in ROLLOUT_MODES:
        return f"Rollout routes were not replayed; {average}."
    if k3.without_replay is None:
        return f"Replay was on and {average}; no probe measured it without."
    count = len(summary.get("probe_steps") or [])
    probes = counted(count, "probe batch")
    short = {"mismatch/k3": "k3", "mismatch/f2": "F(2)", "routing/routers": WOULD}
    clauses = [
        f"{name} {_change(found[key], summary)}" for key, name in short.items() if key in found
    ]
    if "routing/routers" in found and summary.get("replay") in WHOLE:
        clauses.append(f"{RAN} with it: {ROLLOUTS_OWN}")
    return f"Without {ARROW} with replay, on {probes} scored both ways: {'; '.join(clauses)}."


def _change(entry: Compared, summary: Tree) -> str:
    change = f"{entry.show(entry.without_replay)} {ARROW} {entry.show(entry.with_replay)}"
    cut = cut_by(entry, summary)
    if not cut:
        return change
    if cut == SMALL or (entry.ratio is not None and entry.ratio < 1):
        return f"{change} ({cut})"
    return f"{change} (cut by {cut})"


def no_signal(summary: Tree) -> str:
    """Describe the share of groups that teach nothing at the end of a run; "" for none."""
    share = summary.get("groups_without_signal")
    if not share:
        return ""
    return (
        f"{number(share, share=True)} at the end; all rewards of such a group are equal, so it "
        "teaches nothing"
    )


@dataclass(frozen=True)
class Compared:
    """Means of one quantity, over all steps as trained, and over probe steps without replay too.

    None means that it was not measured.
    """

    metric: str
    name: str
    is_share: bool
    trained: float | None
    with_replay: float | None
    without_replay: float | None

    @property
    def ratio(self) -> float | None:
        """Without / with replay; None if replay left nothing or one of both was not measured."""
        if not self.with_replay or self.without_replay is None:
            return None
        return self.without_replay / self.with_replay

    def show(self, value: float | None) -> str:
        """Return a value of this quantity as text."""
        return number(value, share=self.is_share)


def compared(summary: Tree) -> list[Compared]:
    """Return the quantities that were measured, in the order of COMPARED.

    Raises UsageError if the summary is damaged.
    """
    tables = []
    for key in ("mismatch", "mismatch_at_probes", "mismatch_without_replay"):
        table = summary.get(key) or {}
        numbers = isinstance(table, dict) and all(
            isinstance(value, int | float | None) for value in table.values()
        )
        if not numbers:
            raise UsageError(
                f"summary.json: {key} is {table!r}; expected an object of metric: number or null"
            )
        tables.append(table)
    found = [
        Compared(key, name, is_share, *(table.get(key) for table in tables))
        for key, (name, is_share) in QUANTITIES.items()
        if key in COMPARED
    ]
    return [entry for entry in found if entry.trained is not None]


def ran_the_rollouts(entry: Compared, summary: Tree) -> bool:
    """Return whether this is the entry of routers, and replay replaced their choice."""
    return (
        entry.metric == "routing/routers"
        and entry.with_replay is not None
        and summary.get("replay") in WHOLE
    )


def too_small(k3: Compared) -> bool:
    """Return whether every measured mean of k3 is too small to matter."""
    measured = [
        value for value in (k3.trained, k3.with_replay, k3.without_replay) if value is not None
    ]
    return bool(measured) and all(size_in_words(value, 0.0) == SMALL for value in measured)


def cut_by(entry: Compared, summary: Tree) -> str:
    """Return the factor by which replay cut this quantity; empty if a factor means nothing.

    Shares of routes count different choices of the trainer. Replay replaces these choices, but
    does not change them.
    """
    k3 = next((each for each in compared(summary) if each.metric == "mismatch/k3"), None)
    if entry.without_replay is None or entry.with_replay is None:
        return ""
    if entry.metric.startswith("routing/"):
        return ""
    if k3 is not None and too_small(k3):
        return {"mismatch/k3": SMALL}.get(entry.metric, "")
    if entry.ratio is None:
        return ""
    cuts, probes = sorted(summary.get("k3_cuts") or []), len(summary.get("probe_steps") or [])
    if entry.metric == "mismatch/k3" and len(cuts) >= FEWEST_PROBES:
        ends = f"{factor(cuts[0])} to {factor(cuts[-1])}"
        return f"{_times(entry.ratio)}; median probe {factor(statistics.median(cuts))} ({ends})"
    few = {1: ", one probe", 2: ", two probes"}.get(probes, "")
    return f"{_times(entry.ratio)}{few}"


def _times(cut: float) -> str:
    if cut == 0:
        return "more"
    if cut < 1:
        return f"{factor(1 / cut)} more"
    return factor(cut)


COMPARISON_HEADER = (
    "Rollout vs trainer",
    "All steps, as trained",
    "Probes, without replay",
    "Probes, with replay",
    "Cut by replay",
)


def comparison_table(summary: Tree) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the header and the rows of `comparison`, without columns that have no value."""
    columns = [
        (name, *cells)
        for name, *cells in zip(COMPARISON_HEADER, *comparison(summary), strict=True)
        if set(cells) != {DASH}
    ]
    header, *rows = zip(*columns, strict=True)
    return header, rows


def comparison(summary: Tree) -> list[tuple[str, ...]]:
    """Return the rows under COMPARISON_HEADER.

    The second column is the mean over all steps, the others are over the probe steps.
    """
    rows = []
    for entry in compared(summary):
        numbers = (
            entry.show(value) for value in (entry.trained, entry.without_replay, entry.with_replay)
        )
        rows.append((entry.name, *numbers, cut_by(entry, summary) or DASH))
        if ran_the_rollouts(entry, summary):
            rows.append((RAN.capitalize(), DASH, "the trainer's choice", ROLLOUTS_OWN, DASH))
    return rows


NOT_PARTS = ("step", "score_saved", "sampler_idle")  # the whole, and times that were not spent


def time_shares(summary: Tree) -> str:
    """Return text like `rollout 61%, update 30%, ... of 1.2 s`, or "" without times."""
    times = summary.get("time") or {}
    step = times.get("step")
    if not step:
        return ""
    parts = [(seconds or 0, name) for name, seconds in times.items() if name not in NOT_PARTS]
    shares = [
        f"{name} {seconds / step:.0%}"
        for seconds, name in sorted(parts, reverse=True)
        if seconds > 0
    ]
    return f"{', '.join(shares)} of {number(step)} s"
