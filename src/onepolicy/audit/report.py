"""An audit as terminal text, as one HTML file, and as JSON of every number.

Two dumps are shown side by side.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onepolicy.audit.assessment import ONSET_RULE, AuditResult
from onepolicy.audit.figures import audit_figures
from onepolicy.config import UsageError
from onepolicy.console import Console
from onepolicy.correct.equations import in_their_settings
from onepolicy.correct.report import quantiles
from onepolicy.files import DISK_FULL, write_text_atomically
from onepolicy.notation import counted, number
from onepolicy.record.intervals import Interval
from onepolicy.record.schema import VERSION
from onepolicy.report.figures.tokens import extreme_curve
from onepolicy.report.page import Card, Page, Section, Table, plain, write_page
from onepolicy.report.png import write_figures
from onepolicy.report.terminal import told, verdict_parts
from onepolicy.report.words import (
    ALARMING,
    BADGES,
    FORECAST_HEADER,
    HOW_FAR,
    QUANTITIES,
    forecast_rows,
    show,
)
from onepolicy.verdict.rules import R3, mean_length

Z95 = 1.959964
QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
COUNTS = {"tokens": "Tokens compared", "sequences": "Sequences"}
ROUTED = {"routing/routers": "routers", "routing/tokens": "tokens_routed"}
"""Quantities whose statistics have another name than their metric ends with."""


def overall_statistics(result: AuditResult) -> dict[str, float]:
    """Return the statistics of the whole dump by name."""
    accumulated = result.accumulated
    assert accumulated.overall is not None
    found = accumulated.overall.statistics()
    routes = accumulated.routes
    if routes is not None and routes.slots:
        found["routers"] = routes.routers
        found["tokens_routed"] = routes.tokens / routes.slots
    return found


def differences(first: AuditResult, second: AuditResult) -> dict[str, Interval]:
    """Return means of the second dump less those of the first, whose error both sides know.

    The intervals are normal, with standard errors by sequence.
    """
    a, b = overall_statistics(first), overall_statistics(second)
    found = {}
    for name in a:
        errors = [each.get(f"{name}_error", math.nan) for each in (a, b)]
        error = math.hypot(*errors)
        if math.isfinite(error):
            value = b[name] - a[name]
            found[name] = Interval(value, value - Z95 * error, value + Z95 * error)
    return found


def describe_difference(results: Sequence[AuditResult]) -> str:
    """Return the difference of k3 as a sentence; empty for one dump."""
    if len(results) < 2:
        return ""
    k3 = differences(*results).get("k3")
    if k3 is None:
        return ""
    a, b = (result.label for result in results)
    if not k3.excludes(0):
        return (
            f"k3 of {b} less that of {a} is {k3.describe()} nats a token: no difference is shown."
        )
    word = "larger" if k3.value > 0 else "smaller"
    return f"k3 is {word} in {b} than in {a}: {k3.describe()} nats a token."


def audit_tree(result: AuditResult) -> dict[str, Any]:
    """Return every number of an audit for JSON. Numbers that are not finite become null."""
    accumulated = result.accumulated
    taus, shares = extreme_curve(accumulated.histogram)
    shown = (taus >= 1.001) & (shares > 0)
    ratios = quantiles(accumulated.histogram, QUANTILES).tolist()
    tree: dict[str, Any] = {
        "schema_version": VERSION,
        "dump": str(accumulated.path),
        "columns": list(accumulated.columns),
        "rows": accumulated.rows,
        "nonfinite": {
            "tokens": accumulated.nonfinite.count,
            "columns": dict(accumulated.nonfinite.columns),
        },
        "verdict": dataclasses.asdict(result.verdict),
        "framework": result.framework or None,
        "notes": list(result.notes),
        "not_checked": list(result.not_checked),
        "onset": result.onset,
        "onset_rule": ONSET_RULE,
        "overall": overall_statistics(result),
        "ratio_quantiles": dict(zip(map(str, QUANTILES), ratios, strict=True)),
        "extreme": {"tau": taus[shown].tolist(), "share": shares[shown].tolist()},
        "steps": _step_trees(result),
    }
    ages = accumulated.ages
    if ages.by_age:
        tree["k3_by_age"] = [
            {"age": age, "tokens": k3.tokens, "k3": k3.mean}
            for age, k3 in sorted(ages.by_age.items())
        ]
    routes = accumulated.routes
    if routes is not None:
        tree["routers_per_layer"] = (routes.per_layer / max(1, routes.slots)).tolist()
    result_tree: dict[str, Any] = plain(tree)
    return result_tree


def _step_trees(result: AuditResult) -> list[dict[str, Any]]:
    trees = []
    for step, stats in sorted(result.accumulated.steps.items()):
        tree = {"step": step, **stats.statistics()}
        if step in result.accumulated.rewards:
            tree["reward"] = result.accumulated.rewards[step].mean
        trees.append(tree)
    return trees


def write_report(folder: Path, results: Sequence[AuditResult], *, png: bool = False) -> list[Path]:
    """Write audit.json, audit.html and figures/ into a folder. Return their paths.

    Raises UsageError if plotly is missing (for png: kaleido or its browser), or if the folder
    cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        page = _page(results)
        text = json.dumps(_report_tree(results), indent=1, allow_nan=False)
        written = [
            write_text_atomically(folder / "audit.json", text),
            write_page(folder / "audit.html", page),
        ]
        write_figures(folder / "figures", list(page.figures()), png=png)
        return [*written, folder / "figures"]
    except OSError as error:
        if error.errno in DISK_FULL:  # a right path
            raise
        raise UsageError(
            f"{folder}: cannot write the report ({error.strerror}); name another with --out"
        ) from None


