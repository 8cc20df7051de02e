"""Figures of the distance between rollout and trainer: k3, F(tau), probability scatter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from onepolicy.divergence.logprob import Mismatch, mismatch
from onepolicy.notation import counted, number
from onepolicy.report.figure import (
    NEUTRAL,
    REPLAY,
    RHO,
    ROLLOUT,
    TAU,
    TRAINER,
    Absent,
    Figure,
    LineStyle,
    LogScale,
    Spec,
    Width,
    axis,
    line,
    markers,
)
from onepolicy.report.learning import step_axis
from onepolicy.report.run import Array, Run
from onepolicy.report.words import SMALL, compared, course, cut_by, too_small

K3, TOKENS = "mismatch/k3_staleness@", "staleness/tokens@"


def staleness_figures(run: Run) -> list[Figure | Absent]:
    """Return the figures of staleness; none for a run that does not sample while it learns."""
    if not run.names("staleness/"):
        return []
    return [ages(run), busy(run), k3_by_age(run)]


def ages(run: Run) -> Figure:
    """Draw the age of the tokens over steps."""
    most = run.config.get("rollout", {}).get("max_staleness")
    data = [
        line("oldest token", *run.points("staleness/max"), NEUTRAL),
        line("mean of the tokens", *run.points("staleness/mean"), ROLLOUT),
    ]
    note = f"Updates between sampling a token and training on it; rollout.max_staleness = {most}."
    yaxis = axis("updates", rangemode="tozero")
    oldest = max((age for age in run.points("staleness/max")[1] if math.isfinite(age)), default=0.0)
    mean = [age for age in run.points("staleness/mean")[1] if math.isfinite(age)]
    average = number(sum(mean) / max(1, len(mean)))
    title = f"Tokens are {average} updates old on average, the oldest {oldest:.0f}"
    return Figure("staleness", title, note, data, {"xaxis": step_axis(), "yaxis": yaxis})


def busy(run: Run) -> Figure:
    """Draw the shares of the time in which sampler and learner are busy."""
    data = [
        line("sampler", *run.points("async/sampler_busy"), ROLLOUT),
        line("learner", *run.points("async/learner_busy"), TRAINER),
        line("samples that span an update", *run.points("staleness/spanning"), REPLAY),
    ]
    note = (
        "Of each step's time: episodes in play; the learner scoring or learning. Both near 1 is "
        "full overlap."
    )
    yaxis = axis("share", range=[0, 1.05])
    courses = [f"{trace['name']} {course(trace['y'])}" for trace in data[:2]]
    title = f"Busy share of the time: {', '.join(courses)}"
    return Figure("busy", title, note, data, {"xaxis": step_axis(), "yaxis": yaxis})


def k3_by_age(run: Run) -> Figure | Absent:
    """Draw the mean k3 over all tokens of the run of each age."""
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
    label, style = trained_label(run)
    curve = line(label, list(found), scale.lift(found.values()), style) | {"mode": "lines+markers"}
    layout = {
        "xaxis": axis("updates old", rangemode="tozero", dtick=1),
        "yaxis": scale.axis("k3 (nats per token)"),
    }
    note = (
        "k3 between the weights that sampled a token and those that train on it, over all tokens "
        "of the run."
    )
    ends = list(found.values())
    title = f"k3 is {number(ends[0])} nats of tokens {min(found)} updates old"
    if len(found) > 1:
        title += f", {number(ends[-1])} of those {max(found)} old"
    return Figure("k3_staleness", title, note, [curve], layout)


MAX_POINTS = 20_000  # of both scatters together: SVG stays usable
KEPT_EXTREMES = 500  # per scatter; the rest is a random subsample
MARKED = (1.25, 2.0, 5.0)
NO_PROBE = "no probe was written (log.counterfactual_every)"


def mismatch_figures(run: Run) -> list[Figure | Absent]:
    """Return the figures of k3, F(tau) and the probability scatters."""
    if run.probe is None:
        return [k3(run), Absent("f_tau", f"F({TAU}): {NO_PROBE}."), *scatters(run)]
    return [
        k3(run),
        extreme_tokens(pairs_of(run), f" of the probe at step {run.probe.step}"),
        *scatters(run),
    ]


def trained_label(run: Run) -> tuple[str, LineStyle]:
    """Return label and style of the scoring that the run trained on."""
    if run.replay:
        return "with replay", REPLAY
    return "without replay", TRAINER


def k3(run: Run) -> Figure | Absent:
    """Draw k3 over steps, with and without replay."""
    steps, values = run.points("mismatch/k3")
    if not any(math.isfinite(v) for v in values):
        return Absent("k3", "k3 over steps: metrics.jsonl has no mismatch/k3.")
    other_steps, other = run.points("counterfactual/mismatch/k3")
    scale = LogScale.of(values, other)
    label, style = trained_label(run)
    lines = line(label, steps, scale.lift(values), style)
    marker = {"size": 4, "color": style.color, "symbol": scale.symbols(values, style.symbol)}
    data = [lines | {"mode": "lines+markers", "marker": marker}]
    note = (
        f"k3 = mean({RHO} - 1 - log {RHO}), {RHO} = p_trainer / p_rollout of the sampled tokens; "
        "0 = same policy. "
    )
    if other:
        open_zero = {"symbol": scale.symbols(other, TRAINER.symbol), "size": 9}
        points = markers(
            "same batch without replay", other_steps, scale.lift(other), TRAINER, marker=open_zero
        )
        thin = {"color": TRAINER.color, "dash": TRAINER.dash, "width": 1}
        data.append(points | {"mode": "lines+markers", "line": thin})
        note += "Blue is the same batch scored a second time without replay."
    else:
        note += counterfactual_missing(run)
    oldest = max(run.points("staleness/max")[1], default=0)
    if oldest:
        note += (
            f" Tokens are up to {oldest:.0f} updates old, which is part of it: k3 by age is below."
        )
    layout = {"xaxis": step_axis(), "yaxis": scale.axis("k3 (nats per token, log)")}
    return Figure("k3", _k3_title(run, values), note, data, layout, width="wide")


def _k3_title(run: Run, values: list[float]) -> str:
    """Return the title from the summary, or from the curve if the summary has no numbers."""
    found = next((entry for entry in compared(run.summary) if entry.metric == "mismatch/k3"), None)
    if found is None:
        return f"k3 {course(values, 'nats')}"
    if too_small(found):
        return f"k3 is {SMALL}: {number(found.trained)} nats per token on average"
    cut = cut_by(found, run.summary)
    if cut and found.ratio is not None and found.ratio > 1:
        return f"Replay cuts k3 by {cut}: the gap between both curves"
    return f"k3 {course(values, 'nats')}"


def counterfactual_missing(run: Run) -> str:
    """Return the reason why there is no curve without replay."""
    if not run.replay:
        return (
            "No second curve: rollout routes are not replayed, so the trained scoring is the one "
            "without replay."
        )
    return "No second curve: no probe step in this run (log.counterfactual_every)."


@dataclass(frozen=True)
class Pairs:
    """The sampled tokens' log-probabilities from both engines, under one scoring."""

    label: str
    style: LineStyle
    rollout: Array  # [n] float32
    trainer: Array  # [n] float32

    @property
    def mismatch(self) -> Mismatch:
        """Mismatch over all tokens."""
        trainer, rollout = torch.from_numpy(self.trainer), torch.from_numpy(self.rollout)
        return mismatch(trainer, rollout, torch.ones_like(rollout, dtype=torch.bool))


