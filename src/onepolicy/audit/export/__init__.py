"""Exporters that write other frameworks' training steps as dumps of our schema.

Each module is a hook for one framework; docs/audit.md says where to call it. A dump is a folder
with one file per step and process, so that a killed run leaves complete files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onepolicy.audit.schema import write_parquet
from onepolicy.files import replace_atomically


def write_step(
    folder: Path | str, step: int, rows: Sequence[Mapping[str, Any]], *, rank: int = 0
) -> Path:
    """Write the rows (schema version 1) of one training step to FOLDER/step_00012_0.parquet.

    The file is complete or absent.
    """
    path = Path(folder) / f"step_{step:05d}_{rank}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_atomically(path) as temporary:
        write_parquet(temporary, rows)
    return path
