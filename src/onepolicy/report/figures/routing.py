"""Differing experts and the gate mass of replayed ones, by layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.notation import number
from onepolicy.report.figures.parts import Absent, Figure, LineStyle, Series, Spec, axis, bars
from onepolicy.report.words import RAN, ROLLOUTS_OWN, WHOLE

LAYER, GATE_MASS = "routing/layer@", "replay/gate_mass@"
NO_ROUTERS = Absent("routing", "Routing: a dense model has no routers, nothing to compare.")
WITH_REPLAY = (
    f"With replay this is what the trainer's routers would have chosen; the {RAN} are "
    f"{ROLLOUTS_OWN} in every layer."
)


def by_layer(
    label: str, style: LineStyle, found: Mapping[str, float | None], metric: str
) -> list[Series]:
    """Return a metric of one scoring by decoder layer; nothing if it was not measured."""
    values = {
        int(name.removeprefix(metric)): math.nan if value is None else value
        for name, value in found.items()
        if name.startswith(metric)
    }
    layers = sorted(values)
    if not layers:
        return []
    return [Series(label, style, [values[layer] for layer in layers], layers)]


def routing_figures(
    differing: Sequence[Series], mass: Sequence[Series], *, mode: str
) -> list[Figure | Absent]:
    """Return the figures of the scorings of one batch, of which there is one at least.

    differing, mass: LAYER and GATE_MASS by layer. mode: of replay.
    """
    drawn: list[Figure | Absent] = [per_layer(differing, WITH_REPLAY * (mode in WHOLE))]
    if mass and mode in ROLLOUT_MODES:
        drawn.append(gate_mass(mass))
    return drawn


def per_layer(series: Sequence[Series], more: str = "") -> Figure:
    """Draw the share of tokens whose router differs, by layer. more: for the note."""
    worst = max(series, key=lambda each: float(np.max(each.y)))
    layer, most = worst.x[int(np.argmax(worst.y))], float(np.max(worst.y))
    whose = f" {worst.label}" * (len(series) > 1)
    share = f"{number(most, share=True)} of tokens{whose}"
    title = f"Layer {layer} would choose otherwise most: for {share}"
    if most == 0:
        title = "No layer would choose another expert"
    elif not stands_out(worst.y):
        title = f"No layer stands out: other experts for at most {share}"
    note = (
        "Differences add up with depth; one layer that stands out, above twice the median of the "
        f"others, points at a bug, not at rounding. {more}"
    )
    layout = {
        "xaxis": _layer_axis(series),
        "yaxis": axis("share of tokens", tickformat=".1%", rangemode="tozero"),
    }
    return Figure("layers", title, note.strip(), _bars(series), layout)


def stands_out(shares: Sequence[float]) -> bool:
    """Return whether the largest share is more than twice the median of the other layers."""
    *others, most = sorted(shares)
    return bool(others) and most > 2 * statistics.median(others)


def gate_mass(series: Sequence[Series]) -> Figure:
    """Draw the gate mass that the replayed experts lack of the trainer's own choice, by layer."""
    held = ", ".join(number(float(np.mean(each.y)), share=True) for each in series)
    title = f"Replayed experts hold {held} of the trainer's best gate mass"
    note = (
        "The part that the replayed experts lack of the scores of the experts that the trainer "
        "would have chosen itself."
    )
    layout = {
        "xaxis": _layer_axis(series),
        "yaxis": axis("gate mass not captured", tickformat=".2p", rangemode="tozero"),
    }
    lost = [replace(each, y=[1 - share for share in each.y]) for each in series]
    return Figure("gate-mass", title, note, _bars(lost), layout)


def _layer_axis(series: Sequence[Series]) -> Spec:
    last = max(each.x[-1] for each in series)
    return axis("MoE layer, from the input", dtick=max(1, last // 12))


def _bars(series: Sequence[Series]) -> list[Spec]:
    return [bars(each.label, list(each.x), list(each.y), each.style) for each in series]
