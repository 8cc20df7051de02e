"""The probes of a run folder: scored records that the run wrote, with both sides' values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from onepolicy.bounded import refuse_holes
from onepolicy.config import UsageError
from onepolicy.files import refuse_links_out
from onepolicy.record.arrays import Safetensors
from onepolicy.record.schema import Array, RaggedColumn, Scored
from onepolicy.record.validate import checked_block

MISSING_ROUTES = 2**26
"""Expert ids of tokens without routes that a probe may have, whatever its size."""
ROUTED = {  # tensor of the figures -> its largest possible value
    "experts_differing": 2.0**62,
    "disagree_per_token": 2.0**16,
    "disagree_per_sequence": 2.0**16,
    "disagree_per_layer": 1.0,
    "gate_mass_per_layer": 2.0,
}
LARGEST_LOGP = 1e4  # either way
LEFT_OUT = "delete the file to leave this probe out"
PER_TOKEN = ("tokens", "logp_rollout", "logp_trainer", "entropy", "version")
OPTIONAL = {  # tensor of a probe, [n] too -> its column
    "logp_trainer_native": "logp_native",
    "logp_vocabulary": "logp_vocabulary",
    "support_counts": "support_counts",
}


def is_run_folder(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() and (path / "config.json").is_file()


def read_run(folder: Path, mapping: Mapping[str, str]) -> Iterator[Scored]:
    """Yield one block for each probe. logp_trainer is from the scoring that trained."""
    if mapping:
        raise UsageError(
            f"{folder}: is a run folder of ours; its columns have one name, leave --columns out"
        )
    refuse_links_out(folder, "the run's")
    probes, first = probe_files(folder), 0
    if not probes:
        fix = "train with log.counterfactual_every=N to write one every N steps"
        raise UsageError(f"{folder}: a run without probes; {fix}")
    for number, (step, path) in enumerate(probes, start=1):
        block = checked_block(str(path), 0, _columns_of(path, step), number / len(probes))
        yield dataclasses.replace(block, first_row=first)
        first += len(block.lengths)


def probe_files(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, file) of each probe, by step."""
    probes = []
    for path in (folder / "probes").glob("*"):
        match = re.fullmatch(r"step_([0-9]+)\.safetensors", path.name)
        if match and path.is_file():
            probes.append((int(match[1]), path))
    return sorted(probes)


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


def read_probe(step: int, path: Path) -> Probe:
    """Read the tensors that figures are drawn from.

    An older version wrote only log-probabilities. Raises UsageError if one is damaged.
    """
    tensors = _load_tensors(path, ("logp_rollout", "logp_trainer"))
    size = tensors["logp_rollout"].shape
    for name in ("logp_rollout", "logp_trainer", "logp_trainer_native"):
        found = tensors.get(name)
        if found is None:
            continue
        if found.dtype.kind != "f" or found.ndim != 1 or found.shape != size or not len(found):
            raise UsageError(
                f"{path}: tensor {name!r} is {found.dtype} of shape {found.shape}; expected one "
                f"number per sampled token {size}; {LEFT_OUT}"
            )
        if not np.isfinite(found).all() or np.abs(found).max() > LARGEST_LOGP:
            raise UsageError(
                f"{path}: tensor {name!r} has values that no log-probability has; {LEFT_OUT}"
            )
    segment = tensors.get("segment")
    if segment is not None and (segment.dtype.kind not in "iu" or segment.shape != size):
        raise UsageError(f"{path}: tensor 'segment' is not one number per token; {LEFT_OUT}")
    for name, found in tensors.items():
        if name.removesuffix("_native") in ROUTED:
            _check_routed(path, name, found)
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