def pairs_of(run: Run) -> list[Pairs]:
    """Return the pairs of the last probe: as trained, then without replay."""
    assert run.probe is not None
    tensors = run.probe.tensors
    found = [Pairs(*trained_label(run), tensors["logp_rollout"], tensors["logp_trainer"])]
    if "logp_trainer_native" in tensors:
        sides = tensors["logp_rollout"], tensors["logp_trainer_native"]
        found.append(Pairs("without replay", TRAINER, *sides))
    return found


def extreme_tokens(pairs: Sequence[Pairs], where: str = "") -> Figure:
    """Draw F(tau), the share of tokens with max(rho, 1/rho) > tau (R3 paper, equation 3).

    `where` completes the note, as in ` of the probe at step 10`.
    """
    found = [(each, each.mismatch) for each in pairs]
    most = max(each.tokens for _, each in found)
    end = max(2.5, math.exp(min(max(each.max_dlogp for _, each in found), 12.0)) * 1.2)
    marked = [tau for tau in MARKED if tau < end]
    grid = (1 + np.geomspace(1e-3, end - 1, 200)).tolist()
    curves = [each.extreme(grid) for _, each in found]
    scale = LogScale.of(*curves, [1 / most, 0.0], top=1.0)
    data = []
    for (each, numbers), shares in zip(found, curves, strict=True):
        stop = len(grid)
        if 0.0 in shares:
            stop = shares.index(0.0) + 1
        lifted = scale.lift(shares[:stop])
        data.append(
            line(each.label, grid[:stop], lifted, each.style, hovertemplate="%{x:.3g}: %{y:.2g}")
        )
        spots = zip(marked, numbers.extreme(marked), strict=True)
        data += [_spot(tau, share, each.style, scale) for tau, share in spots]
    layout = {
        "xaxis": axis(f"probability ratio {TAU} (log)", type="log", **_ratio_ticks(end)),
        "yaxis": scale.axis(f"share beyond {TAU} (log)"),
    }
    note = (
        f"F({TAU}){where}: share of {counted(most, 'token')} whose probability differs by more "
        f"than a factor {TAU}, either way, between rollout and trainer. Markers at "
        f"{' and '.join(f'{tau:g}' for tau in marked)}; an open marker on the lowest line is "
        "exactly 0."
    )
    shares = [(each.label, numbers.extreme(2.0)) for each, numbers in found]
    title = "No token is off by more than a factor of 2"
    if any(share for _, share in shares):
        named = ", ".join(f"{number(share, share=True)} {name}" for name, share in shares)
        title = f"Off by more than a factor of 2: {named}"
    return Figure("f_tau", title, note, data, layout, width="wide")


