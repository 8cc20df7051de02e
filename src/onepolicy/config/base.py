"""The frozen base every config section is built on, and the error types the command line prints."""

from __future__ import annotations

import reprlib
import unicodedata
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=0, lt=2**63)]

# Far above any use: what lies beyond is a slip of the pen, and ends in a loop or an allocation without an end.
MOST = 2**31 - 1
LARGEST = 1e12
Count = Annotated[int, Field(gt=0, le=MOST)]
Few = Annotated[int, Field(gt=0, le=2**16)]
"""Of what is there at once: sequences, processes, threads, layers."""
Many = Annotated[int, Field(gt=0, le=2**20)]
"""Of what a step or an evaluation goes through."""
Tokens = Annotated[int, Field(gt=0, le=2**24)]
"""Of one sequence or forward."""
Rate = Annotated[float, Field(gt=0, le=1e3)]
"""A learning rate: beyond, AdamW's first step leaves nothing of any weights."""
Amount = Annotated[float, Field(gt=0, le=LARGEST)]
"""Seconds, scales and the like."""


def printable(text: str, keep: str = "") -> str:
    """Return the text with every character that a terminal acts on, or shows as nothing, as its escape.

    keep: characters that stay as they are.
    """
    return "".join(each if each in keep or _is_shown(each) else ascii(each)[1:-1] for each in text)


def _is_shown(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # a space


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 100, 100


def shown(value: Any) -> str:
    """Return a short text of what came, however large or deep it is."""
    return _SHORT.repr(value)[:200]


class _Told(Exception):
    """An error whose message may quote a stranger, and is printed: only its line breaks reach a terminal."""

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message), keep="\n"))


class UsageError(_Told, ValueError):
    """Bad input. The message names the path or field, the value and the mend; the command line exits with 2."""


class NotThere(UsageError):
    """A server or a cluster that a run needs at its start does not answer; it may later, so --restarts tries again."""

    EXIT: ClassVar[int] = 75
    """Of the command line: the EX_TEMPFAIL of sysexits.h."""


class TrainingError(_Told, RuntimeError):
    """A run that began well cannot go on. The message says why and what to do; the command line exits with 1."""


class Frozen(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
    )
    renamed: ClassVar[Mapping[str, str]] = {}
    """Old dotted path -> new dotted path (renamed.py)."""
