"""The frozen base every config section is built on, and the error types the command line prints."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class UsageError(ValueError):
    """Bad input. The message names the path or field, the value and the mend; the command line exits with 2."""


class NotThere(UsageError):
    """A server or a cluster that a run needs at its start does not answer; it may later, so --restarts tries again."""

    EXIT: ClassVar[int] = 75
    """Of the command line: the EX_TEMPFAIL of sysexits.h."""


class TrainingError(RuntimeError):
    """A run that began well cannot go on. The message says why and what to do; the command line exits with 1."""


class Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )
