"""The outcome of a run in one sentence: learning, crash, and whether the gap matters.

The summary in the terminal and the report begin with it. Its words for a gap are those of `measure`
and `audit` (verdict/rules.py).
"""

from __future__ import annotations

import statistics

from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.report.words import (
    FEWEST_PROBES,
    Compared,
    Tree,
    compared,
    cut_by,
    number,
    too_small,
    unlearnt,
)
from onepolicy.verdict.rules import REPLAY_HELPS, SMALL, size_in_words

LEAST_CHANGE = 0.02
"""Smallest change of a reward or score, as a share of the larger of first, last and 1."""
GAP = "the gap between rollout and trainer"


def outcome(summary: Tree) -> str:
    """Return the sentence for a summary.json; report/words.py lists its keys."""
    sentence = "; ".join(text for text in (_learning(summary), _gap(summary)) if text)
    return f"{sentence[0].upper()}{sentence[1:]}."


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
    change = last - first
    if not abs(change) >= LEAST_CHANGE * max(1.0, abs(first), abs(last)):  # also if it is NaN
        result, curve = "the policy hardly changed", f"{name} stayed near {number(last)}"
    elif change > 0:
        result, curve = "the policy learnt", f"{name} rose from {number(first)} to {number(last)}"
    else:
        result, curve = (
            "the policy got worse",
            f"{name} fell from {number(first)} to {number(last)}",
        )
    if crash is not None:
        return f"{crashed}: {curve}"
    if summary.get("eval_best") is None:
        return f"{result}: {curve}, and no evaluation looked for a crash"
    return f"{result}: {curve}, and it did not crash"


def _course(summary: Tree) -> tuple[str, float, float] | None:
    """Return name, first and last value of the evaluations; of the rewards if there are none."""
    first, last = summary.get("eval_first"), summary.get("eval_last")
    if first is not None and last is not None and first["step"] < last["step"]:
        name = (summary.get("score") or "score").removeprefix("eval/")
        return f"held-out {name}", first["value"], last["value"]
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
    cut, by = cut_by(k3, summary), ""
    if cut and k3.ratio is not None and k3.ratio >= 1:
        by = f", by {cut}"
    if not _helps(k3, summary):
        return f"replay changed {GAP} little, k3 {without} to {within} nats a token{by}{remaining}"
    return f"replay cut {GAP} from k3 {without} to {within} nats a token{by}{remaining}"


def _as_trained(k3: Compared, summary: Tree) -> str:
    if summary.get("replay") in ROLLOUT_MODES:
        return f"{number(k3.trained)} with replay"
    return f"{number(k3.trained)} without replay"


def _helps(k3: Compared, summary: Tree) -> bool:
    """Return whether replay helps by the rule of `measure`, for the median of several probes."""
    cuts = summary.get("k3_cuts") or []
    if len(cuts) >= FEWEST_PROBES:
        return statistics.median(cuts) > REPLAY_HELPS
    assert k3.without_replay is not None
    assert k3.with_replay is not None
    return k3.without_replay > REPLAY_HELPS * k3.with_replay


def _size(k3: float | None, summary: Tree, scoring: str) -> str:
    """Describe the size of a gap. `scoring` is the summary's key with F(2) of the same tokens."""
    if k3 is None:
        return ""
    size = size_in_words(k3, summary[scoring].get("mismatch/f2") or 0.0)
    if not size:
        return ", more than dense models train well with (see `onepolicy measure`)"
    return f", {size}"
