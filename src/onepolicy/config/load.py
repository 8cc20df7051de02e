"""TOML recipe + dotted overrides -> RunConfig, with errors that name the field and the mend."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from onepolicy.config.base import Frozen, UsageError
from onepolicy.config.near import did_you_mean, near, offered, paths_of, settings_like
from onepolicy.config.renamed import rename_keys, rename_overrides, warn_renamed
from onepolicy.config.run import RunConfig

Tree = dict[str, Any]
Location = tuple[int | str, ...]
Settings = TypeVar("Settings", bound=Frozen)

VARIANT = (
    "kind",
    "mode",
    "preset",
    "format",
)  # the setting that says which variant of a section the others belong to
NOT_TOML = (
    ValueError,
    RecursionError,
)  # a TOMLDecodeError; a number of thousands of digits; brackets as deep


def load(recipe: str | Path | None, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    """The recipe's settings with `a.b=c` overrides on top. `c` is a TOML value; anything else is taken as a string."""
    return resolve(read_recipe(recipe) if recipe is not None else {}, overrides)


def read_recipe(recipe: str | Path) -> Tree:
    path = Path(recipe)
    if path.is_dir():
        raise UsageError(
            f"{path}: a folder, not a recipe; give the path of a .toml file (see recipes/)"
        )
    if not path.is_file():
        raise UsageError(f"{path}: no such recipe; give the path of a .toml file (see recipes/)")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8"
        ) from None
    except NOT_TOML as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def resolve(tree: Tree, overrides: list[str] | tuple[str, ...] = ()) -> RunConfig:
    return resolve_as(RunConfig, tree, overrides)


def resolve_as(
    kind: type[Settings], tree: Tree, overrides: list[str] | tuple[str, ...] = ()
) -> Settings:
    """Return the settings of this kind: the tree with the overrides on top.

    Raises UsageError for a setting that is missing, unknown or wrong.
    """
    tree, old = rename_keys(tree, kind.renamed)
    overrides, overridden = rename_overrides(overrides, kind.renamed)
    for override in overrides:
        tree = apply_override(tree, override)
    tree, inside = rename_keys(tree, kind.renamed)  # of overrides that are whole sections
    warn_renamed([*old, *overridden, *inside], kind.renamed)
    for where, text in _texts(tree):
        if "\0" in text:
            raise UsageError(f"{where}: {text!r} has a NUL character in it; leave it out")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError(
                f"{where}: {text!r} cannot be read as text in this locale; set the environment variable PYTHONUTF8=1"
            )
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise UsageError(describe(error, kind)) from None


