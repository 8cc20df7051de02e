"""Paths that a command writes to: checked before anything is loaded, and claimed by a run."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onepolicy.errors import UsageError

CONFIG = "config.json"
"""In a run's folder: its effective settings."""
BEGUN = ".step"
"""In a run's folder: the step that its process began last."""
NAME_BYTES = 255
"""Longest name on every usual file system of Linux."""
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""Errors of flock on a file system without locks."""


def check_output_path(setting: str, path: Path) -> None:
    """Raise UsageError if nothing can be made at `path`. Its folders need not exist yet."""
    try:
        problem = _why_not_makable(Path(os.path.abspath(path)))
    except UnicodeEncodeError:
        problem = "its name has characters that this system's names of files lack"
    except OSError as error:
        problem = error.strerror
    if problem is not None:
        raise UsageError(f"{setting}: {path} cannot be made: {problem}; choose another place")


def _why_not_makable(path: Path) -> str | None:
    if any(len(os.fsencode(name)) > NAME_BYTES for name in path.parts):
        return f"it has a name longer than {NAME_BYTES} bytes"
    if path.is_symlink() and not path.exists():
        return "it is a symbolic link to nothing"
    above = next(each for each in path.parents if os.path.lexists(each))
    if not above.is_dir():
        return f"{above} is a file, not a folder"
    problem = _why_not_writable(above)
    return problem and f"{above}: {problem}"


def _why_not_writable(folder: Path) -> str | None:
    """Return the reason why this process may not write in an existing folder, or None."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "the file system is read-only"
    return "permission denied"


def check_output_folder(setting: str, path: Path) -> None:
    """Raise UsageError unless files can be put into the folder `path`, which may exist."""
    check_output_path(setting, path)
    if not os.path.lexists(path):
        return
    problem: str | None = "it is a file, not a folder"
    if path.is_dir():
        problem = _why_not_writable(path)
    if problem is not None:
        raise UsageError(f"{setting}: {path} cannot be written to: {problem}; choose another")


def check_new_run_folder(out: Path) -> None:
    """Raise UsageError unless a run folder can be made at `out`, which may be an empty folder."""
    check_output_folder("out", out)
    try:
        empty = not os.path.lexists(out) or not any(out.iterdir())
    except OSError as error:
        raise UsageError(f"out: {out} cannot be read: {error.strerror}; choose another") from None
    if not empty:
        raise UsageError(
            f"out: {out} is not empty; choose another folder, or continue it with `onepolicy train "
            f"--resume {out}`"
        )


@contextmanager
def claim_run_folder(out: Path) -> Iterator[Path]:
    """Yield `out` if it is free, else the first of out-2, out-3, ... that is.

    A free folder is empty or new, and no other process claims it. The claim is a lock on the
    folder, which ends with the process. The run is renamed over the folder. One that was made for
    the claim is removed if it stays empty.
    """
    if not out.name:  # "." has no siblings by its name
        out = Path(os.path.abspath(out))
    number, free, claim = 1, out, _claim(out)
    while claim is None:
        number += 1
        free = out.with_name(f"{out.name}-{number}")
        claim = _claim(free)
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
    made = not os.path.lexists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (FileExistsError, FileNotFoundError, NotADirectoryError):
        return None  # a file, or another start has removed or replaced the folder meanwhile
    except OSError as error:
        if not made:
            return None  # this process may not look into it
        raise UsageError(
            f"out: cannot make {folder}: {error.strerror}; choose another folder"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not any(folder.iterdir()) and os.path.samestat(os.fstat(lock), folder.stat()):
            return lock, made
    except OSError as error:
        if error.errno in NO_LOCKS and not os.listdir(lock):
            return lock, made  # a file system without locks for folders
    os.close(lock)
    return None


def check_resumable(run: Path) -> None:
    """Raise UsageError unless `run` is a run folder that this process may write in."""
    try:
        if not (run / CONFIG).is_file():
            raise UsageError(f"{run}: not a run folder (no {CONFIG}); give the folder of a run")
        problem = _why_not_writable(run)
    except OSError as error:
        raise UsageError(
            f"{run}: cannot be read: {error.strerror}; give the folder of a run"
        ) from None
    if problem is not None:
        raise not_writable_error(run, problem)


def not_writable_error(run: Path, problem: str | None) -> UsageError:
    """Return the error for a run folder that exists but takes no files."""
    return UsageError(
        f"{run}: cannot be written to: {problem}; make it writable, or copy it elsewhere and "
        "resume the copy"
    )
