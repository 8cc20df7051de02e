"""A step's weights as safetensors files, for engines in another process to read."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from onepolicy.config import TrainingError, UsageError
from onepolicy.sync.checksum import Sums

SHARD_BYTES = 2**30
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Written:
    """A step's weights in a folder of WeightFiles. sums: of the learner's tensors on their way there, with this key."""

    folder: str
    version: int
    key: bytes
    sums: Sums


class WeightFiles:
    """The newest version only, in a folder of this process, which goes when the process ends.

    What a killed process left behind is removed by the next one that uses the same `folder`.
    """

    def __init__(self, folder: str | None, setting: str = "rollout.engine.sync_dir") -> None:
        """folder: one that the engine's process sees too; None: the system's temporary one. setting: its name."""
        self._setting = setting
        base = (
            Path(folder)
            if folder
            else Path(tempfile.gettempdir()) / f"onepolicy-sync-{os.getuid()}"
        )
        try:
            base.mkdir(mode=0o777 if folder else 0o700, parents=True, exist_ok=True)
            if not folder:
                _refuse_foreign(base, setting)
            _remove_orphans(base)
            self.folder = Path(
                tempfile.mkdtemp(prefix=f"{socket.gethostname()}.{os.getpid()}.", dir=base)
            )
        except OSError as error:
            raise UsageError(f"{setting}: {base} cannot be written to: {error}") from error
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._newest: Path | None = None

    def write(
        self, weights: Iterable[tuple[str, Tensor]], version: int, *, keep_older: bool = False
    ) -> Path:
        """A folder with these tensors in files of about SHARD_BYTES, in transformers' layout. Complete or absent.

        The weights are never in memory a second time, only a file's worth of them. The version before is removed.
        keep_older: by `remove_older`, once nobody reads it.
        """
        done, unfinished = self.folder / f"version_{version}", self.folder / "unfinished"
        try:
            for old in (done, unfinished):
                shutil.rmtree(old, ignore_errors=True)
            unfinished.mkdir()
            index: dict[str, str] = {}
            for number, shard in enumerate(_shards(weights), start=1):
                name = f"model-{number:05d}.safetensors"
                save_file(shard, unfinished / name, metadata={"format": "pt"})
                index |= dict.fromkeys(shard, name)
            (unfinished / INDEX).write_text(
                json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
            )
            unfinished.rename(done)
        except (OSError, SafetensorError) as error:
            raise TrainingError(
                f"{self._setting}: {self.folder} cannot hold the weights of version {version}: {error}; set "
                f"{self._setting} to a folder with room for them twice"
            ) from error
        self._newest = done
        if not keep_older:
            self.remove_older()
        return done

    def remove_older(self) -> None:
        """All versions but the one that was written last."""
        for path in self.folder.glob("version_*"):
            if path != self._newest:
                shutil.rmtree(path, ignore_errors=True)


def _shards(weights: Iterable[tuple[str, Tensor]]) -> Iterable[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        shard[name] = (
            tensor.detach().to("cpu", copy=True).contiguous()
        )  # views of one storage cannot be saved together
        size += shard[name].nbytes
        if size >= SHARD_BYTES:
            yield shard
            shard, size = {}, 0
    if shard:
        yield shard


def _refuse_foreign(base: Path, setting: str) -> None:
    """UsageError for a folder that somebody else put at this name, where everybody may put one."""
    about = base.lstat()
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
        raise UsageError(
            f"{setting}: {base} belongs to somebody else, or others may write to it, and could give the engine other "
            f"weights; remove it, or set {setting} to a folder of yours"
        )


def _remove_orphans(base: Path) -> None:
    """Folders of this machine's processes that are no more."""
    for path in base.glob(f"{socket.gethostname()}.*.*"):
        pid = path.name.split(".")[-2]
        if pid.isdecimal() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_weights(folder: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a folder that `WeightFiles` wrote, one at a time."""
    index: dict[str, str] = json.loads((Path(folder) / INDEX).read_text(encoding="utf-8"))[
        "weight_map"
    ]
    for name in sorted(set(index.values())):
        if Path(name).name != name:
            raise TrainingError(f"{folder}/{INDEX}: {name!r} is not a file of this folder")
        with safe_open(Path(folder) / name, framework="pt") as shard:
            for tensor in shard.keys():  # noqa: SIM118 - it is no dict
                yield tensor, shard.get_tensor(tensor)
