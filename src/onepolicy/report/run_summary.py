"""A run's summary.json told once: outcome, card and table, which page and terminal show.

The words for a gap are those of `measure` and `audit` (verdict/rules.py).

Keys used, all optional except `steps`: steps, reward_first, reward_last, reward_error (standard
error of their difference), score (metric name); eval_first, eval_last, eval_best {step, value},
eval_answers (how many an evaluation has), and sampled_first, sampled_last, sampled_answers (how
many) beside a greedy score; crash_step, replay, mismatch {metric: mean over all steps};
probe_steps, mismatch_at_probes and mismatch_without_replay {metric: mean over the probe steps, with
and without replay}, k3_cuts [without / with of each probe step, ascending]; groups_without_signal
(share at the end); asynchronous {staleness_mean, staleness_max, spanning, learner_busy,
sampler_busy}; time {part: seconds}, tokens_per_second, parent {run, step}, missing_supports
{attempts, dropped}, run and report (paths); planned (steps, of a run that was stopped earlier);
nothing_learnt {learnt (nothing or little), verdict, why [sentences], silent and steps (counts)},
only where the rewards taught nothing or little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from onepolicy.config.json_shapes import NothingLearnt
from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.notation import DASH, counted, ends, number
from onepolicy.report.page import Card, Table, Tile
from onepolicy.report.words import (
    ARROW,
    QUANTITIES,
    RAN,
    ROLLOUTS_OWN,
    WHOLE,
    Tree,
    factor,
)
from onepolicy.verdict.rules import REPLAY_HELPS, SMALL, size_in_words

FEWEST_PROBES = 3
"""Fewest probes for an interval of the factor by which replay cuts k3.

k3 is heavy-tailed: one probe can be most of a mean.
"""
LEAST_CHANGE = 0.02
"""Smallest change of a reward or score, as a share of the larger of first, last and 1."""
FEWEST_CHANGED = 6
"""Fewest answers by which two evaluations of the same problems surely differ.

Even if no other answer changed, McNemar's exact test has p = 2 / 2^5 = 0.06 for five, 0.03 for six.
"""
COMPARED = ("mismatch/k3", "mismatch/f2", "routing/routers", "routing/tokens", "routing/sequence")
"""The quantities whose means a summary has, and its page compares with and without replay."""
GAP = "the gap between rollout and trainer"
NOT_PARTS = ("step", "score_saved", "sampler_idle")  # the whole, and times that were not spent


def outcome(summary: Tree) -> str:
    """Return two sentences: learning and crash, then whether the gap matters."""
    found = [text for text in (_learning(summary), _gap(summary)) if text]
    return " ".join(f"{text[0].upper()}{text[1:]}." for text in found)


def failed(summary: Tree) -> bool:
    """Return whether the run crashed, or learnt nothing or little."""
    return unlearnt(summary) is not None or summary.get("crash_step") is not None


def _learning(summary: Tree) -> str:
    idle = unlearnt(summary)
    if idle is not None:
        return idle.verdict.removesuffix(".")
    course = _course(summary)
    crash = summary.get("crash_step")
    crashed = f"the policy crashed at step {crash}"
    if course is None and crash is None:
        return ""
    if course is None:
        return crashed
    name, first, last = course
    if name == "reward" and _own_steps(summary) == 1:
        return f"one step does not show whether the policy learns: {name} {number(first)}"
    curve = f"{name} {moved(first, last)}"
    if crash is not None:
        return f"{crashed}: {curve}"
    if name == "reward" and _in_noise(summary):
        steps = counted(_own_steps(summary), "step")
        return f"{steps} do not show whether the policy learns: {curve}, as single steps do too"
    sampled = _sampled(summary)
    if sampled is not None and (sampled[1] > sampled[0]) != (last > first):
        return f"{curve}, the sampled one {moved(*sampled)}"
    if hardly_differs(first, last):
        return f"the policy hardly changed: {curve}"
    answers = summary.get("eval_answers")
    if name != "reward" and answers and abs(last - first) * answers < FEWEST_CHANGED - 0.5:
        return f"{answers} answers do not show whether the policy learns: {curve}"
    if last > first:
        return f"the policy learnt: {curve}"
    return f"the policy got worse: {curve}"


def _own_steps(summary: Tree) -> int:
    """Return the steps that this run trained: a fork does not have its parent's."""
    parent = summary.get("parent") or {"step": 0}
    return int(summary["steps"]) - int(parent["step"])


def _in_noise(summary: Tree) -> bool:
    """Return whether the course of the reward is within two standard errors of none."""
    error = summary.get("reward_error")
    return error is None or abs(summary["reward_last"] - summary["reward_first"]) < 2 * error


def _sampled(summary: Tree) -> tuple[float, float] | None:
    """Return first and last sampled accuracy beside a greedy score, if they differ by two errors.

    Their standard errors are those of as many independent answers as there were.
    """
    before, after = summary.get("sampled_first"), summary.get("sampled_last")
    if not before or not after:
        return None
    first, last = before["value"], after["value"]
    if hardly_differs(first, last):
        return None
    middle, answers = (first + last) / 2, summary.get("sampled_answers")
    if answers and abs(last - first) < 2 * math.sqrt(2 * max(0.0, middle * (1 - middle)) / answers):
        return None
    return first, last


