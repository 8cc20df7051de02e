"""A check that the rewards of a run taught something, with likely causes if they did not.

A run whose rewards never differ ends without an error and with exit status 0. So a message says so
while the run goes on, and again in its summary and at the top of its report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from onepolicy.config import RunConfig
from onepolicy.notation import counted, number
from onepolicy.objective.advantages import equal_up_to_rounding
from onepolicy.report.jsonl import known, mean, read_metrics

Row = dict[str, Any]

GROUPED = ("group", "leave-one-out")
"""Baselines that compare an answer only with the others of its group."""
LITTLE = 0.9
"""Fraction of steps without a signal, from which on the summary reports it."""
COMMON = 0.5
"""Fraction of answers with something in common, from which on it is named as a cause."""
LOW_ENTROPY = 0.05
"""Entropy below which the samples of a group are mostly the same text [nats]."""
EXCERPT = 200
"""Length of the quoted text of a sample [characters]."""
PATIENCE = 3
"""Steps without any signal at the start of a run, after which the run reports it [steps]."""
MAX_SCANNED_LINES = 10_000
"""Lines of samples.jsonl that are searched for a sample of a step without a signal."""


def nothing_learnt(config: RunConfig, rows: Iterable[Row], run: Path) -> Row | None:
    """Return {learnt, verdict, why, silent, steps} if the rewards taught nothing, or little.

    None if they did teach something, or if the metrics are incomplete. `learnt` is "nothing" or
    "little". A step is silent if its rewards do not tell apart any two answers that the objective
    compares. rows: of metrics.jsonl.
    """
    train = [row for row in rows if known([row], "train/reward")]
    silent = _silent_steps(config, train)
    if silent is None or not train:
        return None
    counts = {"silent": len(silent), "steps": len(train)}
    if len(silent) >= LITTLE * len(train):
        why = [*_causes(config, silent), _samples_hint(run, {row["step"] for row in silent})]
        learnt = "little"
        if len(silent) == len(train):
            learnt = "nothing"
            why.insert(0, _source_of_gradient(config, train))
        verdict = _no_signal_verdict(config, len(silent), len(train))
        return _result(learnt, verdict, [text for text in why if text], counts)
    no_update = _no_update(train)
    if no_update is not None:
        cause, hint = no_update
        return _result("nothing", f"Nothing was learnt: {cause}", [hint], counts)
    return None


def _result(learnt: str, verdict: str, why: list[str], counts: Row) -> Row:
    return {"learnt": learnt, "verdict": verdict, "why": why, **counts}


# --- steps without a signal -----------------------------------------------------------------------


def _silent_steps(config: RunConfig, train: list[Row]) -> list[Row] | None:
    """Return the rows of silent steps. None if a row lacks the metrics for it."""
    objective = config.objective
    if objective.baseline in GROUPED:
        fractions = known(train, "train/groups_without_signal")
        if len(fractions) < len(train):
            return None
        return [row for row, fraction in zip(train, fractions, strict=True) if fraction >= 1]
    lows, highs = known(train, "train/reward_min"), known(train, "train/reward_max")
    if len(lows) < len(train) or len(highs) < len(train) or not train:
        return None
    if objective.baseline == "none" and objective.normalise == "global":
        ranges = zip(train, lows, highs, strict=True)
        return [row for row, low, high in ranges if _same(low, high)]
    if _same(min(lows), max(highs)):  # a critic compares the rewards of all steps
        return train
    return []


def _no_signal_verdict(config: RunConfig, silent: int, steps: int) -> str:
    no_difference = "no two answers had different rewards"
    if config.objective.baseline in GROUPED:
        no_difference = "no group had two different rewards"
    if silent < steps:
        return f"Little was learnt from rewards: {no_difference} in {silent} of {steps} steps."
    when = f"in any of {steps} steps"
    if steps == 1:
        when = "in the only step"
    return f"Nothing was learnt from rewards: {no_difference} {when}."


def _source_of_gradient(config: RunConfig, train: list[Row]) -> str:
    """Return a sentence on the gradient that there was although rewards gave none."""
    norms = known(train, "train/grad_norm")
    if not norms:
        return ""
    objective = config.objective
    if max(norms) == 0:
        moved = "no weight moved"
        if config.optim.weight_decay:
            moved = "only weight decay moved the weights"
        return f"The gradient was exactly 0: {moved}."
    coefficients = {
        "the entropy bonus": objective.entropy_coef,
        "the KL to the reference": objective.kl.coef,
        "the penalty on overlong answers": objective.overlong_buffer,
    }
    active = " and ".join(name for name, coefficient in coefficients.items() if coefficient)
    source = "did not come from rewards that tell answers apart"
    if active:
        source = f"came from {active}"
    return (
        f"The gradient that there was (norm up to {number(max(norms))}) {source}: the policy "
        "moved, but not towards better answers."
    )


# --- rewards that differed, without an update -----------------------------------------------------


def _no_update(train: list[Row]) -> tuple[str, str] | None:
    """Return cause and hint if rewards differed, but no weight moved."""
    norms = known(train, "train/grad_norm")
    if norms and max(norms) == 0 and len(norms) == len(train):
        hint = "Look at correction/rejected and train/clip_high in metrics.jsonl."
        rejected = mean(known(train, "correction/rejected"))
        if rejected is not None:
            hint += f" The correction left {rejected:.0%} of the tokens out of the loss."
        when = f"in all {len(norms)} steps"
        if len(norms) == 1:
            when = "in the only step"
        cause = f"the gradient was exactly 0 {when}, though rewards differed."
        return cause, hint
    skipped = known(train, "train/updates_skipped")
    if not norms and len(skipped) == len(train) and all(skipped):
        cause = (
            f"no update was made in {counted(len(train), 'step')}: no gradient was finite "
            "(optim.max_skipped)."
        )
        return cause, "Fork from an earlier checkpoint with a lower optim.lr."
    return None


# --- causes ---------------------------------------------------------------------------------------


def _causes(config: RunConfig, silent: list[Row]) -> list[str]:
    """Return the usual causes that the metrics of silent steps point to, the surest first."""
    causes, sampling = [], config.rollout.sampling
    cut = mean(known(silent, "train/cut_by_length"))
    if cut is not None and cut >= COMMON:
        causes.append(
            f"{cut:.0%} of the answers were cut at the length limit (rollout.sampling.max_tokens = "
            f"{sampling.max_tokens}): raise it, or let the prompt ask for shorter answers."
        )
    malformed = mean(known(silent, "tools/malformed", 0.0))
    if malformed is not None and malformed >= COMMON:
        causes.append(
            f"{number(malformed)} turns per episode named no tool and no answer (tools/malformed)."
        )
    causes.append(_cause_in_rewards(config, silent))
    entropy = mean(known(silent, "train/entropy"))
    if entropy is not None and entropy < LOW_ENTROPY:
        causes.append(
            f"The policy is almost certain of every token (entropy {number(entropy)} nats), so "
            "answers to one problem are mostly the same text: raise rollout.sampling.temperature "
            f"({sampling.temperature:g})."
        )
    return causes


def _cause_in_rewards(config: RunConfig, silent: list[Row]) -> str:
    names = ("train/reward_min", "train/reward_max", "train/reward")
    values = [value for name in names for value in known(silent, name)]
    least, most = min(values), max(values)
    if not _same(least, most):
        return (
            "Rewards differ between problems or steps, but not between the answers that are "
            "compared: take problems that are solved now and then, or more answers to each "
            f"(rollout.group_size = {config.rollout.group_size})."
        )
    if _same(most, 0.0):
        keys = ("grader", "answer_prefix")
        section, task = "task", config.task
        if not hasattr(task, "grader") and hasattr(task, "problems"):
            section, task = "task.problems", task.problems
        settings = ", ".join(f"{section}.{key}" for key in keys if hasattr(task, key))
        return (
            "Every reward is 0: no answer was right, or the grader found none in the text. Compare "
            "the text with the right answer and with the grader's settings "
            f"({settings or 'the section task'}). If they fit, take easier problems."
        )
    if most >= getattr(config.task, "threshold", 1.0):
        return (
            f"Every reward is {most:g}: the task is too easy for this policy, or solved; take "
            "harder problems."
        )
    return (
        f"Every reward is {most:g}: the grader gives all answers the same; check the text that it "
        "reads."
    )


def _samples_hint(run: Path, steps: set[int]) -> str:
    """Return a sentence that quotes the first sample of these steps."""
    sample = _first_sample(run / "samples.jsonl", steps)
    if sample is None:
        return (
            "Look at the answers: set log.samples_per_step above 0, and they are in samples.jsonl."
        )
    text, answer = _excerpt(sample.get("response")), _excerpt(sample.get("answer"))
    hint = f"Look at samples.jsonl. Its first of these, of step {sample['step']}, reads `{text}`."
    if answer:
        hint += f" The right answer is `{answer}`."
    return hint


def _first_sample(path: Path, steps: set[int]) -> Row | None:
    """Return the first sample of these steps. Damaged lines are skipped."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for _, line in zip(range(MAX_SCANNED_LINES), lines, strict=False):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and row.get("step") in steps:
                return row
    return None


