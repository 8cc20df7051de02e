"""Generated pages of docs/reference: settings, command line and metrics.

`python benchmarks/reference_pages.py` writes them anew, and the table of columns in
docs/dump_schema.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from onepolicy.cli import build_parser
from onepolicy.cli.parser import Parser
from onepolicy.config.base import LARGEST_FLOAT, LARGEST_INT, VARIANT_KEYS, Frozen
from onepolicy.config.engine import VLLMEngineConfig
from onepolicy.config.policy import PolicyConfig
from onepolicy.config.run import RunConfig
from onepolicy.config.serve import ServeConfig
from onepolicy.config.spelling import classes_of
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
    }


def command_line() -> str:
    """Return the help of every command as Markdown, what all have in common once."""
    os.environ["COLUMNS"] = WIDTH  # argparse asks it for the width of its lines
    text = (
        "# Command line\n\nFor whoever types a command: what it takes. After it you can write any "
        "command whole.\n\n"
        f"{WRITTEN}\n`COMMAND --help` prints the same, with examples. Where `a.b=value` stands, "
        "any [setting](settings.md) of a recipe may follow, without dashes. "
        "[Exit codes](../reliability.md#exit-codes) are the same for all.\n"
    )
    for name, parser in _commands("onepolicy", build_parser()):
        if name == "onepolicy" or not parser.subcommands():
            text += f"\n## {name}\n\n```\n{_own_help(parser)}\n```\n"
    return text


def _own_help(parser: Parser) -> str:
    """Return a command's help without usage, examples, `--help` and what every command has."""
    text = re.sub(r"\n  -h, --help +show this help message and exit", "", parser.format_help())
    parts = [part.rstrip() for part in text.split("\n\n")]
    left_out = ("usage:", "settings:\n", "corrections (`onepolicy config preset")
    left_out += ("examples:\n", "exit codes:\n")
    return "\n\n".join(p for p in parts if p != "options:" and not p.startswith(left_out))


def _commands(name: str, parser: Parser) -> Iterator[tuple[str, Parser]]:
    yield name, parser
    for child, subparser in parser.subcommands().items():
        yield from _commands(f"{name} {child}", subparser)


AREAS = {
    "train": "Does it learn?",
    "tools": "What do its tools do?",
    "program": "What do its programs do? (those that ended in the step)",
    "mismatch": "How far apart are engine and trainer?",
    "routing": "How many routers choose other experts?",
    "replay": "What is replayed?",
    "repeat": "How noisy is the trainer? Two scorings with the same weights, packed in opposite "
    "orders (R3 paper, section 3.3).",
    "correction": "What does the correction do? Of rho (`ratio_*`) before any bound.",
    "rollout": "What went wrong while sampling?",
    "quant": "Do the calibrated scales still fit?",
    "adapter": "Does the engine have the adapter? On a fixed batch, after every sync.",
    "staleness": "How old are the tokens?",
    "async": "Who waits?",
    "time": "Where does the time go? [s]",
    "sync": "What travels?",
    "eval": "What can it do?",
}
"""Question that the metrics of an area answer."""


def metrics() -> str:
    """Return every column of metrics.jsonl, a list for each area."""
    text = (
        "# Metrics\n\nFor whoever reads `metrics.jsonl`, TensorBoard, W&B or trackio: the meaning "
        "of every name, by the question that it answers.\nAfter it you know what a curve shows.\n\n"
        f"{WRITTEN}\nA row is one step. `rho` is p_trainer / p_rollout of a sampled token; means "
        "are over the step's trainable slots; `@k` stands for a layer, a turn or a number. "
        "Units are in brackets, but for shares and plain numbers.\n"
    )
    areas: dict[str, list[str]] = {}
    for name, description in METRICS.items():
        area = name.partition("/")[0]
        if area != "counterfactual":
            meaning = re.sub(r" \[(1|share|s)\]$", "", description)
            areas.setdefault(area, []).append(f"- `{name}`: {meaning}\n")
    for area, rows in areas.items():
        text += f"\n## {area}\n{AREAS[area]}\n\n{''.join(rows)}"
    return text + (
        "\n## counterfactual\nWhat would it be without replay? `counterfactual/NAME`, of the same "
        "batch scored without it (`log.counterfactual_every`): the names of [mismatch](#mismatch), "
        "[routing](#routing) and [repeat](#repeat).\n"
    )


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

