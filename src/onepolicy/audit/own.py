"""Our own run folder as a dump: the probes of `onepolicy train` hold tokens and both sides' log-probabilities."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from onepolicy.audit.arrays import as_numpy, check_plain
from onepolicy.audit.schema import Array, Block, Ragged, assemble
from onepolicy.config import UsageError
from onepolicy.config.numerics import ON_POLICY
from onepolicy.invariant.fingerprint import difference_reason

PER_TOKEN = ("tokens", "logp_rollout", "logp_trainer", "entropy", "version")


def is_run(path: Path) -> bool:
    return (path / "metrics.jsonl").is_file() and (path / "config.json").is_file()


def read_run(folder: Path, mapping: Mapping[str, str]) -> Iterator[Block]:
    """One block a probe, its step that of the probe; logp_trainer is of the scoring that trained."""
    if mapping:
        raise UsageError(
            f"{folder}: is a run folder of ours; its columns have one name, leave --columns out"
        )
    steps, first = _probes(folder), 0
    for number, (step, path) in enumerate(steps, start=1):
        block = assemble(str(path), 0, _columns(path, step), number / len(steps))
        yield Block(first, block.lengths, block.columns, block.done)
        first += len(block.lengths)


def bitwise(folder: Path) -> str:
    """How many log-probabilities of a run's probes differ in any bit, and whether equality may be claimed at all."""
    differing, tokens, why = _bits(folder)
    claim = (
        "rollouts and trainer were computed alike"
        if why is None
        else f"cannot claim equality: {why}"
    )
    return (
        f"To the bit: {differing:,} of {tokens:,} log-probabilities of the probes differ; {claim}"
    )


def equal_on_purpose(path: Path) -> bool:
    """A run of ours whose fingerprints say that rollouts and trainer were computed alike."""
    return is_run(path) and _bits(path)[2] is None


def _bits(folder: Path) -> tuple[int, int, str | None]:
    """Log-probabilities that differ, of how many, and why equality may not be claimed."""
    differing = tokens = 0
    why = None
    for _, path in _probes(folder):
        with safe_open(path, "pt") as probe:
            rollout, trainer = probe.get_tensor("logp_rollout"), probe.get_tensor("logp_trainer")
            about = probe.metadata() or {}
        differing, tokens = differing + int((rollout != trainer).sum()), tokens + len(rollout)
        ours, theirs = _fingerprints(path, about)
        why = why or difference_reason(json.dumps(ours), theirs)
        if ours.get("numerics") != ON_POLICY:
            why = why or "numerics were not on-policy"
    return differing, tokens, why


def _fingerprints(path: Path, about: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Of the trainer, and of each rollout as text, as a probe's metadata has them."""
    try:
        ours, theirs = (
            json.loads(about.get("fingerprint", "{}")),
            json.loads(about.get("rollout", "[]")),
        )
        right = isinstance(theirs, list) and all(
            isinstance(json.loads(each), dict) for each in theirs
        )
    except (ValueError, TypeError, RecursionError):
        right = False
    if not right or not isinstance(ours, dict):
        raise UsageError(
            f"{path}: its fingerprints are damaged; delete the file to leave this probe out"
        )
    return ours, theirs


def _probes(folder: Path) -> list[tuple[int, Path]]:
    """(step, file) of each, by step. UsageError if there is none."""
    found = {
        path: re.fullmatch(r"step_([0-9]+)\.safetensors", path.name)
        for path in (folder / "probes").glob("*")
    }
    steps = sorted((int(match[1]), path) for path, match in found.items() if match)
    if not steps:
        mend = "train with log.counterfactual_every=N to write one every N steps"
        raise UsageError(f"{folder}: a run without probes; {mend}")
    return steps


def _columns(path: Path, step: int) -> dict[str, Ragged]:
    try:
        loaded = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path}: not a readable safetensors file ({str(error)[:160]})") from None
    for name, tensor in loaded.items():
        check_plain(f"{path}: {name}", tensor)
    tensors = {name: as_numpy(tensor) for name, tensor in loaded.items()}
    if lacking := [name for name in (*PER_TOKEN, "segment") if name not in tensors]:
        raise UsageError(
            f"{path}: no {', '.join(lacking)}; an older version wrote this probe, train some steps more"
        )
    sizes = {name: tensors[name].shape for name in (*PER_TOKEN, "segment")}
    if len(set(sizes.values())) > 1 or len(sizes["tokens"]) != 1 or not sizes["tokens"][0]:
        raise UsageError(
            f"{path}: its tensors differ in length, or are empty: {sizes}; the file is damaged"
        )
    lengths = np.unique(tensors["segment"], return_counts=True)[1].astype(np.int64)
    rows = len(lengths)
    raw = {name: Ragged(tensors[name], lengths) for name in PER_TOKEN}
    if "logp_trainer_native" in tensors:
        if tensors["logp_trainer_native"].shape != sizes["tokens"]:
            raise UsageError(
                f"{path}: logp_trainer_native differs in length from the others; the file is damaged"
            )
        raw["logp_native"] = Ragged(tensors["logp_trainer_native"], lengths)
    raw |= {
        "mask": Ragged(np.ones(lengths.sum(), bool), lengths),
        "step": Ragged(np.full(rows, step), None),
    }
    raw["trained_version"] = Ragged(np.full(rows, step - 1), None)
    if "routes_rollout" in tensors and "routes_trainer" in tensors:
        both = {name: tensors[name] for name in ("routes_rollout", "routes_trainer")}
        shapes = {each.shape for each in both.values()}
        if (
            len(shapes) > 1
            or both["routes_rollout"].ndim != 3
            or len(both["routes_rollout"]) > lengths.sum()
        ):
            raise UsageError(
                f"{path}: routes of shapes {shapes}, expected one [tokens, layers, top-k]; damaged"
            )
        _, layers, k = both["routes_rollout"].shape
        raw |= {
            name: Ragged(_padded(each, int(lengths.sum())), lengths * layers * k)
            for name, each in both.items()
        }
        raw |= {
            "route_layers": Ragged(np.full(rows, layers), None),
            "route_top_k": Ragged(np.full(rows, k), None),
        }
    return raw


def _padded(routes: Array, tokens: int) -> Array:
    """[m, L, K] -> [tokens * L * K]: what was not written is -1."""
    rest = np.full((tokens - len(routes), *routes.shape[1:]), -1, routes.dtype)
    return np.concatenate([routes, rest]).reshape(-1)
