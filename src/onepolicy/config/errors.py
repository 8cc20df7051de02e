"""Messages for settings that pydantic refuses: one line a problem, with field, value and fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from onepolicy.config.base import Frozen
from onepolicy.config.run import RunConfig
from onepolicy.config.spelling import (
    closest_name,
    did_you_mean,
    paths_of,
    similar_settings,
    suggestion_of,
)

Tree = dict[str, Any]
Problem = Mapping[str, Any]
Location = tuple[int | str, ...]


def describe_errors(error: ValidationError, kind: type[Frozen] = RunConfig) -> str:
    """Return one line per problem: field, value, fix."""
    problems = [
        problem
        for problem in error.errors()
        if problem["type"] != "default_factory_not_called"  # follows from another problem
    ]
    return "\n".join(
        _describe(problem, kind)
        for problem in problems
        if not _follows_from_another(problem, problems)
    )


def _follows_from_another(problem: Problem, problems: list[Any]) -> bool:
    """Return whether a list only counts as too short because pydantic refused some entries."""
    location = problem["loc"]
    inside = [
        other
        for other in problems
        if other["loc"][: len(location)] == location and other is not problem
    ]
    return problem["type"] == "too_short" and bool(inside)


def _describe(problem: Problem, kind: type[Frozen]) -> str:
    schema, location, value = _schema(kind), problem["loc"], problem["input"]
    where = ".".join(_written(schema, location))
    match problem["type"]:
        case "extra_forbidden":
            unknown = f"unknown setting{_variant(schema, location)} (value {value!r})"
            return f"{where}: {unknown}{_suggestion(kind, location, where)}"
        case "union_tag_invalid":
            return _wrong_variant(where, problem["ctx"])
        case "union_tag_not_found":
            name = _unquoted(problem["ctx"]["discriminator"])
            return f"{where}.{name}: required, but not set; give it first"
        case "literal_error" | "enum":
            return f"{where}: {_none_of(value, problem['ctx']['expected'])}"
        case "missing":
            fix = f"add it to the recipe{_override(location, where)}"
            return f"{where}: required, but not set; {fix}"
        case "model_type" | "model_attributes_type":
            meant = _setting_of(schema, location, where, value)
            return f"{where}: {value!r} is a value, but this is a section{meant}"
        case "tuple_type" | "list_type":
            return f"{where}: {value!r} is no list; write {where}=[...]"
        case "value_error":
            return str(problem["msg"]).removeprefix("Value error, ")
        case _:
            return f"{where}: {problem['msg']} (value {value!r})"


@cache
def _schema(kind: type[Frozen]) -> Tree:
    return kind.model_json_schema()


def _override(location: Location, where: str) -> str:
    if any(isinstance(key, int) for key in location):
        return ""  # overrides cannot reach into lists
    return f" or give {where}=..."


def _variant(schema: Tree, location: Location) -> str:
    """Return ` with mode=off` for a setting that this variant of its section does not have."""
    section = _resolve(schema, _at(schema, location[:-2]))
    if "discriminator" not in section:
        return ""
    return f" with {section['discriminator']['propertyName']}={location[-2]}"


def _suggestion(kind: type[Frozen], location: Location, where: str) -> str:
    """Return the setting that was probably meant, or all settings of this section.

    First choice: the same name in another section. Then a similar one of this section or another.
    """
    known, paths = _fields_at(_schema(kind), location[:-1]), paths_of(kind)
    section, _, name = where.rpartition(".")
    close = closest_name(name, known)
    elsewhere: list[str] = []
    if where not in paths:  # else it is a setting of another variant
        elsewhere = similar_settings(where, paths)
    same = bool(elsewhere) and elsewhere[0].rpartition(".")[2] == name
    if close is not None and not same:
        return suggestion_of([f"{section}.{close}".removeprefix(".")])
    if elsewhere:
        return suggestion_of(elsewhere)
    return f"; known here: {', '.join(sorted(known))}" if known else ""


def _wrong_variant(where: str, context: Tree) -> str:
    """Return the message for a section whose `kind`, `mode` or `format` names no variant."""
    name = _unquoted(context["discriminator"])
    return f"{where}.{name}: {_none_of(context['tag'], context['expected_tags'])}"


def _none_of(value: Any, expected: str) -> str:
    """Return `VALUE is none of ...`. expected: as pydantic lists choices, `'a', 'b' or 'c'`."""
    choices = [_unquoted(each) for each in expected.replace(" or ", ", ").split(", ")]
    listed = expected.replace(" or ", ", ")
    return f"{value!r} is none of {listed}{did_you_mean(value, choices)}"


def _unquoted(text: str) -> str:
    return text.strip("'")


def _setting_of(schema: Tree, location: Location, where: str, value: Any) -> str:
    """Return the setting that a value given to a whole section was probably meant for."""
    known = _fields_at(schema, location)
    name = "kind"
    if len(known) == 1:
        name = known[0]
    elif "preset" in known:
        name = "preset"
    if name not in known:
        return f"; its settings: {', '.join(sorted(known))}"
    if isinstance(location[-1], int):
        return f'; did you mean {{ {name} = "{value}" }}?'
    return f"; did you mean {where}.{name}={value}?"


def _fields_at(schema: Tree, location: Location) -> list[str]:
    """Return the names of settings of the section at this location."""
    node = _resolve(schema, _at(schema, location))
    if "properties" in node:
        return list(node["properties"])
    if "discriminator" in node:
        return [node["discriminator"]["propertyName"]]
    return []


def _at(schema: Tree, location: Location) -> Tree:
    return [schema, *(node for _, node in _walk(schema, location))][-1]


def _written(schema: Tree, location: Location) -> list[str]:
    """Return the path as a recipe has it, without the names of variants that pydantic adds."""
    return [name for name, _ in _walk(schema, location) if name is not None]


def _walk(schema: Tree, location: Location) -> Iterator[tuple[str | None, Tree]]:
    """Yield every key of a location with the schema there. None: the name of a union's variant."""
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
    """Return the schema that a node refers to. A setting that may be unset: its other type."""
    types = [each for each in node.get("anyOf", []) if each != {"type": "null"}]
    if types:
        node = types[0]
    name = node.get("$ref", "").removeprefix("#/$defs/")
    return schema["$defs"].get(name, {}) if name else node
