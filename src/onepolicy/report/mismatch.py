"""Figures of the distance between rollout and trainer: k3 over steps, F(tau), probability scatter."""

from __future__ import annotations

import math

import numpy as np

from onepolicy.report.figure import REPLAY, RHO, TAU, TRAINER, Absent, Figure, LogScale, Look, Spec, axis, line, markers
from onepolicy.report.learning import step_axis
from onepolicy.report.run import Array, Run

MAX_POINTS = 20_000  # of both scatters together: SVG stays usable
KEPT_EXTREMES = 500  # per scatter; the rest is a random subsample
MARKED = (1.25, 2.0, 5.0)
NO_PROBE = "no probe was written (log.counterfactual_every)"


def mismatch_figures(run: Run) -> list[Figure | Absent]:
    return [k3(run), extreme_tokens(run), *scatters(run)]


def trained_label(run: Run) -> tuple[str, Look]:
    return ("with replay (trained on)", REPLAY) if run.replay else ("no replay (trained on)", TRAINER)


def k3(run: Run) -> Figure | Absent:
    steps, values = run.points("mismatch/k3")
    if not any(math.isfinite(v) for v in values):
        return Absent("k3", "k3 over steps: metrics.jsonl has no mismatch/k3.")
    other_steps, other = run.points("counterfactual/mismatch/k3")
    scale = LogScale.of(values, other)
    label, look = trained_label(run)
    lines = line(label, steps, scale.lift(values), look)
    marker = {"size": 4, "color": look.color, "symbol": scale.symbols(values, look.symbol)}
    data = [lines | {"mode": "lines+markers", "marker": marker}]
    note = f"k3 = mean({RHO} - 1 - log {RHO}), {RHO} = p_trainer / p_rollout of the sampled tokens; 0 = same policy. "
    if other:
        open_zero = {"symbol": scale.symbols(other, TRAINER.symbol), "size": 9}
        points = markers("same batch without replay", other_steps, scale.lift(other), TRAINER, marker=open_zero)
        data.append(
            points | {"mode": "lines+markers", "line": {"color": TRAINER.color, "dash": TRAINER.dash, "width": 1}}
        )
        note += "Blue is the same batch scored a second time without replay."
        title = "k3 should stay low and flat; the gap to blue is what replay removes"
    else:
        title = "k3 should stay low and flat"
        note += counterfactual_missing(run)
    layout = {"xaxis": step_axis(), "yaxis": scale.axis("k3 (nats per token, log)")}
    return Figure("k3", title, note, data, layout, width="wide")


def counterfactual_missing(run: Run) -> str:
    if not run.replay:
        return "No second curve: rollout routes are not replayed, so the trained scoring is the one without replay."
    return "No second curve: no probe step in this run (log.counterfactual_every)."


def extreme_tokens(run: Run) -> Figure | Absent:
    """F(tau): share of tokens with max(rho, 1/rho) > tau (R3 paper eq. 3), at the last probe."""
    if run.probe is None:
        return Absent("f_tau", f"F({TAU}): {NO_PROBE}.")
    found = {trained_label(run): run.probe.mismatch("logp_trainer")}
    if "logp_trainer_native" in run.probe.tensors:
        found[("without replay", TRAINER)] = run.probe.mismatch("logp_trainer_native")
    count = len(run.probe.tensors["logp_rollout"])
    end = max(10.0, math.exp(min(max(each.max_dlogp for each in found.values()), 12.0)) * 1.2)
    grid = (1 + np.geomspace(1e-3, end - 1, 200)).tolist()
    curves = {key: each.extreme(grid) for key, each in found.items()}
    scale = LogScale.of(*curves.values(), [1 / count, 0.0], top=1.0)
    data = []
    for (label, look), shares in curves.items():
        stop = shares.index(0.0) + 1 if 0.0 in shares else len(grid)  # to the first zero
        data.append(line(label, grid[:stop], scale.lift(shares[:stop]), look, hovertemplate="%{x:.3g}: %{y:.2g}"))
        marked = found[(label, look)].extreme(MARKED)
        data += [_spot(tau, share, look, scale) for tau, share in zip(MARKED, marked, strict=True)]
    layout = {
        "xaxis": axis(f"probability ratio {TAU} (log)", type="log", **_ratio_ticks(end)),
        "yaxis": scale.axis(f"share of tokens beyond {TAU} (log)"),
    }
    note = (
        f"F({TAU}) at probe step {run.probe.step}: share of {count:,} tokens whose probability differs by more than "
        f"a factor {TAU} between rollout and trainer. "
        "Markers at 1.25, 2 and 5; an open marker on the lowest line is exactly 0."
    )
    title = "Few tokens beyond a factor of 2" + (", fewer with replay" if len(found) == 2 else "")
    return Figure("f_tau", title, note, data, layout, width="wide")


