"""Did the rewards of a run teach anything? If not: what its metrics point to, in words for people.

A run whose rewards never differ ends without an error and with exit status 0. So it is said while it runs, in its
summary and at the top of its report.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from onepolicy.config import RunConfig
from onepolicy.objective.advantages import equal_up_to_rounding
from onepolicy.run.log import read_metrics

Row = dict[str, Any]

GROUPED = ("group", "leave-one-out")
"""Baselines that compare the answers of one group with each other only."""
PATIENCE = 3
"""Steps from the start without any signal, after which a run says so [steps]."""
MOST = 0.9
"""Share of a run's steps without a signal, from which on its summary says so."""
MANY = 0.5
"""Share of answers from which on what they have in common is named as a cause."""
CERTAIN = 0.05
"""Entropy below which the samples of a group are mostly the same text [nats]."""
EXCERPT = 200
"""Of a sample's text [characters]."""
SCANNED = 10_000
"""Lines of samples.jsonl that are looked through for one of a step without a signal."""


def nothing_learnt(config: RunConfig, rows: Iterable[Row], run: Path) -> Row | None:
    """{learnt, verdict, why, silent, steps} if the rewards taught `nothing` or `little`; None if they did, or if
    the metrics do not say.

    rows: of metrics.jsonl. A step is silent if its rewards tell no two answers apart that the objective compares.
    """
    train = [row for row in rows if _number(row, "train/reward") is not None]
    silent = _silent(config, train)
    if silent is None or not train:
        return None
    counts = {"silent": len(silent), "steps": len(train)}
    if len(silent) >= MOST * len(train):
        learnt = "nothing" if len(silent) == len(train) else "little"
        why = [_gradient(config, train)] if learnt == "nothing" else []
        why += [*_causes(config, silent), _look(run, {row["step"] for row in silent})]
        verdict = _no_signal(config, *counts.values())
        return {
            "learnt": learnt,
            "verdict": verdict,
            "why": [text for text in why if text],
            **counts,
        }
    still = _no_update(train)
    if still is not None:
        return {
            "learnt": "nothing",
            "verdict": f"Nothing was learnt: {still[0]}",
            "why": [still[1]],
            **counts,
        }
    return None


class LearningMonitor:
    """Says once, while a run goes on, that its first steps had nothing to learn from."""

    def __init__(self, config: RunConfig, run: Path, say: Callable[[str], None]) -> None:
        self._config, self._run, self._say = config, run, say
        self._rows = read_metrics(run) if (run / "metrics.jsonl").exists() else []
        self._done = False

    def after_step(self, step: int, metrics: Row) -> None:
        """Of every training step, with its metrics, when its samples are written."""
        if self._done:
            return
        self._rows.append({"step": step, **metrics})
        if sum("train/reward" in row for row in self._rows) < PATIENCE:
            return
        self._done = True
        found = nothing_learnt(self._config, self._rows, self._run)
        if found is not None and found["learnt"] == "nothing":
            self._say(
                "\n".join(
                    [
                        f"warning, after step {step}: {found['verdict']}",
                        *found["why"],
                        "The run goes on.",
                    ]
                )
            )


def _silent(config: RunConfig, train: list[Row]) -> list[Row] | None:
    """The steps whose rewards tell nothing; None if their metrics do not say."""
    objective = config.objective
    if objective.baseline in GROUPED:
        shares = [_number(row, "train/groups_without_signal") for row in train]
        known = [share for share in shares if share is not None]
        if len(known) < len(train):
            return None
        return [row for row, share in zip(train, known, strict=True) if share >= 1]
    ranges = [(_number(row, "train/reward_min"), _number(row, "train/reward_max")) for row in train]
    found = [(low, high) for low, high in ranges if low is not None and high is not None]
    if len(found) < len(train) or not found:
        return None
    if objective.baseline == "none" and objective.normalise == "global":
        return [row for row, (low, high) in zip(train, found, strict=True) if _same(low, high)]
    least, most = min(low for low, _ in found), max(high for _, high in found)
    return train if _same(least, most) else []  # a critic compares those of all steps


def _no_signal(config: RunConfig, silent: int, steps: int) -> str:
    grouped = config.objective.baseline in GROUPED
    differ = "a group had two different rewards" if grouped else "two answers had different rewards"
    if silent < steps:
        return f"Little was learnt from rewards: {_no(differ)} in {silent} of {steps} steps."
    every = "in the only step" if steps == 1 else f"in any of {steps} steps"
    return f"Nothing was learnt from rewards: {_no(differ)} {every}."


def _no(differ: str) -> str:
    return differ.replace("a group", "no group").replace("two answers", "no two answers")


def _gradient(config: RunConfig, train: list[Row]) -> str:
    """Rewards are not all that a gradient can come from."""
    norms = [norm for row in train if (norm := _number(row, "train/grad_norm")) is not None]
    if not norms:
        return ""
    objective = config.objective
    if max(norms) == 0:
        moved = (
            "only weight decay moved the weights"
            if config.optim.weight_decay
            else "no weight moved"
        )
        return f"The gradient was exactly 0: {moved}."
    terms = {
        "the entropy bonus": objective.entropy_coef,
        "the KL to the reference": objective.kl.coef,
        "the penalty on overlong answers": objective.overlong_buffer,
    }
    others = " and ".join(name for name, weight in terms.items() if weight)
    source = (
        f"came from {others}" if others else "did not come from rewards that tell answers apart"
    )
    return (
        f"The gradient that there was (norm up to {max(norms):.2g}) {source}: the policy moved, but not towards "
        "better answers."
    )