def _course(summary: Tree) -> tuple[str, float, float] | None:
    """Return name, first and last value of the evaluations; of the rewards if there are none."""
    evaluated = held_out(summary)
    if evaluated is not None:
        return evaluated
    if summary.get("reward_first") is None or summary.get("reward_last") is None:
        return None
    return "reward", summary["reward_first"], summary["reward_last"]


def held_out(summary: Tree) -> tuple[str, float, float] | None:
    """Return name, first and last value of the score; None if it was not evaluated twice."""
    first, last = summary.get("eval_first"), summary.get("eval_last")
    if first is None or last is None or first["step"] >= last["step"]:
        return None
    return accuracy(summary.get("score")), first["value"], last["value"]


def _gap(summary: Tree) -> str:
    k3 = k3_of(summary)
    if k3 is None:
        return f"{GAP} was not measured"
    without, within = k3.show(k3.without_replay), k3.show(k3.with_replay)
    both = k3.without_replay is not None and k3.with_replay is not None
    trained = _as_trained(k3, summary)
    if too_small(k3) and both:
        return f"{GAP} is {SMALL} (k3 {without} without replay, {within} with)"
    if too_small(k3):
        return f"{GAP} is {SMALL} (k3 {trained})"
    if not both:
        return f"{GAP} is k3 {trained}{_size(k3.trained, summary, 'mismatch')}"
    remaining = _size(k3.with_replay, summary, "mismatch_at_probes")
    assert k3.without_replay is not None
    assert k3.with_replay is not None
    way = f"from k3 {without} to {within} nats a token"
    if k3.without_replay <= REPLAY_HELPS * k3.with_replay:
        if k3.with_replay > REPLAY_HELPS * k3.without_replay:
            return f"{GAP} is larger with replay, {way}{remaining}"
        return f"replay changed {GAP} little, {way}{remaining}"
    return f"replay cut {GAP} {way}{_in_bursts(summary)}{remaining}"


def _in_bursts(summary: Tree) -> str:
    """Say so where the means differ by a few probes: at the median one replay does not help."""
    cuts = summary.get("k3_cuts") or []
    if len(cuts) < FEWEST_PROBES or statistics.median(cuts) > REPLAY_HELPS:
        return ""
    return f", in bursts (median probe {factor(statistics.median(cuts))})"


def _as_trained(k3: Compared, summary: Tree) -> str:
    if summary.get("replay") in ROLLOUT_MODES:
        return f"{number(k3.trained)} with replay"
    return f"{number(k3.trained)} without replay"


def _size(k3: float | None, summary: Tree, scoring: str) -> str:
    """Describe the size of a gap. `scoring` is the summary's key with F(2) of the same tokens."""
    if k3 is None:
        return ""
    size = size_in_words(k3, summary[scoring].get("mismatch/f2") or 0.0)
    if not size:
        return ", larger than in published dense models (see `onepolicy measure`)"
    return f", {size}"


def accuracy(score: str | None) -> str:
    """Return a metric of the evaluations, such as "eval/greedy", as a sentence names it."""
    name = (score or "").removeprefix("eval/")
    if name == "greedy":
        return "greedy held-out accuracy"
    if name.startswith("avg@"):
        return f"sampled held-out accuracy ({name})"
    return f"held-out {name or 'score'}"


def unlearnt(summary: Tree) -> NothingLearnt | None:
    """Return the reasons if the rewards taught nothing or little. Reports say this first."""
    found = summary.get("nothing_learnt")
    if found is None:
        return None
    return NothingLearnt(**found)


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
    return f"{verb} from {' to '.join(ends(first, last))}"


def goes(name: str, first: float, last: float) -> str:
    """Return the words of `moved` for a figure's title."""
    if hardly_differs(first, last):
        return f"{name} stays near {number(last)}"
    return f"{name} goes from {' to '.join(ends(first, last))}"


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
    """Return the quantities that were measured, in the order of COMPARED."""
    scorings = ("mismatch", "mismatch_at_probes", "mismatch_without_replay")
    tables = [summary.get(key) or {} for key in scorings]
    found = [
        Compared(key, name, is_share, *(table.get(key) for table in tables))
        for key, (name, is_share) in QUANTITIES.items()
        if key in COMPARED
    ]
    return [entry for entry in found if entry.trained is not None]


def k3_of(summary: Tree) -> Compared | None:
    """Return the entry of k3; None if it was not measured."""
    return next((entry for entry in compared(summary) if entry.metric == "mismatch/k3"), None)


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
    k3 = k3_of(summary)
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


COMPARISON_HEADER = (
    "Rollout vs trainer",
    "All steps",
    "Without replay",
    "With replay",
    "Cut by replay",
)
PROBED = " Without and with replay: the probe steps, whose batches were scored both ways."