def scatters(run: Run) -> list[Figure | Absent]:
    """Rollout against trainer probability of each sampled token, one figure per scoring, same axes."""
    if run.probe is None:
        return [Absent("scatter", f"Probability scatter: {NO_PROBE}.")]
    tensors = run.probe.tensors
    label, look = trained_label(run)
    panels = [("scatter", "logp_trainer", label, look)]
    if "logp_trainer_native" in tensors:
        panels.insert(0, ("scatter_native", "logp_trainer_native", "without replay", TRAINER))
    out: list[Figure | Absent] = []
    for name, tensor, panel, panel_look in panels:
        out.append(_scatter(run, name, tensor, panel, panel_look, MAX_POINTS // len(panels)))
    if len(panels) == 1 and run.replay:
        out.append(Absent("scatter_native", "Scatter without replay: the last probe has no logp_trainer_native."))
    return out


def _scatter(run: Run, name: str, tensor: str, label: str, look: Look, budget: int) -> Figure:
    assert run.probe is not None
    rollout = np.exp(run.probe.tensors["logp_rollout"].astype(np.float64))
    trainer = np.exp(run.probe.tensors[tensor].astype(np.float64))
    difference = np.abs(trainer - rollout)
    chosen = subsample(difference, budget)
    x, y = rollout[chosen].round(5).tolist(), trainer[chosen].round(5).tolist()
    marker = {"size": 4, "opacity": 0.5, "color": look.color, "symbol": look.symbol}
    diagonal = line("equal", [0, 1], [0, 1], Look("@ink", "dot", "circle", ""), hoverinfo="skip", opacity=0.6)
    data = [
        markers(label, x, y, look, marker=marker, hovertemplate="rollout %{x}<br>trainer %{y}<extra></extra>"),
        diagonal,
    ]
    layout = {
        "xaxis": axis("rollout probability", range=[-0.02, 1.02]),
        "yaxis": axis("trainer probability", range=[-0.02, 1.02]),
        "showlegend": False,
    }
    shown = f"{len(chosen):,} of {len(rollout):,} tokens (the {KEPT_EXTREMES} farthest off, the rest at random)"
    if len(chosen) == len(rollout):
        shown = f"All {len(rollout):,} tokens"
    found = run.probe.mismatch(tensor)
    pearson = f"{found.pearson:.6f}" if math.isfinite(found.pearson) else "undefined"
    note = f"{shown} of probe step {run.probe.step}. Correlation {pearson}, largest difference {found.max_dp:.3g}."
    return Figure(name, f"Points should hug the diagonal: {label}", note, data, layout, square=True)


def subsample(difference: Array, budget: int) -> Array:
    """Indices of at most `budget` tokens: the KEPT_EXTREMES with the largest difference and a fixed random rest."""
    if len(difference) <= budget:
        return np.arange(len(difference))
    order = np.argsort(-difference, kind="stable")
    kept = min(KEPT_EXTREMES, budget)
    rest = np.random.default_rng(0).choice(order[kept:], size=budget - kept, replace=False)
    return np.sort(np.concatenate([order[:kept], rest]))


def _spot(tau: float, share: float, look: Look, scale: LogScale) -> Spec:
    marker = {"symbol": scale.symbols([share], look.symbol)}
    text = f"F({tau:g}) = {share:.3g}<extra></extra>"
    return markers("", [tau], scale.lift([share]), look, marker=marker, showlegend=False, hovertemplate=text)


def _ratio_ticks(end: float) -> Spec:
    ticks = [t for t in (1.0, *MARKED) if t <= end] + [10.0**k for k in range(1, math.ceil(math.log10(end)) + 1)]
    return {
        "range": [0, math.log10(end)],
        "tickmode": "array",
        "tickvals": ticks,
        "ticktext": [f"{t:g}" for t in ticks],
    }