For whoever writes a recipe: every setting with its default and bounds. After it you can change any
of them, in the file or as `section.key=value` on the command line.

Written by `python benchmarks/reference_pages.py` from the models in `src/onepolicy/config/`; a test
compares them.

`section.key` is `key` in the table `[section]` of the TOML file. Brackets hold the default, then
other choices or bounds; no number may be negative but returns and bounds of gates, and what has
no type is text. *unset*: leave it out. `onepolicy config RECIPE` prints what results. Settings that
contradict each other are an error; one that changes nothing is named on stderr. Another `kind`,
`mode`, `preset` or `format` drops what the recipe sets in its section, not what you type.
"""
COMMANDS: tuple[tuple[str, type[Frozen], type[Frozen] | None, str], ...] = (
    (
        "Settings of a run",
        RunConfig,
        None,
        "`onepolicy train`. `eval`, `measure`, `plan` and `engine check` read the same recipes and "
        "ignore what they have no use for.",
    ),
    ("Settings of make-policy", PolicyConfig, None, "`onepolicy make-policy`, as `key=value`."),
    (
        "Settings of engine serve",
        ServeConfig,
        VLLMEngineConfig,
        "`onepolicy engine serve MODEL`, as `key=value`: those of [rollout.engine](#rolloutengine) "
        "with kind `vllm`, and",
    ),
)
"""Title, settings, those of them that stand elsewhere on the page, and what takes them."""
UNBOUNDED = (2**16, 2**20, 2**24, 2**63, LARGEST_INT, LARGEST_FLOAT)
"""Largest values that are far above any use."""


class Section(NamedTuple):
    """A section of the settings, with one class per variant."""

    path: str  # dotted; empty for the top
    variants: list[type[Frozen]]
    default: object  # its value if it is not set
    is_list: bool  # entries of a list are such sections
    about: str  # its description


Known = dict[str, list[type[Frozen]]]
"""Classes that the section at a path describes."""


def settings_page() -> str:
    """Return the page of all settings as Markdown."""
    parts: list[str] = [INTRODUCTION]
    known: Known = {}
    for title, kind, elsewhere, about in COMMANDS:
        parts.append(f"## {title}\n{about}\n")
        top = Section("", [kind], None, is_list=False, about="")
        parts += _section_texts(top, known, elsewhere)
    return "\n".join(parts)


def _section_texts(
    section: Section, known: Known, elsewhere: type[Frozen] | None = None
) -> Iterator[str]:
    """Yield the text of a section and of those inside it. A known section is a link."""
    for path, variants in known.items():
        if set(section.variants) <= set(variants):
            chosen = ""
            if len(section.variants) < len(variants):
                chosen = _chosen_variants(section)
            yield f"### {section.path}\n{section.about} As {_link(path)}{chosen}.\n"
            return
    known[section.path] = section.variants
    yield _section_text(section, elsewhere)
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
                listed, about = _is_list(field.annotation), _description(variant, name)
                inner.setdefault(path, Section(path, classes, field.default, listed, about))
    return list(inner.values())


def _is_list(annotation: Any) -> bool:
    inner = get_args(annotation)
    return get_origin(annotation) is tuple or any(_is_list(each) for each in inner)


def _section_text(section: Section, elsewhere: type[Frozen] | None) -> str:
    """Return heading and settings of a section."""
    lines: list[str] = []
    if section.path:
        lines.append(f"### {section.path}\n{section.about}")
        if section.is_list:
            lines[-1] += " Each entry of the list:"
        lines.append("")
    lines += _setting_lines(section, elsewhere)
    return "\n".join([*lines, ""])


def _variant_key(section: Section) -> str | None:
    """Return the setting that chooses the variant, or None if there is one variant only."""
    if len(section.variants) == 1:
        return None
    names = section.variants[0].model_fields
    return next(name for name in VARIANT_KEYS if name in names)


def _setting_lines(section: Section, elsewhere: type[Frozen] | None) -> list[str]:
    """Return a line for every setting. Those of a variant, or of several, stand below it."""
    key = _variant_key(section)
    names: dict[str, list[int]] = {}
    for place, variant in enumerate(section.variants):
        for name in variant.model_fields:
            shown = elsewhere is None or name not in elsewhere.model_fields
            line = _line(variant, name) if name != key and shown else ""
            if line:
                names.setdefault(line, []).append(place)
    if key is None:
        return list(names)
    below: dict[tuple[int, ...], list[str]] = {(i,): [] for i in range(len(section.variants))}
    for line, places in names.items():
        below.setdefault(tuple(places), []).append(f"    {line}")
    return [f"`{key}` is one of these, with the settings below it:\n", *_groups(section, below)]


def _groups(section: Section, below: dict[tuple[int, ...], list[str]]) -> Iterator[str]:
    """Yield each variant with its own settings, then variants that share some."""
    key = _variant_key(section)
    assert key is not None
    for places, lines in below.items():
        variants = [section.variants[place] for place in places]
        named = "all"
        if len(variants) < len(section.variants):
            named = ", ".join(f"**`{variant.default_of(key)}`**" for variant in variants)
        if len(variants) == 1:
            if isinstance(section.default, variants[0]):
                named += " (default)"
            named += f" {_description(variants[0], key)}"
        yield f"- {named}"
        yield from lines


def _line(variant: type[Frozen], name: str) -> str:
    """Return the line of a setting; nothing for a section or the only kind of a variant."""
    field = variant.model_fields[name]
    only_kind = name == "kind" and len(get_args(field.annotation)) == 1
    if only_kind or classes_of(field.annotation):
        return ""
    node = variant.model_json_schema()["properties"][name]
    values = values_text(node, _default(variant, name))
    return f"- `{name}` ({values}): {_description(variant, name)}"


def _description(variant: type[Frozen], name: str) -> str:
    return " ".join((variant.model_fields[name].description or "").split())


def _default(variant: type[Frozen], name: str) -> str:
    """Return the default as TOML has it, `required` or `unset`."""
    field = variant.model_fields[name]
    if field.is_required():
        return "required"
    value = field.default
    if field.default_factory is not None:
        value = {}  # of a table of free keys
    if value is None:
        return "unset"
    return f"`{json.dumps(value)}`"


def values_text(node: dict[str, Any], default: str) -> str:
    """Return the default of a setting, then what it may be, from its JSON schema."""
    options = [each for each in node.get("anyOf", ()) if each != {"type": "null"}]
    if options:
        return values_text(options[0], default)
    if "enum" in node:
        others = [f"`{json.dumps(each)}`" for each in node["enum"]]
        return ", ".join([default, *(each for each in others if each != default)])
    words = [default]
    if default in ("required", "unset", "`[]`") and node["type"] != "string":
        words.append(type_text(node))  # the default does not show it
    if node["type"] in ("integer", "number"):
        words += _bounds(node)
    return ", ".join(words)


def type_text(node: dict[str, Any]) -> str:
    """Return the type of a setting in words."""
    match node.get("type"):
        case "array" if "prefixItems" in node:
            return f"{len(node['prefixItems'])} numbers"
        case "array" if "enum" in node["items"]:
            return "list of " + ", ".join(f"`{each}`" for each in node["items"]["enum"])
        case "array":
            return f"list of {type_text(node['items'])}s"
        case "object":
            return "table"
        case "string":
            return "text"
        case other:
            return str(other)


def _bounds(node: dict[str, Any]) -> list[str]:
    """Return the bounds of a number but for 0, 1 of whole ones, and those far above any use."""
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "maximum": "≤", "exclusiveMaximum": "<"}
    usual = {0, *UNBOUNDED}
    if node["type"] == "integer":
        usual.add(1)
    bounds = {sign: node[name] for name, sign in signs.items() if name in node}
    return [f"{sign}{_number(bound)}" for sign, bound in bounds.items() if bound not in usual]


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
