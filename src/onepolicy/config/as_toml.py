"""Settings as TOML that a recipe may hold: every setting with what it is, the sections in order."""

from __future__ import annotations

import textwrap
from typing import Any

import tomlkit
from pydantic import BaseModel

from onepolicy.config.load import VARIANT

COLUMNS = 100


def as_toml(settings: BaseModel) -> str:
    """Return the effective settings as TOML. What is unset is a comment: TOML has no null."""
    document = tomlkit.document()
    _fill(document, settings, settings.model_dump())
    return tomlkit.dumps(document).strip()


def _fill(table: Any, settings: BaseModel, values: dict[str, Any]) -> None:
    """Add the settings that `values` holds, those that are no sections first, as TOML wants it."""
    fields = type(settings).model_fields
    sections = {name for name in values if isinstance(getattr(settings, name), BaseModel)}
    plain = [each for each in fields if each in values and each not in sections]
    for name in sorted(plain, key=lambda each: each not in VARIANT):
        for line in textwrap.wrap(
            fields[name].description or "", COLUMNS - 2, break_on_hyphens=False
        ):
            table.add(tomlkit.comment(line))
        if values[name] is None:
            table.add(tomlkit.comment(f"{name} is unset"))
        else:
            table.add(name, _inline(values[name]))
    for name in [each for each in fields if each in sections]:
        section = tomlkit.table()
        _fill(section, getattr(settings, name), values[name])
        table.add(name, section)


def _inline(value: Any) -> Any:
    """A value on one line; entries of lists that are sections as inline tables."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({name: _inline(each) for name, each in value.items() if each is not None})
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(_inline(each) for each in value)
        return array
    return value
