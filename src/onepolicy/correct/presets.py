"""Corrections by name, each with the numbers of its source."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from onepolicy.config import TIS, CorrectionConfig, CorrectionOff, UsageError

PRESETS: dict[str, CorrectionConfig] = {
    "off": CorrectionOff(),
    "tis": TIS(cap=2.0),  # Flash-RL / verl's default C
}


def preset(name: str, **override: Any) -> CorrectionConfig:
    """The named correction, with single settings replaced: `preset("tis", cap=3.0)`."""
    if name not in PRESETS:
        raise UsageError(f"preset: no correction is called {name!r}; there are {', '.join(sorted(PRESETS))}")
    base = PRESETS[name]
    try:
        return type(base).model_validate(base.model_dump() | override)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, e['loc']))}={e['input']!r}: {e['msg']}" for e in error.errors()]
        known = ", ".join(type(base).model_fields)
        raise UsageError(f"preset {name!r}: {'; '.join(problems)}; its settings are {known}") from None
