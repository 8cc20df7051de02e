"""Results of `onepolicy measure` in the terminal and as one HTML file.

The input is the tree of OUT/measure.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file

from onepolicy.config.secrets import without_secrets
from onepolicy.console import make_table
from onepolicy.files import write_text_atomically
from onepolicy.notation import DASH, counted, number
from onepolicy.report import causes
from onepolicy.report.causes import (
    breakdown_figures,
    change,
    fall_figure,
    interval,
    noise_figure,
    noise_rows,
    signed,
)
from onepolicy.report.figure import DENSE, REPLAY, TRAINER, Absent, Figure, Width
from onepolicy.report.mismatch import MAX_POINTS, Pairs, extreme_tokens, scatter
from onepolicy.report.page import render
from onepolicy.report.png import write_figures
from onepolicy.report.routing import Series, routing_figures_of
from onepolicy.report.turns import Curve, by_turn
from onepolicy.report.words import RAN, ROLLOUTS_OWN, WHOLE, WOULD, Tree
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.rules import SMALL

SCORINGS = {  # name in the files -> (label, line style)
    "without_replay": ("without replay", TRAINER),
    "with_replay": ("with replay", REPLAY),
    "dense": ("dense model", DENSE),
}
QUANTITIES = {  # metric -> (name, is a share)
    "mismatch/k1": ("k1 = mean -log rho, nats per token", False),
    "mismatch/k3": ("k3, nats per token", False),
    "mismatch/f1.25": ("F(1.25), tokens off by more", True),
    "mismatch/f2": ("F(2), tokens off by more", True),
    "mismatch/f5": ("F(5), tokens off by more", True),
    "mismatch/max_dp": ("largest difference of probability", False),
    "mismatch/max_dlogp": ("largest |log rho|, nats", False),
    "mismatch/ess": ("effective share of tokens", True),
    "routing/routers": (WOULD, True),
    "routing/tokens": ("tokens with such a route", True),
    "routing/sequence": ("such routes per token", False),
}
REPEATS = {
    "repeat/k3": ("trainer repeated, other packing: k3", False),
    "repeat/max_dlogp": ("trainer repeated: largest |log ratio|", False),
    "repeat/routers": (f"trainer repeated: {WOULD}", True),
}
ENGINE = {
    "k3": ("k3", False),
    "max_dlogp": ("largest |log ratio|", False),
    "routers": ("routes that differ", True),
    "same": ("tokens that came out the same", True),
}
FALL_HEADER = ("", "change", "95% interval", "left", "measured as")
ALONE_HEADER = ("", "nats per token", "95% interval", "measured as")
ENGINE_HEADER = ("Engine against itself, same requests and seeds", "all together", "one at a time")
ROW_HEADER = ("", "tokens", "k3", "mean |log rho|", "share of the gap")
FORECAST_HEADER = ("Preset", "tokens kept", "step multiplied by")
COLORS = {"bug": "bold red", "nothing": "bold green"}
BADGES = {
    "bug": "bug",
    "nothing": "nothing to do",
    "replay": "replay the routes",
    "correct": "correct it",
    "unclear": "unclear: look first",
}
IN_THE_PAGE = (
    "the engine's own noise, each change measured alone, and the gap by place, probability, "
    "entropy and class of token"
)
Rows = Sequence[tuple[str, ...]]


def summary(tree: Tree) -> list[RenderableType]:
    """Return the verdict with its reasons, and the tables of scorings and of what explains the gap.

    The page has the other tables: IN_THE_PAGE.
    """
    verdict = tree["verdict"]
    style = COLORS.get(verdict["action"], "bold yellow")
    parts: list[RenderableType] = []
    if tree.get("pressure"):
        parts.append(Text(f"Not a real engine: {tree['pressure']}.", style="bold red"))
        parts.append(Text(calibration(tree)))
    parts.append(Text(verdict_line(tree), style=style))
    if verdict["setting"]:
        parts.append(Text(f"Set: {verdict['setting']}"))
    parts += [Text(f"Because {text}.") for text in verdict["basis"]]
    title = f"{tree['model']}: {_sampled(tree)}"
    parts.append(_table(title, comparison_header(tree), comparison(tree)))
    whole, would = tree.get("distribution"), tree.get("prediction")
    if whole is not None:
        parts.append(_table(causes.title(whole), causes.HEADER, causes.rows(whole)))
    parts.append(
        _table("Where the gap comes from, k3 in nats per token", FALL_HEADER, waterfall_rows(tree))
    )
    if would is not None:
        parts.append(Text(describe_prediction(would)))
    return parts


def _sampled(tree: Tree) -> str:
    """Return how much was sampled: tokens and sequences."""
    return f"{counted(tree['tokens'], 'token')} of {counted(tree['sequences'], 'sequence')}"


def verdict_line(tree: Tree) -> str:
    """Return the verdict, with its prompts where they were not the user's own."""
    sentence: str = tree["verdict"]["sentence"]
    config = tree["config"]
    if config["task"].get("kind") != "chain":
        return sentence
    prompts = config["rollout"]["prompts_per_step"]
    return f"{sentence} Judged on {prompts} made-up sums: give --prompts to judge on your own."


