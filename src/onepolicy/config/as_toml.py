"""Settings as TOML that a recipe may hold, every setting with its description."""

from __future__ import annotations

import textwrap
from typing import Any

import tomlkit
from pydantic import BaseModel

from onepolicy.config.base import VARIANT_KEYS
from onepolicy.config.run import PRECISION

COLUMNS = 100


def as_toml(settings: BaseModel) -> str:
    """Return the effective settings as TOML. An unset one is a comment: TOML has no null.

    So is a precision that nobody set: as a setting it would be a GPU's too.
    """
    document = tomlkit.document()
    _fill(document, settings, settings.model_dump())
    return tomlkit.dumps(document).strip()


def _fill(table: Any, settings: BaseModel, values: dict[str, Any]) -> None:
    """Add the settings in `values`, plain ones before sections, as TOML wants it."""
    fields = type(settings).model_fields
    sections = {name for name in values if isinstance(getattr(settings, name), BaseModel)}
    plain = [name for name in fields if name in values and name not in sections]
    for name in sorted(plain, key=lambda each: each not in VARIANT_KEYS):
        description = fields[name].description or ""
        for line in textwrap.wrap(description, COLUMNS - 2, break_on_hyphens=False):
            table.add(tomlkit.comment(line))
        if values[name] is None:
            table.add(tomlkit.comment(f"{name} is unset"))
        elif name in PRECISION.get(type(settings), ()) and name not in settings.model_fields_set:
            table.add(tomlkit.comment(f"{name} = {tomlkit.item(values[name]).as_string()}"))
        else:
            table.add(name, _inline(values[name]))
    for name in fields:
        if name in sections:
            section = tomlkit.table()
            _fill(section, getattr(settings, name), values[name])
            table.add(name, section)


def _inline(value: Any) -> Any:
    """Return a value on one line. Sections inside lists become inline tables."""
    if isinstance(value, dict):
        table = tomlkit.inline_table()
        table.update({name: _inline(each) for name, each in value.items() if each is not None})
        return table
    if isinstance(value, list | tuple):
        array = tomlkit.array()
        array.extend(_inline(each) for each in value)
        return array
    return value
