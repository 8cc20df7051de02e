"""What `onepolicy measure` found, in the terminal and as one HTML file. Input: the tree of OUT/measure.json."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from onepolicy.report import distribution
from onepolicy.report.figure import NEUTRAL, REPLAY, ROLLOUT, TRAINER, Absent, Figure, axis, bars
from onepolicy.report.html import document, section
from onepolicy.report.mismatch import extreme_tokens, scatters
from onepolicy.report.routing import routing_figures
from onepolicy.report.run import Run, Tree, read_probe
from onepolicy.report.words import DASH, number

QUANTITIES = {  # metric -> (name, is a share)
    "mismatch/k1": ("k1, nats per token", False),
    "mismatch/k3": ("k3, nats per token", False),
    "mismatch/f1.25": ("F(1.25), tokens off by more", True),
    "mismatch/f2": ("F(2), tokens off by more", True),
    "mismatch/f5": ("F(5), tokens off by more", True),
    "mismatch/max_dp": ("max |difference of p|", False),
    "mismatch/max_dlogp": ("max |log rho|", False),
    "mismatch/ess": ("effective share of tokens", True),
    "routing/routers": ("routers that differ", True),
    "routing/tokens": ("tokens with a differing router", True),
    "routing/sequence": ("differing routers per token", False),
}
REPEATS = {
    "repeat/k3": ("forward repeated, other packing: k3", False),
    "repeat/max_dlogp": ("forward repeated: max |log ratio|", False),
    "repeat/routers": ("forward repeated: routers that differ", True),
}
Rows = Sequence[tuple[str, ...]]


def summary(tree: Tree) -> list[RenderableType]:
    """The verdict, then tables: both scorings, the waterfall, what was measured alone, breakdowns."""
    title = f"{tree['model']}: {tree['tokens']:,} tokens of {tree['sequences']} sequences"
    parts: list[RenderableType] = [_table(title, ("", "without replay", "with replay"), comparison(tree))]
    if (whole := tree.get("distribution")) is not None:
        parts.append(_table(distribution.title(whole), distribution.HEADER, distribution.rows(whole)))
    parts.append(_table("Where the gap comes from, k3 in nats per token", FALL_HEADER, waterfall_rows(tree)))
    parts.append(_table("Each measured alone", ("", "nats", "95% interval", "measured as"), alone_rows(tree)))
    parts += [_table(f"By {name}", ROW_HEADER, breakdown_rows(rows)) for name, rows in tree["breakdowns"].items()]
    said = tree["verdict"]
    color = {"bug": "bold red", "nothing": "bold green"}.get(said["action"], "bold yellow")
    parts.append(Text(said["sentence"], style=color))
    parts += [Text(line) for line in verdict_lines(tree)]
    return parts


def verdict_lines(tree: Tree) -> list[str]:
    said = tree["verdict"]
    return [*([f"Set: {said['setting']}"] if said["setting"] else []), *(f"Because {text}." for text in said["basis"])]


def comparison(tree: Tree) -> Rows:
    metrics = tree["metrics"]
    plain, replayed, repeated = metrics["without_replay"], metrics.get("with_replay", {}), metrics["repeated_forward"]
    rows = [
        (words, number(plain[name], share=share), number(replayed.get(name), share=share))
        for name, (words, share) in QUANTITIES.items()
        if name in plain
    ]
    for name, (words, share) in REPEATS.items():
        if (value := repeated.get(f"counterfactual/{name}")) is not None:
            rows.append((words, number(value, share=share), number(repeated.get(name), share=share)))
    return rows


FALL_HEADER = ("", "removed", "95% interval", "left", "measured as")


def waterfall_rows(tree: Tree) -> Rows:
    fall = tree["waterfall"]
    total = fall["total"]
    rows: list[tuple[str, ...]] = [
        ("the gap", "", _interval(total), number(total["value"]), "trainer as it is against the rollout")
    ]
    for bar in fall["bars"]:
        removed = bar["removed"]
        rows.append(
            (bar["name"], number(removed["value"]), _interval(removed), number(bar["left"]["value"]), bar["how"])
        )
    left = fall["bars"][-1]["left"] if fall["bars"] else total
    why = "what no step removes: the engine's kernels and batches, or other weights (see the verdict)"
    return [*rows, ("remainder", "", _interval(left), number(left["value"]), why)]


def alone_rows(tree: Tree) -> Rows:
    return [(a["name"], number(a["nats"]["value"]), _interval(a["nats"]), a["how"]) for a in tree["alone"]]


ROW_HEADER = ("", "tokens", "k3", "mean |log rho|", "share of the gap")


def breakdown_rows(rows: list[Tree]) -> Rows:
    return [
        (r["name"], f"{r['tokens']:,}", number(r["k3"]), number(r["mean_dlogp"]), number(r["share"], share=True))
        for r in rows
    ]


def write_report(out: Path) -> Path:
    """OUT/report.html from OUT/measure.json and OUT/probes. UsageError if plotly is not installed."""
    tree = json.loads((out / "measure.json").read_text(encoding="utf-8"))
    probe = read_probe(out / "probes" / "step_00000.safetensors", step=0)
    config = tree["config"] if "with_replay" in tree["metrics"] else tree["config"] | {"replay": {"mode": "off"}}
    run = Run(out, config, {}, {"steps": 1}, [{"step": 0, **tree["metrics"]["without_replay"]}], [], probe)
    sections: list[tuple[str, str, list[Figure | Absent]]] = [
        ("Attribution", "Which part of the gap goes away with which change?", [fall_figure(tree)]),
        (
            "Mismatch",
            "How far apart are the engine that samples and the one that learns?",
            [extreme_tokens(run), *scatters(run)],
        ),
        ("Routing", "Where do the two choose different experts?", routing_figures(run)),
        ("Where the gap sits", "Its share by place, probability, entropy and class.", breakdown_figures(tree)),
    ]
    if (whole := tree.get("distribution")) is not None:
        sections.insert(2, ("Distributions", distribution.title(whole) + ".", [distribution.figure(whole)]))
    figures = [f for _, _, items in sections for f in items if isinstance(f, Figure)]
    lines = "".join(f"<p>{escape(line)}</p>" for line in verdict_lines(tree))
    head = (
        f'<h1>{escape(tree["model"])}</h1><div class="card verdict"><p><b>{escape(tree["verdict"]["sentence"])}</b></p>'
        f"{lines}</div>{_html(('Rollout vs trainer', 'without replay', 'with replay'), comparison(tree))}"
    )
    tables = _html(FALL_HEADER, waterfall_rows(tree)) + _html(
        ("", "nats", "95% interval", "measured as"), alone_rows(tree)
    )
    if whole is not None:
        tables += f"<h2>Distributions</h2>{_html(distribution.HEADER, distribution.rows(whole))}"
        tables += f"<h2>Worst positions</h2>{_html(distribution.WORST_HEADER, distribution.worst_rows(whole))}"
    body = "\n".join([head, *(section(*each) for each in sections), "<h2>Numbers</h2>", tables, worst(tree)])
    path = out / "report.html"
    temporary = out / "report.html.tmp"
    temporary.write_text(document("onepolicy measure", body, figures), encoding="utf-8", errors="backslashreplace")
    os.replace(temporary, path)
    return path


def fall_figure(tree: Tree) -> Figure:
    """Waterfall as floating bars: each spans from what was left to what was there before."""
    fall = tree["waterfall"]
    levels = [fall["total"]["value"], *(bar["left"]["value"] for bar in fall["bars"])]
    names = [bar["name"] for bar in fall["bars"]]
    floating = bars("removed", names, [a - b for a, b in itertools.pairwise(levels)], REPLAY)
    data = [
        bars("the gap", ["the gap"], [levels[0]], ROLLOUT),
        floating | {"base": levels[1:]},
        bars("remainder", ["remainder"], [levels[-1]], TRAINER),
    ]
    layout = {
        "xaxis": axis("", type="category"),
        "yaxis": axis("k3, nats per token", rangemode="tozero", exponentformat="power"),
        "barmode": "overlay",
    }
    note = "k3 of the same tokens, each bar after one more change of the trainer's side. " + "; ".join(
        f"{bar['name']}: {number(bar['removed']['value'])} [{_interval(bar['removed'])}]" for bar in fall["bars"]
    )
    return Figure("waterfall", "Where the gap comes from", note, data, layout, width="wide")


def breakdown_figures(tree: Tree) -> list[Figure | Absent]:
    out: list[Figure | Absent] = []
    for i, (name, rows) in enumerate(tree["breakdowns"].items()):
        labels = [row["name"] for row in rows]
        tokens = sum(row["tokens"] for row in rows)
        data = [
            bars("of the gap", labels, [row["share"] for row in rows], TRAINER),
            bars("of the tokens", labels, [row["tokens"] / tokens for row in rows], NEUTRAL),
        ]
        layout = {"xaxis": axis(name, type="category"), "yaxis": axis("share", tickformat=".0%")}
        note = "A bin whose blue bar is the higher one holds more than its share of the gap."
        out.append(Figure(f"breakdown-{i}", f"By {name}", note, data, layout))
    return out


def worst(tree: Tree) -> str:
    header = ("Text before", "Token", "p rollout", "p trainer", "sequence, place")
    rows = [
        (
            w["before"],
            repr(w["token"]),
            number(w["p_rollout"]),
            number(w["p_trainer"]),
            f"{w['sequence']}, {w['place']}",
        )
        for w in tree["worst"]
    ]
    return "<h2>Worst tokens</h2>" + _html(header, rows)


def _html(header: tuple[str, ...], rows: Rows) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _table(title: str, header: tuple[str, ...], rows: Rows) -> Table:
    table = Table(*header, title=title, title_justify="left", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _interval(estimate: Tree) -> str:
    return f"{number(estimate['low'])} {DASH} {number(estimate['high'])}"
