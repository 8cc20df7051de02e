"""The probes of a run folder: scored records that the run wrote, with both sides' values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
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
        columns = _columns_of(path, step, _load_tensors(path, (*PER_TOKEN, "segment")))
        block = checked_block(str(path), 0, columns, number / len(probes))
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


def read_probe(step: int, path: Path) -> Scored:
    """Return the record of a probe for figures; an older version wrote only log-probabilities.

    Raises UsageError if it is damaged.
    """
    tensors = _load_tensors(path, ("logp_rollout", "logp_trainer"))
    zeros = np.zeros(tensors["logp_rollout"].shape, np.int64)
    tensors = dict.fromkeys((*PER_TOKEN, "segment"), zeros) | tensors  # no figure needs the rest
    block = checked_block(str(path), 0, _columns_of(path, step, tensors), 1.0)
    if block.left_out.count:
        raise UsageError(f"{block.first_left_out}; {LEFT_OUT}")
    return block


def _columns_of(path: Path, step: int, tensors: Mapping[str, Array]) -> dict[str, RaggedColumn]:
    shapes = {name: tensors[name].shape for name in (*PER_TOKEN, "segment")}
    if len(set(shapes.values())) > 1 or len(shapes["tokens"]) != 1 or not shapes["tokens"][0]:
        raise UsageError(
            f"{path}: its tensors differ in length, or are empty: {shapes}; {LEFT_OUT}"
        )
    lengths = np.unique(tensors["segment"], return_counts=True)[1].astype(np.int64)
    rows = len(lengths)
    raw = {name: RaggedColumn(tensors[name], lengths) for name in PER_TOKEN}
    for name, column in OPTIONAL.items():
        values = tensors.get(name)
        if values is None:
            continue
        if values.shape != shapes["tokens"]:
            raise UsageError(f"{path}: {name} differs in length from the others; {LEFT_OUT}")
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
        raise UsageError(f"{path}: support_ids are not as many as support_counts says; {LEFT_OUT}")
    return RaggedColumn(ids, sizes)


def _route_columns(
    path: Path, tensors: Mapping[str, Array], lengths: Array
) -> dict[str, RaggedColumn]:
    rollout, trainer = tensors["routes_rollout"], tensors["routes_trainer"]
    tokens, rows = int(lengths.sum()), len(lengths)
    if rollout.shape != trainer.shape or rollout.ndim != 3 or len(rollout) > tokens:
        shapes = {rollout.shape, trainer.shape}
        raise UsageError(
            f"{path}: routes of shapes {shapes}, expected one [tokens, layers, top-k]; {LEFT_OUT}"
        )
    _, layers, top_k = rollout.shape
    if tokens * layers * top_k > MISSING_ROUTES + 64 * rollout.size:
        raise UsageError(
            f"{path}: {len(rollout)} of {tokens} tokens have routes, of {layers} layers with "
            f"{top_k} experts; {LEFT_OUT}"
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
