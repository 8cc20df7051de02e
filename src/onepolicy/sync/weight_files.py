"""Weights of one version as safetensors files, for engines in other processes to read."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onepolicy.config import TrainingError, UsageError

SHARD_BYTES = 2**30
INDEX = "model.safetensors.index.json"
LOCK = ".lock"


class WeightFiles:
    """A folder of this process that holds the newest version only and is removed at its end.

    Folders that a killed process left behind are removed by the next process that uses the same
    `folder`.
    """

    def __init__(self, folder: str | None, setting: str = "rollout.engine.sync_dir") -> None:
        """Make this process's folder.

        folder: parent folder that the engine's process sees too; None: the system's temporary
        folder. setting: name of the setting, for errors. Raises UsageError if it cannot be written.
        """
        self._setting = setting
        if folder:
            base, mode = Path(folder), 0o777
        else:
            base, mode = Path(tempfile.gettempdir()) / f"onepolicy-sync-{os.getuid()}", 0o700
        try:
            base.mkdir(mode=mode, parents=True, exist_ok=True)
            if not folder:
                _refuse_foreign(base, setting)
            _remove_orphans(base)
            prefix = f".{socket.gethostname()}.{os.getpid()}."
            hidden = Path(tempfile.mkdtemp(prefix=prefix, dir=base))  # until it is locked
            lock = os.open(hidden / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            _try_lock(lock)
            self.folder = hidden.rename(base / hidden.name[1:])
        except OSError as error:
            raise UsageError(f"{setting}: {base} cannot be written to: {error}") from error
        self._remove = weakref.finalize(self, _remove_own, self.folder, lock)

    def write_version(self, named_weights: Iterable[tuple[str, Tensor]], version: int) -> Path:
        """Write the tensors to a folder in files of about SHARD_BYTES, in transformers' layout.

        The folder is complete or absent. Only one file's worth of weights is copied in memory at a
        time. Older versions are then removed. Raises TrainingError if the folder cannot hold the
        weights.
        """
        done, unfinished = self.folder / f"version_{version}", self.folder / "unfinished"
        try:
            for old in (done, unfinished):
                shutil.rmtree(old, ignore_errors=True)
            unfinished.mkdir()
            _write_shards(named_weights, unfinished)
            unfinished.rename(done)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"{self._setting}: {self.folder} cannot hold the weights of version {version}: "
                f"{error}; set {self._setting} to a folder with room for them twice"
            ) from error
        for path in self.folder.glob("version_*"):
            if path != done:
                shutil.rmtree(path, ignore_errors=True)
        return done


def _write_shards(named_weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    index: dict[str, str] = {}
    for number, shard in enumerate(_split_into_shards(named_weights), start=1):
        name = f"model-{number:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    content = json.dumps({"metadata": {}, "weight_map": index})
    (folder / INDEX).write_text(content, encoding="utf-8")


def _split_into_shards(
    named_weights: Iterable[tuple[str, Tensor]],
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named_weights:
        # A copy, because views of one storage cannot be saved together.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += shard[name].nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _refuse_foreign(base: Path, setting: str) -> None:
    """Raise UsageError if another user may write to the folder.

    Every user can make a folder of this name in the system's temporary folder.
    """
    status = base.lstat()
    owned = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not owned or status.st_mode & 0o022:
        raise UsageError(
            f"{setting}: {base} belongs to somebody else, or others may write to it, and could "
            f"give the engine other weights; remove it, or set {setting} to a folder of yours"
        )


def _remove_own(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _remove_orphans(base: Path) -> None:
    """Remove the folders of processes of this host name that have ended.

    Containers of one host name do not see each other's processes, so the lock says it too.
    """
    for path in base.glob(f"{socket.gethostname()}.*.*"):
        pid = path.name.split(".")[-2]
        if pid.isdecimal() and not _is_running(int(pid)) and not _is_used(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_used(folder: Path) -> bool:
    """Return whether a process has locked the folder."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return True
    try:
        return not _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(file: int) -> bool:
    """Lock an open file. Return False if another process has locked it.

    A file system without locks leaves it to the processes that are known.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def num_files(folder: Path) -> int:
    """Return the number of files with weights in a folder that `WeightFiles` wrote, at least 1."""
    return max(1, len(list(folder.glob("*.safetensors"))))


def is_indexed(folder: str) -> bool:
    """Return whether `read_weights` can read a folder: a run's checkpoints have an index too."""
    return (Path(folder) / INDEX).is_file()


def read_weights(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a folder that `WeightFiles` wrote, one at a time.

    Raises TrainingError if the folder's index names a file outside the folder.
    """
    index = json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))
    files: dict[str, str] = index["weight_map"]
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise TrainingError(f"{folder}/{INDEX}: {name!r} is not a file of this folder")
        with safe_open(Path(folder) / name, framework="pt") as shard:
            for tensor in shard.keys():  # noqa: SIM118 - it is no dict
                yield tensor, shard.get_tensor(tensor)
