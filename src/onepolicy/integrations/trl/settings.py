"""The settings of `attach`, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onepolicy.config import CorrectionConfig, UsageError
from onepolicy.integrations.core.payload import FORMS
from onepolicy.replay.sample_checks import OnMismatch

Replay = Literal["r3", "off"]
Scoring = Literal["always", "training-forward"]


@dataclass(frozen=True, slots=True)
class TrlSettings:
    """The settings of `attach`. Raises UsageError for a value that there is not."""

    replay: Replay = "r3"
    correction: CorrectionConfig | None = None
    dump: Path | None = None
    scoring: Scoring = "always"
    native_every: int = 0
    form: str = "vllm"
    check: bool = True
    on_mismatch: OnMismatch = "stop"

    def __post_init__(self) -> None:
        allowed = {
            "replay": ("r3", "off"),
            "scoring": ("always", "training-forward"),
            "form": tuple(FORMS),
            "on_mismatch": ("stop", "drop"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise UsageError(f"attach: {name} is {value!r}; there are {', '.join(values)}")
        if type(self.native_every) is not int or self.native_every < 0:
            raise UsageError(
                f"attach: native_every is {self.native_every!r}; give a number of generations, or "
                "0 for never"
            )
