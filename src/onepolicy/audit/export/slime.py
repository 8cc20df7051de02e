"""slime and miles: their --save-debug-train-data files (also written by --dump-details), as one dump.

    python -m onepolicy.audit.export.slime DUMP_DETAILS/train_data dump      # then `onepolicy audit dump`

These files hold tokens and both sides' log-probabilities, but as torch.save archives, which are opened with
weights_only=True: nothing in them is executed. slime writes one file a rollout; miles one a rank, whose tensor-parallel
copies are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from onepolicy.audit.arrays import load_pt
from onepolicy.audit.export import write_step
from onepolicy.config import UsageError

PER_TOKEN = {"log_probs": "logp_trainer", "rollout_log_probs": "logp_rollout", "loss_masks": "mask"}


def convert(source: Path | str, folder: Path | str) -> int:
    """Every *.pt of a folder; the number of samples written. UsageError names a file that cannot be used."""
    paths = sorted(Path(source).glob("*.pt"))
    seen: set[tuple[int, int]] = set()
    written = 0
    for path in paths:
        found = load_pt(path)
        rollout, rank = (_whole(path, name, found.get(name, 0)) for name in ("rollout_id", "rank"))
        rows = []
        for number, sample in enumerate(samples(path, found)):
            key = (rollout, _whole(path, "sample_index", sample.get("sample_index", number)))
            if "log_probs" in sample and key not in seen:  # other pipeline stages have none
                seen.add(key)
                rows.append(row(path, sample) | {"step": rollout})
        if rows:
            write_step(folder, rollout, rows, rank=rank)
            written += len(rows)
    if not written:
        mend = "let the trainer score, without --use-rollout-logprobs"
        raise UsageError(f"{source}: no sample with log_probs in {len(paths)} *.pt files; {mend}")
    return written


def samples(path: Path, found: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """One dict a sample: slime's list (format_version 2), or miles' columns."""
    if not ({"samples", "rollout_data"} & found.keys()):
        raise UsageError(
            f"{path}: neither samples nor rollout_data; is it a --save-debug-train-data file?"
        )
    if _whole(path, "cp_size", found.get("cp_size", 1)) != 1:
        raise UsageError(
            f"{path}: holds one rank's slices of context parallelism; dump with --context-parallel-size 1"
        )
    if "samples" in found:
        yield from (
            _expect(path, sample, dict, "a sample")
            for sample in _expect(path, found["samples"], list, "samples")
        )
        return
    columns = _expect(path, found["rollout_data"], dict, "rollout_data")
    names = {name: name for name in ("tokens", "entropy", "weight_versions", *PER_TOKEN)}
    known = {
        ours: _expect(path, columns[theirs], list, theirs)
        for ours, theirs in (names | {"sample_index": "sample_indices"}).items()
        if columns.get(theirs) is not None
    }
    if len({len(values) for values in known.values()}) > 1:
        raise UsageError(f"{path}: columns of rollout_data differ in length")
    for i in range(len(known.get("tokens", ()))):
        yield {name: values[i] for name, values in known.items()}


def row(path: Path, sample: Mapping[str, Any]) -> dict[str, Any]:
    """The response of a sample: log-probabilities and mask are of its last tokens."""
    lacking = [name for name in (*PER_TOKEN, "tokens") if name not in sample]
    if lacking:
        raise UsageError(f"{path}: samples have no {', '.join(lacking)}")
    names = PER_TOKEN | {name: name for name in ("tokens", "entropy") if name in sample}
    made = {ours: _numbers(path, theirs, sample[theirs]) for theirs, ours in names.items()}
    made["tokens"] = made["tokens"][max(0, len(made["tokens"]) - len(made["mask"])) :]
    given = sample.get("weight_versions")  # as strings, one a turn
    versions = [int(v) for v in (given if isinstance(given, list) else ()) if str(v).isdecimal()]
    return made | ({"version": min(versions)} if versions else {})


def _numbers(path: Path, name: str, value: Any) -> list[Any]:
    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(())
    if found.dim() != 1:
        raise UsageError(f"{path}: {name} of a sample is not a list of numbers")
    listed: list[Any] = found.tolist()
    return listed


def _whole(path: Path, name: str, value: Any) -> int:
    if isinstance(value, int):
        return value
    raise UsageError(f"{path}: {name} is {str(value)[:40]}; expected a whole number")


def _expect(path: Path, value: Any, kind: type, name: str) -> Any:
    if isinstance(value, kind):
        return value
    raise UsageError(f"{path}: {name} is of type {type(value).__name__}; expected {kind.__name__}")


if __name__ == "__main__":
    print(f"{convert(sys.argv[1], sys.argv[2])} samples")
