"""The folder of a gateway's Unix socket. The next one removes that of a killed process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import weakref
from pathlib import Path

PREFIX, SOCKET = "onepolicy-gateway-", "gateway.sock"


class SocketFolder:
    """A folder for one socket, in the folder of temporary files, closed to other users.

    A socket in the abstract namespace would go with its process, but a sandbox with a network of
    its own cannot reach it. So the folder is locked as long as its process lives, and one without
    a lock is left over.
    """

    def __init__(self) -> None:
        """Remove leftovers, and make the folder."""
        home = Path(tempfile.gettempdir())
        for left in home.glob(f"{PREFIX}*"):
            _remove_left(left)
        hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))  # until it is locked
        lock = _lock(hidden)
        assert lock is not None
        self.path = hidden.rename(home / hidden.name[1:])
        self.socket = self.path / SOCKET
        self.remove = weakref.finalize(self, _remove_of, os.getpid(), self.path, lock)


def _lock(folder: Path) -> int | None:
    """Return the open folder with a lock on it, None if another process has that."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        return None
    return opened


def _remove_left(folder: Path) -> None:
    """Remove a folder of this user's that no process has locked."""
    with contextlib.suppress(OSError):  # another one removes it, or it is another user's
        if folder.stat(follow_symlinks=False).st_uid != os.getuid():
            return
        lock = _lock(folder)
        if lock is not None:
            _remove(folder, lock)


def _remove_of(maker: int, folder: Path, lock: int) -> None:
    """Remove the folder in the process that made it: a forked one ends with the same finalizers."""
    if os.getpid() == maker:
        _remove(folder, lock)


def _remove(folder: Path, lock: int) -> None:
    """Remove the socket and the folder, and nothing else that may be in it."""
    with contextlib.suppress(OSError):
        (folder / SOCKET).unlink(missing_ok=True)
        folder.rmdir()
    os.close(lock)
