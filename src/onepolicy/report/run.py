"""Read a run folder: what must be there, what may be there, and what is wrong with it."""

from __future__ import annotations

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
from onepolicy.config.shapes import About, Settings, Summary, read_object
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
RUN_MEND = "is this the folder of a run that has finished?"
SUMMARY_MEND = "delete it and resume the run, which writes it again"
_PROBE_NAME = re.compile(r"step_([0-9]+)\.safetensors")


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
        found = [self.tensors.get(full) for full in (name, f"{name}_native")]
        trained, native = (None if each is None or not each.size else each for each in found)
        return trained, native


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
        return list(
            dict.fromkeys(name for row in self.rows for name in row if name.startswith(prefix))
        )


def load_run(folder: Path) -> Run:
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such run folder")
    rows = read_metrics(folder)
    if not rows:
        raise UsageError(
            f"{folder / 'metrics.jsonl'}: empty; a report needs at least one finished step"
        )
    return Run(
        folder=folder,
        config=read_object(folder / "config.json", Settings, RUN_MEND),
        info=read_object(folder / "run.json", About, RUN_MEND),
        summary=read_object(folder / "summary.json", Summary, SUMMARY_MEND),
        rows=rows,
        samples=read_samples(folder),
        probe=_last_probe(folder / "probes"),
    )


def _last_probe(folder: Path) -> Probe | None:
    matches = [
        match
        for path in folder.glob("*.safetensors")
        if (match := _PROBE_NAME.fullmatch(path.name))
    ]
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
            raise UsageError(f"{path}: no tensor {name!r}; {LEFT_OUT}")
    size = tensors["logp_rollout"].shape
    for name in ("logp_rollout", "logp_trainer", "logp_trainer_native"):
        if name not in tensors:
            continue
        found = tensors[name]
        if found.dtype.kind != "f" or found.ndim != 1 or found.shape != size or not len(found):
            raise UsageError(
                f"{path}: tensor {name!r} is {found.dtype} of shape {found.shape}; expected one number per sampled "
                f"token {size}; {LEFT_OUT}"
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
    """UsageError for what is not one row of finite numbers from 0 on, as the routing figures draw them."""
    largest = ROUTED[name.removesuffix("_native")]
    right = found.dtype.kind in "uif" and found.ndim == 1
    if right and not len(found):  # drawn as not recorded
        return
    if not right or not np.isfinite(found).all() or found.min() < 0 or found.max() > largest:
        raise UsageError(
            f"{path}: tensor {name!r} ({found.dtype} of shape {found.shape}) is not one row of numbers from 0 to "
            f"{largest:g}; {LEFT_OUT}"
        )
    if name.startswith("experts_differing") and not found.sum():
        raise UsageError(f"{path}: tensor {name!r} counts no router; {LEFT_OUT}")
