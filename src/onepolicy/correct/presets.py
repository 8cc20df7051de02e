"""Corrections by name. Loads no torch."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from onepolicy.config.correction import CorrectionConfig
from onepolicy.config.errors import describe_errors
from onepolicy.config.presets import ALIASES, correction_presets, describe_unknown
from onepolicy.errors import UsageError


def preset(name: str, **override: Any) -> CorrectionConfig:
    """Return the named correction with single settings replaced.

    For example `preset("tis", weight={"high": 3.0})`. Raises UsageError if no correction has the
    name or a setting is wrong.
    """
    if not isinstance(name, str) or ALIASES.get(name, name) not in correction_presets():
        raise UsageError(f"preset: no correction is called {describe_unknown(name)}")
    try:
        return CorrectionConfig.model_validate({"preset": name, **override})
    except ValidationError as error:
        raise UsageError(f"preset {name!r}: {describe_errors(error, CorrectionConfig)}") from None


def check_config(caller: str, config: object) -> None:
    """Raise UsageError if `config` is not a correction.

    `caller` is the public function that was given it.
    """
    if isinstance(config, CorrectionConfig):
        return
    if isinstance(config, str):
        raise UsageError(
            f"{caller}: config is the text {config!r}, expected a correction; pass "
            f"op.preset({config!r})"
        )
    if config is None:
        raise UsageError(
            f"{caller}: config is None, expected a correction. A correction without a live part "
            "has live_part None (check correction.live); op.preset('recompute') corrects nothing"
        )
    raise UsageError(
        f"{caller}: config is {type(config).__name__}, expected a correction; op.preset(name) "
        "gives one"
    )
