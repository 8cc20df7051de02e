"""Declarations of a run's settings about its two sides: number formats, and a gap that is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onepolicy.verdict.rules import CEILINGS, Declared, Format

FORMATS: dict[str, Format] = {"int8": "int8", "fp8": "fp8", "fp8-weight": "fp8", "nf4": "4bit"}
"""rollout.quant.format and train.lora.base -> the format of the verdict."""
FEW_BITS = 5
"""Bits of simulated weights up to which they are as coarse as 4 bits."""


def declared_of(settings: Mapping[str, Any]) -> Declared:
    """Return what the settings of a run, as in its config.json, declare.

    Of all formats the coarsest counts. Settings that are missing declare nothing.
    """
    quant = _section(settings, "rollout", "quant")
    lora = _section(settings, "train", "lora")
    found: list[Format] = ["bfloat16"]
    named = (quant.get("format"), lora.get("base"))
    found += [FORMATS[name] for name in named if name in FORMATS]
    if quant.get("format") == "simulated":
        found.append("int8")
        if quant.get("bits", 4) <= FEW_BITS:
            found.append("4bit")
    coarsest = max(found, key=lambda name: CEILINGS[name])
    return Declared(coarsest, forced=bool(_section(settings, "rollout", "pressure")))


def _section(settings: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        settings = settings.get(name) or {}
        if not isinstance(settings, Mapping):
            return {}
    return settings