def _columns_of(path: Path, step: int) -> dict[str, RaggedColumn]:
    tensors = _load_tensors(path, (*PER_TOKEN, "segment"))
    shapes = {name: tensors[name].shape for name in (*PER_TOKEN, "segment")}
    if len(set(shapes.values())) > 1 or len(shapes["tokens"]) != 1 or not shapes["tokens"][0]:
        raise UsageError(
            f"{path}: its tensors differ in length, or are empty: {shapes}; the file is damaged"
        )
    lengths = np.unique(tensors["segment"], return_counts=True)[1].astype(np.int64)
    rows = len(lengths)
    raw = {name: RaggedColumn(tensors[name], lengths) for name in PER_TOKEN}
    for name, column in OPTIONAL.items():
        values = tensors.get(name)
        if values is None:
            continue
        if values.shape != shapes["tokens"]:
            raise UsageError(
                f"{path}: {name} differs in length from the others; the file is damaged"
            )
        raw[column] = RaggedColumn(values, lengths)
    raw["mask"] = RaggedColumn(np.ones(lengths.sum(), bool), lengths)
    raw["step"] = RaggedColumn(np.full(rows, step), None)
    raw["trained_version"] = RaggedColumn(np.full(rows, step - 1), None)
    if "routes_rollout" in tensors and "routes_trainer" in tensors:
        raw |= _route_columns(path, tensors, lengths)
    if "support_counts" in raw:
        raw["support_ids"] = _set_column(path, tensors, lengths)
    return raw


def _load_tensors(path: Path, needed: tuple[str, ...]) -> dict[str, Array]:
    refuse_holes(path, LEFT_OUT)
    with Safetensors(path) as probe:
        missing = [name for name in needed if name not in probe.tensors]
        if missing:
            raise UsageError(
                f"{path}: no {', '.join(missing)}; an older version wrote this probe, "
                "train some steps more"
            )
        return {name: probe.read(name) for name in probe.tensors}


def _set_column(path: Path, tensors: Mapping[str, Array], lengths: Array) -> RaggedColumn:
    """Return the ids of the probe's supports, of which a row has as many as its counts say."""
    ids, counts = tensors.get("support_ids"), tensors["support_counts"].astype(np.int64)
    sizes = np.zeros(len(lengths), np.int64)
    np.add.at(sizes, np.repeat(np.arange(len(lengths)), lengths), counts)
    if ids is None or (counts < 0).any() or ids.shape != (sizes.sum(),):
        raise UsageError(f"{path}: support_ids are not as many as support_counts says; damaged")
    return RaggedColumn(ids, sizes)


def _route_columns(
    path: Path, tensors: Mapping[str, Array], lengths: Array
) -> dict[str, RaggedColumn]:
    rollout, trainer = tensors["routes_rollout"], tensors["routes_trainer"]
    tokens, rows = int(lengths.sum()), len(lengths)
    if rollout.shape != trainer.shape or rollout.ndim != 3 or len(rollout) > tokens:
        shapes = {rollout.shape, trainer.shape}
        raise UsageError(
            f"{path}: routes of shapes {shapes}, expected one [tokens, layers, top-k]; damaged"
        )
    _, layers, top_k = rollout.shape
    if tokens * layers * top_k > MISSING_ROUTES + 64 * rollout.size:
        raise UsageError(
            f"{path}: {len(rollout)} of {tokens} tokens have routes, of {layers} layers with "
            f"{top_k} experts; damaged"
        )
    entries = lengths * layers * top_k
    return {
        "routes_rollout": RaggedColumn(_padded(rollout, tokens), entries),
        "routes_trainer": RaggedColumn(_padded(trainer, tokens), entries),
        "route_layers": RaggedColumn(np.full(rows, layers), None),
        "route_top_k": RaggedColumn(np.full(rows, top_k), None),
    }


def _padded(routes: Array, tokens: int) -> Array:
    """Return [m, L, K] as [tokens * L * K]. Rows that were not written become -1."""
    rest = np.full((tokens - len(routes), *routes.shape[1:]), -1, routes.dtype)
    return np.concatenate([routes, rest]).reshape(-1)
