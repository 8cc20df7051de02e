"""stdout and stderr that never end a command: of any encoding, closed, without a reader, or on a full disk.

What a command found lies in its files or in memory when it prints, so text that cannot be written must not undo it.
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

PLAIN = {
    "\u2192": "->",
    "\u00d7": "x",
    "\u2013": "-",
    "\u2014": "-",
    "\u2212": "-",
    "\u2026": "...",
    "\u2022": "*",
}
POWERS = str.maketrans(
    "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079", "-0123456789"
)  # superscripts
BRAILLE = range(0x2800, 0x2900)  # spinners are drawn with it
HANDLER = "onepolicy.plain"


@contextmanager
def tolerant() -> Iterator[Streams]:
    """Inside, every text can be printed on stdout and stderr. Afterwards both are what they were."""
    codecs.register_error(HANDLER, _plain)
    _occupy_standard_descriptors()
    before = sys.stdout, sys.stderr
    streams = Streams()
    sys.stdout, sys.stderr = streams.wrap(sys.stdout, 1), streams.wrap(sys.stderr, 2)
    try:
        yield streams
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # somebody closed it
                stream.flush()
        sys.stdout, sys.stderr = before


class Streams:
    """The standard streams of a command, and the first error of each."""

    def __init__(self) -> None:
        self.errors: dict[int, OSError] = {}

    def wrap(self, stream: TextIO | None, number: int) -> TextIO:
        """The same stream, tolerant. One that is not the process's own (a test's) keeps its errors."""
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
            BufferedWriter(_Forgiving(number, self.errors)),
            encoding=stream.encoding,
            errors=HANDLER,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )

    def lost(self) -> str | None:
        """Why what was printed did not arrive. None: it did, or its reader wanted no more (`| head`)."""
        with suppress(ValueError):
            sys.stdout.flush()
        error = self.errors.get(1)
        return None if error is None or error.errno == errno.EPIPE else error.strerror


class _Forgiving(FileIO):
    """A standard stream. After its first error everything is dropped."""

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
    """Where one is closed the next file that is opened would take its number, and get what is printed."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _plain(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks, as an ASCII look-alike or else as the escape that JSON and TOML read."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end]
    text = re.sub(
        "[\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+",
        lambda m: "^" + m[0].translate(POWERS),
        text,
    )
    return "".join(map(_escaped, text)), error.end


def _escaped(character: str) -> str:
    if character.isascii():
        return character
    if character in PLAIN:
        return PLAIN[character]
    if ord(character) in BRAILLE:
        return "*"
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(
        f"\\u{high:02x}{low:02x}" for high, low in zip(units[::2], units[1::2], strict=True)
    )
