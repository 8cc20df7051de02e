"""Paths that a command writes to, checked before anything is loaded."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from onepolicy.errors import UsageError

CONFIG = "config.json"
"""In a run's folder: its effective settings."""
BEGUN = ".step"
"""In a run's folder: the step that its process began last."""
NAME_BYTES = 255
"""Longest name on every usual file system of Linux."""
PATH_BYTES = 4096 - 256
"""Longest path of a run folder. Linux ends paths at 4096 bytes, and the longest name inside a run
takes about 200."""
HINT = "choose another place"


def check_output_path(setting: str, path: Path) -> None:
    """Raise UsageError if nothing can be made at `path`. Its folders need not exist yet."""
    if "\0" in str(path):
        raise UsageError(f"{setting}: {str(path)!r} has a NUL character in it; {HINT}")
    try:
        problem = _problem_of_path(path)
    except UnicodeEncodeError:
        raise UsageError(
            f"{setting}: {str(path)!r} is no name of a file on this system; {HINT}"
        ) from None
    except OSError as error:
        raise UsageError(f"{setting}: {path} cannot be made: {error.strerror}; {HINT}") from None
    if problem is not None:
        raise UsageError(f"{setting}: {path} {problem}")


def _problem_of_path(path: Path) -> str | None:
    """Return the reason why nothing can be made at this path, with a hint, or None."""
    absolute = Path(os.path.abspath(path))
    if any(len(os.fsencode(name)) > NAME_BYTES for name in absolute.parts):
        return f"has a name longer than {NAME_BYTES} bytes; choose a shorter one"
    if len(os.fsencode(absolute)) > PATH_BYTES:
        return f"is longer than {PATH_BYTES} bytes; choose a shorter one"
    if absolute.is_symlink() and not absolute.exists():
        return f"is a symbolic link to nothing; remove it, or {HINT}"
    above = next(each for each in absolute.parents if os.path.lexists(each))
    if not stat.S_ISDIR(os.stat(above).st_mode):
        return f"cannot be made: {above} is a file, not a folder; {HINT}"
    problem = _why_not_writable(above)
    if problem is not None:
        return f"cannot be made in {above}: {problem}; {HINT}"
    return None


def check_output_folder(setting: str, path: Path) -> None:
    """Raise UsageError unless files can be put into the folder `path`, which may exist."""
    check_output_path(setting, path)
    if not os.path.lexists(path):
        return
    if not path.is_dir():
        raise UsageError(f"{setting}: {path} is a file, not a folder; choose another")
    problem = _why_not_writable(path)
    if problem is not None:
        raise UsageError(
            f"{setting}: {path} cannot be written to: {problem}; choose another folder"
        )


def _why_not_writable(folder: Path) -> str | None:
    """Return the reason why this process may not write in an existing folder, or None."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return "the file system is read-only"
    return "permission denied"


def check_new_run_folder(out: Path) -> None:
    """Raise UsageError unless a run folder can be made at `out`, which may be an empty folder."""
    check_output_path("out", out)
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
            f"out: {out} is not empty; choose another folder, or continue it with `onepolicy train "
            f"--resume {out}`"
        )


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
