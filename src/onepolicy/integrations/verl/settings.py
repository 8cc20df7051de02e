"""The settings `trainer.onepolicy.*` of a verl run, and which of verl's own they contradict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, field_validator

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.config.base import Frozen
from onepolicy.config.errors import describe_errors

ASYNC_NOTE = "rows of a partial rollout come from several versions of the weights"


class Settings(Frozen):
    """The section `trainer.onepolicy`, which verl itself does not read."""

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
        """The correction, if the driver computes its weights once per step."""
        if self.correction is None or self.correction.live:
            return None
        return self.correction

    @property
    def live(self) -> CorrectionConfig | None:
        """The correction, if the loss must evaluate it for the policy that is being trained."""
        if self.correction is None or not self.correction.live:
            return None
        return self.correction


def read_settings(section: Mapping[str, Any] | None) -> Settings:
    """Return the settings of `trainer.onepolicy`, resolved to plain Python.

    Raises UsageError with field, value and fix.
    """
    try:
        return Settings.model_validate(dict(section or {}))
    except ValidationError as error:
        raise UsageError(f"trainer.onepolicy: {describe_errors(error, Settings)}") from None
