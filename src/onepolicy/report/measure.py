"""Results of `onepolicy measure` in the terminal and as one HTML file.

The input is the tree of OUT/measure.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from rich.console import RenderableType
from rich.text import Text
from safetensors.numpy import load_file

from onepolicy.config.secrets import without_secrets
from onepolicy.notation import DASH, counted, number
from onepolicy.record.intervals import FEWEST_UNITS
from onepolicy.report.figures import causes, groups, routing, tokens
from onepolicy.report.figures.causes import change, interval, remainder, signed
from onepolicy.report.figures.parts import DENSE, WITH, WITHOUT, Absent, Figure, Width
from onepolicy.report.page import Card, Excerpt, Page, Section, Table, Tile, write_page
from onepolicy.report.png import write_figures
from onepolicy.report.terminal import told, verdict_parts
from onepolicy.report.words import (
    ALARMING,
    BADGES,
    FORECAST_HEADER,
    HOW_FAR,
    QUANTITIES,
    RAN,
    ROLLOUTS_OWN,
    WHERE_ROUTES,
    WHOLE,
    WOULD,
    Tree,
    forecast_rows,
    show,
)
from onepolicy.verdict.declared import HARMLESS_KL
from onepolicy.verdict.rules import SMALL

SCORINGS = {  # name in the files -> (label, line style)
    "without_replay": WITHOUT,
    "with_replay": WITH,
    "dense": ("dense model", DENSE),
}
REPEATS = {  # metric -> (name, is a share)
    "repeat/k3": ("Trainer repeated, other packing: k3", False),
    "repeat/max_dlogp": ("Trainer repeated: largest |log ratio|", False),
    "repeat/routers": (f"Trainer repeated: {WOULD}", True),
}
ENGINE = {
    "k3": ("k3", False),
    "max_dlogp": ("largest |log ratio|", False),
    "routers": ("routes that differ", True),
    "same": ("tokens that came out the same", True),
}
REPEATED = {  # metric -> (name, description of the repetition)
    "counterfactual/repeat/k3": (
        "trainer, repeated",
        "the same forward a second time, packed in the opposite order",
    ),
    "engine_all/k3": ("engine, repeated", "the same requests with the same seeds a second time"),
}
DISTRIBUTIONS = {  # name in JSON -> (label, is a share)
    "argmax_differs": ("positions whose likeliest token differs", True),
    "tv_low": ("total variation, mean, at least", False),
    "tv_high": ("total variation, mean, at most", False),
    "tv_low_max": ("total variation, largest, at least", False),
    "kl_low": ("KL(rollout || trainer), nats, at least", False),
    "kl_shared": ("KL given that it is one of the {top}, nats", False),
    "overlap": ("of the {top}, also among the trainer's {top} likeliest", True),
    "mass_rollout": ("rollout's probability of the {top}", True),
    "mass_trainer": ("trainer's probability of the {top}", True),
}
FALL_HEADER = ("", "change", "95% interval", "left", "measured as")
ALONE_HEADER = ("", "nats per token", "95% interval", "measured as")
ENGINE_HEADER = ("Engine against itself, same requests and seeds", "all together", "one at a time")
ROW_HEADER = ("", "tokens", "k3", "mean |log rho|", "share of the gap")
WORST_HEADER = (
    "Text before",
    "Sampled",
    "TV",
    "Likeliest: p rollout / p trainer",
    "sequence, place",
)
IN_THE_PAGE = (
    "what explains the gap, the engine's own noise, each change measured alone, and the gap by "
    "place, probability, entropy and class of token"
)
METHODS = (
    "The engine samples, the trainer scores the same tokens. rho = p_trainer / p_rollout of a "
    "sampled token; k3 = mean(rho - 1 - log rho), in nats per token, estimates KL(rollout || "
    "trainer) without bias and is 0 for one policy. F(tau) is the share of tokens with "
    "max(rho, 1/rho) > tau. Routers are counted once a token and MoE layer; one differs if its two "
    "sets of experts differ. Definitions: R3 paper (arXiv:2510.11370), section 3.\n\n"
    "Waterfall: every step changes one more thing on one side and scores the same tokens again, so "
    "bars and remainder add up to the gap; another order would divide it otherwise. Intervals are "
    "95% bootstraps over whole sequences, with the same draws at every step (expanded percentile "
    f"intervals, Hesterberg 2015), and there are none of fewer than {FEWEST_UNITS} sequences."
)
Drawn = list[Figure | Absent]


def summary(tree: Tree) -> list[RenderableType]:
    """Return the verdict with its reasons, the table of scorings, and the causes of a gap.

    The page has the other tables: IN_THE_PAGE.
    """
    parts: list[RenderableType] = []
    if tree.get("pressure"):
        parts.append(Text(f"Not a real engine: {tree['pressure']}.", style="bold red"))
        parts.append(Text(calibration(tree)))
    parts += verdict_parts(card(tree))
    title = f"{tree['model']}: {_sampled(tree)}"
    parts.append(told(Table(comparison_header(tree), comparison(tree), title)))
    whole, would = tree.get("distribution"), tree.get("prediction")
    if whole is not None:
        parts.append(told(distribution_table(whole)))
    if tree["waterfall"]["total"]["value"] >= HARMLESS_KL:
        title = "Where the gap comes from, k3 in nats per token"
        parts.append(told(Table(FALL_HEADER, waterfall_rows(tree), title)))
    if would is not None:
        parts.append(Text(describe_prediction(would)))
    return parts


def short_summary(tree: Tree) -> list[RenderableType]:
    """Return the verdict and k3 of each scoring in a line, for a first look."""
    verdict = verdict_parts(card(tree))
    lines = []
    for name in _scored(tree):
        found = tree["metrics"][name]
        line = f"  {SCORINGS[name][0]}: k3 {show('mismatch/k3', found['mismatch/k3'])} nats a token"
        if name == "without_replay" and "routing/routers" in found:
            line += f", {show('routing/routers', found['routing/routers'])} of the routes differ"
        lines.append(Text(line))
    shown = 2 + bool(card(tree).setting)
    last = f"Of {tree['model']}. Yours: `onepolicy measure MODEL`. Page: --out FOLDER"
    return [*verdict[:shown], *lines, Text(last)]


def card(tree: Tree) -> Card:
    """Return the verdict, with its prompts where they were not the user's own."""
    found, config = tree["verdict"], tree["config"]
    sentence = found["sentence"]
    if config["task"].get("kind") == "chain":
        prompts = config["rollout"]["prompts_per_step"]
        sentence += f" Judged on {prompts} made-up sums: give --prompts to judge on your own."
    action, lines = found["action"], [f"Because {text}." for text in found["basis"]]
    setting, bad = found["setting"], action in ALARMING
    return Card(sentence, BADGES[action], action, bad, setting, lines, tiles=tiles(tree))


