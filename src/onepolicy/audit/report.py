"""An audit as terminal text, one HTML file and JSON of every number. Two dumps stand side by side."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from onepolicy.audit.figures import extreme_curve, figures
from onepolicy.audit.judge import ONSET_RULE, Audited
from onepolicy.audit.schema import VERSION
from onepolicy.config import UsageError
from onepolicy.correct.histogram import quantiles
from onepolicy.files import write_text_atomically
from onepolicy.report.figure import Figure
from onepolicy.report.html import document, plain, section, tile
from onepolicy.report.measure import BADGES
from onepolicy.report.png import write_figures
from onepolicy.report.words import WOULD, number

Z95 = 1.959964


def numbers(each: Audited) -> dict[str, float]:
    """Overall statistics by name."""
    tally = each.tally
    assert tally.total is not None
    found = tally.total.numbers()
    if tally.routes is not None and tally.routes.slots:
        found |= {
            "routers": tally.routes.routers,
            "tokens_routed": tally.routes.tokens / tally.routes.slots,
        }
    return found


@dataclass(frozen=True)
class Difference:
    """Of a mean between two dumps, the second less the first, with its 95% interval (normal, by sequences)."""

    value: float
    low: float
    high: float

    def text(self, *, share: bool = False) -> str:
        low, high = (number(bound, share=share) for bound in (self.low, self.high))
        return f"{number(self.value, share=share)} [{low}, {high}]"


def differences(a: Audited, b: Audited) -> dict[str, Difference]:
    """By statistic, of those whose standard error is known on both sides."""
    first, second = numbers(a), numbers(b)
    found = {}
    for name in first:
        error = math.hypot(
            first.get(f"{name}_error", math.nan), second.get(f"{name}_error", math.nan)
        )
        if math.isfinite(error):
            value = second[name] - first[name]
            found[name] = Difference(value, value - Z95 * error, value + Z95 * error)
    return found


def compared(audited: Sequence[Audited]) -> str:
    """What the difference of k3 says, in a sentence; empty for one dump."""
    if len(audited) < 2 or (found := differences(*audited).get("k3")) is None:
        return ""
    a, b = audited
    if found.low <= 0 <= found.high:
        return f"k3 of {b.label} less that of {a.label} is {found.text()} nats a token: no difference is shown."
    word = "larger" if found.value > 0 else "smaller"
    return f"k3 is {word} in {b.label} than in {a.label}: {found.text()} nats a token."


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
    "tokens_routed": ("Tokens with such a router", True),
}


def as_tree(each: Audited) -> dict[str, Any]:
    """Every number of an audit, JSON-ready; null where a number is not finite."""
    tally = each.tally
    taus, shares = extreme_curve(tally.histogram)
    kept = (taus >= 1.001) & (shares > 0)
    steps = []
    for step, sketch in sorted(tally.steps.items()):
        total, count = tally.rewards.get(step, (0.0, 0))
        steps.append(
            {"step": step, **sketch.numbers()} | ({"reward": total / count} if count else {})
        )
    tree: dict[str, Any] = {
        "schema_version": VERSION,
        "dump": str(tally.path),
        "columns": list(tally.columns),
        "rows": tally.rows,
        "verdict": dataclasses.asdict(each.verdict),
        "notes": list(each.notes),
        "not_checked": list(each.not_checked),
        "onset": each.onset,
        "onset_rule": ONSET_RULE,
        "overall": numbers(each),
        "ratio_quantiles": dict(
            zip(map(str, QUANTILES), quantiles(tally.histogram, QUANTILES).tolist(), strict=True)
        ),
        "extreme": {"tau": taus[kept].tolist(), "share": shares[kept].tolist()},
        "steps": steps,
    }
    if tally.ages.found:
        tree["k3_by_age"] = [
            {"age": age, "tokens": tally.ages.found[age][0], "k3": k3}
            for age, k3 in tally.ages.k3.items()
        ]
    if tally.routes is not None:
        tree["routers_per_layer"] = (tally.routes.per_layer / max(1, tally.routes.slots)).tolist()
    result: dict[str, Any] = plain(tree)
    return result


def write_report(folder: Path, audited: Sequence[Audited], *, png: bool = False) -> list[Path]:
    """FOLDER/audit.json, audit.html and figures/. UsageError: plotly (png: kaleido or its browser) is missing, or the
    folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        drawn = [f for f in figures(audited) if isinstance(f, Figure)]
        trees = [as_tree(each) for each in audited]
        tree = trees[0] if len(trees) == 1 else _both(audited, trees)
        text = json.dumps(tree, indent=1, allow_nan=False)
        written = [
            write_text_atomically(folder / "audit.json", text),
            write_text_atomically(folder / "audit.html", _page(audited)),
        ]
        write_figures(folder / "figures", drawn, png=png)
        return [*written, folder / "figures"]
    except OSError as error:
        raise UsageError(
            f"{folder}: cannot write the report ({error.strerror}); name another with --out"
        ) from None


def _both(audited: Sequence[Audited], trees: list[dict[str, Any]]) -> dict[str, Any]:
    found = {name: dataclasses.asdict(each) for name, each in differences(*audited).items()}
    return {"dumps": trees, "differences": plain(found)}