def _no_update(train: list[Row]) -> tuple[str, str] | None:
    """Rewards differed, and the weights stayed all the same."""
    norms = [_number(row, "train/grad_norm") for row in train]
    known = [norm for norm in norms if norm is not None]
    if known and max(known) == 0 and len(known) == len(norms):
        rejected = _mean(train, "correction/rejected")
        kept = (
            ""
            if rejected is None
            else f" The correction left {rejected:.0%} of the tokens out of the loss."
        )
        return f"the gradient was exactly 0 in all {len(norms)} steps, though rewards differed.", (
            f"Look at correction/rejected and train/clip_high in metrics.jsonl.{kept}"
        )
    if not known and all(_number(row, "train/updates_skipped") for row in train):
        return (
            f"no update was made in {len(norms)} steps: no gradient was finite (optim.max_skipped).",
            ("Fork from an earlier checkpoint with a lower optim.lr."),
        )
    return None


def _causes(config: RunConfig, silent: list[Row]) -> list[str]:
    """Which of the usual causes the metrics of these steps point to, the surest first."""
    out, sampling = [], config.rollout.sampling
    cut, entropy = _mean(silent, "train/cut_by_length"), _mean(silent, "train/entropy")
    malformed = _mean(silent, "tools/malformed")
    if cut is not None and cut >= MANY:
        out.append(
            f"{cut:.0%} of the answers were cut at the length limit (rollout.sampling.max_tokens = "
            f"{sampling.max_tokens}): raise it, or let the prompt ask for shorter answers."
        )
    if malformed is not None and malformed >= MANY:
        out.append(
            f"{malformed:.2g} turns per episode named no tool and no answer (tools/malformed)."
        )
    out.append(_of_rewards(config, silent))
    if entropy is not None and entropy < CERTAIN:
        out.append(
            f"The policy is almost certain of every token (entropy {entropy:.2g} nats), so answers to one problem are "
            f"mostly the same text: raise rollout.sampling.temperature ({sampling.temperature:g})."
        )
    return [text for text in out if text]


def _of_rewards(config: RunConfig, silent: list[Row]) -> str:
    lows, highs = (
        [_number(row, name) for row in silent] for name in ("train/reward_min", "train/reward_max")
    )
    means = [_number(row, "train/reward") for row in silent]
    values = [value for value in (*lows, *highs, *means) if value is not None]
    least, most = min(values), max(values)
    if not _same(least, most):
        where = "between problems or steps, but not between the answers that are compared"
        return (
            f"Rewards differ {where}: take problems that are solved now and then, or more answers to each "
            f"(rollout.group_size = {config.rollout.group_size})."
        )
    if _same(most, 0.0):
        names = [
            f"task.{name}" for name in ("grader", "answer_prefix") if hasattr(config.task, name)
        ]
        where = ", ".join(names) or "the task's settings"
        return (
            "Every reward is 0: no answer was right, or the grader found none in the text. Compare the text with the "
            f"right answer and with what the grader reads ({where}); if they fit, take easier problems."
        )
    if most >= getattr(config.task, "threshold", 1.0):
        return f"Every reward is {most:g}: the task is too easy for this policy, or solved; take harder problems."
    return (
        f"Every reward is {most:g}: the grader gives all answers the same; look at what it reads."
    )


def _look(run: Path, steps: set[int]) -> str:
    sample = _first_sample(run / "samples.jsonl", steps)
    if sample is None:
        return (
            "Look at the answers: set log.samples_per_step above 0, and they are in samples.jsonl."
        )
    text, answer = _excerpt(sample.get("response")), _excerpt(sample.get("answer"))
    right = f" The right answer is `{answer}`." if answer else ""
    return f"Look at samples.jsonl. Its first of these, of step {sample['step']}, reads `{text}`.{right}"


def _first_sample(path: Path, steps: set[int]) -> Row | None:
    """Of the first of these steps that has one; lines that are damaged are passed over."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as lines:
        for _, line in zip(range(SCANNED), lines, strict=False):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and row.get("step") in steps:
                return row
    return None


def _excerpt(text: object) -> str:
    """On one line, with nothing in it that a terminal obeys."""
    clean = "".join(
        c if c.isprintable() else " " for c in str("" if text is None else text)[: 4 * EXCERPT]
    )
    line = " ".join(clean.split())
    return line if len(line) <= EXCERPT else f"{line[:EXCERPT]}..."


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)


def _mean(rows: list[Row], name: str) -> float | None:
    values = [value for row in rows if (value := _number(row, name)) is not None]
    return sum(values) / len(values) if values else None


def _same(low: float, high: float) -> bool:
    return bool(
        equal_up_to_rounding(
            torch.tensor(low, dtype=torch.float64), torch.tensor(high, dtype=torch.float64)
        )
    )
