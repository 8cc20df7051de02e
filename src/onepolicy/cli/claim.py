"""The claim of a free run folder by `onepolicy train`, so that two starts never share one."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onepolicy.config import UsageError
from onepolicy.config.output_paths import check_output_path


@contextmanager
def claim_run_folder(out: Path) -> Iterator[Path]:
    """Yield `out` if it is free, else the first of out-2, out-3, ... that is.

    The folder is empty and no other process claims it. The claim is a lock on the folder, which
    dies with the process. The run may be renamed over the folder, which is removed if it stays
    empty.
    """
    number, free = 1, out
    while True:
        claim = _claim(free)
        if claim is not None:
            break
        number += 1
        free = out.with_name(f"{out.name}-{number}")
    lock, made = claim
    try:
        yield free
    finally:
        if made:
            with suppress(OSError):  # the run has taken its place
                free.rmdir()
        os.close(lock)


def _claim(folder: Path) -> tuple[int, bool] | None:
    """Return the descriptor of the lock, and whether the folder was made for it.

    None: another process uses the folder. Raises UsageError if the folder cannot be made.
    """
    check_output_path("out", folder)
    if _is_taken(folder):
        return None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = _make(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError):
        return None  # another start has removed or replaced it meanwhile
    except OSError as error:
        raise UsageError(
            f"out: cannot make {folder}: {error.strerror}; choose another folder"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _is_taken(folder) and os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock, made
    except FileNotFoundError:
        pass  # as above
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN):
            return lock, made  # a file system without locks for folders
    os.close(lock)
    return None


def _make(folder: Path) -> bool:
    """Make the folder. Return False if it exists."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _is_taken(path: Path) -> bool:
    try:
        return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))
    except OSError:  # this process may not look into it
        return True
