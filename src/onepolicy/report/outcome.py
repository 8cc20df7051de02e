"""What came of a run, in one sentence: did the policy learn, did it crash, does the gap matter? The summary in the
terminal and the report begin with it. Its words for a gap are those of `measure` and `audit` (verdict/rules.py)."""

from __future__ import annotations

import statistics

from onepolicy.config.objective import ROLLOUT_ROUTES
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
"""Of a reward or score from first to last, in shares of the larger of both and 1: less is called no change."""
GAP = "the gap between rollout and trainer"


def outcome(summary: Tree) -> str:
    """Of summary.json; its keys are in report/words.py."""
    said = [text for text in (_learning(summary), _gap(summary)) if text]
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


def failed(summary: Tree) -> bool:
    """Did it crash, or learn nothing or little?"""
    return unlearnt(summary) is not None or summary.get("crash_step") is not None


def _learning(summary: Tree) -> str:
    idle = unlearnt(summary)
    if idle is not None:
        return idle.verdict.removesuffix(".")
    course = _course(summary)
    crash = summary.get("crash_step")
    if course is None:
        return "" if crash is None else f"the policy crashed at step {crash}"
    name, first, last = course
    change = last - first
    moved = abs(change) >= LEAST_CHANGE * max(1.0, abs(first), abs(last))
    verb = "stayed" if not moved else "rose" if change > 0 else "fell"
    told = (
        f"{name} {verb} from {number(first)} to {number(last)}"
        if moved
        else f"{name} stayed near {number(last)}"
    )
    if crash is not None:
        return f"the policy crashed at step {crash}: {told}"
    judged = (
        "it did not crash"
        if summary.get("eval_best") is not None
        else "no evaluation looked for a crash"
    )
    if not moved:
        return f"the policy hardly changed: {told}, and {judged}"
    result = "the policy learnt" if change > 0 else "the policy got worse"
    return f"{result}: {told}, and {judged}"


def _course(summary: Tree) -> tuple[str, float, float] | None:
    """(what, first, last) of the evaluations, or of the rewards of training where there are less than two."""
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
    if too_small(k3):
        shown = f"{without} without replay, {within} with" if both else _as_trained(k3, summary)
        return f"{GAP} is {SMALL} (k3 {shown})"
    if not both:
        return f"{GAP} is k3 {_as_trained(k3, summary)}{_size(k3.trained, summary, 'mismatch')}"
    left = _size(k3.with_replay, summary, "mismatch_at_probes")
    cut = cut_by(k3, summary)
    by = f", by {cut}" if cut and k3.ratio is not None and k3.ratio >= 1 else ""
    if not _helps(k3, summary):
        return f"replay changed {GAP} little, k3 {without} to {within} nats a token{by}{left}"
    return f"replay cut {GAP} from k3 {without} to {within} nats a token{by}{left}"


def _as_trained(k3: Compared, summary: Tree) -> str:
    replayed = "with" if summary.get("replay") in ROLLOUT_ROUTES else "without"
    return f"{number(k3.trained)} {replayed} replay"


def _helps(k3: Compared, summary: Tree) -> bool:
    """By the rule on which `measure` recommends replay; in the middle one of several probes."""
    cuts = summary.get("k3_cuts") or []
    if len(cuts) >= FEWEST_PROBES:
        return statistics.median(cuts) > REPLAY_HELPS
    assert k3.without_replay is not None
    assert k3.with_replay is not None
    return k3.without_replay > REPLAY_HELPS * k3.with_replay


def _size(k3: float | None, summary: Tree, scoring: str) -> str:
    """scoring: the key of the summary under which F(2) of the same tokens is."""
    if k3 is None:
        return ""
    size = size_in_words(k3, summary[scoring].get("mismatch/f2") or 0.0)
    return (
        f", {size}"
        if size
        else ", more than dense models train well with (see `onepolicy measure`)"
    )
