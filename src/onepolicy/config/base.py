"""The base class of config sections, and bounds of numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, model_validator

from onepolicy.config.rules import Check, Rule, broken

Seed = Annotated[int, Field(ge=0, lt=2**63)]

# Far above any use. A larger number is a slip of the pen and would end in an endless loop or
# allocation.
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e12
Count = Annotated[int, Field(gt=0, le=LARGEST_INT)]
SmallCount = Annotated[int, Field(gt=0, le=2**16)]
"""Number of things that exist at once: sequences, processes, threads, layers."""
LargeCount = Annotated[int, Field(gt=0, le=2**20)]
"""Number of things that a step or an evaluation goes through."""
Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""Tokens of one sequence or forward."""
LearningRate = Annotated[float, Field(gt=0, le=1e3)]
"""Above 1000, AdamW's first step leaves nothing of any weights."""
PositiveFloat = Annotated[float, Field(gt=0, le=LARGEST_FLOAT)]
"""Seconds, scales and the like."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The broken rules of all sections, collected as the context of a validation."""

    checks: list[Check] = field(default_factory=list)


VARIANT_KEYS = ("kind", "mode", "preset", "format")
"""Settings that say which variant of a section the others belong to."""


class Frozen(BaseModel):
    """A section of settings: immutable, without unknown fields, every field described."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
    rules: ClassVar[tuple[Rule[Any], ...]] = ()
    """Which of its settings contradict each other, and which change nothing beside others."""

    @classmethod
    def default_of(cls, name: str) -> Any:
        """Return the default value of a field."""
        return cls.model_fields[name].default

    def usual(self, name: str) -> Any:
        """Return the value that a setting has if nobody sets it."""
        return self.default_of(name)

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        """Refuse settings that break rules, all of them at once.

        A caller who wants those of all sections together gives a `Broken` as context.
        """
        failed = broken(self.rules, self)
        if isinstance(info.context, Broken):
            info.context.checks.extend(failed)
        elif failed:
            raise ValueError("\n".join(map(str, failed)))
        return self
