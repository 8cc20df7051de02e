"""Figure of the mismatch as a function of the turn number, in episodes of several turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from onepolicy.divergence.breakdown import turn_name
from onepolicy.notation import counted, number
from onepolicy.report.figure import TRAINER, Absent, Figure, LineStyle, LogScale, Spec, axis, line
from onepolicy.report.mismatch import counterfactual_missing, trained_label
from onepolicy.report.run import Run
from onepolicy.report.words import ARROW

K3, TOKENS = "mismatch/k3_turn@", "train/tokens_turn@"
NATIVE = "counterfactual/"


@dataclass(frozen=True)
class Curve:
    """k3 of one scoring by turn; keys are the first turn of each bin, from 0, ascending."""

    label: str
    style: LineStyle
    tokens: dict[int, float]
    k3: dict[int, float]  # of all these tokens
    spread: dict[int, tuple[float, float]]  # lowest and highest k3 of a batch
    batches: int

    @classmethod
    def of(
        cls,
        label: str,
        style: LineStyle,
        rows: Sequence[Mapping[str, float | None]],
        prefix: str = "",
    ) -> Self:
        """Build a curve from the metrics of batches.

        `prefix` is that of the names of k3; the counts of tokens have none.
        """
        found: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for row in rows:
            for name, k3 in row.items():
                if name.startswith(prefix + K3) and k3 is not None:
                    turn = name.removeprefix(prefix + K3)
                    found[int(turn)].append((row.get(TOKENS + turn) or 0.0, k3))
        tokens = {turn: sum(n for n, _ in found[turn]) for turn in sorted(found)}
        tokens = {turn: count for turn, count in tokens.items() if count > 0}
        k3s = {turn: sum(n * k3 for n, k3 in found[turn]) / count for turn, count in tokens.items()}
        spread = {
            turn: (min(k3 for _, k3 in found[turn]), max(k3 for _, k3 in found[turn]))
            for turn in tokens
        }
        return cls(label, style, tokens, k3s, spread, len(rows))


def turn_figures(run: Run) -> list[Figure | Absent]:
    """Return the figure of k3 by turn; no figure if episodes have one turn."""
    if not run.names(K3):
        return []
    rows = [row for row in run.rows if TOKENS + "0" in row]
    if not rows:
        reason = f"metrics.jsonl has no {TOKENS}k; an older version wrote it."
        return [Absent("turns", f"k3 by turn: {reason}")]
    if not any(row[TOKENS + "0"] for row in rows):
        reason = f"metrics.jsonl counts no token of the first turn ({TOKENS}0)."
        return [Absent("turns", f"k3 by turn: {reason}")]
    label, style = trained_label(run)
    probes = [row for row in rows if NATIVE + K3 + "0" in row]
    if not probes:
        trained = Curve.of(label, style, rows)
        note = f"{_batches('step', trained.batches)}. {counterfactual_missing(run)}"
        return [by_turn([trained], note)]
    native = Curve.of("without replay", TRAINER, probes, NATIVE)
    note = f"{_batches('probe step', len(probes))}."
    return [by_turn([Curve.of(label, style, probes), native], note)]


def by_turn(curves: Sequence[Curve], where: str = "") -> Figure:
    """Draw k3 by turn. `where` is a sentence for the note that names the batches."""
    scale = LogScale.of(
        *(values for curve in curves for values in (curve.k3.values(), *curve.spread.values()))
    )
    turns = sorted({turn for curve in curves for turn in curve.tokens})
    layout = {
        "xaxis": axis(
            "turn of the model",
            type="category",
            categoryorder="array",
            categoryarray=[turn_name(t) for t in turns],
        ),
        "yaxis": scale.axis("k3 (nats per token, log)"),
    }
    note = f"k3 of the tokens the model wrote in its first, second, ... turn. {where}"
    if any(curve.batches > 1 for curve in curves):
        note += " Whiskers: the lowest and the highest of them."
    data = [_trace(curve, scale) for curve in curves]
    return Figure("turns", _title(curves), note.strip(), data, layout, "wide")


def _trace(curve: Curve, scale: LogScale) -> Spec:
    values = list(curve.k3.values())
    y = scale.lift(values)
    marker = {
        "size": 8,
        "color": curve.style.color,
        "symbol": scale.symbols(values, curve.style.symbol),
    }
    text = [counted(round(tokens), "token") for tokens in curve.tokens.values()]
    hover = "turn %{x}: %{y:.3g} nats, %{text}<extra></extra>"
    settings: Spec = {
        "mode": "lines+markers",
        "marker": marker,
        "text": text,
        "hovertemplate": hover,
    }
    if curve.batches > 1:
        ends = [scale.lift(pair) for pair in curve.spread.values()]
        settings["error_y"] = {
            "type": "data",
            "array": [max(0.0, high - at) for at, (_, high) in zip(y, ends, strict=True)],
            "arrayminus": [max(0.0, at - low) for at, (low, _) in zip(y, ends, strict=True)],
            "color": curve.style.color,
            "thickness": 1,
            "width": 4,
        }
    return line(curve.label, [turn_name(turn) for turn in curve.tokens], y, curve.style, **settings)


def _title(curves: Sequence[Curve]) -> str:
    shared = set.intersection(*(set(curve.k3) for curve in curves))
    if not shared:
        return "k3 by turn"
    first, last = min(shared), max(shared)
    ends = (f"{number(c.k3[first])} {ARROW} {number(c.k3[last])} {c.label}" for c in curves)
    return f"k3 from turn {turn_name(first)} to turn {turn_name(last)}: " + ", ".join(ends)


def _batches(unit: str, count: int) -> str:
    if count == 1:
        return f"All tokens of 1 {unit}"
    return f"All tokens of {count} {unit}s"