def describe_prediction(would: Tree) -> str:
    """Describe the predicted effect of the run's correction in a sentence."""
    correction = would["correction"]
    if would["not_modelled"]:
        correction = f"{correction} without {', '.join(would['not_modelled'])}"
    return (
        f"The correction of these settings ({correction}) would keep "
        f"{number(would['keep'], share=True)} of the tokens and multiply a step by "
        f"{number(would['attenuation'])}, if log ratios were normal with this k3 "
        f"({number(would['kl'])}) over {counted(would['length'], 'token')}."
    )


def calibration(tree: Tree) -> str:
    """Return the size of the gap that rollout.pressure makes, in a sentence."""
    metrics = tree["metrics"]
    plain, replayed = metrics["without_replay"], metrics.get("with_replay", {})
    routers, tokens, f2 = (
        number(plain.get(key), share=True)
        for key in ("routing/routers", "routing/tokens", "mismatch/f2")
    )
    without, within = (number(each.get("mismatch/k3")) for each in (plain, replayed))
    return (
        f"Calibration: {routers} of routes differ, {tokens} of tokens have such a route, F(2) is "
        f"{f2}; k3 is {without} nats a token without replay and {within} with it."
    )


def comparison_header(tree: Tree) -> tuple[str, ...]:
    """Return the header of the table of scorings."""
    return (
        "Rollout against trainer",
        *(SCORINGS[name][0] for name in SCORINGS if name in tree["metrics"]),
    )


def comparison(tree: Tree) -> Rows:
    """Return the rows of the table of scorings."""
    metrics = tree["metrics"]
    columns = [name for name in SCORINGS if name in metrics]
    rows = []
    for key, (label, share) in QUANTITIES.items():
        if key in metrics["without_replay"]:
            rows.append((label, *(_cell(metrics[name].get(key), share=share) for name in columns)))
    if "with_replay" in columns and tree["config"].get("replay", {}).get("mode", "r3") in WHOLE:
        ran = {"without_replay": "the trainer's choice", "with_replay": ROLLOUTS_OWN}
        rows.append((RAN, *(ran.get(name, DASH) for name in columns)))
    prefixes = {"without_replay": "counterfactual/", "with_replay": ""}
    repeated = metrics["repeated_forward"]
    for key, (label, share) in REPEATS.items():
        values = [repeated.get(f"{prefixes.get(name, 'none/')}{key}") for name in columns]
        if any(value is not None for value in values):
            rows.append((label, *(_cell(value, share=share) for value in values)))
    return rows


def engine_rows(tree: Tree) -> Rows:
    """Return the rows under ENGINE_HEADER."""
    found = tree["metrics"]["repeated_forward"]
    rows = []
    for key, (label, share) in ENGINE.items():
        values = [found.get(f"engine_{how}/{key}") for how in ("all", "alone")]
        if any(value is not None for value in values):
            rows.append((label, *(_cell(value, share=share) for value in values)))
    return rows


def waterfall_rows(tree: Tree) -> Rows:
    """Return the rows under FALL_HEADER."""
    fall = tree["waterfall"]
    total = fall["total"]
    first = "trainer as it is against the rollout"
    rows: list[tuple[str, ...]] = [("the gap", "", interval(total), number(total["value"]), first)]
    for bar in fall["bars"]:
        each, left = change(bar), number(bar["left"]["value"])
        rows.append((bar["name"], signed(each["value"]), interval(each), left, bar["how"]))
    remainder = total
    if fall["bars"]:
        remainder = fall["bars"][-1]["left"]
    why = "what no step takes away: the engine's kernels, or a fault of another kind"
    return [*rows, ("remainder", "", interval(remainder), number(remainder["value"]), why)]


