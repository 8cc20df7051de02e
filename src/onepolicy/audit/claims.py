"""A run folder's own claims: its settings, its pressure, equality of both sides to the bit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from onepolicy.config import UsageError
from onepolicy.config.json_shapes import RunInfo, Settings, read_json_object
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.output_paths import CONFIG
from onepolicy.invariant.fingerprint import difference_reason
from onepolicy.record.arrays import Safetensors
from onepolicy.record.probes import is_run_folder, probe_files
from onepolicy.verdict.declared import Declared, declared_of


def describe_pressure(folder: Path) -> str | None:
    """Return what a run of ours says of its rollout.pressure; None if it had none."""
    about = folder / "run.json"
    if not (is_run_folder(folder) and about.is_file()):
        return None
    info = read_json_object(about, RunInfo, "delete it, or copy the whole run folder again")
    pressure: str | None = info.get("pressure")
    return pressure


def declared_by(folder: Path) -> Declared:
    """Return what the settings of a run of ours declare of its two sides."""
    hint = "copy the whole run folder again"
    return declared_of(read_json_object(folder / CONFIG, Settings, hint))


class BitComparison(NamedTuple):
    """A comparison of the log-probabilities of a run's probes, bit by bit."""

    differing: int
    tokens: int
    reason: str | None  # why the run cannot claim that the two sides are equal; None: it can


def describe_bit_equality(folder: Path) -> str:
    """Return how many log-probabilities of a run differ, and whether it may claim equality."""
    differing, tokens, reason = _compare_bits(folder)
    claim = "rollouts and trainer were computed alike"
    if reason is not None:
        claim = f"cannot claim equality: {reason}"
    return (
        f"To the bit: {differing:,} of {tokens:,} log-probabilities of the probes differ; {claim}"
    )


def claims_equality(path: Path) -> bool:
    """Return whether `path` is a run of ours that computed rollouts and trainer alike."""
    return is_run_folder(path) and _compare_bits(path).reason is None


def _compare_bits(folder: Path) -> BitComparison:
    differing = tokens = 0
    reason = None
    for _, path in probe_files(folder):
        with Safetensors(path) as probe:
            rollout, trainer = probe.read("logp_rollout"), probe.read("logp_trainer")
            if "logp_own" in probe.tensors:  # tokens of older weights, scored by these
                trainer = probe.read("logp_own")
            metadata = probe.metadata
        differing += int((rollout != trainer).sum())
        tokens += len(rollout)
        trainer_print, rollout_prints = _fingerprints(path, metadata)
        reason = reason or difference_reason(json.dumps(trainer_print), rollout_prints)
        if trainer_print.get("numerics") != ON_POLICY:
            reason = reason or "numerics were not on-policy"
    return BitComparison(differing, tokens, reason)


def _fingerprints(path: Path, metadata: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the trainer's fingerprint, and the text of each rollout's, from a probe's metadata."""
    damaged = UsageError(
        f"{path}: its fingerprints are damaged; delete the file to leave this probe out"
    )
    try:
        trainer = json.loads(metadata.get("fingerprint", "{}"))
        rollouts = json.loads(metadata.get("rollout", "[]"))
        if not isinstance(trainer, dict) or not isinstance(rollouts, list):
            raise damaged
        if not all(isinstance(json.loads(text), dict) for text in rollouts):
            raise damaged
    except (ValueError, TypeError, RecursionError):
        raise damaged from None
    return trainer, rollouts