def _sampled(tree: Tree) -> str:
    return f"{counted(tree['tokens'], 'token')} of {counted(tree['sequences'], 'sequence')}"


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
    routers, touched, f2 = (
        show(key, plain.get(key)) for key in ("routing/routers", "routing/tokens", "mismatch/f2")
    )
    without, within = (number(each.get("mismatch/k3")) for each in (plain, replayed))
    return (
        f"Calibration: {routers} of routes differ, {touched} of tokens have such a route, F(2) is "
        f"{f2}; k3 is {without} nats a token without replay and {within} with it."
    )


def comparison_header(tree: Tree) -> tuple[str, ...]:
    """Return the header of the table of scorings."""
    return ("Rollout vs trainer", *(SCORINGS[name][0] for name in _scored(tree)))


def _scored(tree: Tree) -> list[str]:
    return [name for name in SCORINGS if name in tree["metrics"]]


def comparison(tree: Tree) -> list[tuple[str, ...]]:
    """Return the rows of the table of scorings."""
    metrics, columns = tree["metrics"], _scored(tree)
    measured, rows = metrics["without_replay"], []
    left_out = {"mismatch/chi2", "mismatch/pearson", "mismatch/ppl_ratio"}
    for key, (label, _) in QUANTITIES.items():
        if key in measured and key not in left_out:
            rows.append((label, *(show(key, metrics[name].get(key)) for name in columns)))
    if "with_replay" in columns and tree["config"].get("replay", {}).get("mode", "r3") in WHOLE:
        ran = {"without_replay": "the trainer's choice", "with_replay": ROLLOUTS_OWN}
        rows.append((RAN.capitalize(), *(ran.get(name, DASH) for name in columns)))
    prefixes = {"without_replay": "counterfactual/", "with_replay": ""}
    repeated = metrics["repeated_forward"]
    of_columns = [f"{prefixes.get(name, 'none/')}{{}}" for name in columns]
    return rows + _known_rows(REPEATS, repeated, of_columns)


