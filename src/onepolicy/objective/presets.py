"""Objectives by name: their loss, source and settings. Loads no torch."""

from __future__ import annotations

from onepolicy.config.objective import ObjectiveConfig
from onepolicy.config.presets import objective_presets
from onepolicy.config.spelling import did_you_mean
from onepolicy.errors import UsageError


def describe_presets(name: str | None = None) -> str:
    """Return the preset's loss, source and effective settings.

    Without a name: all presets, one a line. Raises UsageError for an unknown name.
    """
    rows = objective_presets()
    if name is None:
        return "\n".join(f"{row:22}{rows[row]['loss']}" for row in rows)
    if name not in rows:
        raise UsageError(
            f"objective: none is called {name!r}; there are {', '.join(rows)}"
            f"{did_you_mean(name, rows)}"
        )
    settings = ObjectiveConfig(preset=name).model_dump_json(indent=2)
    return f"{name}\n{rows[name]['loss']}\n{rows[name]['source']}\n{settings}"


def markdown_list() -> str:
    """Return the presets of docs/objectives.md, one a line."""
    rows = objective_presets().items()
    return "\n".join(f"- `{name}`: {row['loss']}. *{row['source']}*" for name, row in rows)
