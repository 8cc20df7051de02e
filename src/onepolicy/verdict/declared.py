"""Declarations about the two sides: number formats, age, and a gap that is made on purpose.

They say how large a sound gap may be. The command line reads the formats and
the actions of a verdict without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from onepolicy.notation import number

Action = Literal["nothing", "replay", "correct", "bug", "unclear"]
Format = Literal["float32", "bfloat16", "float16", "fp8", "int8", "4bit"]
"""The coarsest number format of either side's weights or arithmetic."""
CEILINGS: dict[Format, float] = {
    "float32": 0.03,
    "bfloat16": 0.03,
    "float16": 0.03,
    "fp8": 0.06,
    "int8": 0.06,
    "4bit": 0.3,
}
"""k3 above which a gap is looked into before it is corrected [nats a token].

docs/audit.md has the largest k3 of sound worlds beside them.
"""
CEILING_OF_AGE = 0.1
"""Rise of the ceiling with each declared update of age [nats a token]."""
TOO_FAR = 1.0
"""k3 above which the sides may be unrelated [nats a token].

No correction is recommended then, whatever is declared: two policies, not one.
"""
HARMLESS_KL = 1e-4
"""k3 below which a gap is too small to matter [nats a token].

Rows of sound runs differ threefold there, so parts are not compared. No cause is looked for, and no
ratio of two such gaps is shown.
"""
FORMATS: dict[str, Format] = {"int8": "int8", "fp8": "fp8", "fp8-weight": "fp8", "nf4": "4bit"}
"""rollout.quant.format and train.lora.base -> the format of the verdict."""
FEW_BITS = 5
"""Bits of simulated weights up to which they are as coarse as 4 bits."""


@dataclass(frozen=True, slots=True)
class Declared:
    """Declarations about the two sides, which say how large a sound gap may be."""

    number_format: Format = "bfloat16"
    age: int = 0  # updates by which the oldest tokens are old
    forced: bool = False  # the gap is made on purpose (rollout.pressure)

    @property
    def ceiling(self) -> float:
        """Largest k3 that is corrected before it is looked into [nats a token]."""
        if self.forced:
            return TOO_FAR
        return min(TOO_FAR, CEILINGS[self.number_format] + CEILING_OF_AGE * self.age)

    def text(self) -> str:
        """Return words for the ceiling."""
        sides: str = self.number_format
        if self.age:
            sides += f" and tokens up to {self.age} updates old"
        if self.forced:
            sides = "two policies"
        return f"the {number(self.ceiling)} nats that {sides} may differ by"


UNDECLARED = Declared()
"""The declarations of sides about which nothing is said."""


def declared_of(settings: Mapping[str, Any]) -> Declared:
    """Return what the settings of a run, as in its config.json, declare.

    Of all formats the coarsest counts. Settings that are missing declare nothing.
    """
    quant = _section(settings, "rollout", "quant")
    lora = _section(settings, "train", "lora")
    found: list[Format] = ["bfloat16"]
    named = (quant.get("format"), lora.get("base"))
    found += [FORMATS[name] for name in named if isinstance(name, str) and name in FORMATS]
    if quant.get("format") == "simulated":
        found.append("int8")
        bits = quant.get("bits", 4)
        if not isinstance(bits, int) or bits <= FEW_BITS:
            found.append("4bit")
    coarsest = max(found, key=lambda name: CEILINGS[name])
    return Declared(coarsest, forced=bool(_section(settings, "rollout", "pressure")))


def _section(settings: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    for name in names:
        settings = settings.get(name) or {}
        if not isinstance(settings, Mapping):
            return {}
    return settings