def engine_rows(tree: Tree) -> list[tuple[str, ...]]:
    """Return the rows under ENGINE_HEADER."""
    repeated = tree["metrics"]["repeated_forward"]
    return _known_rows(ENGINE, repeated, ["engine_all/{}", "engine_alone/{}"])


def _known_rows(
    names: Mapping[str, tuple[str, bool]], found: Tree, columns: Sequence[str]
) -> list[tuple[str, ...]]:
    """Return a row for each name of which a column has a value. columns: patterns of keys."""
    rows = []
    for key, (label, share) in names.items():
        values = [found.get(column.format(key)) for column in columns]
        if any(value is not None for value in values):
            rows.append((label, *(number(value, share=share) for value in values)))
    return rows


def distribution_table(found: Tree) -> Table:
    """Return the distances between the distributions, of each scoring."""
    top, metrics = found["top"], [found["metrics"].get(name, {}) for name in list(SCORINGS)[:2]]
    rows = [
        (label.format(top=top), *(number(each.get(name), share=share) for each in metrics))
        for name, (label, share) in DISTRIBUTIONS.items()
    ]
    title = f"Whole distributions, from the rollout's {top} likeliest tokens of each position"
    return Table(("", WITHOUT[0], WITH[0]), rows, title)


def worst_positions(found: Tree) -> list[tuple[str, ...]]:
    """Return the rows under WORST_HEADER: positions with the largest total variation."""
    return [
        (
            each["before"],
            repr(each["sampled"]),
            f"{number(each['tv_low'])} {DASH} {number(each['tv_high'])}",
            ", ".join(
                f"{c['token']!r} {number(c['p_rollout'])} / {number(c['p_trainer'])}"
                for c in each["candidates"]
            ),
            f"{each['sequence']}, {each['place']}",
        )
        for each in found["worst"]
    ]


def waterfall_rows(tree: Tree) -> list[tuple[str, ...]]:
    """Return the rows under FALL_HEADER."""
    fall = tree["waterfall"]
    total, left = fall["total"], remainder(fall)
    first = "trainer as it is against the rollout"
    if any(bar["name"] == "support" for bar in fall["bars"]):
        first = "trainer over the whole vocabulary against the rollout, which had top-p or the like"
    why = "what no step takes away: the engine's kernels, or a fault of another kind"
    bars = [(bar, change(bar)) for bar in fall["bars"]]
    return [
        ("the gap", "", interval(total), number(total["value"]), first),
        *(
            (
                bar["name"],
                signed(each["value"]),
                interval(each),
                number(bar["left"]["value"]),
                bar["how"],
            )
            for bar, each in bars
        ),
        ("remainder", "", interval(left), number(left["value"]), why),
    ]


def alone_rows(tree: Tree) -> list[tuple[str, ...]]:
    """Return the rows under ALONE_HEADER; repeats have no interval."""
    repeated = tree["metrics"]["repeated_forward"]
    rows: list[tuple[str, ...]] = []
    for key, (name, how) in REPEATED.items():
        if key in repeated:
            rows.append((name, number(repeated[key]), DASH, f"k3 between two passes: {how}"))
    for each in tree["alone"]:
        nats = each["nats"]
        rows.append((each["name"], number(nats["value"]), interval(nats), each["how"]))
    return rows


