"""Figures of differing experts, by router, token, sequence and layer."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.notation import number
from onepolicy.report.figure import TRAINER, Absent, Figure, LineStyle, LogScale, axis, bars
from onepolicy.report.mismatch import NO_PROBE, trained_label
from onepolicy.report.run import Array, Run
from onepolicy.report.words import RAN, ROLLOUTS_OWN, WHOLE, WOULD

BINS = 16
WITH_REPLAY = (
    f"With replay this is what the trainer's routers would have chosen; the {RAN} are "
    f"{ROLLOUTS_OWN} in every layer."
)


@dataclass(frozen=True)
class Series:
    """One tensor of a probe under one scoring (shapes: run/probe_file.py `routing_tensors`)."""

    label: str
    style: LineStyle
    values: Array


def routing_figures(run: Run) -> list[Figure | Absent]:
    """Return the figures of the last probe."""
    if not run.names("routing/"):
        return [Absent("routing", "Routing: a dense model has no routers, nothing to compare.")]
    if run.probe is None:
        return [Absent("routing", f"Routing: {NO_PROBE}.")]
    probe = run.probe

    def series(tensor: str) -> list[Series]:
        trained, native = probe.both(tensor)
        out = []
        if native is not None:
            out.append(Series("without replay", TRAINER, native))
        if trained is not None:
            out.append(Series(*trained_label(run), trained))
        return out

    return routing_figures_of(series, mode=run.config.get("replay", {}).get("mode", "off"))


def routing_figures_of(
    series: Callable[[str], list[Series]], *, mode: str
) -> list[Figure | Absent]:
    """Return the figures.

    `series` returns the tensor of this name of every scoring that has it; `mode` is the replay
    mode.
    """
    drawn: list[tuple[str, str, Callable[[Sequence[Series]], Figure]]] = [
        ("routers", "experts_differing", per_router),
        ("tokens", "disagree_per_token", per_token),
        ("sequences", "disagree_per_sequence", per_sequence),
        ("layers", "disagree_per_layer", per_layer),
    ]
    if mode in ROLLOUT_MODES:
        drawn.append(("gate mass", "gate_mass_per_layer", gate_mass))
    out: list[Figure | Absent] = []
    for name, tensor, draw in drawn:
        found = series(tensor)
        if not found:
            out.append(Absent(name, f"Routing, {name}: the last probe has no {tensor}."))
            continue
        figure = draw(found)
        if mode in WHOLE and tensor != "gate_mass_per_layer":
            figure = dataclasses.replace(figure, note=f"{figure.note} {WITH_REPLAY}")
        out.append(figure)
    return out


def per_router(series: Sequence[Series]) -> Figure:
    """Draw the share of routes (token, layer) with 0..K differing experts."""
    shares = [(each, each.values / each.values.sum()) for each in series]
    scale = LogScale.of(*(values[values > 0] for _, values in shares), top=1.0)
    data = []
    for each, values in shares:
        heights = [value or None for value in values.tolist()]
        data.append(bars(each.label, list(range(len(values))), heights, each.style))
    layout = {
        "xaxis": axis("experts chosen otherwise", dtick=1),
        "yaxis": scale.axis("share of routes (log)"),
    }
    title = f"{WOULD.capitalize()}: " + _each((e.label, 1 - values[0]) for e, values in shares)
    note = "Counted: every token in every MoE layer. A bar left out is exactly 0."
    return Figure("routers", title, note, data, layout)


def per_token(series: Sequence[Series]) -> Figure:
    """Draw the share of tokens with 0..L differing layers."""
    layers = max(int(each.values.max()) for each in series)
    data, touched = [], []
    for each in series:
        shares = np.bincount(each.values.astype(np.int64), minlength=layers + 1) / len(each.values)
        data.append(bars(each.label, list(range(layers + 1)), shares.tolist(), each.style))
        touched.append((each.label, 1 - shares[0]))
    x = axis("layers choosing otherwise", dtick=max(1, layers // 8))
    layout = {"xaxis": x, "yaxis": axis("share of tokens", tickformat=".0%")}
    note = (
        "Prompt and response tokens. At 0 every layer of the token would choose the same experts "
        "on both sides."
    )
    title = f"Tokens with a router that would choose otherwise: {_each(touched)}"
    return Figure("tokens", title, note, data, layout)


def per_sequence(series: Sequence[Series]) -> Figure:
    """Draw the share of sequences by their mean number of differing routers per token."""
    top = max(float(each.values.max()) for each in series) or 1.0
    edges = np.linspace(0, top, BINS + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).round(4).tolist()
    data = []
    for each in series:
        counts = np.histogram(each.values, bins=edges)[0]
        data.append(bars(each.label, middles, (counts / len(each.values)).tolist(), each.style))
    layout = {
        "xaxis": axis("routers choosing otherwise", rangemode="tozero"),
        "yaxis": axis("share of sequences", tickformat=".0%"),
        "bargap": 0.08,
    }
    means = ", ".join(f"{number(float(each.values.mean()))} {each.label}" for each in series)
    title = f"{WOULD.capitalize()}, per token: {means}"
    note = (
        "Mean of each sequence. A tail to the right is a group of sequences that are routed worse "
        "than the rest."
    )
    return Figure("sequences", title, note, data, layout)


def per_layer(series: Sequence[Series]) -> Figure:
    """Draw the share of tokens whose router differs, by layer."""
    layers = [list(range(len(each.values))) for each in series]
    data = [
        bars(e.label, x, e.values.tolist(), e.style) for e, x in zip(series, layers, strict=True)
    ]
    count = max(map(len, layers))
    layout = {
        "xaxis": axis("MoE layer, from the input", dtick=max(1, count // 12)),
        "yaxis": axis("share of tokens", tickformat=".1%", rangemode="tozero"),
    }
    worst = max(series, key=lambda each: float(each.values.max()))
    layer, most = int(worst.values.argmax()), float(worst.values.max())
    share = f"{number(most, share=True)} of tokens {worst.label}"
    title = f"Layer {layer} would choose otherwise most: for {share}"
    if most == 0:
        title = "No layer would choose another expert"
    elif not stands_out(worst.values.tolist()):
        title = f"No layer stands out: other experts for at most {share}"
    note = (
        "Differences add up with depth; one layer that stands out, above twice the median of the "
        "others, points at a bug, not at rounding."
    )
    return Figure("layers", title, note, data, layout)


def stands_out(shares: Sequence[float]) -> bool:
    """Return whether the largest share is more than twice the median of the other layers."""
    *others, most = sorted(shares)
    return bool(others) and most > 2 * statistics.median(others)


def gate_mass(series: Sequence[Series]) -> Figure:
    """Draw the gate mass that the replayed experts lack of the trainer's own choice, by layer."""
    lost = [(each, 1 - each.values.astype(np.float64)) for each in series]
    data = [
        bars(each.label, list(range(len(values))), values.tolist(), each.style)
        for each, values in lost
    ]
    layout = {
        "xaxis": axis("MoE layer, from the input", dtick=max(1, len(lost[0][1]) // 12)),
        "yaxis": axis("gate mass not captured", tickformat=".2p", rangemode="tozero"),
    }
    held = ", ".join(number(1 - values.mean(), share=True) for _, values in lost)
    note = (
        "The part that the replayed experts lack of the scores of the experts that the trainer "
        "would have chosen itself."
    )
    title = f"Replayed experts hold {held} of the trainer's best gate mass"
    return Figure("gate-mass", title, note, data, layout, "wide")


def _each(shares: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{number(float(share), share=True)} {label}" for label, share in shares)
