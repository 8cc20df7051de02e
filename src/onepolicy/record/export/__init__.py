"""Exporters that write other frameworks' training steps as dumps of our schema.

Each module is a hook for one framework; docs/audit.md says where to call it. A dump is a folder
with one file per step and process, so that a killed run leaves complete files.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onepolicy.files import replace_atomically
from onepolicy.record.schema import write_parquet


def write_step(
    folder: Path | str,
    step: int,
    rows: Sequence[Mapping[str, Any]],
    *,
    rank: int = 0,
    ranks: int | None = None,
    keep_older: bool = False,
    framework: str = "",
    replayed: bool = False,
) -> Path:
    """Write the rows (schema version 1) of one training step to FOLDER/step_00012_0.parquet.

    framework: the trainer, by its name in config/frameworks.toml, for advice in its settings.
    replayed: it scored with the rollout's routes. ranks: how many write; with `keep_older`, a file
    of the step by a further rank is an older one.
    The file is complete or absent. A file of the step that is there is replaced. With `keep_older`
    it stays beside the new one, under a name that `onepolicy audit` does not read, and a warning
    says so: a run that was resumed trains some of its steps again.
    """
    path = step_file(folder, step, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as temporary:
        write_parquet(temporary, rows, framework=framework, replayed=replayed)
        if keep_older:
            _keep_older(path)
    if keep_older and ranks is not None:
        for other in path.parent.glob(f"step_{step:05d}_*.parquet"):
            if int(other.stem.rpartition("_")[2]) >= ranks:
                _keep_older(other)
    return path


def step_file(folder: Path | str, step: int, rank: int = 0) -> Path:
    """Return the path of a step's file in a dump."""
    return Path(folder) / f"step_{step:05d}_{rank}.parquet"


def _keep_older(path: Path) -> None:
    """Rename FILE to FILE.1, or to the first number that is free."""
    names = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    try:
        path.rename(kept)
    except FileNotFoundError:  # there is none, or another rank has renamed it
        return
    logging.getLogger(__name__).warning("%s was written before; the older is %s", path, kept.name)
