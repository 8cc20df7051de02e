"""Read a run folder: what must be there, what may be there, and what is wrong with it."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from onepolicy.config import UsageError
from onepolicy.config.objective import ROLLOUT_ROUTES
from onepolicy.report.jsonl import read_jsonl

Array = np.ndarray
Tree = dict[str, Any]

POINT = {"step", "value"}
SUMMARY_PARTS = {"eval_best": POINT, "eval_first": POINT, "eval_last": POINT, "parent": {"run", "step"}}
_PROBE_NAME = re.compile(r"step_(\d+)\.safetensors")


@dataclass(frozen=True)
class Probe:
    """Tensors of one probe step (n trainable tokens, T slots, L MoE layers, S sequences, K experts per token).

    `logp_rollout`, `logp_trainer` [n] are always there; with a suffix `_native` the same batch scored without replay.
    """

    path: Path
    step: int
    tensors: dict[str, Array]

    def both(self, name: str) -> tuple[Array | None, Array | None]:
        """(under the scoring that trained, under the scoring without replay); None where not recorded."""
        return self.tensors.get(name), self.tensors.get(f"{name}_native")


@dataclass(frozen=True)
class Run:
    folder: Path
    config: Tree
    info: Tree  # run.json
    summary: Tree
    rows: list[Tree]  # metrics.jsonl, one per step
    samples: list[Tree]
    probe: Probe | None  # the last one

    @property
    def replay(self) -> bool:
        """Whether the scoring that trained replayed the rollout's routes."""
        return self.config.get("replay", {}).get("mode") in ROLLOUT_ROUTES

    def points(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of the rows that have this metric; null is NaN, which a figure shows as a gap."""
        found = [(row["step"], row[name]) for row in self.rows if name in row]
        return [s for s, _ in found], [math.nan if v is None else float(v) for _, v in found]

    def names(self, prefix: str) -> list[str]:
        """Metric names under a prefix, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name.startswith(prefix)))


def load_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such run folder")
    rows = read_jsonl(folder / "metrics.jsonl")
    if not rows:
        raise UsageError(f"{folder / 'metrics.jsonl'}: empty; a report needs at least one finished step")
    for number, row in enumerate(rows, start=1):
        for name, value in row.items():
            if not isinstance(value, int | float | None):
                raise UsageError(f"{folder / 'metrics.jsonl'}:{number}: {name} is {value!r}, not a number or null")
    samples = folder / "samples.jsonl"
    return Run(
        folder=folder,
        config=_read_object(folder / "config.json"),
        info=_read_object(folder / "run.json"),
        summary=_read_summary(folder / "summary.json"),
        rows=rows,
        samples=read_jsonl(samples) if samples.exists() else [],
        probe=_last_probe(folder / "probes"),
    )


def _read_object(path: Path) -> Tree:
    if not path.is_file():
        raise UsageError(f"{path}: missing; is this the folder of a finished run?")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def _read_summary(path: Path) -> Tree:
    """The summary, with every part of it that figures and words look into."""
    summary = _read_object(path)
    if type(summary.get("steps")) is not int:
        raise UsageError(f"{path}: no integer `steps`; delete it and resume the run, which writes it again")
    for name, keys in SUMMARY_PARTS.items():
        part = summary.get(name)
        if part is not None and not (isinstance(part, dict) and keys <= part.keys()):
            raise UsageError(f"{path}: {name} is {part!r}, expected null or an object with {', '.join(sorted(keys))}")
    return summary


def _last_probe(folder: Path) -> Probe | None:
    matches = [match for path in folder.glob("*.safetensors") if (match := _PROBE_NAME.fullmatch(path.name))]
    if not matches:
        return None
    last = max(matches, key=lambda match: int(match[1]))
    return read_probe(folder / last[0], step=int(last[1]))


def read_probe(path: Path, *, step: int) -> Probe:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"{path}: not a readable safetensors file: {error}; delete it to leave its figures out"
        ) from None
    for name in ("logp_rollout", "logp_trainer"):
        if name not in tensors:
            raise UsageError(f"{path}: no tensor {name!r}; delete the file to leave its figures out")
    size = tensors["logp_rollout"].shape
    for name in ("logp_rollout", "logp_trainer", "logp_trainer_native"):
        if name not in tensors:
            continue
        found = tensors[name]
        if found.ndim != 1 or found.shape != size or not len(found) or not np.isfinite(found).all():
            raise UsageError(
                f"{path}: tensor {name!r} of shape {found.shape} has {(~np.isfinite(found)).sum()} values that are not "
                f"finite; expected one finite number per sampled token {size}; delete the file to leave its figures out"
            )
    return Probe(path, step, tensors)
