"""The summary of a finished run, with its best step and, by a fixed rule, its crash step."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path
from typing import Any

from onepolicy.config import RunConfig
from onepolicy.config.stored_config import read_stored_config
from onepolicy.files import write_text_atomically
from onepolicy.report.jsonl import known, mean, read_metrics
from onepolicy.report.run_page import write_report
from onepolicy.report.run_summary import COMPARED
from onepolicy.run.learning_check import GROUPED, nothing_learnt
from onepolicy.run.run_folder import SUMMARY, read_parent

Row = dict[str, Any]

CRASH_DROP = 0.25
FEWEST_JUDGED = 4  # steps of which the noise of a reward is told
CRASH_RULE = (
    f"crash step: the first evaluation whose score is {CRASH_DROP} or more below the best score "
    f"before it, if no later one comes within {CRASH_DROP} of that best score again"
)
TIMES = (
    "rollout",
    "wait",
    "score",
    "score_saved",
    "counterfactual",
    "update",
    "sync",
    "step",
)


def write_summary(config: RunConfig, run: Path, parent: Row | None) -> Row:
    """Write summary.json and, if log.report asks for it, the report. Return the summary."""
    summary = summarise(config, read_metrics(run), run, parent)
    write_text_atomically(run / SUMMARY, json.dumps(summary, indent=1))
    if config.log.report:
        summary["report"] = str(write_report(run))
        write_text_atomically(run / SUMMARY, json.dumps(summary, indent=1))
    return summary


def write_report_so_far(run: Path) -> Path | None:
    """Write the report of a run that was stopped, and return its path.

    It gets no summary.json, which says that a run has finished. None if the run has finished, if no
    step has, or if log.report asks for no report.
    """
    config, rows = read_stored_config(run), read_metrics(run)
    steps = [int(row["step"]) for row in rows if "train/reward" in row]
    if not steps or not config.log.report:
        return None
    if steps[-1] == config.steps and has_summary(config, run):
        return None
    so_far = config.model_copy(update={"steps": steps[-1]})
    summary = summarise(so_far, rows, run, read_parent(run)) | {"planned": config.steps}
    return write_report(run, summary)


def has_summary(config: RunConfig, run: Path) -> bool:
    """Return whether the run has its summary and, if log.report asks for it, its report."""
    if not (run / SUMMARY).exists():
        return False
    return not config.log.report or (run / "report.html").exists()


def crash_step(scores: list[tuple[int, float]]) -> int | None:
    """Return the crash step by CRASH_RULE. `scores` are (step, score) in step order."""
    best, crash, line = float("-inf"), None, 0.0
    for step, score in scores:
        if crash is not None and score > line:
            crash = None
        if crash is None and score <= best - CRASH_DROP:
            crash, line = step, best - CRASH_DROP
        best = max(best, score)
    return crash


def score_name(config: RunConfig) -> str | None:
    """Return the metric that judges evaluations: greedy accuracy, else avg@k."""
    if not config.eval.every:
        return None
    if config.eval.greedy:
        return "eval/greedy"
    if config.eval.k:
        return f"eval/avg@{config.eval.k}"
    return None


def summarise(config: RunConfig, rows: list[Row], run: Path, parent: Row | None) -> Row:
    """Return the content of summary.json.

    `rows` are those of metrics.jsonl: one per training step, with the evaluation that followed it.
    """
    train = [row for row in rows if "train/reward" in row]
    window = max(1, min(5, len(train) // 2))
    ended = train[-window:]
    summary: Row = {
        "run": str(run),
        "parent": parent,
        "steps": config.steps,
        "replay": config.replay.mode,
        "correction": config.correction.name,
        "score": score_name(config),
        "reward_first": mean(known(train[:window], "train/reward")),
        "reward_last": mean(known(ended, "train/reward")),
        "reward_window": window,
        "reward_error": _error_of_difference(train, window),
    }
    summary |= _evaluations(config, rows)
    summary |= {
        "tokens_per_second": _tokens_per_second(train),
        "objective": config.objective.name,
        "time": {part: mean(known(train, f"time/{part}", 0.0)) or 0.0 for part in TIMES},
    }
    if config.rollout.pressure is not None:
        summary["pressure"] = config.rollout.pressure.describe()
    skipped = sum(row.get("train/updates_skipped") or 0.0 for row in train)
    if skipped:
        summary["updates_skipped"] = skipped
    if config.rollout.sampling.missing_support == "drop":
        summary["missing_supports"] = _dropped(train)
    if config.objective.baseline in GROUPED:
        summary["groups_without_signal"] = mean(known(ended, "train/groups_without_signal"))
    if config.rollout.max_staleness is not None:
        summary["asynchronous"] = _asynchronous(config.rollout.max_staleness, train)
    summary |= _mismatch(train)
    found = nothing_learnt(config, train, run)
    if found is not None:
        summary["nothing_learnt"] = found
    return summary


def _dropped(train: list[Row]) -> Row:
    """Return the attempts in which the engine returned no support, and the episodes that it cost.

    Episodes that tools or environments alone ended are not among them.
    """
    counts = {"attempts": "rollout/missing_supports", "dropped": "rollout/dropped_without_support"}
    return {name: sum(row.get(each) or 0 for row in train) for name, each in counts.items()}


def _evaluations(config: RunConfig, rows: list[Row]) -> Row:
    """Return the first, last and best evaluation, and the crash step."""
    scores = _scores(rows, score_name(config))
    first = last = best = None
    if scores:
        first, last = _point(scores[0]), _point(scores[-1])
        best = _point(max(scores, key=lambda score: score[1]))
    return {
        "eval_first": first,
        "eval_last": last,
        "eval_best": best,
        "eval_answers": config.eval.problems * (1 if config.eval.greedy else config.eval.k),
        "crash_step": crash_step(scores),
        "crash_rule": CRASH_RULE,
        **_sampled(config, rows),
    }


def _sampled(config: RunConfig, rows: list[Row]) -> Row:
    """Return the ends of the sampled accuracy where the greedy one is the score."""
    if not config.eval.greedy or not config.eval.k:
        return {}
    scores = _scores(rows, f"eval/avg@{config.eval.k}")
    if not scores:
        return {}
    return {
        "sampled_first": _point(scores[0]),
        "sampled_last": _point(scores[-1]),
        "sampled_answers": config.eval.problems * config.eval.k,
    }


def _scores(rows: list[Row], name: str | None) -> list[tuple[int, float]]:
    """Return (step, value) of every evaluation that has this metric."""
    if name is None:
        return []
    return [(int(row["step"]), float(row[name])) for row in rows if row.get(name) is not None]


def _mismatch(train: list[Row]) -> Row:
    """Return the mean mismatch, and its comparison with the scoring without replay."""
    probes = [row for row in train if f"counterfactual/{COMPARED[0]}" in row]
    pairs = [(row["counterfactual/mismatch/k3"], row.get("mismatch/k3")) for row in probes]
    cuts = [without / within for without, within in pairs if without is not None and within]
    return {
        "mismatch": {key: mean(known(train, key)) for key in COMPARED},
        "probe_steps": [int(row["step"]) for row in probes],
        "mismatch_at_probes": {key: mean(known(probes, key)) for key in COMPARED},
        "mismatch_without_replay": {
            key: mean(known(probes, f"counterfactual/{key}")) for key in COMPARED
        },
        "k3_cuts": sorted(cut for cut in cuts if math.isfinite(cut)),
    }


def _asynchronous(max_staleness: int, train: list[Row]) -> Row:
    """Return staleness in updates and busy fractions: means over steps, except staleness_max."""
    ages = [row.get("staleness/max") for row in train]
    return {
        "max_staleness": max_staleness,
        "staleness_mean": mean(known(train, "staleness/mean")),
        "staleness_max": max((age for age in ages if age is not None), default=None),
        "spanning": mean(known(train, "staleness/spanning")),
        "learner_busy": mean(known(train, "async/learner_busy")),
        "sampler_busy": mean(known(train, "async/sampler_busy")),
    }


def _tokens_per_second(train: list[Row]) -> float | None:
    """Return the tokens of all steps, those of prompts too, over their seconds."""
    seconds = [row.get("time/step") for row in train]
    rates = [row.get("train/tokens_per_second") for row in train]
    measured = [(rate, s) for rate, s in zip(rates, seconds, strict=True) if rate and s]
    if not measured:
        return None
    return sum(rate * s for rate, s in measured) / sum(s for _, s in measured)


def _point(score: tuple[int, float]) -> Row:
    return {"step": score[0], "value": score[1]}


def _error_of_difference(rows: list[Row], window: int) -> float | None:
    """Return the standard error of `reward_last` - `reward_first`, None for fewer than 4 steps.

    The noise of a step is half the mean square of successive differences (von Neumann, 1941): a
    slow rise does not count as noise.
    """
    rewards = known(rows, "train/reward")
    if len(rewards) < FEWEST_JUDGED:
        return None
    noise = statistics.fmean((b - a) ** 2 / 2 for a, b in itertools.pairwise(rewards))
    return math.sqrt(2 * noise / window)