def _report_tree(results: Sequence[AuditResult]) -> dict[str, Any]:
    trees = [audit_tree(result) for result in results]
    if len(trees) == 1:
        return trees[0]
    found = {name: dataclasses.asdict(each) for name, each in differences(*results).items()}
    return {"dumps": trees, "differences": plain(found)}


def _page(results: Sequence[AuditResult]) -> Page:
    title, several = " and ".join(result.label for result in results), len(results) > 1
    difference = describe_difference(results)
    numbers = Table(("", *_header(results)), _rows(results), note=difference)
    sections = [
        Section("Mismatch", HOW_FAR, audit_figures(results)),
        Section("Numbers", "", [numbers]),
    ]
    for result in results:
        rows = forecast_rows([dataclasses.asdict(each) for each in result.verdict.forecasts])
        assert result.accumulated.overall is not None
        length = counted(mean_length(result.accumulated.overall), "token")
        lead = f"Predicted for a normal log-ratio with KL = k3 and {length} a sequence."
        if rows:
            table = Table(FORECAST_HEADER, rows)
            sections.append(Section(f"Corrections: {result.label}", lead, [table]))
    return Page(
        f"{title}: audit",
        f"Audit of {title}",
        "onepolicy audit: rollout against trainer, as dumped",
        [card(result, several=several) for result in results],
        sections,
        footer="onepolicy audit.",
    )


def card(result: AuditResult, *, several: bool) -> Card:
    """Return the verdict and the tiles of a dump, named where there are several."""
    found, verdict, accumulated = overall_statistics(result), result.verdict, result.accumulated
    f2, ess = (number(found[key], share=True) for key in ("f2", "ess"))
    tiles = [
        ("k3", number(found["k3"]), "nats per token", ""),
        ("F(2)", f2, "off by more than a factor of 2", ""),
        ("Effective share of tokens", ess, "of token importance weights", ""),
        ("Tokens", f"{found['tokens']:,.0f}", counted(accumulated.rows, "row"), ""),
    ]
    small = [f"Not looked for: {'; '.join(result.not_checked)}."] if result.not_checked else []
    return Card(
        verdict.sentence,
        BADGES[verdict.action],
        verdict.action,
        verdict.action in ALARMING,
        verdict.setting,
        _reasons(result),
        small,
        result.label * several,
        tiles,
    )


def _header(results: Sequence[AuditResult]) -> list[str]:
    labels = [result.label for result in results]
    return [*labels, "difference, 95% interval"] if len(results) > 1 else labels


def _rows(results: Sequence[AuditResult]) -> list[list[str]]:
    """Return the rows of the table of numbers, of which the first cell is the name."""
    found, both = [overall_statistics(result) for result in results], len(results) > 1
    between = differences(*results) if both else {}
    rows = [[name, *(f"{each[key]:,.0f}" for each in found)] for key, name in COUNTS.items()]
    for metric, (name, share) in QUANTITIES.items():
        key = ROUTED.get(metric, metric.rpartition("/")[2])
        if metric == "mismatch/max_dlogp" or not any(key in values for values in found):
            continue
        rows.append([name, *(show(metric, values.get(key, math.nan)) for values in found)])
        if key in between:
            rows[-1].append(between[key].describe(share=share))
    for part in (0.01, 0.99):
        ratios = [quantiles(result.accumulated.histogram, (part,)) for result in results]
        cells = [number(ratio.log().item()) for ratio in ratios]
        rows.append([f"{part:.0%} quantile of log rho, nats", *cells])
    if any(result.accumulated.steps for result in results):
        onsets = ["none" if result.onset is None else f"step {result.onset}" for result in results]
        rows.append(["Onset of divergence", *onsets])
    return [[*row, *[""] * (1 + len(found) + both - len(row))] for row in rows]


def print_audit(console: Console, results: Sequence[AuditResult]) -> None:
    """Print the verdicts and the numbers."""
    several = len(results) > 1
    for result in results:
        for part in verdict_parts(card(result, several=several)):
            console.print(part)
    header = [""] * 2
    if several:  # 80 columns have no room for names
        first, second = (result.label for result in results)
        console.print_line(f"A: {first}, B: {second}")
        header = ["", "A", "B", "B - A, 95% interval"]
    console.print(told(Table(header, _rows(results)), right=True))
    difference = describe_difference(results)
    if difference:
        console.print_line(difference)


def _reasons(result: AuditResult) -> list[str]:
    """Return the setting as a trainer's users write it, the reasons, and how they were reached."""
    setting, advised = result.verdict.setting, result.verdict.setting
    if result.verdict.action == "correct" and not result.verdict.causes:
        advised = f"{R3} {setting}"  # whether routes differ is not known
    lines, theirs = [], ""
    if result.framework:
        theirs = in_their_settings(advised, result.framework)
    if theirs:
        lines.append(f"{theirs}.")
    elif "correction.preset=" in setting:
        name = setting.rpartition("=")[2]
        lines.append(
            f"`onepolicy config preset {name}` says it in the settings of verl, miles, TRL and "
            "others."
        )
    if result.verdict.effect:
        lines.append(result.verdict.effect)
    lines += [f"Because {text.removesuffix('.')}." for text in result.verdict.basis]
    return [*lines, *result.notes]