def scatters(run: Run) -> list[Figure | Absent]:
    """Draw rollout against trainer probability of each sampled token, one figure per scoring."""
    if run.probe is None:
        return [Absent("scatter", f"Probability scatter: {NO_PROBE}.")]
    trained, *native = pairs_of(run)
    budget, where = MAX_POINTS // (1 + len(native)), f" of the probe at step {run.probe.step}"
    out: list[Figure | Absent] = [scatter("scatter_native", each, budget, where) for each in native]
    out.append(scatter("scatter", trained, budget, where))
    if not native and run.replay:
        out.append(
            Absent(
                "scatter_native",
                "Scatter without replay: the last probe has no logp_trainer_native.",
            )
        )
    return out


def scatter(name: str, pairs: Pairs, budget: int, where: str = "", width: Width = "half") -> Figure:
    """Draw rollout against trainer probability of at most `budget` tokens."""
    rollout, trainer = (np.exp(each.astype(np.float64)) for each in (pairs.rollout, pairs.trainer))
    difference = np.abs(trainer - rollout)
    chosen = subsample(difference, budget)
    x, y = rollout[chosen].round(5).tolist(), trainer[chosen].round(5).tolist()
    marker = {"size": 4, "opacity": 0.5, "color": pairs.style.color, "symbol": pairs.style.symbol}
    largest = max(rollout.max(), trainer.max())
    top = 1.0
    if largest <= 0.5:
        top = float(f"{1.1 * largest:.1g}") or 1.0
    dotted = LineStyle("@ink", "dot", "circle", "")
    diagonal = line("equal", [0, top], [0, top], dotted, hoverinfo="skip", opacity=0.6)
    hover = "rollout %{x}<br>trainer %{y}<extra></extra>"
    data = [markers(pairs.label, x, y, pairs.style, marker=marker, hovertemplate=hover), diagonal]
    span = [-0.02 * top, 1.02 * top]
    layout = {
        "xaxis": axis("rollout probability", range=span, dtick=top / 4),
        "yaxis": axis("trainer probability", range=span, dtick=top / 4),
        "showlegend": False,
    }
    shown = (
        f"{len(chosen):,} of {counted(len(rollout), 'token')}{where} (the {KEPT_EXTREMES} farthest "
        "off, the rest at random)"
    )
    if len(chosen) == len(rollout):
        shown = f"All {counted(len(rollout), 'token')}{where}"
    found = pairs.mismatch
    pearson = "undefined"
    if math.isfinite(found.pearson):
        pearson = f"{found.pearson:.6f}"
    label = pairs.label[0].upper() + pairs.label[1:]
    title = f"{label}: largest difference of probability {number(found.max_dp)}"
    note = f"{shown}; on the diagonal both agree. Correlation {pearson}."
    return Figure(name, title, note, data, layout, width=width, square=True)


def subsample(difference: Array, budget: int) -> Array:
    """Return the indices of at most `budget` tokens.

    These are the KEPT_EXTREMES with the largest difference and a random rest with a fixed seed.
    """
    if len(difference) <= budget:
        return np.arange(len(difference))
    order = np.argsort(-difference, kind="stable")
    kept = min(KEPT_EXTREMES, budget)
    rest = np.random.default_rng(0).choice(order[kept:], size=budget - kept, replace=False)
    return np.sort(np.concatenate([order[:kept], rest]))


def _spot(tau: float, share: float, style: LineStyle, scale: LogScale) -> Spec:
    marker = {"symbol": scale.symbols([share], style.symbol)}
    text = f"F({tau:g}) = {number(share)}<extra></extra>"
    return markers(
        "", [tau], scale.lift([share]), style, marker=marker, showlegend=False, hovertemplate=text
    )


def _ratio_ticks(end: float) -> Spec:
    ticks = [tick for tick in (1.0, *MARKED) if tick <= end]
    ticks += [10.0**power for power in range(1, math.ceil(math.log10(end)) + 1)]
    return {
        "range": [0, math.log10(end)],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{t:g}" for t in ticks],
    }
