"""The effective settings a run folder holds."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from onepolicy.config.base import UsageError
from onepolicy.config.load import describe
from onepolicy.config.run import RunConfig

CONFIG = "config.json"
BEGUN = ".step"  # in the run's folder: the step that its process began last


def read_config(run: Path) -> RunConfig:
    path = run / CONFIG
    if not path.is_file():
        raise UsageError(f"{run}: not a run folder (no {CONFIG})")
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise UsageError(f"{path}: not the settings of a run: {describe(error)}") from None
