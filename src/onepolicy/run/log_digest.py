"""Digests of a run's log, by which a resume sees that rows before its checkpoint are damaged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onepolicy.report.jsonl import METRICS, SAMPLES

LOG_FILES: dict[str, int | None] = {METRICS: None, SAMPLES: None}


def digest_log(folder: Path, lengths: Mapping[str, int | None] = LOG_FILES) -> dict[str, Any]:
    """Return the length and SHA-256 of each file's first `length` bytes (None: of all)."""
    found = {}
    for name, length in lengths.items():
        path, data = folder / name, b""
        if path.exists():
            data = path.read_bytes()[:length]
        found[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return found


def find_damage(folder: Path, saved: Mapping[str, Any]) -> list[Path]:
    """Return the files that do not begin with the bytes that an earlier `digest_log` saw.

    Rows may have been added since. A checkpoint of an older version has no digests.
    """
    lengths = {name: saved[name]["bytes"] for name in LOG_FILES if name in saved}
    now = digest_log(folder, lengths)
    return [folder / name for name in lengths if now[name] != saved[name]]
