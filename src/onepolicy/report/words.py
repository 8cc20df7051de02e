"""summary.json in plain words: the sentences and table rows that the HTML report and the terminal share.

Keys used, all optional but `steps`: steps, reward_first, reward_last, score (metric name); eval_first, eval_last,
eval_best {step, value}; crash_step, replay, mismatch {metric: mean over all steps}; probe_steps, mismatch_at_probes and
mismatch_without_replay {metric: mean over the probe steps, with and without replay}, k3_cuts [without / with of each
probe step, ascending]; groups_without_signal (share at the end); asynchronous {staleness_mean, staleness_max, spanning,
learner_busy, sampler_busy}; time {part: seconds}, tokens_per_second, parent {run, step}, run and report (paths);
nothing_learnt {learnt (nothing or little), verdict, why [sentences], silent and steps (counts)}, only where the rewards
taught nothing or little.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onepolicy.config import UsageError
from onepolicy.config.objective import ROLLOUT_ROUTES
from onepolicy.verdict.rules import SMALL, size_in_words

Tree = dict[str, Any]

DASH = "\N{EN DASH}"
ARROW = "\N{RIGHTWARDS ARROW}"
TIMES = "\N{MULTIPLICATION SIGN}"

WOULD = "routers that would choose otherwise"
RAN = "experts that ran"
"""Under replay they are the rollout's, whatever the trainer's router would have chosen."""
ROLLOUTS_OWN = "100% the rollout's"
WHOLE = ("r3", "weights")
"""Modes of replay in which no other expert runs."""
FEWEST_PROBES = 3
"""Probes from which on what replay cuts is given as an interval over them: k3 is heavy-tailed, one can be most of a
mean."""
STEADY, STRAYS = 0.1, 2.0
"""A curve whose ends differ by at most this share stays; one with a value this many times beyond them does not."""
QUANTITIES = {  # metric -> (name, is a share)
    "mismatch/k3": ("k3, nats per token", False),
    "mismatch/f2": ("F(2), share of tokens off by more than 2" + TIMES, False),
    "routing/routers": ("Routers that would choose otherwise", True),
    "routing/tokens": ("Tokens with such a router", True),
    "routing/sequence": ("Such routers per token", False),
}


def number(value: float | None, *, share: bool = False) -> str:
    """Three significant digits; a dash where there is no number."""
    if value is None or math.isnan(value):
        return DASH
    if share:
        percent = 100 * value
        return f"{percent:.3g}%" if percent == 0 or abs(percent) >= 0.01 else f"{number(percent)}%"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")


SUPERSCRIPT = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


def nats(value: float | None) -> str:
    """Three significant digits, with a power of ten below 0.001; a dash where there is no number."""
    if value is None or math.isnan(value):
        return DASH
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}".replace("-", "\u2212")
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}{TIMES}10{str(int(exponent)).translate(SUPERSCRIPT)}".replace("-", "\u2212")


def powers(text: str) -> str:
    """The same text with 1.5e-05 written as 1.5\u00d710\u207b\u2075."""
    return re.sub(
        r"(\d)e([+-]?\d+)\b",
        lambda m: f"{m[1]}{TIMES}10{str(int(m[2])).translate(SUPERSCRIPT)}",
        text,
    )


def factor(ratio: float | None) -> str:
    return (
        DASH if ratio is None else f"{ratio:.3g}{TIMES}" if ratio < 1000 else f"{ratio:,.0f}{TIMES}"
    )


@dataclass(frozen=True)
class Unlearnt:
    """That the rewards of a run taught nothing, or little: it comes before whatever else is said of the run."""

    learnt: str
    verdict: str
    why: list[str]
    silent: int
    steps: int


def unlearnt(summary: Tree) -> Unlearnt | None:
    """None if the rewards taught something, or the summary does not say it in a way that can be read."""
    found = summary.get("nothing_learnt")
    if not isinstance(found, dict) or not isinstance(found.get("why"), list):
        return None
    learnt, said, why = found.get("learnt"), found.get("verdict"), found["why"]
    silent, steps = found.get("silent"), found.get("steps")
    texts_good = (
        isinstance(learnt, str)
        and isinstance(said, str)
        and all(isinstance(text, str) for text in why)
    )
    if not texts_good or type(silent) is not int or type(steps) is not int:
        return None
    return Unlearnt(str(learnt), str(said), why, silent, steps)


def verdict(summary: Tree) -> list[str]:
    """One sentence each on reward, evaluation, crash, and replay."""
    out = []
    if (parent := summary.get("parent")) is not None:
        out.append(f"Continued from {parent['run']} at step {parent['step']}.")
    first, last = summary.get("reward_first"), summary.get("reward_last")
    if first is not None and last is not None:
        verb = "rose" if last > first else "fell" if last < first else "went"
        out.append(
            f"Reward {verb} from {number(first)} to {number(last)} over {summary['steps']} steps."
        )
    best = summary.get("eval_best")
    crash = summary.get("crash_step")
    if best is None:  # a crash is judged by evaluations
        out.append("No evaluation was run, so a crash would not have been seen.")
    else:
        out.append(
            f"The best evaluation{_of_score(summary)} is {number(best['value'])}, at step {best['step']}."
        )
        out.append("It did not crash." if crash is None else f"It crashed at step {crash}.")
    silent = no_signal(summary)
    if silent:
        out.append(f"Groups without signal: {silent}.")
    if (overlap := summary.get("asynchronous")) is not None:
        out.append(f"Sampled while learning: {overlap_words(overlap)}.")
    return [*out, _replay_sentence(summary)]


def course(values: Sequence[float], unit: str = "") -> str:
    """How a curve goes, as after its name in a title. First and last: means of the same windows as the summary's."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "is not known"
    of_unit = f" {unit}" if unit else ""
    low, high = min(known), max(known)
    if low == high:
        return f"is {number(low)}{of_unit} throughout"
    window = max(1, min(5, len(known) // 2))
    first, last = statistics.fmean(known[:window]), statistics.fmean(known[-window:])
    ends = sorted((first, last))
    if ends[1] - ends[0] <= STEADY * max(abs(first), abs(last)):
        if high > STRAYS * ends[1] or low < ends[0] / STRAYS:
            return f"ends where it began, near {number(last)}{of_unit}, but was {number(low)} to {number(high)} between"
        return f"stays near {number(last)}{of_unit}"
    verb = "rises" if last > first else "falls"
    times = ""
    if ends[0] > 0 and ends[1] >= STRAYS * ends[0]:
        times = f" {ends[1] / ends[0]:.2g}-fold,"
    return f"{verb}{times} from {number(first)} to {number(last)}{of_unit}"


def overlap_words(overlap: Tree) -> str:
    """Of summary["asynchronous"]."""
    mean, oldest = number(overlap.get("staleness_mean")), number(overlap.get("staleness_max"))
    spanning, learner, sampler = (
        number(overlap.get(key), share=True) for key in ("spanning", "learner_busy", "sampler_busy")
    )
    return (
        f"tokens were {mean} updates old on average, the oldest {oldest}; {spanning} of the samples span an update; "
        f"the learner was busy {learner} of the time, the sampler {sampler}"
    )


def _of_score(summary: Tree) -> str:
    name = (summary.get("score") or "").removeprefix("eval/")
    return f" ({name})" if name else ""


def _replay_sentence(summary: Tree) -> str:
    found = {entry.metric: entry for entry in compared(summary)}
    k3 = found.get("mismatch/k3")
    if k3 is None:
        return "The mismatch of rollout and trainer was not measured."
    small = f", {SMALL}" if too_small(k3) else ""
    if summary.get("replay") not in ROLLOUT_ROUTES:
        return f"Rollout routes were not replayed; k3 averaged {number(k3.trained)}{small}."
    if k3.without_replay is None:
        return f"Replay was on and k3 averaged {number(k3.trained)}{small}; no probe measured it without."
    count = len(summary.get("probe_steps") or [])
    probes = "1 probe batch" if count == 1 else f"{count} probe batches"
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
    said_by_itself = cut == SMALL or (entry.ratio is not None and entry.ratio < 1)
    return f"{change} ({cut})" if said_by_itself else f"{change} (cut by {cut})"


def no_signal(summary: Tree) -> str:
    """How many groups taught nothing at the end of a run; empty if none, or if the summary does not say."""
    share = summary.get("groups_without_signal")
    if not share:
        return ""
    return f"{number(share, share=True)} at the end; all rewards of such a group are equal, so it teaches nothing"


@dataclass(frozen=True)
class Compared:
    """One quantity: mean over all steps as trained, and over the probe steps scored both ways. None: not measured."""

    metric: str
    name: str
    is_share: bool
    trained: float | None
    with_replay: float | None
    without_replay: float | None

    @property
    def ratio(self) -> float | None:
        """without / with; None where replay left nothing or one of both was not measured."""
        return (
            self.without_replay / self.with_replay
            if self.with_replay and self.without_replay is not None
            else None
        )

    def show(self, value: float | None) -> str:
        return number(value, share=self.is_share)


def compared(summary: Tree) -> list[Compared]:
    """The quantities that were measured, in the order of QUANTITIES."""
    tables = []
    for key in ("mismatch", "mismatch_at_probes", "mismatch_without_replay"):
        table = summary.get(key) or {}
        if not isinstance(table, dict) or any(
            not isinstance(v, int | float | None) for v in table.values()
        ):
            raise UsageError(
                f"summary.json: {key} is {table!r}; expected an object of metric: number or null"
            )
        tables.append(table)
    found = [
        Compared(key, *words, *(table.get(key) for table in tables))
        for key, words in QUANTITIES.items()
    ]
    return [entry for entry in found if entry.trained is not None]


def ran_the_rollouts(entry: Compared, summary: Tree) -> bool:
    """Is this the entry of routers, and was what they would choose replaced?"""
    return (
        entry.metric == "routing/routers"
        and entry.with_replay is not None
        and summary.get("replay") in WHOLE
    )


def too_small(k3: Compared) -> bool:
    """Is every mean of k3 that was measured too small to matter?"""
    measured = [
        value for value in (k3.trained, k3.with_replay, k3.without_replay) if value is not None
    ]
    return bool(measured) and all(size_in_words(value, 0.0) == SMALL for value in measured)


def cut_by(entry: Compared, summary: Tree) -> str:
    """By how much replay cut this quantity; empty where that says nothing.

    Shares of routers are what the trainer would choose otherwise: replay replaces that choice, it does not change it.
    """
    k3 = next((each for each in compared(summary) if each.metric == "mismatch/k3"), None)
    if entry.is_share or entry.without_replay is None or entry.with_replay is None:
        return ""
    if entry.metric.startswith("routing/"):
        return ""
    if k3 is not None and too_small(k3):
        return SMALL if entry.metric == "mismatch/k3" else ""
    if entry.ratio is None:
        return ""
    cuts, probes = sorted(summary.get("k3_cuts") or []), len(summary.get("probe_steps") or [])
    if entry.metric == "mismatch/k3" and len(cuts) >= FEWEST_PROBES:
        median = factor(statistics.median(cuts))
        return f"{median}, {factor(cuts[0])} to {factor(cuts[-1])} over {len(cuts)} probes"
    few = {1: ", one probe", 2: ", two probes"}.get(probes, "")
    if entry.ratio == 0:
        return f"more{few}"
    if entry.ratio < 1:
        return f"{factor(1 / entry.ratio)} more{few}"
    return f"{factor(entry.ratio)}{few}"


COMPARISON_HEADER = ("Rollout vs trainer", "Trained on", "Without replay", "With replay", "Cut by")


def comparison(summary: Tree) -> list[tuple[str, ...]]:
    """Rows under COMPARISON_HEADER: mean over all steps as trained; the other columns over probe steps only."""
    rows = []
    for entry in compared(summary):
        numbers = (
            entry.show(value) for value in (entry.trained, entry.without_replay, entry.with_replay)
        )
        rows.append((entry.name, *numbers, cut_by(entry, summary) or DASH))
        if ran_the_rollouts(entry, summary):
            rows.append((RAN.capitalize(), DASH, "the trainer's choice", ROLLOUTS_OWN, DASH))
    return rows


NOT_PARTS = ("step", "score_saved", "sampler_idle")  # times that are the whole, or were not spent


def time_shares(summary: Tree) -> str:
    """`rollout 61%, update 30%, ... of 1.2 s`; empty if the summary has no times."""
    times = summary.get("time") or {}
    step = times.get("step")
    if not step:
        return ""
    parts = sorted(
        ((v, k) for k, v in times.items() if k not in NOT_PARTS and v is not None and v > 0),
        reverse=True,
    )
    return (
        ", ".join(f"{name} {seconds / step:.0%}" for seconds, name in parts)
        + f" of {number(step)} s"
    )
