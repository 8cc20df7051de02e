"""stdout and stderr whose errors never end a command.

Such errors are an encoding that lacks a character, a closed stream, a pipe without a reader and a
full disk. A command prints after its work is done, so a failed print must not undo the work.
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO

SUBSTITUTES = {
    "\u2192": "->",
    "\u00d7": "x",
    "\u2013": "-",
    "\u2014": "-",
    "\u2212": "-",
    "\u2026": "...",
    "\u2022": "*",
}
SUPERSCRIPTS = str.maketrans(
    "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-0123456789"
)
BRAILLE = range(0x2800, 0x2900)  # characters of the spinners
HANDLER = "onepolicy.plain"


@contextmanager
def tolerant_streams() -> Iterator[Streams]:
    """Replace stdout and stderr by streams that accept every text, and restore them afterwards."""
    codecs.register_error(HANDLER, _substitute)
    _occupy_standard_descriptors()
    before = sys.stdout, sys.stderr
    streams = Streams()
    sys.stdout, sys.stderr = streams.wrap(sys.stdout, 1), streams.wrap(sys.stderr, 2)
    try:
        yield streams
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # the stream is closed
                stream.flush()
        sys.stdout, sys.stderr = before


class Streams:
    """The standard streams of a command, and the first error of each."""

    def __init__(self) -> None:
        self.errors: dict[int, OSError] = {}

    def wrap(self, stream: TextIO | None, number: int) -> TextIO:
        """Return a stream that drops everything after its first error.

        A stream that a test put in place of stdout or stderr keeps its errors.
        """
        if stream is None:  # closed before the start
            return open(os.devnull, "w", encoding="utf-8")
        if not isinstance(stream, TextIOWrapper):
            return stream
        if stream not in (sys.__stdout__, sys.__stderr__):
            stream.reconfigure(errors=HANDLER)
            return stream
        with suppress(OSError):
            stream.flush()
        return TextIOWrapper(
            BufferedWriter(_ErrorTolerantFile(number, self.errors)),
            encoding=stream.encoding,
            errors=HANDLER,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )

    def stdout_error(self) -> str | None:
        """Return the error of stdout, if any. A reader that stopped reading (`| head`) is none."""
        with suppress(ValueError):
            sys.stdout.flush()
        error = self.errors.get(1)
        if error is None or error.errno == errno.EPIPE:
            return None
        return error.strerror


class _ErrorTolerantFile(FileIO):
    """A standard stream that drops everything after its first error."""

    def __init__(self, number: int, errors: dict[int, OSError]) -> None:
        super().__init__(number, "w", closefd=False)
        self._errors = errors

    def write(self, data: object, /) -> int:
        if self.fileno() in self._errors:
            return len(memoryview(data))  # type: ignore[arg-type]
        try:
            return super().write(data)  # type: ignore[arg-type]
        except BlockingIOError:
            raise
        except OSError as error:
            self._errors[self.fileno()] = error
            return len(memoryview(data))  # type: ignore[arg-type]


def _occupy_standard_descriptors() -> None:
    """Open the null device for every closed standard stream.

    Otherwise the next file that is opened would get its number, and everything that is printed.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _substitute(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for the characters that an encoding lacks.

    It is a look-alike, or else the escape that JSON and TOML read.
    """
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    text = re.sub(
        "[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+",
        lambda match: "^" + match[0].translate(SUPERSCRIPTS),
        text,
    )
    return "".join(map(_ascii_form, text)), error.end


def _ascii_form(character: str) -> str:
    if character.isascii():
        return character
    if character in SUBSTITUTES:
        return SUBSTITUTES[character]
    if ord(character) in BRAILLE:
        return "*"
    units = character.encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs)
