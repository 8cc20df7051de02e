"""TOML recipe + dotted overrides -> RunConfig, with errors that name the field and the mend."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from onepolicy.config.base import Frozen, UsageError
from onepolicy.config.run import RunConfig

Tree = dict[str, Any]
Settings = TypeVar("Settings", bound=Frozen)

VARIANT = ("kind", "mode", "preset", "format")  # the setting that says which variant of a section the others belong to
NOT_TOML = (ValueError, RecursionError)  # a TOMLDecodeError; a number of thousands of digits; brackets as deep


def load(recipe: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """The recipe's settings with `a.b=c` overrides on top. `c` is a TOML value; anything else is taken as a string."""
    return resolve(read_recipe(recipe) if recipe is not None else {}, overrides)


def read_recipe(recipe: str | Path) -> Tree:
    path = Path(recipe)
    if path.is_dir():
        raise UsageError(f"{path}: a folder, not a recipe; give the path of a .toml file (see recipes/)")
    if not path.is_file():
        raise UsageError(f"{path}: no such recipe; give the path of a .toml file (see recipes/)")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from None
    except NOT_TOML as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def resolve(tree: Tree, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    return resolve_as(RunConfig, tree, overrides)


def resolve_as(kind: type[Settings], tree: Tree, overrides: list[str] | tuple[str, ...] = ()) -> Settings:
    """Settings of another kind than a run's, by the same rules."""
    for override in overrides:
        tree = apply_override(tree, override)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UsageError(describe(error, kind)) from None


def apply_override(tree: Tree, override: str) -> Tree:
    """A copy of `tree` with one `a.b=c` applied. Another `kind`, `mode` or `preset` drops the old one's knobs."""
    path, sign, text = override.partition("=")
    keys = path.split(".")
    if not sign or not all(keys):
        raise UsageError(f"{override!r}: an override reads a.b=value, e.g. optim.lr=1e-4")
    tree = dict(tree)
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.get(key, {})
        if not isinstance(child, dict):
            raise UsageError(f"{override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
        node[key] = dict(child)
        node = node[key]
    value = parse_value(text)
    if keys[-1] in VARIANT and node.get(keys[-1], value) != value:
        node.clear()
    node[keys[-1]] = value
    return tree


def parse_value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except NOT_TOML:
        return text


def describe(error: ValidationError, kind: type[Frozen] = RunConfig) -> str:
    """One line per problem: field, value, mend."""
    schema, lines = kind.model_json_schema(), []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        match item["type"]:
            case "extra_forbidden":
                lines.append(f"{where}: unknown setting (value {item['input']!r}){_suggestion(schema, where)}")
            case "missing":
                lines.append(f"{where}: required, but not set; add it to the recipe or give {where}=...")
            case "model_type" | "model_attributes_type":
                meant = _setting_of(schema, where, item["input"])
                lines.append(f"{where}: {item['input']!r} is a value, but this is a section{meant}")
            case "value_error":
                lines.append(item["msg"].removeprefix("Value error, "))
            case _:
                lines.append(f"{where}: {item['msg']} (value {item['input']!r})")
    return "\n".join(lines)


def _suggestion(schema: Tree, where: str) -> str:
    *section, name = where.split(".")
    known = _fields_at(schema, section)
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"; did you mean {'.'.join([*section, close[0]])}?"
    return f"; known here: {', '.join(sorted(known))}" if known else ""


def _setting_of(schema: Tree, where: str, value: Any) -> str:
    """The setting that a value given to a whole section was meant for, as far as that is clear."""
    known = _fields_at(schema, where.split("."))
    name = known[0] if len(known) == 1 else "preset" if "preset" in known else "kind"
    if name in known:
        return f"; did you mean {where}.{name}={value}?"
    return f"; its settings: {', '.join(sorted(known))}"


def _fields_at(schema: Tree, section: list[str]) -> list[str]:
    """Setting names of the section at this path; a union's variant stands in the path as pydantic puts it there."""
    node: Tree = schema
    for key in section:
        node = _resolve(schema, node)
        if "discriminator" in node:
            node = {"$ref": node["discriminator"]["mapping"].get(key, "")}
        else:
            node = node.get("properties", {}).get(key, {})
    node = _resolve(schema, node)
    return list(node.get("properties", {})) or [node["discriminator"]["propertyName"]] * ("discriminator" in node)


def _resolve(schema: Tree, node: Tree) -> Tree:
    node = next((each for each in node.get("anyOf", []) if each != {"type": "null"}), node)  # what may be unset
    name = node.get("$ref", "").removeprefix("#/$defs/")
    return schema["$defs"].get(name, {}) if name else node
