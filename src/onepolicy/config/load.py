"""TOML recipe + dotted overrides -> RunConfig."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from onepolicy.config.base import VARIANT_KEYS, Broken, Frozen
from onepolicy.config.errors import describe_errors
from onepolicy.config.rules import require
from onepolicy.config.run import RunConfig
from onepolicy.config.run_rules import CONTRADICTIONS
from onepolicy.errors import UsageError

Tree = dict[str, Any]
Settings = TypeVar("Settings", bound=Frozen)
Overrides = list[str] | tuple[str, ...]

TOML_ERRORS = (ValueError, RecursionError)
"""A TOMLDecodeError, a number of thousands of digits, brackets as deep."""
DEEPEST = 64
"""Levels of sections and lists."""
QUANT = ["rollout", "quant"]
"""The section that may be the bare name of a format (quant.py)."""

RunConfig.rules = CONTRADICTIONS  # they read a RunConfig, so run.py cannot import them


def load(recipe: str | Path | None, overrides: Overrides = ()) -> RunConfig:
    """Return the recipe's settings with `a.b=c` overrides on top.

    `c` is a TOML value, or else a string. Raises UsageError, as `resolve_as` does.
    """
    tree: Tree = {}
    if recipe is not None:
        tree = read_recipe(recipe)
    return resolve(tree, overrides)


def read_recipe(recipe: str | Path) -> Tree:
    """Return the tree of a TOML file. Raises UsageError if it is none."""
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
    except TOML_ERRORS as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None


def resolve(tree: Tree, overrides: Overrides = ()) -> RunConfig:
    """Return the settings of a run: the tree with the overrides on top. See `resolve_as`."""
    return resolve_as(RunConfig, tree, overrides)


def resolve_as(kind: type[Settings], tree: Tree, overrides: Overrides = ()) -> Settings:
    """Return the settings of this kind: the tree with the overrides on top.

    Raises UsageError, one line a problem, for settings that are missing, unknown, out of range or
    contradictory.
    """
    typed = {override.partition("=")[0] for override in overrides}
    for override in variants_first(overrides):
        tree = apply_override(tree, override, typed)
    _check_texts(tree)
    broken = Broken()
    try:
        settings = kind.model_validate(tree, context=broken)
    except ValidationError as error:
        lines = [describe_errors(error, kind), *map(str, broken.checks)]
        raise UsageError("\n".join(lines)) from None
    require(broken.checks)
    return settings


def _check_texts(tree: Tree) -> None:
    """Raise UsageError for a text that no file or command can hold."""
    for where, text in _texts(tree):
        if "\0" in text:
            raise UsageError(f"{where}: {text!r} has a NUL character in it; leave it out")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError(
                f"{where}: {text!r} cannot be read as text in this locale; set the environment "
                "variable PYTHONUTF8=1"
            )


def _texts(node: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (path, text) for every text in a tree, names of settings included.

    Raises UsageError for a tree too deep to be read back from config.json.
    """
    if depth > DEEPEST:
        raise UsageError(f"{where[:80]}...: is nested more than {DEEPEST} levels deep")
    if isinstance(node, str):
        yield where, node
    elif isinstance(node, dict):
        for key, child in node.items():
            inner = str(key)
            if where:
                inner = f"{where}.{key}"
            yield inner, str(key)
            yield from _texts(child, inner, depth + 1)
    elif isinstance(node, list | tuple):
        for number, child in enumerate(node):
            yield from _texts(child, f"{where}.{number}", depth + 1)


def variants_first(overrides: Overrides) -> list[str]:
    """Return the overrides with each `preset`, `kind` and the like before its section's settings.

    Another one drops a section's settings: those of the recipe, but not those that were typed.
    """
    ordered: list[str] = []
    for override in overrides:
        path, _, value = override.partition("=")
        section, _, name = path.rpartition(".")
        place = len(ordered)
        if name in VARIANT_KEYS and value != "off":  # what is off has no settings
            # a later value of the same or of the whole section wins over an earlier one
            for at in range(len(ordered) - 1, -1, -1):
                earlier = ordered[at].partition("=")[0]
                if earlier == path or f"{section}.".startswith(f"{earlier}."):
                    if name != "preset" and ordered[at] != override:
                        place = len(ordered)  # what is between was typed for the other one
                    break
                if earlier.startswith(f"{section}."):
                    place = at
        ordered.insert(place, override)
    return ordered


def apply_override(tree: Tree, override: str, typed: Collection[str] = ()) -> Tree:
    """Return a copy of the tree with one `a.b=c` applied.

    Another `kind`, `mode`, `preset` or `format` drops the section's other settings; held_out_path
    drops a held_out that is not `typed` too. Raises UsageError for an override of another form.
    """
    path, sign, text = override.partition("=")
    keys = path.split(".")
    if not sign or not all(keys):
        raise UsageError(f"{override!r}: an override reads a.b=value, e.g. optim.lr=1e-4")
    tree = dict(tree)
    node = tree
    for depth, key in enumerate(keys[:-1]):
        child = node.get(key)
        if child in (None, "off"):  # as a stored config or a recipe writes what is not there
            child = {}
        if isinstance(child, str) and keys[: depth + 1] == QUANT:
            child = {"format": child}
        if not isinstance(child, dict):
            raise UsageError(
                f"{override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section"
            )
        node[key] = dict(child)
        node = node[key]
    value = parse_value(text)
    if keys[-1] in VARIANT_KEYS and node.get(keys[-1], value) != value:
        node.clear()
    if keys[-1] == "held_out_path" and path.removesuffix("_path") not in typed:
        node.pop("held_out", None)
    node[keys[-1]] = value
    return tree


def parse_value(text: str) -> Any:
    """Return the TOML value, or the text itself if it is none."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except TOML_ERRORS:
        return text
