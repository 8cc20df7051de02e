"""Generated pages of docs/reference: settings, command line, metrics and presets.

`python benchmarks/reference_pages.py` writes them anew, and the table of columns in
docs/dump_schema.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from onepolicy.cli import build_parser
from onepolicy.cli.parser import Parser
from onepolicy.config.base import LARGEST_FLOAT, LARGEST_INT, VARIANT_KEYS, Frozen
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.presets import offered_corrections
from onepolicy.config.run import RunConfig
from onepolicy.config.serve import ServeConfig
from onepolicy.config.spelling import classes_of
from onepolicy.correct.equations import NAMED, show, translations
from onepolicy.objective.presets import describe_presets
from onepolicy.record.schema import COLUMNS, ColumnSpec
from onepolicy.run.log import METRICS

DOCS = Path(__file__).parents[1] / "docs"
WRITTEN = "Written by `python benchmarks/reference_pages.py`; a test compares it with the code.\n"
WIDTH = "100"  # of a line of help


def pages() -> dict[str, str]:
    """Return the text of each page by its file name."""
    return {
        "settings.md": settings_page(),
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


# --- settings.md ----------------------------------------------------------------------

INTRODUCTION = """\
# Settings

Written by `python benchmarks/reference_pages.py` from the models in `src/onepolicy/config/`, where
every setting has its description; a test compares this page with them.

A recipe is a TOML file: a setting `section.key` of this page is `key` in the table `[section]`. Any
setting can be changed on the command line as `section.key=value`. `onepolicy config RECIPE` prints
all effective settings of a recipe with these descriptions. *Unset* is the absence of a setting:
leave it out. Settings that contradict each other are an error; one that changes nothing beside the
others is named in one line on stderr.
"""
COMMANDS: tuple[tuple[str, type[Frozen], str], ...] = (
    (
        "Settings of a run",
        RunConfig,
        "`onepolicy train`. `eval`, `measure`, `plan` and `engine check` read the same recipes and "
        "ignore what they have no use for.",
    ),
    ("Settings of make-policy", PolicyConfig, "`onepolicy make-policy`, as `key=value`."),
    ("Settings of engine serve", ServeConfig, "`onepolicy engine serve MODEL`, as `key=value`."),
)
UNBOUNDED = (LARGEST_INT, LARGEST_FLOAT, 2**63)


class Section(NamedTuple):
    """A section of the settings, with one class per variant."""

    path: str  # dotted; empty for the top
    variants: list[type[Frozen]]
    default: object  # its value if it is not set
    is_list: bool  # entries of a list are such sections


Known = dict[str, list[type[Frozen]]]
"""Classes that the section at a path describes."""


def settings_page() -> str:
    """Return the page of all settings as Markdown."""
    parts: list[str] = [INTRODUCTION]
    known: Known = {}
    for title, kind, about in COMMANDS:
        parts.append(f"## {title}\n{about}\n")
        parts += _section_texts(Section("", [kind], None, is_list=False), known)
    return "\n".join(parts)


def _section_texts(section: Section, known: Known) -> Iterator[str]:
    """Yield the text of a section and of those inside it. A known section is a link."""
    for path, variants in known.items():
        if set(section.variants) <= set(variants):
            chosen = ""
            if len(section.variants) < len(variants):
                chosen = _chosen_variants(section)
            yield f"### {section.path}\nAs {_link(path)}{chosen}.\n"
            return
    known[section.path] = section.variants
    yield _section_text(section)
    for inner in _inner_sections(section):
        yield from _section_texts(inner, known)


def _chosen_variants(section: Section) -> str:
    """Return ` with kind = ...` of the variants in this section."""
    key = _variant_key(section)
    if key is None:
        return ""
    values = " or ".join(f"`{variant.default_of(key)}`" for variant in section.variants)
    return f" with {key} = {values}"


def _inner_sections(section: Section) -> list[Section]:
    """Return the sections directly inside a section, each path once."""
    inner: dict[str, Section] = {}
    for variant in section.variants:
        for name, field in variant.model_fields.items():
            classes = classes_of(field.annotation)
            if classes:
                path = f"{section.path}.{name}".removeprefix(".")
                inner[path] = Section(path, classes, field.default, _is_list(field.annotation))
    return list(inner.values())


def _is_list(annotation: Any) -> bool:
    inner = get_args(annotation)
    return get_origin(annotation) is tuple or any(_is_list(each) for each in inner)


def _section_text(section: Section) -> str:
    """Return heading, variants and table of a section."""
    lines: list[str] = []
    if section.path:
        lines.append(f"### {section.path}")
    variant_key = _variant_key(section)
    if section.is_list:
        lines.append("Each entry of the list:\n")
    if variant_key is not None:
        lines += _variants_table(section, variant_key)
    lines += _settings_table(section, variant_key)
    return "\n".join([*lines, ""])


def _variant_key(section: Section) -> str | None:
    """Return the setting that chooses the variant, or None if there is one variant only."""
    if len(section.variants) == 1:
        return None
    names = section.variants[0].model_fields
    return next(name for name in VARIANT_KEYS if name in names)


def _variants_table(section: Section, key: str) -> list[str]:
    lines = [f"| {key} | |", "|---|---|"]
    for variant in section.variants:
        value = variant.default_of(key)
        shown = f"`{value}`"
        if isinstance(section.default, variant):
            shown += " (default)"
        lines.append(f"| {shown} | {_description(variant, key)} |")
    return [*lines, ""]


def _settings_table(section: Section, variant_key: str | None) -> list[str]:
    """Return the rows of all variants. A setting that several variants have is one row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for variant in section.variants:
        chosen = ""
        if variant_key is not None:
            chosen = f"`{variant.default_of(variant_key)}`"
        for name in variant.model_fields:
            if name != variant_key and not _is_only_kind(variant, name):
                rows.setdefault(_row(variant, name, section), []).append(chosen)
    header = ["key", "type", "default", "description"]
    if variant_key is not None:
        header.insert(1, variant_key)
    lines = [f"| {' | '.join(header)} |", "|---" * len(header) + "|"]
    for row, chosen_by in rows.items():
        cells = list(row)
        if variant_key is not None:
            chosen = ", ".join(chosen_by)
            if len(chosen_by) == len(section.variants):
                chosen = "all"
            cells.insert(1, chosen)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _is_only_kind(variant: type[Frozen], name: str) -> bool:
    return name == "kind" and len(get_args(variant.model_fields[name].annotation)) == 1