def breakdown(name: str, rows: Sequence[Tree]) -> Table:
    """Return the gap by parts of the tokens, of which the title names the one with most of it."""
    told = [
        (r["name"], f"{r['tokens']:,}", number(r["k3"]), number(r["mean_dlogp"]),
         number(r["share"], share=True))
        for r in rows
    ]  # fmt: skip
    most, tokens = max(rows, key=lambda row: row["share"]), sum(row["tokens"] for row in rows)
    of_gap, of_tokens = (
        number(share, share=True) for share in (most["share"], most["tokens"] / tokens)
    )
    title = f"By {name}: {most['name']} holds {of_gap} of the gap on {of_tokens} of the tokens"
    return Table(ROW_HEADER, told, title)


def write_report(out: Path, *, png: bool = False) -> Path:
    """Write OUT/report.html and OUT/figures from OUT/measure.json and OUT/tensors.safetensors.

    Raises UsageError if plotly is missing, or with `png` kaleido or its browser.
    """
    tree = json.loads((out / "measure.json").read_text(encoding="utf-8"))
    notices = []
    if tree.get("pressure"):
        notices = [f"Not a real engine: {tree['pressure']}. {calibration(tree)}"]
    settings = json.dumps(without_secrets(tree["config"]), indent=1, ensure_ascii=False)
    name, told_facts = short_name(tree), facts(tree)
    engine = ", ".join(value for key, value in told_facts if key in ("engine", "trainer"))
    page = Page(
        f"onepolicy measure: {tree['model']}",
        name,
        f"onepolicy measure, rollout against trainer: {engine}",
        [card(tree)],
        _sections(tree, load_file(out / "tensors.safetensors")),
        facts=told_facts,
        notices=notices,
        details=[("How it was measured", METHODS), ("Settings", settings)],
    )
    write_figures(out / "figures", list(page.figures()), png=png)
    return write_page(out / "report.html", page)


def _sections(tree: Tree, tensors: dict[str, np.ndarray]) -> list[Section]:
    quiet = tree["waterfall"]["total"]["value"] < HARMLESS_KL
    distance, routes = distance_figures(tree, tensors)
    whole = tree.get("distribution")
    note = "Each change by itself: these do not add up."
    alone = Table(ALONE_HEADER, alone_rows(tree), "Each measured alone", note, texts=True)
    sections = [
        Section(
            "Causes",
            "Which part of the gap goes away with which change?",
            [causes.waterfall(tree), alone],
        ),
        Section("Distance", HOW_FAR, distance, folded=quiet),
        Section("Routing", WHERE_ROUTES, routes, folded=quiet),
        Section(
            "Where the gap sits",
            "Which tokens carry more than their share of it?",
            [breakdown(name, rows) for name, rows in tree["breakdowns"].items()],
            folded=quiet,
        ),
        Section(
            "Worst tokens",
            f"The {len(tree['worst'])} sampled tokens on which the two sides are farthest apart, "
            "marked in their text.",
            [_excerpt(each) for each in tree["worst"]],
            folded=quiet,
        ),
        Section("Numbers", "", _tables(tree)),
    ]
    if whole is not None:
        table = distribution_table(whole)
        drawn = causes.distribution(whole)
        sections.insert(2, Section("Distributions", f"{table.title}.", [drawn, table]))
    return sections


def _excerpt(worst: Tree) -> Excerpt:
    parts = [("plain", worst["before"]), ("mark", worst["token"]), ("plain", worst["after"])]
    odds = f"rollout {number(worst['p_rollout'])}, trainer {number(worst['p_trainer'])}"
    return Excerpt(parts, f"{odds}, sequence {worst['sequence']}, place {worst['place']}")


def _tables(tree: Tree) -> list[Table]:
    whole, forecasts = tree.get("distribution"), forecast_rows(tree["verdict"]["forecasts"])
    tables = [
        Table(comparison_header(tree), comparison(tree), "All scorings"),
        Table(ENGINE_HEADER, engine_rows(tree), "The engine against itself"),
        Table(FALL_HEADER, waterfall_rows(tree), "Waterfall", texts=True),
        Table(FORECAST_HEADER, forecasts, "Corrections, predicted for what is left"),
    ]
    if whole is not None:
        tables.append(Table(WORST_HEADER, worst_positions(whole), "Worst positions", texts=True))
    return [table for table in tables if table.rows]


