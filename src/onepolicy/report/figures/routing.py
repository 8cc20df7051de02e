"""Differing experts, by router, token, sequence and layer. Series hold tensors of a probe."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np

from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.notation import number
from onepolicy.report.figures.parts import Absent, Figure, LogScale, Series, Width, axis, bars
from onepolicy.report.words import RAN, ROLLOUTS_OWN, WHOLE, WOULD

BINS = 16
NO_ROUTERS = Absent("routing", "Routing: a dense model has no routers, nothing to compare.")
WITH_REPLAY = (
    f"With replay this is what the trainer's routers would have chosen; the {RAN} are "
    f"{ROLLOUTS_OWN} in every layer."
)


def routing_figures(
    series: Callable[[str], list[Series]], *, mode: str, why: str = "the last probe has no"
) -> list[Figure | Absent]:
    """Return the figures of one batch.

    `series` returns the tensor of this name (run/probe_file.py `routing_tensors`) of every scoring
    that has it; `mode` is the replay mode.
    """
    drawn: dict[str, tuple[str, Callable[[Sequence[Series]], Figure]]] = {
        "layers": ("disagree_per_layer", per_layer),
        "tokens": ("disagree_per_token", per_token),
        "routers": ("experts_differing", per_router),
        "sequences": ("disagree_per_sequence", per_sequence),
    }
    if mode in ROLLOUT_MODES:
        drawn["gate mass"] = ("gate_mass_per_layer", gate_mass)
    out: list[Figure | Absent] = []
    for name, (tensor, draw) in drawn.items():
        found = series(tensor)
        if not found:
            out.append(Absent(name, f"Routing, {name}: {why} {tensor}."))
        elif mode in WHOLE and draw is not gate_mass:
            out.append(draw(found).noted(WITH_REPLAY))
        else:
            out.append(draw(found))
    return out


def per_router(series: Sequence[Series]) -> Figure:
    """Draw the share of routes (token, layer) with 0..K differing experts."""
    shares = [each.y / each.y.sum() for each in series]
    scale = LogScale.of(*(values[values > 0] for values in shares), top=1.0)
    heights = [[value or None for value in values.tolist()] for values in shares]
    title = f"{WOULD.capitalize()}: {_each(series, [1 - values[0] for values in shares])}"
    note = "Counted: every token in every MoE layer. A bar left out is exactly 0."
    layout = {
        "xaxis": axis("experts chosen otherwise", dtick=1),
        "yaxis": scale.axis("share of routes (log)"),
    }
    return Figure("routers", title, note, _bars(series, heights), layout)


def per_token(series: Sequence[Series]) -> Figure:
    """Draw the share of tokens with 0..L differing layers."""
    layers = max(int(each.y.max()) for each in series)
    counts = [np.bincount(each.y.astype(np.int64), minlength=layers + 1) for each in series]
    shares = [found / len(each.y) for found, each in zip(counts, series, strict=True)]
    touched = _each(series, [1 - values[0] for values in shares])
    title = f"Tokens with a router that would choose otherwise: {touched}"
    note = (
        "Prompt and response tokens. At 0 every layer of the token would choose the same experts "
        "on both sides."
    )
    layout = {
        "xaxis": axis("layers choosing otherwise", dtick=max(1, layers // 8)),
        "yaxis": axis("share of tokens", tickformat=".0%"),
    }
    return Figure("tokens", title, note, _bars(series, [v.tolist() for v in shares]), layout)


def per_sequence(series: Sequence[Series]) -> Figure:
    """Draw the share of sequences by their mean number of differing routers per token."""
    edges = np.linspace(0, max(float(each.y.max()) for each in series) or 1.0, BINS + 1)
    middles = ((edges[1:] + edges[:-1]) / 2).round(4).tolist()
    heights = [(np.histogram(each.y, bins=edges)[0] / len(each.y)).tolist() for each in series]
    means = ", ".join(f"{number(float(each.y.mean()))} {each.label}" for each in series)
    note = (
        "Mean of each sequence. A tail to the right is a group of sequences that are routed worse "
        "than the rest."
    )
    layout = {
        "xaxis": axis("routers choosing otherwise", rangemode="tozero"),
        "yaxis": axis("share of sequences", tickformat=".0%"),
        "bargap": 0.08,
    }
    title = f"{WOULD.capitalize()}, per token: {means}"
    return Figure("sequences", title, note, _bars(series, heights, middles), layout)


def per_layer(series: Sequence[Series], width: Width = "half") -> Figure:
    """Draw the share of tokens whose router differs, by layer."""
    heights = [np.asarray(each.y).tolist() for each in series]
    worst = max(series, key=lambda each: float(np.max(each.y)))
    layer, most = int(np.argmax(worst.y)), float(np.max(worst.y))
    whose = f" {worst.label}" * (len(series) > 1)
    share = f"{number(most, share=True)} of tokens{whose}"
    title = f"Layer {layer} would choose otherwise most: for {share}"
    if most == 0:
        title = "No layer would choose another expert"
    elif not stands_out(np.asarray(worst.y).tolist()):
        title = f"No layer stands out: other experts for at most {share}"
    note = (
        "Differences add up with depth; one layer that stands out, above twice the median of the "
        "others, points at a bug, not at rounding."
    )
    layout = {
        "xaxis": _layer_axis(max(map(len, heights))),
        "yaxis": axis("share of tokens", tickformat=".1%", rangemode="tozero"),
    }
    return Figure("layers", title, note, _bars(series, heights), layout, width)


def stands_out(shares: Sequence[float]) -> bool:
    """Return whether the largest share is more than twice the median of the other layers."""
    *others, most = sorted(shares)
    return bool(others) and most > 2 * statistics.median(others)


def gate_mass(series: Sequence[Series]) -> Figure:
    """Draw the gate mass that the replayed experts lack of the trainer's own choice, by layer."""
    lost = [1 - each.y.astype(np.float64) for each in series]
    held = ", ".join(number(1 - values.mean(), share=True) for values in lost)
    title = f"Replayed experts hold {held} of the trainer's best gate mass"
    note = (
        "The part that the replayed experts lack of the scores of the experts that the trainer "
        "would have chosen itself."
    )
    layout = {
        "xaxis": _layer_axis(len(lost[0])),
        "yaxis": axis("gate mass not captured", tickformat=".2p", rangemode="tozero"),
    }
    data = _bars(series, [values.tolist() for values in lost])
    return Figure("gate-mass", title, note, data, layout, "wide")


def _layer_axis(layers: int) -> dict:
    return axis("MoE layer, from the input", dtick=max(1, layers // 12))


def _bars(series: Sequence[Series], heights: Sequence[list], x: list | None = None) -> list[dict]:
    return [
        bars(each.label, x or list(range(len(found))), found, each.style)
        for each, found in zip(series, heights, strict=True)
    ]


def _each(series: Sequence[Series], shares: Sequence[float]) -> str:
    return ", ".join(
        f"{number(float(share), share=True)} {each.label}"
        for share, each in zip(shares, series, strict=True)
    )
