"""The settings that a trainer hands on to its adapter."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.base import Frozen
from onepolicy.config.errors import describe_errors
from onepolicy.errors import short_repr


class Settings(Frozen):
    """A section of the trainer's own settings, which the trainer itself does not read."""

    correction: CorrectionConfig | None = None
    """A preset's name, or a table as in a recipe. Unset: measure only."""
    dump: Path | None = None
    """Folder for one Parquet file per step, for `onepolicy audit`."""

    @field_validator("correction", mode="before")
    @classmethod
    def _preset_by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"preset": value}
        return value

    @property
    def fixed(self) -> CorrectionConfig | None:
        """The correction, if its weights can be computed once per step."""
        if self.correction is None or self.correction.live:
            return None
        return self.correction

    @property
    def live(self) -> CorrectionConfig | None:
        """The correction, if the loss must evaluate it for the policy that is being trained."""
        if self.correction is None or not self.correction.live:
            return None
        return self.correction


def read_settings(section: Any, name: str) -> Settings:
    """Return the settings of a section, resolved to plain Python.

    Args:
        section: a table, JSON text of one, or None for none.
        name: of the section, for errors.

    Raises UsageError with field, value and fix.
    """
    if isinstance(section, str):
        with contextlib.suppress(ValueError):  # said below
            section = json.loads(section)
    if section is not None and not isinstance(section, Mapping):
        raise UsageError(
            f'{name}: {short_repr(section)} is no table; give e.g. {{"correction": "tis"}}'
        )
    try:
        return Settings.model_validate(dict(section or {}))
    except ValidationError as error:
        raise UsageError(f"{name}: {describe_errors(error, Settings)}") from None


def dump_folder(dump: Any, caller: str) -> Path | None:
    """Return the folder that the argument `dump` of an `attach` names; None for none.

    Raises UsageError for anything else.
    """
    if dump is None or isinstance(dump, Path):
        return dump
    if not isinstance(dump, str):
        raise UsageError(f"{caller}: dump is {dump!r}; give a folder's path, or None for no dump")
    return Path(dump)
