"""Suggestions for a mistyped name: the nearest known name, and settings of other sections."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from onepolicy.config.base import Frozen

Tree = dict[str, Any]

SAME_SECTION = 0.6
OTHER_SECTION = 0.75
"""Least similarity (difflib) of two names: in one section, and across sections."""
MOST_SUGGESTED = 3


def closest_name(word: object, known: Iterable[str], cutoff: float = SAME_SECTION) -> str | None:
    """Return the nearest known name. Case, dashes and underscores make no difference."""
    names = {_folded(name): name for name in reversed(list(known))}
    close = difflib.get_close_matches(_folded(str(word)), names, n=1, cutoff=cutoff)
    return names[close[0]] if close else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return `; did you mean NAME?`, or nothing where no known name is near."""
    name = closest_name(word, known)
    return "" if name is None else f"; did you mean {name}?"


def settings_with_name(path: str, paths: Iterable[str]) -> list[str]:
    """Return the full paths of settings with this name in any section, the likeliest first.

    `lr` is optim.lr. Initials count too, so learning_rate is as well.
    """
    paths = [each for each in paths if each != path]
    same = [each for each in paths if _folded(each) == _folded(path)]
    if same:
        return same
    last = _last(path)
    initials = "".join(part[0] for part in last.split("_") if part)
    named = [each for each in paths if _last(each) == last]
    if not named and len(initials) > 1:
        named = [each for each in paths if _last(each) == initials]
    return _likeliest(path, named)


def similar_settings(path: str, paths: Iterable[str]) -> list[str]:
    """Return the settings with this name, or else those whose name looks alike."""
    paths = [each for each in paths if each != path]
    named = settings_with_name(path, paths)
    if named:
        return named
    alike = closest_name(_last(path), {_last(each) for each in paths}, OTHER_SECTION)
    return _likeliest(path, [each for each in paths if _last(each) == alike])


def suggestion_of(paths: list[str]) -> str:
    """Return `; did you mean A? (or B, C)`, or nothing."""
    if not paths:
        return ""
    first, *others = paths
    if others:
        return f"; did you mean {first}? (or {', '.join(others)})"
    return f"; did you mean {first}?"


@cache
def paths_of(kind: type[Frozen]) -> tuple[str, ...]:
    """Return the dotted path of every setting and section of this kind, in all variants."""
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
    """Return the settings of the section that was named, or else all, the shallowest first."""
    section = path.rpartition(".")[0].split(".")[0]
    inside = [each for each in named if section and each.split(".")[0] == section]
    return sorted(inside or named, key=lambda each: each.count("."))[:MOST_SUGGESTED]


def _last(path: str) -> str:
    return _folded(path.rpartition(".")[2])


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")
