"""Published corrections and objectives by name: the rows of corrections.toml and objectives.toml.

frameworks.toml says how other frameworks' settings there are written. A row of corrections.toml
with a `question` is a preset to choose. The others are equations of other frameworks: their names
are taken too, with one line on stderr that names the replacement.
"""

from __future__ import annotations

import functools
import logging
import tomllib
from pathlib import Path
from typing import Any

from onepolicy.config.spelling import did_you_mean
from onepolicy.errors import UsageError

Rows = dict[str, dict[str, Any]]
LOG = logging.getLogger(__name__)
ALIASES = {"off": "recompute", "bypass": "ppo-is"}
FRAMEWORK_ALIASES = {"slime": "miles", "nemo-rl": "nemo"}
WARNED: set[str] = set()
"""Names of other frameworks' equations that this process has said a line about."""


@functools.cache
def correction_presets() -> Rows:
    """Return the rows of corrections.toml: settings, source, and other frameworks' settings."""
    return _read("corrections.toml")


@functools.cache
def objective_presets() -> Rows:
    """Return the rows of objectives.toml: settings, loss, source, other frameworks' settings."""
    return _read("objectives.toml")


@functools.cache
def frameworks() -> Rows:
    """Return the rows of frameworks.toml: other frameworks, and where they have their settings."""
    return _read("frameworks.toml")


def framework_names() -> list[str]:
    """Return the names that `framework_name` takes."""
    return [*frameworks(), *FRAMEWORK_ALIASES]


def framework_name(name: str) -> str:
    """Return the name in frameworks.toml. Raises UsageError if no framework is called so."""
    found = FRAMEWORK_ALIASES.get(name, name)
    if found in frameworks():
        return found
    known = framework_names()
    guess = did_you_mean(name, known)
    raise UsageError(f"--from: give one of {', '.join(known)}, not {name!r}{guess}")


def offered_corrections() -> dict[str, list[str]]:
    """Return the names to choose among, grouped by the question that they answer."""
    groups: dict[str, list[str]] = {}
    for name, row in correction_presets().items():
        if "question" in row:
            groups.setdefault(row["question"], []).append(name)
    return groups


def names_by_question() -> str:
    """Return the help text of the presets: each question with the names that answer it."""
    lines = ["corrections (`onepolicy config preset NAME` says all about one):"]
    for question, names in offered_corrections().items():
        lines += [f"  {question}", f"      {', '.join(names)}"]
    return "\n".join(lines)


def start_from(name: str) -> tuple[str, dict[str, Any]]:
    """Return the preset's own name and its settings of CorrectionConfig.

    Raises ValueError if there is none of this name.
    """
    name = ALIASES.get(name, name)
    row = correction_presets().get(name)
    if row is None:
        raise ValueError(f"correction.preset: none is called {describe_unknown(name)}")
    settings = dict(row["settings"])
    if "preset" in settings:
        _, base = start_from(settings.pop("preset"))
        settings = merge(base, settings)
    return name, settings


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return settings with changes on top. Tables are merged, other values replaced."""
    merged = dict(base)
    for key, value in changes.items():
        before = merged.get(key)
        both_tables = isinstance(before, dict) and isinstance(value, dict)
        merged[key] = before | value if both_tables else value
    return merged


def describe_unknown(name: object) -> str:
    """Return `'tsi'; there are ...` for a name that no correction has."""
    offered = [each for names in offered_corrections().values() for each in names]
    guess = did_you_mean(name, [*correction_presets(), *ALIASES])
    return f"{name!r}; there are {', '.join([*offered, *ALIASES])}{guess}"


def toml_lines(settings: dict[str, Any]) -> list[str]:
    """Return settings as lines of a TOML table. A table in it is inline, None is left out."""
    return [f"{key} = {_toml(value)}" for key, value in settings.items()]


def warn_translated(name: str) -> None:
    """Say once in a process how to write a preset that is not one to choose."""
    row = correction_presets()[name]
    if "question" not in row and name not in WARNED:
        WARNED.add(name)
        lines = ", ".join(toml_lines(row["settings"]))
        LOG.warning("correction.preset: %s still works; write %s instead", name, lines)


def _toml(value: Any) -> str:
    match value:
        case dict():
            fields = ", ".join(f"{k} = {_toml(v)}" for k, v in value.items() if v is not None)
            return f"{{ {fields} }}"
        case list() | tuple():
            return "[" + ", ".join(map(_toml, value)) + "]"
        case str():
            return f'"{value}"'
        case _:
            return f"{value}"


def _read(file: str) -> Rows:
    return tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
