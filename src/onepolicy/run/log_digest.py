"""Digests of a run's log and of its problems, by which a resume sees that they were changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from onepolicy.config import RunConfig
from onepolicy.config.problems import problem_files
from onepolicy.report.jsonl import METRICS, SAMPLES

CHUNK = 2**20
LOG_FILES: dict[str, int | None] = {METRICS: None, SAMPLES: None}


def digest_log(folder: Path, lengths: Mapping[str, int | None] = LOG_FILES) -> dict[str, Any]:
    """Return the length and SHA-256 of each file's first `length` bytes (None: of all)."""
    found = {}
    for name, length in lengths.items():
        path, digest, count = folder / name, hashlib.sha256(), 0
        if path.is_file():
            with path.open("rb") as file:
                left = path.stat().st_size if length is None else length
                while left and (data := file.read(min(left, CHUNK))):
                    digest.update(data)
                    count, left = count + len(data), left - len(data)
        found[name] = {"bytes": count, "sha256": digest.hexdigest()}
    return found


def find_damage(folder: Path, saved: Mapping[str, Any]) -> list[Path]:
    """Return the files that do not begin with the bytes that an earlier `digest_log` saw.

    Rows may have been added since. A checkpoint of an older version has no digests.
    """
    lengths = {name: saved[name]["bytes"] for name in LOG_FILES if name in saved}
    now = digest_log(folder, lengths)
    return [folder / name for name in lengths if now[name] != saved[name]]


def digest_problems(config: RunConfig) -> dict[str, Any]:
    """Return the length and SHA-256 of each file of the task's problems."""
    return digest_log(Path(), dict.fromkeys(problem_files(config.task)))


def find_changed_problems(config: RunConfig, saved: Mapping[str, Any]) -> list[str]:
    """Return the files of problems that are not as an earlier `digest_problems` saw them.

    A run of an older version has no digests. A file that is gone is named as the task is made.
    """
    now = digest_problems(config)
    there = [path for path in now if path in saved and Path(path).is_file()]
    return [path for path in there if now[path] != saved[path]]