def _row(variant: type[Frozen], name: str, section: Section) -> tuple[str, ...]:
    field = variant.model_fields[name]
    description = _description(variant, name)
    if classes_of(field.annotation):
        path = f"{section.path}.{name}".removeprefix(".")
        return f"`{name}`", f"section {_link(path)}", "", description
    node = variant.model_json_schema()["properties"][name]
    return f"`{name}`", type_text(node), _default(variant, name), description


def _description(variant: type[Frozen], name: str) -> str:
    text = " ".join((variant.model_fields[name].description or "").split())
    return text.replace("|", "\\|")


def _default(variant: type[Frozen], name: str) -> str:
    field = variant.model_fields[name]
    if field.is_required():
        return "required"
    value = field.default
    if field.default_factory is not None:
        value = {}  # of a table of free keys
    if value is None:
        return "unset"
    return f"`{json.dumps(value)}`"


def type_text(node: dict[str, Any]) -> str:
    """Return the type of a setting in words, from its JSON schema."""
    options = [each for each in node.get("anyOf", ()) if each != {"type": "null"}]
    if options:
        return type_text(options[0])
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{each}`" for each in node["enum"])
    match node["type"]:
        case "integer" | "number" as kind:
            return f"{kind} {_range(node)}".strip()
        case "boolean":
            return "true or false"
        case "array" if "prefixItems" in node:
            return f"list of {len(node['prefixItems'])} numbers"
        case "array":
            return f"list of {type_text(node['items'])}".replace("of text", "of texts")
        case "object":
            return "table"
        case _:
            return "text"


def _range(node: dict[str, Any]) -> str:
    """Return the bounds of a number. Largest values that are far above any use are left out."""
    above, least = node.get("exclusiveMinimum"), node.get("minimum")
    most, below = node.get("maximum"), node.get("exclusiveMaximum")
    if node["type"] == "integer" and above is not None:
        least = above + 1
        above = None
    if most in UNBOUNDED:
        most = None
    if below in UNBOUNDED:
        below = None
    if least is not None and most is not None:
        return f"{least:g} to {_number(most)}"
    bounds = [("> ", above), ("≥ ", least), ("≤ ", most), ("< ", below)]
    return ", ".join(f"{sign}{_number(bound)}" for sign, bound in bounds if bound is not None)


def _number(value: float) -> str:
    if value == int(value):
        return str(int(value))
    return str(value)


def _link(path: str) -> str:
    """Return a link to the section's heading, as GitHub names it."""
    return f"[{path}](#{path.replace('.', '')})"


if __name__ == "__main__":
    for file, text in pages().items():
        (DOCS / "reference" / file).write_text(text, encoding="utf-8")
    page = DOCS / "dump_schema.md"
    page.write_text(with_columns(page.read_text(encoding="utf-8")), encoding="utf-8")
