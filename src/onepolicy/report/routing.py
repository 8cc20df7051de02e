"""Figures of which experts differ between rollout and trainer, per router, token, sequence and layer."""

from __future__ import annotations

import numpy as np

from onepolicy.report.figure import TRAINER, Absent, Figure, LogScale, Look, axis, bars
from onepolicy.report.mismatch import NO_PROBE, trained_label
from onepolicy.report.run import Array, Run

BINS = 16


def routing_figures(run: Run) -> list[Figure | Absent]:
    if not run.names("routing/"):
        return [Absent("routing", "Routing: a dense model has no routers, nothing to compare.")]
    if run.probe is None:
        return [Absent("routing", f"Routing: {NO_PROBE}.")]
    figures = [per_router(run), per_token(run), per_sequence(run), per_layer(run)]
    return [*figures, gate_mass(run)] if run.replay else figures


def per_router(run: Run) -> Figure | Absent:
    """Share of routers (token, layer) with 0..K differing experts."""
    series = _series(run, "experts_differing")
    if not series:
        return _no_tensor("routers", "experts_differing")
    shares = [(label, look, counts / counts.sum()) for label, look, counts in series]
    scale = LogScale.of(*(values[values > 0] for _, _, values in shares), top=1.0)
    data = [
        bars(label, list(range(len(values))), [v if v > 0 else None for v in values.tolist()], look)
        for label, look, values in shares
    ]
    layout = {"xaxis": axis("differing experts of a router", dtick=1), "yaxis": scale.axis("share of routers (log)")}
    differing = ", ".join(f"{label}: {1 - values[0]:.2%}" for label, _, values in shares)
    note = f"A router is one token in one MoE layer. Any expert differs: {differing}. A bar left out is exactly 0."
    return Figure("routers", "Routers: nearly all at 0 differing experts", note, data, layout)


def per_token(run: Run) -> Figure | Absent:
    series = _series(run, "disagree_per_token")
    if not series:
        return _no_tensor("tokens", "disagree_per_token")
    layers = max(int(values.max()) for _, _, values in series)
    data, touched = [], []
    for label, look, values in series:
        shares = np.bincount(values.astype(np.int64), minlength=layers + 1) / len(values)
        data.append(bars(label, list(range(layers + 1)), shares.tolist(), look))
        touched.append(f"{label}: {1 - shares[0]:.1%}")
    layout = {"xaxis": axis("differing layers of a token"), "yaxis": axis("share of tokens", tickformat=".0%")}
    note = f"Tokens with at least one differing router: {', '.join(touched)}."
    return Figure("tokens", "Tokens: mass near 0 differing layers", note, data, layout)


def per_sequence(run: Run) -> Figure | Absent:
    series = _series(run, "disagree_per_sequence")
    if not series:
        return _no_tensor("sequences", "disagree_per_sequence")
    top = max(float(values.max()) for _, _, values in series) or 1.0
    edges = np.linspace(0, top, BINS + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).round(4).tolist()
    data = []
    for label, look, values in series:
        counts = np.histogram(values, bins=edges)[0]
        data.append(bars(label, middles, (counts / len(values)).tolist(), look))
    layout = {
        "xaxis": axis("differing routers per token, sequence mean"),
        "yaxis": axis("share of sequences", tickformat=".0%"),
        "bargap": 0.08,
    }
    means = ", ".join(f"{label}: {float(values.mean()):.3g}" for label, _, values in series)
    return Figure(
        "sequences", "Sequences: no tail of badly routed ones", f"Mean of all sequences: {means}.", data, layout
    )


def per_layer(run: Run) -> Figure | Absent:
    series = _series(run, "disagree_per_layer")
    if not series:
        return _no_tensor("layers", "disagree_per_layer")
    data = [bars(label, list(range(len(values))), values.tolist(), look) for label, look, values in series]
    layout = {"xaxis": axis("MoE layer"), "yaxis": axis("share of tokens that differ", tickformat=".1%")}
    note = "Differences add up with depth; one layer that stands out points at a bug, not at rounding."
    return Figure("layers", "Layers: a smooth rise with depth at most", note, data, layout)


def gate_mass(run: Run) -> Figure | Absent:
    """What the replayed experts hold of the scores of those the trainer would have chosen, per layer."""
    series = _series(run, "gate_mass_per_layer")
    if not series:
        return _no_tensor("gate mass", "gate_mass_per_layer")
    lost = [(label, look, 1 - values.astype(np.float64)) for label, look, values in series]
    data = [bars(label, list(range(len(values))), values.tolist(), look) for label, look, values in lost]
    layout = {"xaxis": axis("MoE layer"), "yaxis": axis("gate mass not captured", tickformat=".2p")}
    mean = ", ".join(f"{label}: {values.mean():.3%}" for label, _, values in lost)
    note = f"Share of the trainer's best experts' scores that the replayed experts lack; mean of all layers, {mean}."
    return Figure("gate-mass", "Gate mass that the replayed experts do not hold", note, data, layout)


def _series(run: Run, tensor: str) -> list[tuple[str, Look, Array]]:
    assert run.probe is not None
    trained, native = run.probe.both(tensor)
    out = []
    if native is not None:
        out.append(("without replay", TRAINER, native))
    if trained is not None:
        out.append((*trained_label(run), trained))
    return out


def _no_tensor(name: str, tensor: str) -> Absent:
    return Absent(name, f"Routing, {name}: the last probe has no {tensor}.")
