"""Reading of a run folder for a report, with checks of every file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from onepolicy.bounded import refuse_holes
from onepolicy.config import UsageError
from onepolicy.config.json_shapes import RunInfo, Settings, Summary, read_json_object
from onepolicy.config.replay import ROLLOUT_MODES
from onepolicy.report.jsonl import read_metrics, read_samples

Array = np.ndarray
Tree = dict[str, Any]

ROUTED = {  # tensor -> its largest possible value
    "experts_differing": 2.0**62,
    "disagree_per_token": 2.0**16,
    "disagree_per_sequence": 2.0**16,
    "disagree_per_layer": 1.0,
    "gate_mass_per_layer": 2.0,
}
LARGEST_LOGP = 1e4  # either way
LEFT_OUT = "delete the file to leave its figures out"
RUN_FIX = "is this the folder of a run that has finished?"
SUMMARY_FIX = "delete it and resume the run, which writes it again"
_PROBE_NAME = re.compile(r"step_([0-9]+)\.safetensors")


@dataclass(frozen=True)
class Probe:
    """Tensors of one probe step.

    n trainable tokens, T slots, L MoE layers, S sequences, K experts per token. `logp_rollout`,
    `logp_trainer` [n] are always there; with a suffix `_native` the same batch scored without
    replay.
    """

    path: Path
    step: int
    tensors: dict[str, Array]

    def both(self, name: str) -> tuple[Array | None, Array | None]:
        """Return the tensor of the scoring that trained and of that without replay, or None."""
        return self._recorded(name), self._recorded(f"{name}_native")

    def _recorded(self, name: str) -> Array | None:
        tensor = self.tensors.get(name)
        if tensor is None or not tensor.size:
            return None
        return tensor


@dataclass(frozen=True)
class Run:
    """Content of a run folder."""

    folder: Path
    config: Tree
    info: Tree  # run.json
    summary: Tree
    rows: list[Tree]  # metrics.jsonl, one per step
    samples: list[Tree]
    probe: Probe | None  # the last one

    @property
    def replay(self) -> bool:
        """True if the scoring that trained replayed the rollout's routes."""
        return self.config.get("replay", {}).get("mode") in ROLLOUT_MODES

    def points(self, name: str) -> tuple[list[int], list[float]]:
        """Return steps and values of the rows that have this metric.

        A null becomes NaN, which a figure shows as a gap.
        """
        rows = [row for row in self.rows if name in row]
        values = [math.nan if row[name] is None else float(row[name]) for row in rows]
        return [row["step"] for row in rows], values

    def names(self, prefix: str) -> list[str]:
        """Return the metric names with a prefix, in order of first appearance."""
        return list(
            dict.fromkeys(name for row in self.rows for name in row if name.startswith(prefix))
        )


def load_run(folder: Path, summary: Tree | None = None) -> Run:
    """Read a run folder. Raises UsageError if a file is missing or damaged.

    summary: in place of summary.json, which only a finished run has.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such run folder")
    rows = read_metrics(folder)
    if not rows:
        raise UsageError(
            f"{folder / 'metrics.jsonl'}: empty; a report needs at least one finished step"
        )
    if summary is None:
        summary = read_json_object(folder / "summary.json", Summary, SUMMARY_FIX)
    return Run(
        folder=folder,
        config=read_json_object(folder / "config.json", Settings, RUN_FIX),
        info=read_json_object(folder / "run.json", RunInfo, RUN_FIX),
        summary=summary,
        rows=rows,
        samples=read_samples(folder),
        probe=_last_probe(folder / "probes"),
    )


def _last_probe(folder: Path) -> Probe | None:
    matches = [_PROBE_NAME.fullmatch(path.name) for path in folder.glob("*.safetensors")]
    probes = [match for match in matches if match is not None]
    if not probes:
        return None
    last = max(probes, key=lambda match: int(match[1]))
    return read_probe(folder / last[0], step=int(last[1]))


def read_probe(path: Path, *, step: int) -> Probe:
    """Read and check the tensors of a probe. Raises UsageError if they are damaged."""
    try:
        refuse_holes(path, LEFT_OUT)
        tensors = load_file(path)
    except UsageError:
        raise
    # the last three: kinds of numbers that numpy lacks, or shapes that do not fit their bytes
    except (SafetensorError, OSError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: not a readable safetensors file: {error}; delete it to leave its figures out"
        ) from None
    for name in ("logp_rollout", "logp_trainer"):
        if name not in tensors:
            raise UsageError(f"{path}: no tensor {name!r}; {LEFT_OUT}")
    size = tensors["logp_rollout"].shape
    for name in ("logp_rollout", "logp_trainer", "logp_trainer_native"):
        if name not in tensors:
            continue
        found = tensors[name]
        if found.dtype.kind != "f" or found.ndim != 1 or found.shape != size or not len(found):
            raise UsageError(
                f"{path}: tensor {name!r} is {found.dtype} of shape {found.shape}; expected one "
                f"number per sampled token {size}; {LEFT_OUT}"
            )
        if not np.isfinite(found).all() or np.abs(found).max() > LARGEST_LOGP:
            raise UsageError(
                f"{path}: tensor {name!r} has values that no log-probability has; {LEFT_OUT}"
            )
    for name in ROUTED:
        for full in (name, f"{name}_native"):
            if full in tensors:
                _check_routed(path, full, tensors[full])
    return Probe(path, step, tensors)


def _check_routed(path: Path, name: str, found: Array) -> None:
    """Raise UsageError unless the tensor is one row of finite numbers from 0 on."""
    largest = ROUTED[name.removesuffix("_native")]
    right = found.dtype.kind in "uif" and found.ndim == 1
    if right and not len(found):  # figures treat it as not recorded
        return
    if not right or not np.isfinite(found).all() or found.min() < 0 or found.max() > largest:
        raise UsageError(
            f"{path}: tensor {name!r} ({found.dtype} of shape {found.shape}) is not one row of "
            f"numbers from 0 to {largest:g}; {LEFT_OUT}"
        )
    if name.startswith("experts_differing") and not found.sum():
        raise UsageError(f"{path}: tensor {name!r} counts no router; {LEFT_OUT}")
