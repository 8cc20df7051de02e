"""The page of a run, RUN/report.html."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from onepolicy.config.secrets import without_secrets
from onepolicy.divergence.breakdown import turn_name
from onepolicy.notation import counted, number
from onepolicy.report.figures import groups, routing, steps, tokens
from onepolicy.report.figures.parts import (
    NEUTRAL,
    REPLAY,
    ROLLOUT,
    TRAINER,
    WITH,
    WITHOUT,
    Absent,
    Figure,
    LineStyle,
    Series,
)
from onepolicy.report.page import Excerpt, Page, Section, write_page
from onepolicy.report.run import Run, Tree, load_run
from onepolicy.report.run_summary import (
    NOT_PARTS,
    card,
    comparison_table,
    cut_by,
    goes,
    held_out,
    k3_of,
    too_small,
    unlearnt,
)
from onepolicy.report.words import HOW_FAR, WHERE_ROUTES, course
from onepolicy.verdict.rules import SMALL

SHOWN_SAMPLES = 8
EVAL_SYMBOLS = ("star", "triangle-up", "x", "cross")
NO_PROBE = "no probe was written (log.counterfactual_every)"
SINGLE = (  # name, metric, unit, style, title, note
    (
        "length", "train/response_length", "tokens", ROLLOUT, "Response length",
        "Mean sampled tokens per rollout. A sudden jump to the limit means answers stopped ending.",
    ),
    (
        "entropy", "train/entropy", "nats", TRAINER, "Entropy",
        "Mean entropy of the trainer's next-token distribution on sampled tokens. Healthy: level, "
        "or falling slowly.",
    ),
    (
        "grad_norm", "train/grad_norm", "", TRAINER, "Gradient norm",
        "Before clipping. Spikes before a fall of the reward are a warning; exactly 0 teaches "
        "nothing.",
    ),
)  # fmt: skip
Drawn = list[Figure | Absent]


def write_report(run: Path, summary: Tree | None = None) -> Path:
    """Write RUN/report.html.

    summary: in place of summary.json, which only a finished run has. Raises UsageError if a
    required file is missing or corrupt, or plotly is not installed.
    """
    page = page_of(load_run(run, summary), run.resolve().name)
    return write_page(run / "report.html", page)


def page_of(loaded: Run, name: str) -> Page:
    """Return the page of a run folder of this name."""
    facts = _facts(loaded)
    notices, pressure = [], loaded.summary.get("pressure")
    if pressure:
        notices.append(f"Not a real engine: {pressure}.")
    return Page(
        f"{name}: run report",
        name,
        ", ".join(
            ["onepolicy train", *(value for key, value in facts if key in ("model", "task"))]
        ),
        [card(loaded.summary)],
        _sections(loaded),
        facts=facts,
        notices=notices,
        details=[
            ("Effective configuration", _json(without_secrets(loaded.config))),
            ("Versions and origin", _json(loaded.info)),
        ],
    )


def _json(tree: Tree) -> str:
    return json.dumps(tree, indent=2, ensure_ascii=False)


def _sections(run: Run) -> list[Section]:
    table, k3 = comparison_table(run.summary), k3_of(run.summary)
    numbers = [table] if table is not None else []
    quiet = k3 is not None and too_small(k3)
    sections = [
        Section("Learning", "Does it learn, and how healthily?", learning_figures(run)),
        Section("Mismatch", HOW_FAR, [*mismatch_figures(run), *numbers]),
        Section("Tokens", "Which tokens are they apart on?", token_figures(run), folded=quiet),
        Section("Routing", WHERE_ROUTES, routing_figures(run), folded=quiet),
        Section("Time", "Where does a step's time go?", [time_split(run)]),
        Section("Samples", "The last rollouts that were written down, newest first.", samples(run)),
    ]
    overlap = staleness_figures(run)
    if overlap:
        question = "How old are the tokens that are trained on, and does the overlap pay?"
        sections.insert(2, Section("Staleness", question, overlap))
    return sections


def curve(run: Run, metric: str, label: str, style: LineStyle) -> Series:
    """Return a metric over the steps that have it."""
    at, values = run.points(metric)
    return Series(label, style, values, at)


def trained_label(run: Run) -> tuple[str, LineStyle]:
    """Return label and style of the scoring that the run trained on."""
    return WITH if run.replay else WITHOUT


def learning_figures(run: Run) -> Drawn:
    """Return the figures of reward, response length, entropy and gradient norm."""
    return [reward(run), *(_single(run, *each) for each in SINGLE)]


def reward(run: Run) -> Figure | Absent:
    """Draw the reward and the evaluations over steps."""
    values = run.points("train/reward")[1]
    if not values:
        return Absent("reward", "Reward: metrics.jsonl has no train/reward.")
    series = [curve(run, "train/reward", "training reward", ROLLOUT)]
    scores = [name for name in run.names("eval/") if name != "eval/response_length"]
    for name, symbol in zip(scores, EVAL_SYMBOLS, strict=False):
        style = LineStyle(NEUTRAL.color, "dot", symbol, "")
        series.append(curve(run, name, name.replace("eval/", "evaluation, "), style))
    said = "no evaluation was run (eval.every = 0)."
    if scores:
        said = "evaluation uses held-out problems."
    note = f"Training reward is sampled at the training temperature; {said}"
    title, idle = f"Reward {course(values)}", unlearnt(run.summary)
    crash = run.summary.get("crash_step")
    evaluated = held_out(run.summary)
    if evaluated is not None and run.summary.get("score") in scores:
        title += f"; {goes(*evaluated)}"
    if idle is not None:
        title = f"Reward: {idle.learnt} was learnt from it"
    marks = [] if crash is None else [(crash, "crash")]
    return steps.over_steps("reward", title, note, series, "reward, accuracy", marks=marks)


def _single(
    run: Run, name: str, metric: str, unit: str, style: LineStyle, title: str, note: str
) -> Figure | Absent:
    """Draw one metric over steps; a norm far above its median has a log axis."""
    values = run.points(metric)[1]
    if not any(map(math.isfinite, values)):
        return Absent(name, f"{title}: metrics.jsonl has no {metric}.")
    log = name == "grad_norm" and steps.stretched(values)
    shown = (unit or "norm") + " (log)" * log
    heading, series = f"{title} {course(values, unit)}", [curve(run, metric, title, style)]
    return steps.over_steps(name, heading, note, series, shown, log=log, width="third")


def mismatch_figures(run: Run) -> Drawn:
    """Return the figures of k3 over steps and by turn."""
    values = run.points("mismatch/k3")[1]
    if not any(map(math.isfinite, values)):
        return [
            Absent("k3", "k3 over steps: metrics.jsonl has no mismatch/k3."),
            *turn_figures(run),
        ]
    series = [curve(run, "mismatch/k3", *trained_label(run))]
    other = curve(run, "counterfactual/mismatch/k3", *WITHOUT)
    note = _no_counterfactual(run)
    if len(other.y):
        series.insert(0, other)
        note = "Blue is the same batch scored a second time without replay."
    oldest = max(run.points("staleness/max")[1], default=0)
    if oldest:
        note += (
            f" Tokens are up to {oldest:.0f} updates old, which is part of it: k3 by age is below."
        )
    return [steps.k3(series, _k3_title(run, values), note), *turn_figures(run)]


def _k3_title(run: Run, values: Sequence[float]) -> str:
    """Return the title from the summary, or from the curve if the summary has no numbers."""
    found = k3_of(run.summary)
    if found is not None:
        cut = cut_by(found, run.summary)
        if too_small(found):
            return f"k3 is {SMALL}: {number(found.trained)} nats per token on average"
        if cut and found.ratio is not None and found.ratio > 1:
            return f"Replay cuts k3 by {cut}"
    return f"k3 {course(values, 'nats')}"


def _no_counterfactual(run: Run) -> str:
    """Return the reason why there is no curve without replay."""
    if not run.replay:
        return (
            "No second curve: rollout routes are not replayed, so the trained scoring is the one "
            "without replay."
        )
    return "No second curve: no probe step in this run (log.counterfactual_every)."


def turn_figures(run: Run) -> Drawn:
    """Return the figure of k3 by turn; no figure if episodes have one turn."""
    if not run.names(groups.K3):
        return []
    first = f"{groups.TOKENS}0"
    rows = [row for row in run.rows if first in row]
    if not rows:
        reason = f"metrics.jsonl has no {groups.TOKENS}k; an older version wrote it."
        return [Absent("turns", f"k3 by turn: {reason}")]
    if not any(row[first] for row in rows):
        reason = f"metrics.jsonl counts no token of the first turn ({first})."
        return [Absent("turns", f"k3 by turn: {reason}")]
    label, style = trained_label(run)
    probes = [row for row in rows if f"{groups.NATIVE}{groups.K3}0" in row]
    if not probes:
        note = f"All tokens of {counted(len(rows), 'step')}. {_no_counterfactual(run)}"
        return [groups.by_turn([groups.Curve.of(label, style, rows)], note)]
    native = groups.Curve.of(*WITHOUT, probes, groups.NATIVE)
    note = f"All tokens of {counted(len(probes), 'probe step')}."
    return [groups.by_turn([groups.Curve.of(label, style, probes), native], note)]


def staleness_figures(run: Run) -> Drawn:
    """Return the figures of staleness; none for a run that does not sample while it learns."""
    if not run.names("staleness/"):
        return []
    return [_ages(run), _busy(run), k3_by_age(run)]


def _ages(run: Run) -> Figure:
    bound = run.config.get("rollout", {}).get("max_staleness")
    series = [
        curve(run, "staleness/max", "oldest token", NEUTRAL),
        curve(run, "staleness/mean", "mean of the tokens", ROLLOUT),
    ]
    note = f"Updates between sampling a token and training on it; rollout.max_staleness = {bound}."
    most, ages = ([age for age in each.y if math.isfinite(age)] for each in series)
    average, oldest = number(sum(ages) / max(1, len(ages))), max(most, default=0.0)
    title = f"Tokens are {average} updates old on average, the oldest {oldest:.0f}"
    return steps.over_steps("staleness", title, note, series, "updates", width="half")


def _busy(run: Run) -> Figure:
    series = [
        curve(run, "async/sampler_busy", "sampler", ROLLOUT),
        curve(run, "async/learner_busy", "learner", TRAINER),
        curve(run, "staleness/spanning", "samples that span an update", REPLAY),
    ]
    note = (
        "Of each step's time: episodes in play; the learner scoring or learning. Both near 1 is "
        "full overlap."
    )
    courses = [f"{each.label} {course(each.y)}" for each in series[:2]]
    title = f"Busy share of the time: {', '.join(courses)}"
    return steps.over_steps("busy", title, note, series, "share", width="half")


def k3_by_age(run: Run) -> Figure | Absent:
    """Draw the mean k3 over all tokens of the run of each age."""
    label, style = trained_label(run)
    k3, tokens_of = groups.AGE_K3, groups.AGE_TOKENS
    found = groups.Curve.of(label, style, run.rows, k3=k3, tokens=tokens_of)
    if not found.k3:
        return Absent("k3_staleness", f"k3 by age: metrics.jsonl has no {groups.AGE_K3}k.")
    return groups.by_age([found], "of the run", partial(turn_name, first=0))


def pairs_of(run: Run) -> list[tokens.Pairs]:
    """Return the tokens of the last probe: as trained, then without replay."""
    assert run.probe is not None
    columns, segment = run.probe.columns, run.probe.segment
    looks = {"logp_trainer": trained_label(run), "logp_native": WITHOUT}
    return [
        tokens.Pairs(*look, columns[name], columns["logp_rollout"], segment)
        for name, look in looks.items()
        if name in columns
    ]


def token_figures(run: Run) -> Drawn:
    """Return F(tau), and rollout against trainer probability of each token, of the last probe."""
    if run.probe is None:
        return [
            Absent("f_tau", f"F({tokens.TAU}): {NO_PROBE}."),
            Absent("scatter", f"Probability scatter: {NO_PROBE}."),
        ]
    pairs, where = pairs_of(run), f" of the probe at step {run.probe.columns['step'][0]}"
    names, budget = ("scatter", "scatter_native"), tokens.MAX_POINTS // len(pairs)
    out: Drawn = [tokens.extreme_tokens([each.tail() for each in pairs], where)]
    drawn = [
        tokens.scatter(name, each, budget, where) for name, each in zip(names, pairs, strict=False)
    ]
    out += reversed(drawn)
    if len(pairs) == 1 and run.replay:
        why = "Scatter without replay: the last probe has no logp_trainer_native."
        out.append(Absent("scatter_native", why))
    return out


def routing_figures(run: Run) -> Drawn:
    """Return the figures of differing experts of the last step that was scored twice."""
    if not run.names("routing/"):
        return [routing.NO_ROUTERS]
    measured = [row for row in run.rows if any(name.startswith(routing.LAYER) for name in row)]
    if not measured:
        why = f"metrics.jsonl has no {routing.LAYER}k (log.counterfactual_every)"
        return [Absent("layers", f"Routing by layer: {why}.")]
    last, trained = measured[-1], trained_label(run)
    differing = routing.by_layer(*WITHOUT, last, f"{groups.NATIVE}{routing.LAYER}")
    differing += routing.by_layer(*trained, last, routing.LAYER)
    mass = routing.by_layer(*trained, last, routing.GATE_MASS)
    mode = run.config.get("replay", {}).get("mode", "off")
    return routing.routing_figures(differing, mass, mode=mode)


def time_split(run: Run) -> Figure | Absent:
    """Draw the seconds per step by part."""
    rows = [row for row in run.rows if row.get("time/step") is not None]
    if not rows:
        return Absent("time", "Time per step: metrics.jsonl has no time/step.")
    names = [name for name in run.names("time/") if name.removeprefix("time/") not in NOT_PARTS]
    parts = {
        name.removeprefix("time/"): np.array([row.get(name) or 0.0 for row in rows])
        for name in names
    }
    total = np.array([row["time/step"] for row in rows], dtype=np.float64)
    return steps.seconds([row["step"] for row in rows], total, parts)


def samples(run: Run) -> list[Excerpt | Absent]:
    """Return the last samples, newest first."""
    shown = run.samples[: -SHOWN_SAMPLES - 1 : -1]
    if not shown:
        return [Absent("samples", "Samples: samples.jsonl is empty (log.samples_per_step = 0).")]
    return [_excerpt(each) for each in shown]


def _excerpt(sample: Tree) -> Excerpt:
    texts = {key: _as_text(value) for key, value in sample.items()}
    parts = [("muted", texts.get("prompt", "")), ("plain", texts.get("response", ""))]
    named = [
        f"{name} {texts[key]}"
        for key, name in (("step", "step"), ("reward", "reward"), ("finish", "ended by"))
        if texts.get(key)
    ]
    if texts.get("answer"):
        named.append(f"right answer {texts['answer']}")
    both = (texts.get(f"mean_logp_{side}") or number(None) for side in ("rollout", "trainer"))
    return Excerpt(parts, f"{', '.join(named)}; mean log p rollout / trainer {' / '.join(both)}")


def _as_text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return number(value)
    return str(value)


def _facts(run: Run) -> list[tuple[str, str]]:
    config = run.config
    task, engine = config.get("task", {}), config.get("rollout", {}).get("engine", {})
    preset = config.get("correction", {}).get("preset") or "custom"
    correction = str(run.summary.get("correction") or preset)
    wanted = {
        "model": config.get("model", {}).get("path"),
        "task": " ".join(str(task[key]) for key in ("kind", "name", "path") if task.get(key)),
        "replay": config.get("replay", {}).get("mode"),
        "max_staleness": config.get("rollout", {}).get("max_staleness"),
        "correction": {"recompute": "none (recompute)"}.get(correction, correction),
        "engine dtype": engine.get("dtype"),
        "trainer dtype": config.get("model", {}).get("dtype"),
        "learning rate": config.get("optim", {}).get("lr"),
        "seed": config.get("seed"),
        "started": run.info.get("started"),
    }
    if "planned" in run.summary:
        wanted["stopped"] = f"after step {run.summary['steps']} of {run.summary['planned']}"
    return [(key, str(value)) for key, value in wanted.items() if value not in (None, "")]
