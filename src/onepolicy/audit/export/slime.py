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
        rollout = int(found.get("rollout_id", -1))
        rows = []
        for number, sample in enumerate(samples(path, found)):
            key = (rollout, int(sample.get("sample_index", number)))
            if "log_probs" in sample and key not in seen:  # other pipeline stages have none
                seen.add(key)
                rows.append(row(path, sample) | {"step": rollout})
        if rows:
            write_step(folder, rollout, rows, rank=int(found.get("rank", 0)))
            written += len(rows)
    if not written:
        mend = "let the trainer score, without --use-rollout-logprobs"
        raise UsageError(f"{source}: no sample with log_probs in {len(paths)} *.pt files; {mend}")
    return written


def samples(path: Path, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One dict a sample: slime's list (format_version 2), or miles' columns."""
    if "samples" in found:
        yield from found["samples"]
        return
    if "rollout_data" not in found:
        raise UsageError(f"{path}: neither samples nor rollout_data; is it a --save-debug-train-data file?")
    if found.get("cp_size", 1) > 1:
        raise UsageError(f"{path}: holds one rank's slices of context parallelism; dump with --context-parallel-size 1")
    columns = found["rollout_data"]
    count = len(columns["tokens"])
    names = {name: name for name in ("tokens", "entropy", "rewards", "weight_versions", *PER_TOKEN)}
    for i in range(count):
        sample = {ours: columns[theirs][i] for theirs, ours in names.items() if columns.get(theirs) is not None}
        yield sample | ({"sample_index": columns["sample_indices"][i]} if "sample_indices" in columns else {})


def row(path: Path, sample: Mapping[str, Any]) -> dict[str, Any]:
    """The response of a sample: log-probabilities and mask are of its last tokens."""
    lacking = [name for name in PER_TOKEN if name not in sample]
    if lacking:
        raise UsageError(f"{path}: samples have no {', '.join(lacking)}")
    made = {ours: torch.as_tensor(sample[theirs]).tolist() for theirs, ours in PER_TOKEN.items()}
    made["tokens"] = torch.as_tensor(sample["tokens"]).tolist()[-len(made["mask"]) :]
    if "entropy" in sample:
        made["entropy"] = torch.as_tensor(sample["entropy"]).tolist()
    versions = [int(v) for v in sample.get("weight_versions") or () if str(v).isdigit()]
    return made | ({"version": min(versions)} if versions else {})


if __name__ == "__main__":
    print(f"{convert(sys.argv[1], sys.argv[2])} samples")
