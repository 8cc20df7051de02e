"""The outcome of a run in two sentences: learning and crash, then whether the gap matters.

The summary in the terminal and the report begin with it. Its words for a gap are those of `measure`
and `audit` (verdict/rules.py).
"""

from __future__ import annotations

import math
import statistics

from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.notation import counted, number
from onepolicy.report.words import (
    FEWEST_PROBES,
    Compared,
    Tree,
    accuracy,
    compared,
    factor,
    hardly_differs,
    moved,
    too_small,
    unlearnt,
)
from onepolicy.verdict.rules import REPLAY_HELPS, SMALL, size_in_words

GAP = "the gap between rollout and trainer"


def outcome(summary: Tree) -> str:
    """Return the sentences for a summary.json; report/words.py lists its keys."""
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
    if name == "reward" and summary["steps"] == 1:
        return f"one step does not show whether the policy learns: {name} {number(first)}"
    curve = f"{name} {moved(first, last)}"
    if crash is not None:
        return f"{crashed}: {curve}"
    if name == "reward" and _in_noise(summary):
        steps = counted(summary["steps"], "step")
        return f"{steps} do not show whether the policy learns: {curve}, as single steps do too"
    sampled = _sampled(summary)
    if sampled is not None and (sampled[1] > sampled[0]) != (last > first):
        return f"{curve}, the sampled one {moved(*sampled)}"
    if hardly_differs(first, last):
        return f"the policy hardly changed: {curve}"
    if last > first:
        return f"the policy learnt: {curve}"
    return f"the policy got worse: {curve}"


def _in_noise(summary: Tree) -> bool:
    """Return whether the course of the reward is within two standard errors of none."""
    if "reward_error" not in summary:  # written by an earlier version
        return False
    error = summary["reward_error"]
    return error is None or abs(summary["reward_last"] - summary["reward_first"]) < 2 * error


def _sampled(summary: Tree) -> tuple[float, float] | None:
    """Return first and last sampled accuracy beside a greedy score, if they differ by two errors.

    Their standard errors are those of as many independent answers as there were.
    """
    ends = summary.get("sampled_first"), summary.get("sampled_last")
    if not ends[0] or not ends[1]:
        return None
    first, last = ends[0]["value"], ends[1]["value"]
    if hardly_differs(first, last):
        return None
    middle, answers = (first + last) / 2, summary.get("sampled_answers")
    if answers and abs(last - first) < 2 * math.sqrt(2 * max(0.0, middle * (1 - middle)) / answers):
        return None
    return first, last


def _course(summary: Tree) -> tuple[str, float, float] | None:
    """Return name, first and last value of the evaluations; of the rewards if there are none."""
    first, last = summary.get("eval_first"), summary.get("eval_last")
    if first is not None and last is not None and first["step"] < last["step"]:
        return accuracy(summary.get("score")), first["value"], last["value"]
    if summary.get("reward_first") is None or summary.get("reward_last") is None:
        return None
    return "reward", summary["reward_first"], summary["reward_last"]


def _gap(summary: Tree) -> str:
    k3 = next((entry for entry in compared(summary) if entry.metric == "mismatch/k3"), None)
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
    ends = f"from k3 {without} to {within} nats a token"
    if k3.without_replay <= REPLAY_HELPS * k3.with_replay:
        if k3.with_replay > REPLAY_HELPS * k3.without_replay:
            return f"{GAP} is larger with replay, {ends}{remaining}"
        return f"replay changed {GAP} little, {ends}{remaining}"
    return f"replay cut {GAP} {ends}{_in_bursts(summary)}{remaining}"


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
