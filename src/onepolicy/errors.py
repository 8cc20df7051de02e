"""Errors for the command line. This file imports nothing heavy, so that a child may raise them."""

from __future__ import annotations

import reprlib
import unicodedata
from typing import Any, ClassVar

LONGEST_MESSAGE = 20_000  # characters; a stranger's may be as long as a file or a reply


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


def printable_lines(text: str, keep: str = "\n") -> str:
    """Return `printable` text in which no line but the first can pass for one of onepolicy's own.

    keep: characters that stay as they are.
    """
    return printable(text, keep).replace("\nonepolicy:", "\n  onepolicy:")


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # a space


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 100, 100


def short_repr(value: Any) -> str:
    """Return at most 200 characters that show the value, however large or deep it is."""
    return _SHORT.repr(value)[:200]


def describe_argument(value: object) -> str:
    """Return a tensor's dtype and shape, or the type of anything else, for an error message."""
    dtype = str(getattr(value, "dtype", ""))
    if not dtype.startswith("torch.") or getattr(value, "is_nested", False):  # it has no shape
        return type(value).__name__
    shape = getattr(value, "shape", ())
    return f"{dtype.removeprefix('torch.')} {list(shape)}"


class _PrintableError(Exception):
    """An error whose message may quote untrusted text. Only its line breaks reach a terminal.

    The middle of a message that is too long is left out.
    """

    def __init__(self, message: object = "") -> None:
        text = str(message)
        if len(text) > LONGEST_MESSAGE:
            half = LONGEST_MESSAGE // 2
            left_out = f" ... ({len(text) - 2 * half:,} characters left out) ... "
            text = text[:half] + left_out + text[-half:]
        super().__init__(printable_lines(text))


class UsageError(_PrintableError, ValueError):
    """Bad input. The message names the path or field, the value and the fix. Exit status 2."""


class ServiceUnavailable(UsageError):
    """A server or cluster that a run needs at its start does not answer. --restarts tries again."""

    EXIT: ClassVar[int] = 75
    """Exit status of the command line: EX_TEMPFAIL of sysexits.h."""


class TrainingError(_PrintableError, RuntimeError):
    """A run that began well cannot go on. The message says why and what to do. Exit status 1."""


LIBRARY_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""Errors of environments and graders on parameters or responses their authors did not expect."""
