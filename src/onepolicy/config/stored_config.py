"""The effective settings that a run folder holds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from onepolicy.config.output_paths import CONFIG
from onepolicy.config.run import RunConfig
from onepolicy.errors import UsageError

TRUST = "model.trust_remote_code"
SECRET = re.compile(r"(?i)((api|access|private)_?key|secret|password|passwd|token|credentials?)$")
"""Names of texts that are secrets, in a task's `env` and `params`."""


def read_stored_config(run: Path) -> RunConfig:
    """Return the settings of a run folder.

    Raises UsageError if there is no config.json, or if it is damaged.
    """
    path = run / CONFIG
    if not path.is_file():
        raise UsageError(f"{run}: not a run folder (no {CONFIG}); give the folder of a run")
    try:
        return RunConfig.model_validate_json(path.read_bytes())
    except ValidationError as error:
        from onepolicy.config.errors import describe_errors

        problem = describe_errors(error)
        raise UsageError(f"{path}: not the settings of a run: {problem}") from None


def check_trust(config: RunConfig, run: Path, overrides: Sequence[str], command: str) -> None:
    """Raise UsageError if the model's own code would run only because a run folder says so.

    config: the run's settings with these overrides. command: that loads its model, for the error.
    """
    typed = any(override.partition("=")[0] == TRUST for override in overrides)
    if config.model.trust_remote_code and not typed:
        raise UsageError(
            f"{run}: its {CONFIG} has {TRUST} = true, so `onepolicy {command}` would run Python "
            f"code that the model brings along; read that code first, then add {TRUST}=true to "
            f"the command, or {TRUST}=false to load the model without it"
        )


def settings_to_repeat(config: RunConfig) -> list[str]:
    """Return the overrides without which `check_trust` refuses this run's folder."""
    if config.model.trust_remote_code:
        return [f"{TRUST}=true"]
    return []


def without_secrets(tree: Any) -> Any:
    """Return settings without texts under names like `api_key`, which tasks may hold."""
    if isinstance(tree, dict):
        hidden = {name for name, value in tree.items() if isinstance(value, str)}
        hidden = {name for name in hidden if SECRET.search(str(name))}
        return {
            name: "hidden" if name in hidden else without_secrets(v) for name, v in tree.items()
        }
    if isinstance(tree, list):
        return [without_secrets(value) for value in tree]
    return tree
