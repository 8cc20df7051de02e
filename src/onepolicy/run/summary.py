"""What a finished run is summed up as, including its best and (by a fixed rule) its crash step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from onepolicy.config import RunConfig
from onepolicy.run.learning_check import GROUPED, nothing_learnt

Row = dict[str, Any]

CRASH_DROP = 0.25
CRASH_RULE = (
    f"crash step: the first evaluation at which the score is {CRASH_DROP} or more below the best score before it, and "
    "after which it never comes back above that line"
)


def crash_step(scores: list[tuple[int, float]]) -> int | None:
    """`scores` are (step, score) in step order. See CRASH_RULE."""
    best, crash, line = float("-inf"), None, 0.0
    for step, score in scores:
        if crash is not None and score > line:
            crash = None
        if crash is None and score <= best - CRASH_DROP:
            crash, line = step, best - CRASH_DROP
        best = max(best, score)
    return crash


def score_name(config: RunConfig) -> str | None:
    """The metric evaluations are judged by: greedy accuracy, else avg@k."""
    if not config.eval.every or not (config.eval.greedy or config.eval.k):
        return None
    return "eval/greedy" if config.eval.greedy else f"eval/avg@{config.eval.k}"


def summarise(config: RunConfig, rows: list[Row], run: Path, parent: Row | None) -> Row:
    """`rows` are those of metrics.jsonl: one per training step, evaluations under the step they followed."""
    train = [row for row in rows if "train/reward" in row]
    name = score_name(config)
    scores = (
        [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]
        if name
        else []
    )
    best = max(scores, key=lambda s: s[1], default=None)
    window = max(1, min(5, len(train) // 2))
    summary: Row = {
        "run": str(run),
        "parent": parent,
        "steps": config.steps,
        "replay": config.replay.mode,
        "correction": config.correction.name,
        "score": name,
        "reward_first": _mean(train[:window], "train/reward"),
        "reward_last": _mean(train[-window:], "train/reward"),
        "reward_window": window,
        "eval_first": _point(scores[0]) if scores else None,
        "eval_last": _point(scores[-1]) if scores else None,
        "eval_best": _point(best) if best else None,
        "crash_step": crash_step(scores),
        "crash_rule": CRASH_RULE,
        "tokens_per_second": _mean(train, "train/tokens_per_second"),
        "objective": config.objective.name,
        "time": {
            key: _mean(train, f"time/{key}", absent=0.0)
            for key in (
                "rollout",
                "wait",
                "score",
                "score_saved",
                "counterfactual",
                "update",
                "sync",
                "step",
            )
        },
    }
    if skipped := sum(row.get("train/updates_skipped") or 0.0 for row in train):
        summary["updates_skipped"] = skipped
    if config.objective.baseline in GROUPED:
        summary["groups_without_signal"] = _mean(train[-window:], "train/groups_without_signal")
    if config.rollout.max_staleness is not None:
        summary["asynchronous"] = _asynchronous(config.rollout.max_staleness, train)
    measured = (
        "mismatch/k3",
        "mismatch/f2",
        "routing/routers",
        "routing/tokens",
        "routing/sequence",
    )
    summary["mismatch"] = {key: _mean(train, key) for key in measured}
    probes = [row for row in train if f"counterfactual/{measured[0]}" in row]
    summary["probe_steps"] = [int(row["step"]) for row in probes]
    summary["mismatch_at_probes"] = {key: _mean(probes, key) for key in measured}
    summary["mismatch_without_replay"] = {
        key: _mean(probes, f"counterfactual/{key}") for key in measured
    }
    pairs = [(row["counterfactual/mismatch/k3"], row.get("mismatch/k3")) for row in probes]
    cuts = [without / within for without, within in pairs if without is not None and within]
    summary["k3_cuts"] = sorted(cut for cut in cuts if math.isfinite(cut))
    if (found := nothing_learnt(config, train, run)) is not None:
        summary["nothing_learnt"] = found
    return summary


def _asynchronous(max_staleness: int, train: list[Row]) -> Row:
    """Staleness in updates, the rest shares; means over steps but for the oldest token."""
    return {
        "max_staleness": max_staleness,
        "staleness_mean": _mean(train, "staleness/mean"),
        "staleness_max": max(
            (age for row in train if (age := row.get("staleness/max")) is not None), default=None
        ),
        "spanning": _mean(train, "staleness/spanning"),
        "learner_busy": _mean(train, "async/learner_busy"),
        "sampler_busy": _mean(train, "async/sampler_busy"),
    }


def _point(score: tuple[int, float]) -> Row:
    return {"step": score[0], "value": score[1]}


def _mean(rows: list[Row], key: str, absent: float | None = None) -> float | None:
    """Mean over the rows that have the key; with `absent`, over all rows, which count as that where they lack it.

    None if a float cannot hold it, which only a damaged file can bring about.
    """
    values = [row.get(key, absent) for row in rows]
    present = [float(value) for value in values if value is not None]
    if not present:
        return absent
    mean = sum(present) / len(present)
    return mean if math.isfinite(mean) else None