def _excerpt(text: object) -> str:
    """Return the start of the text on one line, without control characters."""
    if text is None:
        return ""
    start = str(text)[: 4 * EXCERPT]
    clean = "".join(_printable_or_space(character) for character in start)
    line = " ".join(clean.split())
    if len(line) <= EXCERPT:
        return line
    return f"{line[:EXCERPT]}..."


def _printable_or_space(character: str) -> str:
    if character.isprintable():
        return character
    return " "


def _same(low: float, high: float) -> bool:
    least = torch.tensor(low, dtype=torch.float64)
    most = torch.tensor(high, dtype=torch.float64)
    return bool(equal_up_to_rounding(least, most))


# --- while a run goes on --------------------------------------------------------------------------


class LearningMonitor:
    """A check during the run. It reports once that the first steps had nothing to learn from."""

    def __init__(self, config: RunConfig, run: Path, note: Callable[[str], None]) -> None:
        self._config, self._run, self._note = config, run, note
        self._rows: list[Row] = []
        if (run / "metrics.jsonl").exists():
            self._rows = read_metrics(run)
        self._done = False

    def after_step(self, step: int, metrics: Row) -> None:
        """Check a training step, whose samples are written already."""
        if self._done:
            return
        self._rows.append({"step": step, **metrics})
        if sum("train/reward" in row for row in self._rows) < PATIENCE:
            return
        self._done = True
        found = nothing_learnt(self._config, self._rows, self._run)
        if found is not None and found["learnt"] == "nothing":
            warning = f"warning, after step {step}: {found['verdict']}"
            self._note("\n".join([warning, *found["why"], "The run goes on."]))
