"""The page of a run, RUN/report.html: one file that needs no network, server or other file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onepolicy.config.secrets import without_secrets
from onepolicy.files import write_text_atomically
from onepolicy.notation import counted, number
from onepolicy.report.figure import Absent, Figure
from onepolicy.report.learning import learning_figures, time_split
from onepolicy.report.mismatch import mismatch_figures, staleness_figures
from onepolicy.report.outcome import failed, outcome
from onepolicy.report.page import FOOTER, macro, plain, render
from onepolicy.report.routing import routing_figures
from onepolicy.report.run import Run, Tree, load_run
from onepolicy.report.turns import turn_figures
from onepolicy.report.words import (
    SMALL,
    Compared,
    accuracy,
    compared,
    comparison_table,
    cut_by,
    time_shares,
    too_small,
    unlearnt,
    verdict,
)

__all__ = ["document", "plain", "section", "tile", "write_report"]

SHOWN_SAMPLES = 8


def write_report(run: Path, summary: Tree | None = None) -> Path:
    """Write RUN/report.html.

    summary: in place of summary.json, which only a finished run has. Raises UsageError if a
    required file is missing or corrupt, or plotly is not installed.
    """
    loaded = load_run(run, summary)
    sections: list[tuple[str, str, list[Figure | Absent]]] = [
        ("Learning", "Does it learn, and how healthily?", learning_figures(loaded)),
        (
            "Mismatch",
            "How far apart are the engine that samples and the one that learns?",
            mismatch_figures(loaded) + turn_figures(loaded),
        ),
        ("Routing", "Where do the two choose different experts?", routing_figures(loaded)),
        ("Time", "Where does a step's time go?", [time_split(loaded)]),
    ]
    overlap = staleness_figures(loaded)
    if overlap:
        question = "How old are the tokens that are trained on, and does the overlap pay?"
        sections.insert(2, ("Staleness", question, overlap))
    *story, replay = verdict(loaded.summary)
    header, rows = comparison_table(loaded.summary)
    idle, why = unlearnt(loaded.summary), []
    if idle is not None:
        why.append(" ".join(idle.why))
    shown = loaded.samples[: -SHOWN_SAMPLES - 1 : -1]
    page = render(
        "run.html",
        f"{run.resolve().name}: run report",
        [f for _, _, items in sections for f in items if isinstance(f, Figure)],
        name=run.resolve().name,
        facts=_facts(loaded),
        tiles=_tiles(loaded),
        pressure=loaded.summary.get("pressure"),
        outcome=outcome(loaded.summary),
        failed=failed(loaded.summary),
        sentences=[*why, " ".join(story), replay],
        rules=_rules(loaded.summary),
        header=header,
        rows=rows,
        sections=sections,
        samples=[_shown(sample) for sample in shown],
        answers=any("answer" in sample for sample in shown),
        config=json.dumps(without_secrets(loaded.config), indent=2, ensure_ascii=False),
        info=json.dumps(loaded.info, indent=2, ensure_ascii=False),
    )
    return write_text_atomically(run / "report.html", page)


def document(title: str, body: str, figures: list[Figure], *, footer: str = FOOTER) -> str:
    """Return a page around `body`, which is HTML."""
    return render("body.html", title, figures, footer=footer, body=body)


def section(title: str, question: str, items: list[Figure | Absent]) -> str:
    """Return the HTML of a section of figures."""
    return macro("section", title, question, items)


def tile(name: str, value: str, more: str, kind: str) -> str:
    """Return the HTML of a tile."""
    return macro("tile", name, value, more, kind)


def _rules(summary: Tree) -> list[str]:
    """Return the definitions of the numbers in the tiles."""
    rules, window, rule = [], summary.get("reward_window"), summary.get("crash_rule")
    if window:
        rules.append(f"Reward: means of {counted(window, 'step')} at the start and at the end.")
    if rule and summary.get("crash_step") is not None:
        rules.append(f"{rule[0].upper()}{rule[1:]}.")
    return rules


def _facts(run: Run) -> list[tuple[str, str]]:
    config = run.config
    task = config.get("task", {})
    preset = config.get("correction", {}).get("preset") or "custom"
    correction = str(run.summary.get("correction") or preset)
    wanted = {
        "model": config.get("model", {}).get("path"),
        "task": " ".join(str(task[key]) for key in ("kind", "name", "path") if task.get(key)),
        "replay": config.get("replay", {}).get("mode"),
        "max_staleness": config.get("rollout", {}).get("max_staleness"),
        "correction": {"recompute": "none (recompute)"}.get(correction, correction),
        "engine dtype": config.get("rollout", {}).get("engine", {}).get("dtype"),
        "trainer dtype": config.get("model", {}).get("dtype"),
        "learning rate": config.get("optim", {}).get("lr"),
        "seed": config.get("seed"),
        "started": run.info.get("started"),
    }
    if "planned" in run.summary:
        wanted["stopped"] = f"after step {run.summary['steps']} of {run.summary['planned']}"
    return [(key, str(value)) for key, value in wanted.items() if value not in (None, "")]


Tile = tuple[str, str, str, str]  # name, value, small print, class


def _tiles(run: Run) -> list[Tile]:
    summary = run.summary
    first, last = summary.get("reward_first"), summary.get("reward_last")
    steps = summary.get("steps", len(run.rows))
    ends = f"{number(first)} \u2192 {number(last)}"
    over = f"over {counted(steps, 'step')}"
    tiles = [("Reward", ends, over, ""), _evaluation(summary), _crash(summary)]
    idle = unlearnt(summary)
    if idle is not None:
        reason = "the weights stayed the same"
        if idle.silent:
            reason = f"no reward signal in {idle.silent} of {idle.steps} steps"
        tiles.insert(0, ("Learnt", idle.learnt, reason, "bad"))
    k3 = next((entry for entry in compared(summary) if entry.metric == "mismatch/k3"), None)
    if k3 is not None:
        tiles.append(("Mean k3, as trained", number(k3.trained), _k3_note(k3, summary), ""))
    speed = summary.get("tokens_per_second")
    if speed is not None:
        tiles.append(("Tokens per second, with prompts", number(speed), time_shares(summary), ""))
    return tiles


def _evaluation(summary: Tree) -> Tile:
    name = accuracy(summary.get("score")).capitalize()
    before, after = summary.get("eval_first"), summary.get("eval_last")
    value, note, best = number(None), "not run", summary.get("eval_best")
    if before and after:
        value = f"{number(before['value'])} \u2192 {number(after['value'])}"
    if best:
        note = f"best {number(best['value'])} at step {best['step']}"
    return name, value, note, ""


def _k3_note(k3: Compared, summary: Tree) -> str:
    if too_small(k3):
        return f"nats per token: {SMALL}"
    if k3.ratio is not None and k3.ratio > 1 and unlearnt(summary) is None:
        return f"replay cuts it by {cut_by(k3, summary)}"
    return "nats per token"


def _crash(summary: Tree) -> Tile:
    step = summary.get("crash_step")
    if summary.get("eval_best") is None:
        return "Crash", number(None), "judged by evaluations", ""
    if step is not None:
        return "Crash", f"step {step}", "", "bad"
    if unlearnt(summary) is not None:
        return "Crash", "none", "", ""
    return "Crash", "none", "", "good"


def _shown(sample: Tree) -> Tree:
    """Return every field of a sample as text."""
    keys = (
        "step",
        "reward",
        "finish",
        "prompt",
        "response",
        "answer",
        "mean_logp_rollout",
        "mean_logp_trainer",
    )
    return {key: _as_text(sample.get(key)) for key in keys}


def _as_text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return str(value)
