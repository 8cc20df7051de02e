"""Suggestions for a mistyped name, and the names and paths of settings, read from their classes."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, get_args

from onepolicy.config.base import Frozen

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


def hint(path: str, known: Iterable[str], paths: Iterable[str]) -> str:
    """Return `; did you mean A? (or B, C)` for an unknown setting, or the names known in its place.

    path: as it was typed. known: names of settings in its section. paths: all settings. First
    choice: the same name in another section. Then a similar one of this section or another.
    """
    known, (section, _, name) = sorted(known), path.rpartition(".")
    close = closest_name(name, known)
    found = [] if path in paths else similar_settings(path, paths)  # else one of another variant
    if close is not None and not (found and _last(found[0]) == _folded(name)):
        found = [f"{section}.{close}".removeprefix(".")]
    if found:
        more = f" (or {', '.join(found[1:])})" if found[1:] else ""
        return f"; did you mean {found[0]}?{more}"
    return f"; known here: {', '.join(known)}" if known else ""


def similar_settings(path: str, paths: Iterable[str], *, alike: bool = True) -> list[str]:
    """Return the settings with this name in any section, the likeliest first.

    `lr` is optim.lr. Initials count too, so learning_rate is as well. alike: or else those whose
    name looks alike.
    """
    paths, last = [each for each in paths if each != path], _last(path)
    initials = "".join(part[0] for part in last.split("_") if part)
    found = [each for each in paths if _folded(each) == _folded(path)]
    found = found or [each for each in paths if _last(each) == last]
    if not found and len(initials) > 1:
        found = [each for each in paths if _last(each) == initials]
    if not found and alike:
        close = closest_name(last, {_last(each) for each in paths}, OTHER_SECTION)
        found = [each for each in paths if _last(each) == close]
    section = path.split(".")[0]
    inside = [each for each in found if "." in path and each.split(".")[0] == section]
    return sorted(inside or found, key=lambda each: each.count("."))[:MOST_SUGGESTED]


@cache
def paths_of(kind: type[Frozen]) -> tuple[str, ...]:
    """Return the dotted path of every setting and section of this kind, in all variants."""
    return tuple(dict.fromkeys(_paths(kind, "")))


def _paths(kind: type[Frozen], prefix: str) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}"
        for inner in classes_of(field.annotation):
            yield from _paths(inner, f"{prefix}{name}.")


def classes_of(annotation: Any) -> list[type[Frozen]]:
    """Return the classes of settings in an annotation: several for a union, none for a value."""
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        return [annotation]
    return [each for argument in get_args(annotation) for each in classes_of(argument)]


def _last(path: str) -> str:
    return _folded(path.rpartition(".")[2])


def _folded(word: str) -> str:
    return word.lower().replace("-", "_")
