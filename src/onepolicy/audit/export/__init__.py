"""What other frameworks know of a step -> files of our schema. Each module is a hook for one framework; docs/audit.md
says where to put it. A dump is a folder with one file a step and process, so that a killed run leaves whole files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onepolicy.audit.schema import write_parquet
from onepolicy.files import replace_atomically


def write_step(
    folder: Path | str, step: int, rows: Sequence[Mapping[str, Any]], *, rank: int = 0
) -> Path:
    """FOLDER/step_00012_0.parquet: rows of schema version 1 of one training step. Complete or absent."""
    path = Path(folder) / f"step_{step:05d}_{rank}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as temporary:
        write_parquet(temporary, rows)
    return path