def distance_figures(tree: Tree, tensors: dict[str, np.ndarray]) -> tuple[Drawn, Drawn]:
    """Return the figures on the distance, and those on differing experts."""
    shown = [name for name in SCORINGS if f"{name}.logp_rollout" in tensors]
    pairs = []
    for name in shown:
        trainer, rollout = (tensors[f"{name}.logp_{side}"] for side in ("trainer", "rollout"))
        segment = tensors.get(f"{name}.segment")  # an older version wrote none
        pairs.append(tokens.Pairs(*SCORINGS[name], trainer, rollout, segment))
    width: Width = "third" if len(pairs) == 3 else "half"
    drawn: Drawn = [tokens.extreme_tokens([each.tail() for each in pairs])]
    drawn += [
        tokens.scatter(f"scatter-{name}", each, tokens.MAX_POINTS // len(pairs), width=width)
        for name, each in zip(shown, pairs, strict=True)
    ]
    drawn += turns(tree)

    differing, mass = (
        [
            series
            for name in shown
            for series in routing.by_layer(*SCORINGS[name], tree["metrics"][name], metric)
        ]
        for metric in (routing.LAYER, routing.GATE_MASS)
    )
    if not differing:
        return drawn, [routing.NO_ROUTERS]
    mode = "off"
    if "with_replay" in shown:
        mode = tree["config"].get("replay", {}).get("mode", "r3")
    return drawn, routing.routing_figures(differing, mass, mode=mode)


def turns(tree: Tree) -> list[Figure]:
    """Return the figure of k3 by turn of every scoring; no figure if episodes have one turn."""
    curves = [groups.Curve.of(*SCORINGS[n], [tree["metrics"][n]]) for n in _scored(tree)]
    several = [curve for curve in curves if curve.tokens]
    return [groups.by_turn(several)] if several else []


def facts(tree: Tree) -> list[tuple[str, str]]:
    """Return (name, value) of the facts under the title."""
    config, model = tree["config"], tree["model"]
    engine, sampling = config["rollout"]["engine"], config["rollout"]["sampling"]
    task, trainer = config["task"], config["model"]["dtype"]
    if config["train"]["autocast"] != "off":
        trainer += " + bf16 autocast"
    if short_name(tree) == model:
        model = ""
    kind = " ".join(str(engine[key]) for key in ("kind", "url", "dtype") if engine.get(key))
    named = " ".join(str(task[key]) for key in ("kind", "name", "path") if task.get(key))
    out = [
        ("model", model),
        ("engine", kind),
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


def tiles(tree: Tree) -> list[Tile]:
    """Return (name, value, small print, kind) of the tiles."""
    metrics = tree["metrics"]
    plain, replayed, dense = (metrics.get(name) for name in SCORINGS)
    k3, unit = number(plain["mismatch/k3"]), "nats per token"
    found: list[Tile] = [("k3 without replay", k3, unit, "")]
    if replayed is not None:
        cut = _cut(plain["mismatch/k3"], replayed["mismatch/k3"])
        found.append(("k3 with replay", number(replayed["mismatch/k3"]), cut, ""))
    if dense is not None:
        found.append(("k3 of the dense model", number(dense["mismatch/k3"]), unit, ""))
    f2 = show("mismatch/f2", plain["mismatch/f2"])
    found.append(("F(2)", f2, "of the tokens off by more than a factor of 2", ""))
    if "routing/routers" in plain:
        touched = show("routing/tokens", plain["routing/tokens"])
        more = f"{touched} of the tokens, prompts too, have one"
        routers = show("routing/routers", plain["routing/routers"])
        found.append((WOULD.capitalize(), routers, more, ""))
    return found


def _cut(without: float, within: float) -> str:
    if max(without, within) < HARMLESS_KL:
        return f"both are {SMALL}"
    if within == 0:
        return "nothing is left"
    if without >= within:
        return f"{number(without / within)} times less"
    return f"{number(within / without)} times more" if without else "more"
