"""One run folder -> RUN/report.html: a single file that needs no network, no server and no other file."""

from __future__ import annotations

import json
import math
import os
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.config import UsageError
from onepolicy.report.figure import Absent, Figure
from onepolicy.report.learning import learning_figures, time_split
from onepolicy.report.mismatch import mismatch_figures
from onepolicy.report.page import CSS, SCRIPT
from onepolicy.report.routing import routing_figures
from onepolicy.report.run import Run, Tree, load_run
from onepolicy.report.words import COMPARISON_HEADER, compared, comparison, factor, number, time_shares, verdict

SHOWN_SAMPLES = 8


def write_report(run: Path) -> Path:
    """Write RUN/report.html. UsageError: a required file is missing or corrupt, or plotly is not installed."""
    loaded = load_run(run)
    sections = [
        ("Learning", "Does it learn, and how healthily?", learning_figures(loaded)),
        ("Mismatch", "How far apart are the engine that samples and the one that learns?", mismatch_figures(loaded)),
        ("Routing", "Where do the two choose different experts?", routing_figures(loaded)),
        ("Time", "Where does a step's time go?", [time_split(loaded)]),
    ]
    figures = [f for _, _, items in sections for f in items if isinstance(f, Figure)]
    body = "\n".join([header(loaded), *(section(*each) for each in sections), samples(loaded), settings(loaded)])
    path = run / "report.html"
    temporary = run / "report.html.tmp"
    temporary.write_text(
        document(f"{run.resolve().name}: run report", body, figures), encoding="utf-8", errors="backslashreplace"
    )
    os.replace(temporary, path)
    return path


FOOTER = "Rollout red, trainer blue, replay green, in every figure."


