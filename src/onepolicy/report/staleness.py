"""Figures of a run that sampled while it learned: how old its tokens were, how busy both sides, k3 by age."""

from __future__ import annotations

import math
from collections import defaultdict

from onepolicy.report.figure import NEUTRAL, REPLAY, ROLLOUT, TRAINER, Absent, Figure, LogScale, axis, line
from onepolicy.report.learning import step_axis
from onepolicy.report.mismatch import trained_label
from onepolicy.report.run import Run
from onepolicy.report.words import course, number

K3, TOKENS = "mismatch/k3_staleness@", "staleness/tokens@"


def staleness_figures(run: Run) -> list[Figure | Absent]:
    """Nothing for a run that sampled and learned one after the other."""
    if not run.names("staleness/"):
        return []
    return [ages(run), busy(run), k3_by_age(run)]


def ages(run: Run) -> Figure:
    most = run.config.get("rollout", {}).get("max_staleness")
    data = [
        line("oldest token", *run.points("staleness/max"), NEUTRAL),
        line("mean of the tokens", *run.points("staleness/mean"), ROLLOUT),
    ]
    note = f"Updates between sampling a token and training on it; rollout.max_staleness = {most}."
    yaxis = axis("updates", rangemode="tozero")
    oldest = max((age for age in run.points("staleness/max")[1] if math.isfinite(age)), default=0.0)
    mean = [age for age in run.points("staleness/mean")[1] if math.isfinite(age)]
    title = f"Tokens are {number(sum(mean) / max(1, len(mean)))} updates old on average, the oldest {oldest:.0f}"
    return Figure("staleness", title, note, data, {"xaxis": step_axis(), "yaxis": yaxis})


def busy(run: Run) -> Figure:
    data = [
        line("sampler", *run.points("async/sampler_busy"), ROLLOUT),
        line("learner", *run.points("async/learner_busy"), TRAINER),
        line("samples that span an update", *run.points("staleness/spanning"), REPLAY),
    ]
    note = "Of each step's time: episodes in play; the learner scoring or learning. Both near 1 is full overlap."
    yaxis = axis("share", range=[0, 1.05])
    courses = [f"{trace['name']} {course(trace['y'])}" for trace in data[:2]]
    title = f"Busy share of the time: {', '.join(courses)}"
    return Figure("busy", title, note, data, {"xaxis": step_axis(), "yaxis": yaxis})


def k3_by_age(run: Run) -> Figure | Absent:
    """Mean over all tokens of the run that have this age."""
    sums: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for row in run.rows:
        for name, k3 in row.items():
            if name.startswith(K3) and k3 is not None:
                age = int(name.removeprefix(K3))
                tokens = row.get(TOKENS + str(age)) or 0.0
                sums[age][0] += tokens * k3
                sums[age][1] += tokens
    found = {age: total / tokens for age, (total, tokens) in sorted(sums.items()) if tokens}
    if not found:
        return Absent("k3_staleness", f"k3 by age: metrics.jsonl has no {K3}k.")
    scale = LogScale.of(found.values())
    label, look = trained_label(run)
    curve = line(label, list(found), scale.lift(found.values()), look) | {"mode": "lines+markers"}
    layout = {"xaxis": axis("updates old", rangemode="tozero", dtick=1), "yaxis": scale.axis("k3 (nats per token)")}
    note = "k3 between the weights that sampled a token and those that train on it, over all tokens of the run."
    ends = list(found.values())
    title = f"k3 is {number(ends[0])} nats of tokens {min(found)} updates old"
    if len(found) > 1:
        title += f", {number(ends[-1])} of those {max(found)} old"
    return Figure("k3_staleness", title, note, [curve], layout)
