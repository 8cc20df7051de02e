"""What a mistyped name was meant to be: the nearest of the names that there are, and the settings of any section."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from onepolicy.config.base import Frozen

Tree = dict[str, Any]

SAME_WORD = 0.75
"""Least similarity (difflib) of two names across sections; within one section its default of 0.6 will do."""
MOST_OFFERED = 3


def near(word: object, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the nearest of the known names, whatever its case, dashes and underscores."""
    names = {_folded(name): name for name in reversed(list(known))}
    close = difflib.get_close_matches(_folded(str(word)), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?`, or nothing where no known name is near."""
    name = near(word, known)
    return "" if name is None else f"; did you mean {name}?"


def settings_named(path: str, paths: Iterable[str]) -> list[str]:
    """Return the full paths of the settings of this name in any section, the likeliest first, at most MOST_OFFERED.

    `lr` is optim.lr; initials count too, so learning_rate is as well.
    """
    paths = [each for each in paths if each != path]
    if same := [each for each in paths if _folded(each) == _folded(path)]:
        return same
    last = _last(path)
    initials = "".join(part[0] for part in last.split("_") if part)
    named = [each for each in paths if _last(each) == last]
    if not named and len(initials) > 1:
        named = [each for each in paths if _last(each) == initials]
    return _likeliest(path, named)


def settings_like(path: str, paths: Iterable[str]) -> list[str]:
    """Return the same, or else the settings whose name looks alike."""
    paths = [each for each in paths if each != path]
    alike = near(_last(path), {_last(each) for each in paths}, SAME_WORD)
    return settings_named(path, paths) or _likeliest(
        path, [each for each in paths if _last(each) == alike]
    )


def offered(paths: list[str]) -> str:
    """Return `; did you mean A? (or B, C)`, or nothing."""
    if not paths:
        return ""
    others = f" (or {', '.join(paths[1:])})" if len(paths) > 1 else ""
    return f"; did you mean {paths[0]}?{others}"


@cache
def paths_of(kind: type[Frozen]) -> tuple[str, ...]:
    """Return the dotted path of every setting and section of this kind, of all variants of its sections."""
    schema = kind.model_json_schema()
    return tuple(dict.fromkeys(_paths(schema, schema, "")))


def _paths(schema: Tree, node: Tree, prefix: str) -> Iterator[str]:
    for variant in [*node.get("anyOf", ()), *node.get("oneOf", ())]:
        yield from _paths(schema, variant, prefix)
    if "$ref" in node:
        yield from _paths(schema, schema["$defs"][node["$ref"].removeprefix("#/$defs/")], prefix)
    for name, child in node.get("properties", {}).items():
        yield f"{prefix}{name}"
        yield from _paths(schema, child, f"{prefix}{name}.")


def _likeliest(path: str, named: list[str]) -> list[str]:
    """Those of the section that was named, if there are any; the shallowest first."""
    section = path.rpartition(".")[0].split(".")[0]
    inside = [each for each in named if section and each.split(".")[0] == section]
    return sorted(inside or named, key=lambda each: each.count("."))[:MOST_OFFERED]


def _last(path: str) -> str:
    return _folded(path.rpartition(".")[2])


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")