def alone_rows(tree: Tree) -> Rows:
    """Return the rows under ALONE_HEADER."""
    return [
        (name, number(each["value"]), _interval_or_none(each), how)
        for name, each, how in noise_rows(tree)
    ]


def breakdown_rows(rows: list[Tree]) -> Rows:
    """Return the rows under ROW_HEADER."""
    return [
        (
            r["name"],
            f"{r['tokens']:,}",
            number(r["k3"]),
            number(r["mean_dlogp"]),
            number(r["share"], share=True),
        )
        for r in rows
    ]


def forecast_rows(tree: Tree) -> Rows:
    """Return the rows under FORECAST_HEADER."""
    return [
        (f["preset"], number(f["keep"], share=True), number(f["attenuation"]))
        for f in tree["verdict"]["forecasts"]
    ]


def write_report(out: Path, *, png: bool = False) -> Path:
    """Write OUT/report.html and OUT/figures from OUT/measure.json and OUT/tensors.safetensors.

    Raises UsageError if plotly is missing, or with `png` kaleido or its browser.
    """
    tree = json.loads((out / "measure.json").read_text(encoding="utf-8"))
    sections: list[tuple[str, str, list[Figure | Absent]]] = [
        (
            "Causes",
            "Which part of the gap goes away with which change?",
            [fall_figure(tree), noise_figure(tree)],
        ),
        *distance_sections(tree, load_file(out / "tensors.safetensors")),
        (
            "Where the gap sits",
            "Which tokens carry more than their share of it?",
            breakdown_figures(tree),
        ),
    ]
    whole_tables: list[tuple[str, tuple[str, ...], Rows]] = []
    whole = tree.get("distribution")
    if whole is not None:
        sections.insert(2, ("Distributions", f"{causes.title(whole)}.", [causes.figure(whole)]))
        whole_tables = [
            ("Distributions", causes.HEADER, causes.rows(whole)),
            ("Worst positions", causes.WORST_HEADER, causes.worst_rows(whole)),
        ]
    figures = [f for _, _, items in sections for f in items if isinstance(f, Figure)]
    page = render(
        "measure.html",
        f"onepolicy measure: {tree['model']}",
        figures,
        tree=tree,
        name=short_name(tree),
        badge=BADGES[tree["verdict"]["action"]],
        verdict_line=verdict_line(tree),
        facts=facts(tree),
        tiles=tiles(tree),
        calibration=calibration(tree),
        sections=sections,
        tables=[
            ("Both scorings", comparison_header(tree), comparison(tree)),
            ("The engine against itself", ENGINE_HEADER, engine_rows(tree)),
            ("Waterfall", FALL_HEADER, waterfall_rows(tree)),
            ("Each measured alone", ALONE_HEADER, alone_rows(tree)),
            *whole_tables,
            *(
                (f"By {name}", ROW_HEADER, breakdown_rows(rows))
                for name, rows in tree["breakdowns"].items()
            ),
            ("Corrections, predicted for what is left", FORECAST_HEADER, forecast_rows(tree)),
        ],
        config=json.dumps(without_secrets(tree["config"]), indent=1, ensure_ascii=False),
    )
    write_figures(out / "figures", figures, png=png)
    return write_text_atomically(out / "report.html", page)


def distance_sections(
    tree: Tree, tensors: dict[str, np.ndarray]
) -> list[tuple[str, str, list[Figure | Absent]]]:
    """Return the sections on the distance and on differing experts."""
    shown = {
        name: label_and_style
        for name, label_and_style in SCORINGS.items()
        if f"{name}.logp_rollout" in tensors
    }
    pairs = [
        Pairs(label, style, tensors[f"{name}.logp_rollout"], tensors[f"{name}.logp_trainer"])
        for name, (label, style) in shown.items()
    ]
    budget = MAX_POINTS // len(pairs)
    width: Width = "half"
    if len(pairs) == 3:
        width = "third"
    drawn: list[Figure | Absent] = [
        scatter(f"scatter-{name}", each, budget, width=width)
        for name, each in zip(shown, pairs, strict=True)
    ]

    def series(tensor: str) -> list[Series]:
        return [
            Series(*SCORINGS[name], tensors[f"{name}.{tensor}"])
            for name in shown
            if f"{name}.{tensor}" in tensors
        ]

    question = "How far apart are the engine that samples and the one that learns?"
    routes: list[Figure | Absent] = [
        Absent("routing", "A dense model has no routers: nothing to compare.")
    ]
    if series("experts_differing"):
        mode = "off"
        if "with_replay" in shown:
            mode = tree["config"].get("replay", {}).get("mode", "r3")
        routes = routing_figures_of(series, mode=mode)
    return [
        ("Distance", question, [extreme_tokens(pairs), *drawn, *turns(tree)]),
        ("Routing", "Where do the two choose different experts?", routes),
    ]


