"""stdout and stderr whose errors never end a command.

Such errors are an encoding that lacks a character, a pipe without a reader and a full disk. A
command prints after its work is done, so a failed print must not undo the work.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO


@contextmanager
def tolerant_streams() -> Iterator[None]:
    """Replace stdout and stderr by streams that accept every text, and restore them afterwards."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_tolerant, before)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def stdout_error() -> str | None:
    """Return the error of stdout, if any. A reader that stopped reading (`| head`) is none."""
    sys.stdout.flush()
    file = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    error = getattr(file, "error", None)
    if error is None or error.errno == errno.EPIPE:
        return None
    return str(error.strerror)


def _tolerant(stream: TextIO | None) -> TextIO:
    """Return the stream that a command prints to. One that a test put there stays."""
    if stream is None:  # it was closed before the start
        return open(os.devnull, "w", encoding="utf-8")
    if not isinstance(stream, TextIOWrapper):
        return stream
    if stream not in (sys.__stdout__, sys.__stderr__):
        stream.reconfigure(errors="backslashreplace")
        return stream
    stream.flush()
    return TextIOWrapper(
        BufferedWriter(_TolerantFile(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors="backslashreplace",
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
