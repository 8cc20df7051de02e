"""An audit as terminal text, as one HTML file, and as JSON of every number.

Two dumps are shown side by side.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from onepolicy.audit.assessment import ONSET_RULE, AuditResult
from onepolicy.audit.figures import audit_figures, extreme_curve
from onepolicy.config import UsageError
from onepolicy.console import Console
from onepolicy.correct.equations import in_their_settings
from onepolicy.correct.report import quantiles
from onepolicy.files import DISK_FULL, write_text_atomically
from onepolicy.notation import counted, number
from onepolicy.record.schema import VERSION
from onepolicy.report.figure import Figure
from onepolicy.report.html import document, plain, section, tile
from onepolicy.report.measure import BADGES
from onepolicy.report.png import write_figures
from onepolicy.report.words import WOULD
from onepolicy.verdict.rules import R3

Z95 = 1.959964
QUANTILES = (0.001, 0.01, 0.5, 0.99, 0.999)
ROWS = {  # statistic -> (name, is a share)
    "tokens": ("Tokens compared", False),
    "sequences": ("Sequences", False),
    "k3": ("k3, nats per token", False),
    "k3_error": ("its standard error (by sequences)", False),
    "k1": ("k1 = mean -log rho, nats per token", False),
    "k2": ("k2, nats\N{SUPERSCRIPT TWO} per token", False),
    "chi2": ("chi2", False),
    "ess": ("Effective sample size", True),
    "mean_rho": ("Mean rho", False),
    "f1.25": ("F(1.25)", True),
    "f2": ("F(2), off by more than a factor of 2", True),
    "f5": ("F(5)", True),
    "max_dp": ("Largest difference of probabilities", False),
    "pearson": ("Correlation of probabilities", False),
    "ppl_ratio": ("Perplexity, trainer / rollout", False),
    "routers": (WOULD.capitalize(), True),
    "tokens_routed": ("Tokens with such a route", True),
}
COUNTS = ("tokens", "sequences")
NEAR_ONE = ("mean_rho", "pearson", "ppl_ratio")
ALARMING = ("bug", "unclear")  # actions of a verdict that are shown in red


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


@dataclass(frozen=True)
class Difference:
    """A mean of the second dump less that of the first, with a 95% interval.

    The interval is normal, with standard errors by sequence.
    """

    value: float
    low: float
    high: float

    def describe(self, *, share: bool = False) -> str:
        low, high = (number(bound, share=share) for bound in (self.low, self.high))
        return f"{number(self.value, share=share)} [{low}, {high}]"


def differences(first: AuditResult, second: AuditResult) -> dict[str, Difference]:
    """Return the differences of the statistics whose standard error is known on both sides."""
    a, b = overall_statistics(first), overall_statistics(second)
    found = {}
    for name in a:
        errors = [each.get(f"{name}_error", math.nan) for each in (a, b)]
        error = math.hypot(*errors)
        if math.isfinite(error):
            value = b[name] - a[name]
            found[name] = Difference(value, value - Z95 * error, value + Z95 * error)
    return found


def describe_difference(results: Sequence[AuditResult]) -> str:
    """Return the difference of k3 as a sentence; empty for one dump."""
    if len(results) < 2:
        return ""
    k3 = differences(*results).get("k3")
    if k3 is None:
        return ""
    a, b = (result.label for result in results)
    if k3.low <= 0 <= k3.high:
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
        drawn = [figure for figure in audit_figures(results) if isinstance(figure, Figure)]
        text = json.dumps(_report_tree(results), indent=1, allow_nan=False)
        written = [
            write_text_atomically(folder / "audit.json", text),
            write_text_atomically(folder / "audit.html", _page(results)),
        ]
        write_figures(folder / "figures", drawn, png=png)
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


def _page(results: Sequence[AuditResult]) -> str:
    title = " and ".join(result.label for result in results)
    drawn = audit_figures(results)
    parts = [f"<h1>Audit of {escape(title)}</h1>"]
    for result in results:
        if len(results) > 1:
            parts.append(f"<h2>{escape(result.label)}</h2>{_verdict_card(result)}")
        else:
            parts.append(_verdict_card(result))
    question = "How far apart are the engine that samples and the one that learns?"
    parts.append(section("Mismatch", question, drawn))
    difference = describe_difference(results)
    lead = f'<p class="lead">{escape(difference)}</p>' if difference else ""
    table = _html_table(_cells(results), ["", *_header(results)])
    parts.append(f"<h2>Numbers</h2>{lead}{table}")
    parts += [_forecast_section(result) for result in results if result.verdict.forecasts]
    return document(
        f"{title}: audit",
        "\n".join(parts),
        [figure for figure in drawn if isinstance(figure, Figure)],
        footer="onepolicy audit.",
    )


def _verdict_card(result: AuditResult) -> str:
    """Return the verdict and the tiles of a dump as HTML."""
    found, verdict = overall_statistics(result), result.verdict
    accumulated = result.accumulated
    tokens = f"{accumulated.overall.tokens:,}" if accumulated.overall else ""
    tiles = [
        ("k3", number(found["k3"]), "nats per token", ""),
        ("F(2)", number(found["f2"], share=True), "off by more than a factor of 2", ""),
        (
            "Effective sample size",
            number(found["ess"], share=True),
            "of token importance weights",
            "",
        ),
        ("Tokens", tokens, counted(accumulated.rows, "row"), ""),
    ]
    kind = "bad" if verdict.action in ALARMING else ""
    reasons = "".join(f"<li>{escape(text)}</li>" for text in _reasons(result))
    not_checked = ""
    if result.not_checked:
        text = escape("; ".join(result.not_checked))
        not_checked = f'<p class="rule">Not looked for: {text}.</p>'
    return (
        f'<div class="card verdict {verdict.action}">'
        f'<p class="badge">{escape(BADGES[verdict.action])}</p>'
        f'<p class="{kind}"><b>{escape(verdict.sentence)}</b></p>'
        f"<ul>{reasons}</ul>{not_checked}</div>"
        f'<div class="tiles">{"".join(tile(*each) for each in tiles)}</div>'
    )


def _forecast_section(result: AuditResult) -> str:
    """Return the predicted effect of each correction as HTML."""
    rows = [
        [forecast.preset, number(forecast.keep, share=True), number(forecast.attenuation)]
        for forecast in result.verdict.forecasts
    ]
    length = result.accumulated.mean_length
    return (
        f"<h2>Corrections: {escape(result.label)}</h2>"
        '<p class="lead">Predicted for a normal log-ratio with KL = k3 and '
        f"{counted(length, 'token')} a sequence.</p>"
        + _html_table(rows, ["Preset", "Tokens kept", "Step multiplied by"])
    )


def _html_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _header(results: Sequence[AuditResult]) -> list[str]:
    labels = [result.label for result in results]
    if len(results) > 1:
        labels.append("difference, 95% interval")
    return labels


def _cells(results: Sequence[AuditResult]) -> list[list[str]]:
    """Return the rows of the table of numbers, of which the first cell is the name."""
    found = [overall_statistics(result) for result in results]
    both = len(results) > 1
    between = differences(*results) if both else {}
    rows = []
    for key, (name, share) in ROWS.items():
        if not any(key in values for values in found):
            continue
        cells = [_cell(key, values.get(key, math.nan), share=share) for values in found]
        if key in between:
            cells.append(between[key].describe(share=share))
        elif both:
            cells.append("")
        rows.append([name, *cells])
    if any(result.accumulated.steps for result in results):
        cells = ["none" if result.onset is None else f"step {result.onset}" for result in results]
        if both:
            cells.append("")
        rows.append(["Onset of divergence", *cells])
    return rows


def _cell(key: str, value: float, *, share: bool) -> str:
    if key in COUNTS:
        return f"{value:,.0f}"
    if key in NEAR_ONE:
        return f"{value:.4f}"
    return number(value, share=share)


def print_audit(console: Console, results: Sequence[AuditResult]) -> None:
    """Print the verdicts and the numbers."""
    for result in results:
        if len(results) > 1:
            console.print(Text(result.label, style="bold underline"))
        _print_verdict(console, result)
    header = _header(results)
    if len(results) > 1:  # 80 columns have no room for names
        first, second = (result.label for result in results)
        console.print(Text(f"A: {first}, B: {second}"))
        header = ["A", "B", "B - A, 95% interval"]
    table = Table(show_header=len(results) > 1, pad_edge=False)
    table.add_column("", style="bold", overflow="fold")
    for name in header:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row in _cells(results):
        table.add_row(*map(Text, row))
    console.print(table)
    difference = describe_difference(results)
    if difference:
        console.print(Text(difference))


def _print_verdict(console: Console, result: AuditResult) -> None:
    verdict = result.verdict
    style = "bold red" if verdict.action in ALARMING else "bold"
    console.print(Text(BADGES[verdict.action].upper(), style=style))
    console.print(Text(verdict.sentence, style=style))
    for line in _reasons(result):
        console.print(Text(f"  {line}"))
    if result.not_checked:
        not_checked = "; ".join(result.not_checked)
        console.print(Text(f"  Not looked for: {not_checked}.", style="dim"))


def _reasons(result: AuditResult) -> list[str]:
    """Return the setting to change, the reasons of the verdict, and how it was reached."""
    setting, advised = result.verdict.setting, result.verdict.setting
    if result.verdict.action == "correct" and not result.verdict.causes:
        advised = f"{R3} {setting}"  # whether routes differ is not known
    lines = []
    if setting:
        lines.append(f"Set: {setting}")
    theirs = ""
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
