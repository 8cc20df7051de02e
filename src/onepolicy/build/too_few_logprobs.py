"""The message about an engine that returns fewer log-probabilities than a correction needs."""

from __future__ import annotations

from onepolicy.config import RunConfig


def describe_too_few(config: RunConfig, returned: int, needed: int) -> str:
    """Return the setting, why it cannot be, and a fix."""
    correction = config.correction
    most = f"but this engine returns those of at most {returned}"
    if correction.centering == "support" and returned:
        return (
            f"correction.centering: support needs the log-probabilities of all {needed} tokens, "
            f"{most}; use head"
        )
    fix = "choose one without centering"
    if returned:
        fix = f"set it to at most {returned}"
    return (
        f"correction.head_size: {correction.name} needs the log-probabilities of the {needed} "
        f"likeliest tokens, {most}; {fix}"
    )