def turns(tree: Tree) -> list[Figure]:
    """Return the figure of k3 by turn of every scoring; no figure if episodes have one turn."""
    curves = [
        Curve.of(*SCORINGS[name], [tree["metrics"][name]])
        for name in SCORINGS
        if name in tree["metrics"]
    ]
    several = [curve for curve in curves if curve.tokens]
    if not several:
        return []
    return [by_turn(several)]


def facts(tree: Tree) -> list[tuple[str, str]]:
    """Return (name, value) of the facts under the title."""
    config, model = tree["config"], tree["model"]
    engine, sampling = config["rollout"]["engine"], config["rollout"]["sampling"]
    task, trainer = config["task"], config["model"]["dtype"]
    if config["train"]["autocast"] != "off":
        trainer += " + bf16 autocast"
    if short_name(tree) == model:
        model = ""
    named = " ".join(str(task[key]) for key in ("kind", "name", "path") if task.get(key))
    out = [
        ("model", model),
        (
            "engine",
            " ".join(str(engine[key]) for key in ("kind", "url", "dtype") if engine.get(key)),
        ),
        ("trainer", trainer),
        ("prompts", named),
        ("sampled", _sampled(tree)),
        ("temperature", f"{sampling['temperature']:g}"),
        ("beside it", tree["dense"] or ""),
        ("seed", str(config["seed"])),
        ("versions", ", ".join(f"{name} {version}" for name, version in tree["versions"].items())),
        ("measured", tree["started"]),
    ]
    return [(name, value) for name, value in out if value]


def short_name(tree: Tree) -> str:
    """Return the model's name; of a folder its last part."""
    model: str = tree["model"]
    if model.startswith(("/", ".", "~")):
        return Path(model).name
    return model


def tiles(tree: Tree) -> list[tuple[str, str, str]]:
    """Return (name, value, small print) of the tiles."""
    metrics = tree["metrics"]
    plain, replayed = metrics["without_replay"], metrics.get("with_replay")
    dense = metrics.get("dense")
    out = [("k3 without replay", number(plain["mismatch/k3"]), "nats per token")]
    if replayed is not None:
        out.append(("k3 with replay", number(replayed["mismatch/k3"]), _cut(plain, replayed)))
    if dense is not None:
        out.append(("k3 of the dense model", number(dense["mismatch/k3"]), "nats per token"))
    out.append(
        (
            "F(2)",
            number(plain["mismatch/f2"], share=True),
            "of the tokens off by more than a factor of 2",
        )
    )
    if "routing/routers" in plain:
        more = f"{number(plain['routing/tokens'], share=True)} of the tokens, prompts too, have one"
        out.append((WOULD.capitalize(), number(plain["routing/routers"], share=True), more))
    return out


def _cut(plain: Tree, replayed: Tree) -> str:
    without, within = plain["mismatch/k3"], replayed["mismatch/k3"]
    if max(without, within) < HARMLESS_KL:
        return f"both are {SMALL}"
    if within == 0:
        return "nothing is left"
    cut = without / within
    if cut >= 1:
        return f"{number(cut)} times less"
    if not cut:
        return "more"
    return f"{number(1 / cut)} times more"


def _cell(value: float | None, *, share: bool) -> str:
    if share:
        return number(value, share=True)
    return number(value)


def _interval_or_none(each: Tree) -> str:
    if each["low"] == each["high"]:
        return DASH
    return interval(each)


def _table(title: str, header: tuple[str, ...], rows: Rows) -> Table:
    table = make_table(*header, title=title or None, title_justify="left", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