def _texts(node: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every text in a tree, names of settings included."""
    if isinstance(node, str):
        yield where, node
    elif isinstance(node, dict):
        for key, child in node.items():
            inner = f"{where}.{key}" if where else str(key)
            yield inner, str(key)
            yield from _texts(child, inner)
    elif isinstance(node, list | tuple):
        for number, child in enumerate(node):
            yield from _texts(child, f"{where}.{number}")


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
            raise UsageError(
                f"{override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section"
            )
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
    schema, lines = _schema(kind), []
    problems = [
        each for each in error.errors() if each["type"] != "default_factory_not_called"
    ]  # follows from another
    for item in problems:
        location = item["loc"]
        inner = [
            other
            for other in problems
            if other["loc"][: len(location)] == location and other is not item
        ]
        if item["type"] == "too_short" and inner:
            continue  # pydantic does not count the entries it refused
        where = ".".join(_written(schema, location))
        match item["type"]:
            case "extra_forbidden":
                unknown = f"unknown setting{_variant(schema, location)} (value {item['input']!r})"
                lines.append(f"{where}: {unknown}{_suggestion(kind, location, where)}")
            case "union_tag_invalid":
                lines.append(_wrong_variant(where, item["ctx"]))
            case "union_tag_not_found":
                lines.append(
                    f"{where}.{_unquoted(item['ctx']['discriminator'])}: required, but not set; give it first"
                )
            case "literal_error" | "enum":
                lines.append(f"{where}: {_none_of(item['input'], item['ctx']['expected'])}")
            case "missing":
                lines.append(
                    f"{where}: required, but not set; add it to the recipe{_override(location, where)}"
                )
            case "model_type" | "model_attributes_type":
                meant = _setting_of(schema, location, where, item["input"])
                lines.append(f"{where}: {item['input']!r} is a value, but this is a section{meant}")
            case "tuple_type" | "list_type":
                lines.append(f"{where}: {item['input']!r} is no list; write {where}=[...]")
            case "value_error":
                lines.append(item["msg"].removeprefix("Value error, "))
            case _:
                lines.append(f"{where}: {item['msg']} (value {item['input']!r})")
    return "\n".join(lines)


@cache
def _schema(kind: type[Frozen]) -> Tree:
    return kind.model_json_schema()


def _override(location: Location, where: str) -> str:
    inside_list = any(isinstance(key, int) for key in location)  # which overrides cannot reach
    return "" if inside_list else f" or give {where}=..."


def _variant(schema: Tree, location: Location) -> str:
    """` with mode=off` for a setting that this variant of its section does not have."""
    section = _resolve(schema, _at(schema, location[:-2]))
    return (
        f" with {section['discriminator']['propertyName']}={location[-2]}"
        if "discriminator" in section
        else ""
    )


def _suggestion(kind: type[Frozen], location: Location, where: str) -> str:
    """The same name in another section, else a near one of this section or another, else all that this section has."""
    known, paths = _fields_at(_schema(kind), location[:-1]), paths_of(kind)
    section, _, name = where.rpartition(".")
    close = near(name, known)
    elsewhere = (
        settings_like(where, paths) if where not in paths else []
    )  # it may be of another variant
    same = bool(elsewhere) and elsewhere[0].rpartition(".")[2] == name
    if close is not None and not same:
        return offered([f"{section}.{close}" if section else close])
    return offered(elsewhere) or (f"; known here: {', '.join(sorted(known))}" if known else "")


def _wrong_variant(where: str, context: Tree) -> str:
    """Of a setting that says which variant its section is, and names none."""
    return f"{where}.{_unquoted(context['discriminator'])}: {_none_of(context['tag'], context['expected_tags'])}"


def _none_of(value: Any, expected: str) -> str:
    """expected: the choices as pydantic lists them, `'a', 'b' or 'c'`."""
    choices = [_unquoted(each) for each in expected.replace(" or ", ", ").split(", ")]
    return f"{value!r} is none of {expected.replace(' or ', ', ')}{did_you_mean(value, choices)}"


def _unquoted(text: str) -> str:
    return text.strip("'")


def _setting_of(schema: Tree, location: Location, where: str, value: Any) -> str:
    """The setting that a value given to a whole section was meant for, as far as that is clear."""
    known = _fields_at(schema, location)
    name = known[0] if len(known) == 1 else "preset" if "preset" in known else "kind"
    if name not in known:
        return f"; its settings: {', '.join(sorted(known))}"
    if isinstance(location[-1], int):
        return f'; did you mean {{ {name} = "{value}" }}?'
    return f"; did you mean {where}.{name}={value}?"


def _fields_at(schema: Tree, location: Location) -> list[str]:
    """Setting names of the section at this location."""
    node = _resolve(schema, _at(schema, location))
    return list(node.get("properties", {})) or [node["discriminator"]["propertyName"]] * (
        "discriminator" in node
    )


def _at(schema: Tree, location: Location) -> Tree:
    return [schema, *(node for _, node in _walk(schema, location))][-1]


def _written(schema: Tree, location: Location) -> list[str]:
    """The path as a recipe writes it: without the union variants that pydantic puts in."""
    return [name for name, _ in _walk(schema, location) if name is not None]


def _walk(schema: Tree, location: Location) -> Iterator[tuple[str | None, Tree]]:
    """Every key of a location with the schema there; None for the name of a union's variant."""
    node = schema
    for key in location:
        node = _resolve(schema, node)
        if "discriminator" in node:
            node = {"$ref": node["discriminator"]["mapping"].get(key, "")}
            yield None, node
        elif isinstance(key, int):
            node = node.get("items", {})
            yield str(key), node
        else:
            node = node.get("properties", {}).get(key, {})
            yield key, node


def _resolve(schema: Tree, node: Tree) -> Tree:
    node = next(
        (each for each in node.get("anyOf", []) if each != {"type": "null"}), node
    )  # what may be unset
    name = node.get("$ref", "").removeprefix("#/$defs/")
    return schema["$defs"].get(name, {}) if name else node
