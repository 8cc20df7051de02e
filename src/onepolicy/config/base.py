"""The base class of config sections, bounds of numbers, and errors for the command line."""

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

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


def printable(text: str, keep: str = "") -> str:
    """Return the text with control and invisible characters escaped.

    keep: characters that stay as they are.
    """
    characters = []
    for character in text:
        if character in keep or _is_visible(character):
            characters.append(character)
        else:
            characters.append(ascii(character)[1:-1])
    return "".join(characters)


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # a space


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 100, 100


def short_repr(value: Any) -> str:
    """Return at most 200 characters that show the value, however large or deep it is."""
    return _SHORT.repr(value)[:200]


class _PrintableError(Exception):
    """An error whose message may quote untrusted text. Only its line breaks reach a terminal."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), keep="\n"))


class UsageError(_PrintableError, ValueError):
    """Bad input. The message names the path or field, the value and the fix. Exit status 2."""


class ServiceUnavailable(UsageError):
    """A server or cluster that a run needs at its start does not answer. --restarts tries again."""

    EXIT: ClassVar[int] = 75
    """Exit status of the command line: EX_TEMPFAIL of sysexits.h."""


class TrainingError(_PrintableError, RuntimeError):
    """A run that began well cannot go on. The message says why and what to do. Exit status 1."""


class Frozen(BaseModel):
    """A section of settings: immutable, without unknown fields, every field described."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    """Old dotted path -> new dotted path (renamed.py)."""

    @classmethod
    def default_of(cls, name: str) -> Any:
        """Return the default value of a field."""
        return cls.model_fields[name].default