def document(title: str, body: str, figures: list[Figure], *, footer: str = FOOTER) -> str:
    """One HTML file with everything in it. UsageError: plotly is not installed."""
    specs = [{"name": f.name, **f.spec()} for f in figures]
    # "<" as an escape: no text of a run can close the script element
    data = json.dumps(plain(specs), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{CSS}</style>
</head>
<body>
<main>
{body}
<footer>{escape(footer)} This file is complete: it loads nothing.</footer>
</main>
<noscript>The figures are drawn by a script; allow scripts for this file to see them.</noscript>
<script id="plotly">{_plotly()}</script>
<script id="figures" type="application/json">{data}</script>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UsageError(
            "the HTML report needs plotly; pip install 'onepolicy[report]', or set log.report=false in a run"
        ) from None
    return get_plotlyjs()


def plain(value: Any) -> Any:
    """JSON-ready: NaN and infinity as null (a gap), floats at six digits, arrays as lists."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def header(run: Run) -> str:
    """Name, settings in short, the verdict, and the comparison of the two scorings."""
    chips = "".join(f'<span class="chip"><b>{escape(k)}</b>{escape(v)}</span>' for k, v in _facts(run))
    tiles = "".join(tile(*each) for each in _tiles(run))
    *story, replay = verdict(run.summary)
    sentences = f"<p>{escape(' '.join(story))}</p><p>{escape(replay)}</p>"
    sentences += "".join(f'<p class="rule">{escape(rule)}</p>' for rule in _rules(run.summary))
    parts = [
        f'<h1>{escape(run.folder.resolve().name)}</h1><div class="chips">{chips}</div>',
        f'<div class="tiles">{tiles}</div><div class="card verdict">{sentences}</div>',
    ]
    if rows := comparison(run.summary):
        head = "".join(f"<th>{escape(text)}</th>" for text in COMPARISON_HEADER)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        table = f'<table class="numbers"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
        parts.append(f'<div class="card scroll" id="comparison">{table}</div>')
    return "\n".join(parts)


def _rules(summary: Tree) -> list[str]:
    """What the numbers above are, exactly."""
    window = summary.get("reward_window")
    reward = f"Reward: mean of the first and of the last {window} steps." if window else None
    rule = summary.get("crash_rule")
    return [text for text in (reward, f"{rule[0].upper()}{rule[1:]}." if rule else None) if text]


def _facts(run: Run) -> list[tuple[str, str]]:
    config = run.config
    task = config.get("task", {})
    wanted = {
        "model": config.get("model", {}).get("path"),
        "task": " ".join(str(task[key]) for key in ("kind", "name", "path") if task.get(key)),
        "replay": config.get("replay", {}).get("mode"),
        "correction": config.get("correction", {}).get("preset") or "custom",
        "engine dtype": config.get("rollout", {}).get("engine", {}).get("dtype"),
        "trainer dtype": config.get("model", {}).get("dtype"),
        "learning rate": config.get("optim", {}).get("lr"),
        "seed": config.get("seed"),
        "started": run.info.get("started"),
    }
    return [(key, str(value)) for key, value in wanted.items() if value not in (None, "")]


def _tiles(run: Run) -> list[tuple[str, str, str, str]]:
    """(name, value, small print, class)"""
    summary = run.summary
    first, last = summary.get("reward_first"), summary.get("reward_last")
    best, crash = summary.get("eval_best"), summary.get("crash_step")
    before, after = summary.get("eval_first"), summary.get("eval_last")
    tiles = [
        ("Reward", f"{number(first)} \u2192 {number(last)}", f"over {summary.get('steps', len(run.rows))} steps", ""),
        (
            f"Evaluation {(summary.get('score') or '').removeprefix('eval/')}".strip(),
            f"{number(before['value'])} \u2192 {number(after['value'])}" if before and after else number(None),
            f"best {number(best['value'])} at step {best['step']}" if best else "not run",
            "",
        ),
        ("Crash", *_crash(judged=best is not None, step=crash)),
    ]
    k3 = next((entry for entry in compared(summary) if entry.metric == "mismatch/k3"), None)
    if k3 is not None:
        cut = f"replay cuts it {factor(k3.ratio)}" if k3.ratio is not None and k3.ratio > 1 else "nats per token"
        tiles.append(("Mean k3, as trained", number(k3.trained), cut, ""))
    if summary.get("tokens_per_second") is not None:
        tiles.append(("Tokens per second", number(summary["tokens_per_second"]), time_shares(summary), ""))
    return tiles


def _crash(*, judged: bool, step: int | None) -> tuple[str, str, str]:
    if not judged:
        return number(None), "judged by evaluations", ""
    return ("none", "", "good") if step is None else (f"step {step}", "", "bad")


def tile(name: str, value: str, more: str, kind: str) -> str:
    return (
        f'<div class="card tile"><div class="name">{escape(name)}</div><div class="value {kind}">{escape(value)}</div>'
        f'<div class="more">{escape(more)}</div></div>'
    )


def section(title: str, question: str, items: list[Figure | Absent]) -> str:
    cards = "".join(_card(item) for item in items if isinstance(item, Figure))
    absent = "".join(f"<li>{escape(item.why)}</li>" for item in items if isinstance(item, Absent))
    missing = f'<ul class="absent">{absent}</ul>' if absent else ""
    return f'<h2>{escape(title)}</h2><p class="lead">{escape(question)}</p><div class="grid">{cards}</div>{missing}'


def _card(figure: Figure) -> str:
    shape = f"{figure.width} square" if figure.square else figure.width
    return (
        f'<div class="card figure {shape}"><h3>{escape(figure.title)}</h3><p class="note">{escape(figure.note)}</p>'
        f'<div class="plot" id="fig-{figure.name}" role="img" aria-label="{escape(figure.title)}. '
        f'{escape(figure.note)}"></div></div>'
    )


def samples(run: Run) -> str:
    title = '<h2>Samples</h2><p class="lead">The last rollouts that were written down, newest first.</p>'
    if not run.samples:
        return title + '<ul class="absent"><li>Samples: samples.jsonl is empty (log.samples_per_step = 0).</li></ul>'
    shown = run.samples[: -SHOWN_SAMPLES - 1 : -1]
    answers = any("answer" in sample for sample in shown)
    rows = "".join(_sample_row(sample, answers) for sample in shown)
    names = ("Step", "Reward", "Finish", "Prompt and response", "Right answer", "Mean log p, rollout / trainer")
    head = "".join(f"<th>{name}</th>" for name in names if answers or name != "Right answer")
    table = f'<table class="samples"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'
    return f'{title}<div class="card">{table}</div>'


def _sample_row(sample: Tree, answers: bool) -> str:
    def text(key: str) -> str:
        value = sample.get(key)
        return escape(number(value) if isinstance(value, float) else str("" if value is None else value))

    answer = f'<td data-name="right answer">{text("answer")}</td>' if answers else ""
    return (
        f'<tr><td data-name="step">{text("step")}</td><td data-name="reward">{text("reward")}</td>'
        f'<td data-name="finish">{text("finish")}</td>'
        f'<td><pre class="prompt">{text("prompt")}</pre><pre class="response">{text("response")}</pre></td>'
        f"{answer}"
        f'<td data-name="mean log p">{text("mean_logp_rollout")} / {text("mean_logp_trainer")}</td></tr>'
    )


def settings(run: Run) -> str:
    config = escape(json.dumps(run.config, indent=2, ensure_ascii=False))
    info = escape(json.dumps(run.info, indent=2, ensure_ascii=False))
    return (
        "<h2>Settings</h2>"
        f'<details class="card"><summary>Effective configuration</summary><pre>{config}</pre></details>'
        f'<details class="card"><summary>Versions and origin</summary><pre>{info}</pre></details>'
    )
