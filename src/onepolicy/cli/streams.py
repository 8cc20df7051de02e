"""stdout and stderr whose errors never end a command.

Such errors are an encoding that lacks a character, a pipe without a reader and a full disk. A
command prints after its work is done, so a failed print must not undo the work.
"""

from __future__ import annotations

import codecs
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO

HANDLER = "onepolicy.escape"


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Replace stdout and stderr by streams that accept every text, and restore them afterwards."""
    codecs.register_error(HANDLER, _escape)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _tolerant(sys.stdout, 1), _tolerant(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError):  # the stream is closed
                stream.flush()
        sys.stdout, sys.stderr = before


def stdout_error() -> str | None:
    """Return the error of stdout, if any. A reader that stopped reading (`| head`) is none."""
    with suppress(ValueError):
        sys.stdout.flush()
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = getattr(file, "error", None)
    if error is None or error.errno == errno.EPIPE:
        return None
    return str(error.strerror)


def _tolerant(stream: TextIO | None, number: int) -> TextIO:
    """Return the stream that a command prints to. One that a test put there stays."""
    if stream is None:  # closed before the start; the null device takes its place
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, TextIOWrapper):
        return stream
    if stream not in (sys.__stdout__, sys.__stderr__):
        stream.reconfigure(errors=HANDLER)
        return stream
    with suppress(OSError):
        stream.flush()
    return TextIOWrapper(
        BufferedWriter(_TolerantFile(number, "w", closefd=False)),
        encoding=stream.encoding,
        errors=HANDLER,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _TolerantFile(FileIO):
    """A standard stream that drops everything after its first error."""

    error: OSError | None = None

    def write(self, data: object, /) -> int:
        if self.error is None:
            try:
                return super().write(data)  # type: ignore[arg-type]
            except BlockingIOError:
                raise
            except OSError as error:
                self.error = error
        return len(memoryview(data))  # type: ignore[arg-type]


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""Return the characters that an encoding lacks as JSON and TOML read them: \u2192."""
    assert isinstance(error, UnicodeEncodeError)
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs), error.end
