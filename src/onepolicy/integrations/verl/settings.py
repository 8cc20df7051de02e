"""The settings `trainer.onepolicy.*` of a verl run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepolicy.integrations.core import settings
from onepolicy.integrations.core.settings import Settings

__all__ = ["Settings", "read_settings"]


def read_settings(section: Mapping[str, Any] | None) -> Settings:
    """Return the settings of `trainer.onepolicy`, resolved to plain Python.

    Raises UsageError with field, value and fix.
    """
    return settings.read_settings(section, "trainer.onepolicy")
