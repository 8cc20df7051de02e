"""The figures of an audit: series of one dump, or of two on the same axes.

The heatmap of rows and the scatter are drawn for each dump.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onepolicy.audit.assessment import ONSET_RULE, AuditResult, growth
from onepolicy.notation import number
from onepolicy.record.schema import Array
from onepolicy.report.figures import groups, heatmap, routing, steps, tokens
from onepolicy.report.figures.parts import ARMS, NEUTRAL, Absent, Figure, LineStyle, Series, Width
from onepolicy.report.words import course

NO_STEPS = "Curves over training: the dump has no column step, or one step only."
NO_ROUTES = "Routers per layer: the dump has no columns routes_rollout and routes_trainer."
NO_EXTREMES = "Extreme tokens over training: no token is off by more than a factor of 2."
Look = tuple[str, LineStyle]


def audit_figures(results: Sequence[AuditResult]) -> list[Figure | Absent]:
    """Return all figures of one or two dumps, or why a figure is absent."""
    looks = [(result.label, style) for result, style in zip(results, ARMS, strict=False)]
    if len(results) == 1:
        looks = [(results[0].label, NEUTRAL)]
    assert len(looks) == len(results), "no style is left"
    budget = tokens.MAX_POINTS // len(results)
    return [
        *(_scatter(*each, budget) for each in zip(results, looks, strict=True)),
        _extreme_tokens(results, looks),
        *(_heatmap(result) for result in results),
        *_over_steps(results, looks),
        _routers(results, looks),
        *_ages(results, looks),
    ]


def _sides(result: AuditResult) -> list[tuple[Array, Array]]:
    """Return both log-probabilities of each sampled row, inside the mask: trainer, rollout."""
    rows = [row.columns for row in result.accumulated.sample.rows(None)]
    return [
        (columns["logp_trainer"][columns["mask"]], columns["logp_rollout"][columns["mask"]])
        for columns in rows
        if columns["mask"].any()
    ]


def _figure_name(kind: str, label: str) -> str:
    return f"{kind}_{heatmap.digest(label)}"


def _scatter(result: AuditResult, look: Look, budget: int) -> Figure | Absent:
    sides = _sides(result)
    name = _figure_name("scatter", result.label)
    if not sides:
        return Absent(name, "Probability scatter: no row has a token in the mask.")
    segment = np.repeat(np.arange(len(sides)), [len(trainer) for trainer, _ in sides])
    trainer, rollout = (np.concatenate(each) for each in zip(*sides, strict=True))
    return tokens.scatter(name, tokens.Pairs(*look, trainer, rollout, segment), budget)


def _heatmap(result: AuditResult) -> Figure | Absent:
    gaps = [np.abs(trainer - rollout) for trainer, rollout in _sides(result)]
    return heatmap.row_heatmap(gaps, result.label, growth)


def _extreme_tokens(results: Sequence[AuditResult], looks: Sequence[Look]) -> Figure:
    tails = []
    for result, look in zip(results, looks, strict=True):
        assert result.accumulated.overall is not None
        tails.append(
            tokens.Tail.of(*look, result.accumulated.overall, result.accumulated.histogram)
        )
    width: Width = "half" if len(results) == 1 else "wide"  # beside the scatter
    return tokens.extreme_tokens(tails, width=width)


def _over_steps(results: Sequence[AuditResult], looks: Sequence[Look]) -> list[Figure | Absent]:
    """Return the curves of k3, F(2) and reward over steps, with the onset of divergence."""
    if not any(len(result.accumulated.steps) > 1 for result in results):
        return [Absent("k3", NO_STEPS)]
    found = [(result.onset, result.label) for result in results if result.onset is not None]
    marks = [(step, "onset" + f", {label}" * (len(results) > 1)) for step, label in found]

    k3, f2 = (_of_steps(results, looks, name) for name in ("k3", "f2"))
    values = [value for each in k3 for value in each.y]
    onsets = "; ".join(f"{label}: step {step}" for step, label in found) or "none"
    title = f"k3 diverges ({onsets})"
    if not found:
        ends = f"{number(min(values))} and {number(max(values))}"
        title = f"No onset of divergence: k3 is between {ends} nats at every step"
    note = f"Onset of divergence: {onsets} ({ONSET_RULE})."
    drawn: list[Figure | Absent] = [steps.k3(k3, title, note, marks)]
    if any(value for each in f2 for value in each.y):
        note = "Share of tokens off by more than a factor of 2."
        most = number(max(value for each in f2 for value in each.y), share=True)
        title, limits = f"F(2) is up to {most} of a step's tokens", steps.F2_LIMITS
        drawn.append(
            steps.over_steps(
                "f2", title, note, f2, "F(2)", limits=limits, marks=marks, width="half"
            )
        )
    else:
        drawn.append(Absent("f2", NO_EXTREMES))
    return [*drawn, _reward(results, looks, marks)]


def _of_steps(results: Sequence[AuditResult], looks: Sequence[Look], name: str) -> list[Series]:
    found = []
    for result, look in zip(results, looks, strict=True):
        rows = sorted(result.accumulated.steps.items())
        values = [stats.statistics()[name] for _, stats in rows]
        found.append(Series(*look, values, [step for step, _ in rows]))
    return found


def _reward(
    results: Sequence[AuditResult], looks: Sequence[Look], marks: Sequence[steps.Mark]
) -> Figure | Absent:
    series = []
    for result, look in zip(results, looks, strict=True):
        rewards = sorted(result.accumulated.rewards.items())
        means = [reward.mean for _, reward in rewards]
        if rewards:
            series.append(Series(*look, means, [step for step, _ in rewards]))
    if not series:
        return Absent("reward", "Reward: the dump has no column reward.")
    courses = "; ".join(f"{each.label}: " * (len(series) > 1) + course(each.y) for each in series)
    title, note = f"Reward: {courses}", "Mean over a step's rows."
    return steps.over_steps("reward", title, note, series, "mean reward", marks=marks, width="half")


def _routers(results: Sequence[AuditResult], looks: Sequence[Look]) -> Figure | Absent:
    found = [result.accumulated.routes for result in results]
    series = [
        Series(*look, (routes.per_layer / routes.slots).tolist())
        for look, routes in zip(looks, found, strict=True)
        if routes is not None and routes.slots
    ]
    return routing.per_layer(series) if series else Absent("layers", NO_ROUTES)


def _ages(results: Sequence[AuditResult], looks: Sequence[Look]) -> list[Figure | Absent]:
    """Return the figure of k3 by age; no figure if all tokens are of one age."""
    curves = []
    for result, look in zip(results, looks, strict=True):
        by_age = sorted(result.accumulated.ages.by_age.items())
        k3 = {age: found.mean for age, found in by_age}
        counts = {age: float(found.tokens) for age, found in by_age}
        if len(k3) > 1:
            curves.append(groups.Curve(*look, counts, k3, {}, 1))
    return [groups.by_age(curves, "of the dump")] if curves else []
