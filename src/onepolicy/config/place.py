"""Where a command may write: refused before anything is loaded, with the setting or option and the mend."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onepolicy.config.base import UsageError
from onepolicy.config.stored import CONFIG

NAME_BYTES = 255
"""Of one name, on every usual file system of Linux."""
PATH_BYTES = 4096 - 256
"""Of a run folder's path: Linux ends paths at 4096 bytes, and the longest name inside a run takes about 200."""


def check_place(setting: str, path: Path) -> None:
    """UsageError if nothing can be made at `path`, whose folders may not exist yet."""
    mend = "choose another place"
    if "\0" in str(path):
        raise UsageError(f"{setting}: {str(path)!r} has a NUL character in it; {mend}")
    try:
        absolute = Path(os.path.abspath(path))
        if any(len(os.fsencode(name)) > NAME_BYTES for name in absolute.parts):
            raise UsageError(
                f"{setting}: {path} has a name longer than {NAME_BYTES} bytes; choose a shorter one"
            )
        if len(os.fsencode(absolute)) > PATH_BYTES:
            raise UsageError(
                f"{setting}: {path} is longer than {PATH_BYTES} bytes; choose a shorter one"
            )
        if absolute.is_symlink() and not absolute.exists():
            raise UsageError(
                f"{setting}: {path} is a symbolic link to nothing; remove it, or {mend}"
            )
        above = next(each for each in absolute.parents if os.path.lexists(each))
        if not stat.S_ISDIR(os.stat(above).st_mode):
            raise UsageError(
                f"{setting}: {path} cannot be made: {above} is a file, not a folder; {mend}"
            )
        why = unwritable(above)
    except UnicodeEncodeError:
        raise UsageError(
            f"{setting}: {str(path)!r} is no name of a file on this system; {mend}"
        ) from None
    except OSError as error:
        raise UsageError(f"{setting}: {path} cannot be made: {error.strerror}; {mend}") from None
    if why is not None:
        raise UsageError(f"{setting}: {path} cannot be made in {above}: {why}; {mend}")


def check_folder(setting: str, path: Path) -> None:
    """UsageError unless files can be put into the folder `path`, which may exist."""
    check_place(setting, path)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise UsageError(f"{setting}: {path} is a file, not a folder; choose another")
    if (why := unwritable(path)) is not None:
        raise UsageError(f"{setting}: {path} cannot be written to: {why}; choose another folder")


def unwritable(folder: Path) -> str | None:
    """Why this process may not write in a folder that exists."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    read_only = bool(os.statvfs(folder).f_flag & os.ST_RDONLY)
    return "the file system is read-only" if read_only else "permission denied"


def check_new(out: Path) -> None:
    """UsageError unless a run folder can be made at `out`, which may be an empty folder."""
    check_place("out", out)
    try:
        if not os.path.lexists(out):
            return
        if not out.is_dir():
            raise UsageError(f"out: {out} is a file; choose another folder")
        empty = not any(out.iterdir())
    except OSError as error:
        raise UsageError(
            f"out: {out} cannot be read: {error.strerror}; choose another folder"
        ) from None
    if not empty:
        raise UsageError(
            f"out: {out} is not empty; choose another folder, or continue it with `onepolicy train --resume {out}`"
        )


@contextmanager
def claimed(out: Path) -> Iterator[Path]:
    """`out` itself where nothing is, else the first of out-2, out-3, ...: an empty folder that no other process claims.

    The claim is a lock on the folder, which dies with the process; the run may be renamed over it. It is removed
    afterwards if nothing has come of it.
    """
    number, free = 1, out
    while (claim := _claim(free)) is None:
        number += 1
        free = out.with_name(f"{out.name}-{number}")
    lock, made = claim
    try:
        yield free
    finally:
        if made:
            with suppress(OSError):  # the run lies there now
                free.rmdir()
        os.close(lock)


def _claim(folder: Path) -> tuple[int, bool] | None:
    """The descriptor that holds the lock, and whether the folder was made for it. None: somebody else's."""
    check_place("out", folder)
    if _taken(folder):
        return None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = _make(folder)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # another start has removed or replaced it meanwhile
        return None
    except OSError as error:
        raise UsageError(
            f"out: cannot make {folder}: {error.strerror}; choose another folder"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not _taken(folder) and os.path.samestat(os.fstat(lock), os.stat(folder)):
            return lock, made
    except FileNotFoundError:
        pass  # as above
    except OSError as error:
        if error.errno not in (
            errno.EWOULDBLOCK,
            errno.EAGAIN,
        ):  # a file system that has no locks for folders
            return lock, made
    os.close(lock)
    return None


def _make(folder: Path) -> bool:
    """Make the folder. False if it exists."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _taken(path: Path) -> bool:
    try:
        return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))
    except OSError:  # not ours to look into
        return True


def check_resumable(run: Path) -> None:
    """UsageError unless `run` is a run folder that this process may write in."""
    try:
        if not (run / CONFIG).is_file():
            raise UsageError(f"{run}: not a run folder (no {CONFIG})")
        why = unwritable(run)
    except OSError as error:
        raise UsageError(
            f"{run}: cannot be read: {error.strerror}; give the folder of a run"
        ) from None
    if why is not None:
        raise refused(run, why)


def refused(run: Path, why: str | None) -> UsageError:
    """Of a run folder that exists but takes no files."""
    return UsageError(
        f"{run}: cannot be written to: {why}; make it writable, or copy it elsewhere and resume the copy"
    )
