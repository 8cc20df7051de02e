"""The settings of `onepolicy measure` and `onepolicy engine check`, which do not train."""

from __future__ import annotations

from typing import Any

from onepolicy.config import RolloutReplay, RunConfig, UsageError, resolve
from onepolicy.config.measure import measure_settings
from onepolicy.config.model_path import resolve_model
from onepolicy.models.load import read_config
from onepolicy.replay.checks import is_moe


def measure_config(tree: dict[str, Any], overrides: list[str], path: str | None) -> RunConfig:
    """Return the settings of `measure_settings`, without replay if the model is dense."""
    tree, config = measure_settings(tree, overrides, path)
    if config.rollout.pressure is not None:
        from onepolicy.rollout.hf.pressure import check_pressure

        check_pressure(config.rollout.pressure, read_config(resolve_model(config.model)))
    if not is_moe(read_config(resolve_model(config.model))):
        return resolve(tree | {"replay": {"mode": "off"}}, overrides)
    if not isinstance(config.replay, RolloutReplay):
        raise UsageError(
            f"replay.mode: {config.replay.mode}, but measure scores with the rollout's routes and "
            "without; leave it out"
        )
    return config
