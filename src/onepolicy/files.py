"""Atomic writes: no reader sees half of a file or folder, not even after the writer was killed."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from onepolicy.errors import UsageError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def named_write_errors(path: Path) -> Iterator[None]:
    """Raise OSError with the path: an error of a write lacks it, safetensors has its own class."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from error


def refuse_links_out(folder: Path, whose: str) -> None:
    """Raise UsageError for a symbolic link in a folder that leads out of it.

    whose: the folder, as the error calls it. The folder `wandb` is left out: its client links its
    own logs, and starts a new folder for every process.
    """
    for above, folders, files in os.walk(folder):  # which follows no link
        if Path(above) == folder and "wandb" in folders and not (folder / "wandb").is_symlink():
            folders.remove("wandb")
        for path in (Path(above, name) for name in (*folders, *files)):
            if path.is_symlink() and not leads_into(folder, path):
                raise UsageError(
                    f"{path}: a link out of {whose} folder; if you know what it leads to, make a "
                    f"copy without links and use that: cp -rL {shlex.quote(str(folder))} COPY"
                )


def leads_into(folder: Path, link: Path) -> bool:
    """Return whether a link leads into the folder, or to a file of the hub's cache that it is in.

    The cache of the hub has MODEL/snapshots/COMMIT/..., whose files are links into MODEL/blobs.
    """
    inside = folder.resolve()
    allowed = [inside]
    for above in inside.parents:
        if above.name == "snapshots":
            allowed.append(above.parent / "blobs")
    try:
        return any(link.resolve().is_relative_to(each) for each in allowed)
    except (OSError, RuntimeError):  # links in a circle
        return False


def open_lock(path: Path) -> int:
    """Return the descriptor of a file for a lock, which is made if it is not there.

    Raises OSError, also for a symbolic link: another file is neither emptied nor made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def open_for_appending(path: Path) -> int:
    """Return the descriptor of a file to append to. Raises OSError for a symbolic link."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)


@contextmanager
def replace_atomically(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`, and rename it to `path` once the block has written it.

    `path` keeps its old content if the block raises or the process is killed. durable: also if
    power is lost, after which some file systems have the new name and no content. The folder must
    exist. Raises OSError for a device or a pipe, which the file would take the place of.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    temporary = path.with_name(f".{path.name}.writing")
    try:
        with named_write_errors(path):
            temporary.unlink(missing_ok=True)  # a stranger's link there would be followed
            yield temporary
            if durable:
                sync_to_disk(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Make sure that a file, or the names in a folder, survive a loss of power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def write_folder(path: Path, temporary: Path | None = None) -> Iterator[Path]:
    """Yield a new folder, and rename it to `path` once the block has filled it.

    temporary: that folder; None: one beside `path`, where a killed writer's is replaced.
    """
    writing = temporary or path.with_name(f".{path.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    try:
        with named_write_errors(path):
            yield writing
        os.rename(writing, path)
    finally:
        shutil.rmtree(writing, ignore_errors=True)


def write_text_atomically(path: Path, text: str, *, durable: bool = False) -> Path:
    """Write `text` as UTF-8, and lone surrogates, which UTF-8 cannot hold, as escapes."""
    with replace_atomically(path, durable=durable) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    return path
