"""Atomic writes: no reader sees half of a file, not even after the writer was killed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` once the block has written it.

    `path` keeps its old content if the block raises or the process is killed. The folder must
    exist.
    """
    temporary = path.with_name(f".{path.name}.writing")
    yield temporary
    os.replace(temporary, path)


def write_text_atomically(path: Path, text: str) -> Path:
    """Write `text` as UTF-8, and lone surrogates, which UTF-8 cannot hold, as escapes."""
    with replace_atomically(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path