def _page(audited: Sequence[Audited]) -> str:
    title = " and ".join(each.label for each in audited)
    drawn = figures(audited)
    parts = [f"<h1>Audit of {escape(title)}</h1>"]
    for each in audited:
        found, verdict = numbers(each), each.verdict
        tiles = [
            ("k3", number(found["k3"]), "nats per token", ""),
            ("F(2)", number(found["f2"], share=True), "off by more than a factor of 2", ""),
            (
                "Effective sample size",
                number(found["ess"], share=True),
                "of token importance weights",
                "",
            ),
            (
                "Tokens",
                f"{each.tally.total.tokens:,}" if each.tally.total else "",
                f"{each.tally.rows:,} rows",
                "",
            ),
        ]
        heading = f"<h2>{escape(each.label)}</h2>" if len(audited) > 1 else ""
        kind = "bad" if verdict.action in ("bug", "unclear") else ""
        basis = "".join(f"<li>{escape(text)}</li>" for text in _grounds(each))
        unchecked = "; ".join(each.not_checked)
        parts.append(
            f'{heading}<div class="card verdict {verdict.action}"><p class="badge">{escape(BADGES[verdict.action])}</p>'
            f'<p class="{kind}"><b>{escape(verdict.sentence)}</b></p>'
            f"<ul>{basis}</ul>"
            + (f'<p class="rule">Not looked for: {escape(unchecked)}.</p>' if unchecked else "")
            + f'</div><div class="tiles">{"".join(tile(*each) for each in tiles)}</div>'
        )
    parts.append(
        section(
            "Mismatch", "How far apart are the engine that samples and the one that learns?", drawn
        )
    )
    told = f'<p class="lead">{escape(said)}</p>' if (said := compared(audited)) else ""
    parts.append(f"<h2>Numbers</h2>{told}" + _html_table(_cells(audited), ["", *_header(audited)]))
    for each in audited:
        rows = [[f.preset, f"{f.keep:.1%}", number(f.attenuation)] for f in each.verdict.forecasts]
        if rows:
            length = each.tally.mean_length
            parts.append(
                f"<h2>Corrections: {escape(each.label)}</h2>"
                f'<p class="lead">Predicted for a normal log-ratio with KL = k3 and {length:,} tokens a sequence.</p>'
                + _html_table(rows, ["Preset", "Tokens kept", "Step multiplied by"])
            )
    return document(
        f"{title}: audit",
        "\n".join(parts),
        [f for f in drawn if isinstance(f, Figure)],
        footer="onepolicy audit.",
    )


def _html_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="card scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _header(audited: Sequence[Audited]) -> list[str]:
    return [
        *(each.label for each in audited),
        *(["difference, 95% interval"] if len(audited) > 1 else []),
    ]


def _cells(audited: Sequence[Audited]) -> list[list[str]]:
    found = [numbers(each) for each in audited]
    apart = differences(*audited) if len(audited) > 1 else {}
    rows = []
    for key, (name, share) in ROWS.items():
        if any(key in values for values in found):
            cells = [_cell(key, v.get(key, math.nan), share=share) for v in found]
            if len(audited) > 1:
                cells.append(apart[key].text(share=share) if key in apart else "")
            rows.append([name, *cells])
    onsets = [each.onset for each in audited]
    if any(each.tally.steps for each in audited):
        cells = ["none" if step is None else f"step {step}" for step in onsets]
        rows.append(["Onset of divergence", *cells, *([""] if len(audited) > 1 else [])])
    return rows


def _cell(key: str, value: float, *, share: bool) -> str:
    if key in ("tokens", "sequences"):
        return f"{value:,.0f}"
    return (
        f"{value:.4f}"
        if key in ("mean_rho", "pearson", "ppl_ratio")
        else number(value, share=share)
    )


def show(console: Console, audited: Sequence[Audited]) -> None:
    """The verdict and the numbers in the terminal."""
    for each in audited:
        verdict = each.verdict
        style = "bold red" if verdict.action in ("bug", "unclear") else "bold"
        if len(audited) > 1:
            console.print(Text(each.label, style="bold underline"))
        console.print(Text(BADGES[verdict.action].upper(), style=style))
        console.print(Text(verdict.sentence, style=style))
        for line in _grounds(each):
            console.print(Text(f"  {line}"))
        if each.not_checked:
            console.print(Text(f"  Not looked for: {'; '.join(each.not_checked)}.", style="dim"))
    table = Table(show_header=len(audited) > 1, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for name in _header(audited):
        table.add_column(Text(name), justify="right")
    for row in _cells(audited):
        table.add_row(*map(Text, row))
    console.print(table)
    if told := compared(audited):
        console.print(Text(told))


def _grounds(each: Audited) -> list[str]:
    """What to set, what the verdict rests on, and how it was reached; one sentence each."""
    said = each.verdict
    setting = [f"Set: {said.setting}"] if said.setting else []
    if "correction.preset=" in said.setting:
        name = said.setting.rpartition("=")[2]
        setting.append(
            f"`onepolicy config preset {name}` says it in the settings of verl, miles, TRL and others."
        )
    return [*setting, *(f"Because {text.removesuffix('.')}." for text in said.basis), *each.notes]