def comparison_table(summary: Tree) -> Table | None:
    """Return the quantities of the gap, without columns that have no value; None if none was.

    The second column is the mean over all steps, the others are over the probe steps.
    """
    rows = []
    for entry in compared(summary):
        numbers = map(entry.show, (entry.trained, entry.without_replay, entry.with_replay))
        rows.append((entry.name, *numbers, cut_by(entry, summary) or DASH))
        if ran_the_rollouts(entry, summary):
            rows.append((RAN.capitalize(), DASH, "the trainer's choice", ROLLOUTS_OWN, DASH))
    if not rows:
        return None
    columns = zip(COMPARISON_HEADER, *rows, strict=True)
    header, *shown = zip(*(each for each in columns if set(each[1:]) != {DASH}), strict=True)
    note = "All steps: as trained." + PROBED * (len(header) > 2)
    return Table(header, shown, note=note)


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


def card(summary: Tree) -> Card:
    """Return the outcome, what else is to be said of the run, and its tiles."""
    small, window, rule = [], summary.get("reward_window"), summary.get("crash_rule")
    if window:
        small.append(f"Reward: means of {counted(window, 'step')} at the start and at the end.")
    if rule and summary.get("crash_step") is not None:
        small.append(f"{rule[0].upper()}{rule[1:]}.")
    lines = list(_remarks(summary))
    return Card(
        outcome(summary), bad=failed(summary), lines=lines, small=small, tiles=tiles(summary)
    )


def _remarks(summary: Tree) -> Iterator[str]:
    """Yield a sentence each on what neither the outcome nor a tile says."""
    idle, parent = unlearnt(summary), summary.get("parent")
    if idle is not None:
        yield " ".join(idle.why)
    if parent is not None:
        yield f"Continued from {parent['run']} at step {parent['step']}."
    skipped, silent = summary.get("updates_skipped"), summary.get("groups_without_signal")
    if skipped:
        yield f"Updates skipped: {skipped:.0f}, their gradients were not finite."
    missing = summary.get("missing_supports")
    if missing is not None and missing["attempts"]:
        yield (
            f"Attempts with a token without support: {missing['attempts']:.0f}; "
            f"{counted(int(missing['dropped']), 'episode')} dropped after one."
        )
    if silent:
        yield (
            f"Groups without signal: {number(silent, share=True)} at the end; all rewards of such "
            "a group are equal, so it teaches nothing."
        )
    overlap, saved = summary.get("asynchronous"), (summary.get("time") or {}).get("score_saved")
    if overlap is not None:
        yield f"Sampled while learning: {describe_overlap(overlap)}."
    if saved:
        yield (
            f"Scoring left out: about {number(saved)} s per step saved, the rollout is the "
            "behaviour policy."
        )


def tiles(summary: Tree) -> list[Tile]:
    """Return the tiles that have a value: learning first, then the gap and the speed."""
    found, idle, k3 = list[Tile](), unlearnt(summary), k3_of(summary)
    if idle is not None:
        reason = "the weights stayed the same"
        if idle.silent:
            reason = f"no reward signal in {idle.silent} of {idle.steps} steps"
        found.append(("Learnt", idle.learnt, reason, "bad"))
    rewards = summary.get("reward_first"), summary.get("reward_last")
    if None not in rewards:
        over = f"over {counted(_own_steps(summary), 'step')}"
        found.append(("Reward", f" {ARROW} ".join(ends(*rewards)), over, ""))
    found += _evaluation(summary)
    if k3 is not None:
        found.append(("Mean k3, as trained", number(k3.trained), _k3_note(k3, summary), ""))
    speed = summary.get("tokens_per_second")
    if speed is not None:
        found.append(("Tokens per second, with prompts", number(speed), time_shares(summary), ""))
    return found


def _evaluation(summary: Tree) -> list[Tile]:
    """Return the tiles of the held-out score and of the crash that it would have shown."""
    best, step = summary.get("eval_best"), summary.get("crash_step")
    if best is None:
        return [("Crash", number(None), "no evaluation was run, so none would have been seen", "")]
    first, last = (summary.get(f"eval_{end}") or {"value": None} for end in ("first", "last"))
    value = f" {ARROW} ".join(ends(first["value"], last["value"]))
    note = f"best {number(best['value'])} at step {best['step']}"
    score = accuracy(summary.get("score"))
    found = [(f"{score[0].upper()}{score[1:]}", value, note, "")]
    if step is not None:
        return [*found, ("Crash", f"step {step}", "", "bad")]
    kind = "good" if unlearnt(summary) is None else ""  # a score that never rose cannot fall
    return [*found, ("Crash", "none", "", kind)]


def _k3_note(k3: Compared, summary: Tree) -> str:
    if too_small(k3):
        return f"nats per token: {SMALL}"
    if k3.ratio is not None and k3.ratio > 1 and unlearnt(summary) is None:
        return f"replay cuts it by {cut_by(k3, summary)}"
    return "nats per token"
