"""Generated pages of docs/reference: the command line, the metrics, the presets.

`python -m onepolicy.cli.reference docs/reference` writes them anew, and the table of columns in the
page beside the folder, docs/dump_schema.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from onepolicy.audit.schema import COLUMNS, ColumnSpec
from onepolicy.cli import build_parser
from onepolicy.cli.parser import Parser
from onepolicy.config.presets import offered_corrections
from onepolicy.correct.equations import NAMED, show, translations
from onepolicy.objective.presets import describe_presets
from onepolicy.run.log import METRICS

WRITTEN = (
    "Written by `python -m onepolicy.cli.reference docs/reference`; a test compares it with the "
    "code.\n"
)
WIDTH = "100"  # of a line of help


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "command_line.md": command_line(),
        "metrics.md": metrics(),
        "presets.md": presets(),
    }


def command_line() -> str:
    """Return the help of every command as Markdown."""
    os.environ["COLUMNS"] = WIDTH  # argparse asks it for the width of its lines
    text = f"# Command line\n\n{WRITTEN}"
    for name, parser in _commands("onepolicy", build_parser()):
        text += f"\n## {name}\n\n```\n{parser.format_help().rstrip()}\n```\n"
    return text


def _commands(name: str, parser: Parser) -> Iterator[tuple[str, Parser]]:
    yield name, parser
    for child, subparser in parser.subcommands().items():
        yield from _commands(f"{name} {child}", subparser)


def metrics() -> str:
    """Return every column of metrics.jsonl, a table for each area."""
    text = (
        f"# Metrics\n\n{WRITTEN}\nA row of `metrics.jsonl` is one step. TensorBoard, W&B and "
        "trackio show the same names. `rho` is p_trainer / p_rollout of a sampled token; `@k` "
        "stands for a layer, a turn or a number.\n"
    )
    areas: dict[str, list[str]] = {}
    for name, description in METRICS.items():
        meaning, unit = description, ""
        if description.endswith("]"):
            meaning, _, unit = description[:-1].rpartition(" [")
        row = f"| `{name}` | {_cell(meaning)} | {unit} |\n"
        areas.setdefault(name.split("/")[0], []).append(row)
    for area, rows in areas.items():
        text += f"\n## {area}\n\n| metric | meaning | unit |\n|---|---|---|\n{''.join(rows)}"
    return text


def presets() -> str:
    """Return every preset with its equation, and the settings of other frameworks for each."""
    text = f"# Presets\n\n{WRITTEN}\n## Corrections\n"
    for question, names in offered_corrections().items():
        text += f"\n### {question}\n"
        for name in names:
            title, _, rest = show(name).partition("\n")
            text += f"\n#### {name}\n\n{title.partition(': ')[2]}\n\n```\n{rest.strip()}\n```\n"
    text += f"\n## Objectives\n\n```\n{describe_presets()}\n```\n"
    text += "\n## From another framework\n\nAs `onepolicy config preset --from FRAMEWORK`.\n"
    for framework, title in NAMED.items():
        text += f"\n### {title}\n\n```toml\n{translations(framework)}\n```\n"
    return text


def with_columns(page: str) -> str:
    """Return docs/dump_schema.md with a table of the columns that a dump may have."""
    head, start, rest = page.partition("<!-- columns -->\n")
    _, end, tail = rest.partition("<!-- end of columns -->")
    table = "| column | type | meaning |\n|---|---|---|\n"
    for name, spec in COLUMNS.items():
        table += f"| `{name}` | {_column_type(spec)} | {_cell(spec.meaning)} |\n"
    return head + start + table + end + tail


def _column_type(spec: ColumnSpec) -> str:
    one = {"int": "int", "float": "float", "bool": "0 / 1"}[spec.kind]
    text = {"row": one, "token or row": f"{one}, or list of {one}"}.get(spec.per, f"list of {one}")
    if spec.required:
        text += ", required"
    return text


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("\n", " ")


if __name__ == "__main__":
    for file, text in pages().items():
        (Path(sys.argv[1]) / file).write_text(text, encoding="utf-8")
    page = Path(sys.argv[1]).parent / "dump_schema.md"
    page.write_text(with_columns(page.read_text(encoding="utf-8")), encoding="utf-8")
