"""slime and miles: their --save-debug-train-data files (also written by --dump-details) as a dump.

    python -m onepolicy.record.export.slime DUMP_DETAILS/train_data dump
    onepolicy audit dump

These files have tokens and both sides' log-probabilities, but as torch.save archives. They are
opened with weights_only=True, so nothing in them is executed. slime writes one file per rollout.
miles writes one per rank; the copies of tensor-parallel ranks are left out.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from onepolicy.bounded import Message
from onepolicy.console import print_text
from onepolicy.errors import UsageError, short_repr
from onepolicy.record.arrays import as_numpy, check_plain_tensor, load_pt
from onepolicy.record.export import write_step
from onepolicy.record.read import read_bounded
from onepolicy.record.schema import COLUMNS
from onepolicy.record.trainers import TRAINERS

LARGEST_INT = 2**31 - 1
NAMES = TRAINERS["miles"].names
NEEDED = [theirs for ours, theirs in NAMES.items() if COLUMNS[ours].required]


def convert(source: Path | str, folder: Path | str) -> int:
    """Convert every *.pt file of `source` into a dump. Return the number of samples written.

    Copies of a sample are left out, and their number is printed. The newest weights that sampled a
    rollout count as those that trained on it; versions are left out unless all samples have one.
    Raises UsageError with the file that cannot be used.
    """
    paths = sorted(Path(source).glob("*.pt"))
    seen: set[tuple[int, int, bytes]] = set()
    written = copies = 0
    versioned: bool | None = None
    task = "onepolicy.record.export.slime:read_samples"
    messages = (message for _, message in read_bounded(task, paths))
    for rollout, found in itertools.groupby(messages, key=lambda each: each.info["rollout"]):
        by_rank: dict[int, list[dict[str, Any]]] = {}
        for info, arrays in found:
            sample = rollout, info["index"], _digest(arrays)
            if sample in seen:
                copies += 1
                continue
            seen.add(sample)
            row = {name: array.tolist() for name, array in arrays.items()} | info["row"]
            by_rank.setdefault(info["rank"], []).append(row)
        rows = list(itertools.chain(*by_rank.values()))
        versioned = _set_versions(rows, rollout, versioned)
        for rank, of_rank in by_rank.items():
            write_step(folder, rollout, of_rank, rank=rank, framework="miles")
        written += len(rows)
    if not written:
        fix = "let the trainer score, without --use-rollout-logprobs"
        raise UsageError(f"{source}: no sample with log_probs in {len(paths)} *.pt files; {fix}")
    if versioned is False:
        print_text("no versions: not all samples have weight_versions")
    if copies:
        print_text(f"{copies} left out: copies of other ranks' samples")
    return written


def _set_versions(rows: list[dict[str, Any]], rollout: int, versioned: bool | None) -> bool:
    """Give the rows of a rollout the newest version, or take versions off. Return which.

    versioned: which it was before, as all rows of a dump have the same columns. Raises UsageError
    if the rollouts before had versions, and these rows have not.
    """
    have = all("version" in row for row in rows)
    if versioned and not have:
        raise UsageError(
            f"rollout {rollout}: samples have no weight_versions, those of rollouts before have; "
            "convert them into a dump of their own"
        )
    if have and versioned is not False:
        newest = max(row["trained_version"] for row in rows)
        for row in rows:
            row["trained_version"] = newest
        return True
    for row in rows:
        row.pop("version", None)
        row.pop("trained_version", None)
    return False


def _digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a number of a sample's tokens and the engine's log-probabilities.

    Several samples may have one index: of agents, or of a history that was made shorter.
    """
    values = (arrays[name].tobytes() for name in ("tokens", "logp_rollout"))
    return hashlib.sha256(b"".join(values)).digest()


def read_samples(files: list[str]) -> Iterator[Message | None]:
    """Yield the scored samples of training dumps, as a task of bounded.py."""
    import torch  # noqa: F401

    yield None
    for number, file in enumerate(files):
        path = Path(file)
        yield Message({"file": number})
        loaded = load_pt(path)
        rollout = _whole_number(path, "rollout_id", loaded.get("rollout_id", 0))
        rank = _whole_number(path, "rank", loaded.get("rank", 0))
        for place, sample in enumerate(iterate_samples(path, loaded)):
            index = _whole_number(path, "sample_index", sample.get("sample_index", place))
            if "log_probs" in sample:  # other pipeline stages have none
                arrays, more = sample_row(path, sample)
                info = {"rollout": rollout, "rank": rank, "index": index}
                yield Message(info | {"row": more | {"step": rollout}}, arrays)


def iterate_samples(path: Path, loaded: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield one dict per sample, from slime's list (format_version 2) or miles' columns."""
    if not ({"samples", "rollout_data"} & loaded.keys()):
        raise UsageError(
            f"{path}: neither samples nor rollout_data; is it a --save-debug-train-data file?"
        )
    if _whole_number(path, "cp_size", loaded.get("cp_size", 1)) != 1:
        raise UsageError(
            f"{path}: holds one rank's slices of context parallelism; "
            "dump with --context-parallel-size 1"
        )
    if "samples" in loaded:
        for sample in _expect(path, loaded["samples"], list, "samples"):
            yield _expect(path, sample, dict, "a sample")
        return
    columns = _rollout_columns(path, _expect(path, loaded["rollout_data"], dict, "rollout_data"))
    for i in range(len(columns.get("tokens", ()))):
        yield {name: values[i] for name, values in columns.items()}


def _rollout_columns(path: Path, data: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the columns of miles' rollout_data that are there, by slime's names."""
    names = {name: name for name in (*NAMES.values(), "weight_versions")}
    names["sample_index"] = "sample_indices"
    columns = {
        ours: _expect(path, data[theirs], list, theirs)
        for ours, theirs in names.items()
        if data.get(theirs) is not None
    }
    if len({len(values) for values in columns.values()}) > 1:
        raise UsageError(f"{path}: columns of rollout_data differ in length")
    return columns


def sample_row(
    path: Path, sample: Mapping[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Return the response of a sample as columns per token, and those per row.

    Log-probabilities and the mask belong to its last tokens.
    """
    missing = [name for name in NEEDED if name not in sample]
    if missing:
        raise UsageError(f"{path}: samples have no {', '.join(missing)}")
    arrays = {
        ours: _numbers(path, theirs, sample[theirs])
        for ours, theirs in NAMES.items()
        if theirs in sample
    }
    arrays["tokens"] = arrays["tokens"][max(0, len(arrays["tokens"]) - len(arrays["mask"])) :]
    versions = sample.get("weight_versions")  # strings, one per turn
    if isinstance(versions, list):
        known = [int(version) for version in versions if re.fullmatch("[0-9]{1,9}", str(version))]
        if known:
            return arrays, {"version": min(known), "trained_version": max(known)}
    return arrays, {}


def _numbers(path: Path, name: str, value: Any) -> np.ndarray:
    import torch

    try:
        found = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(())
    check_plain_tensor(f"{path}: {name} of a sample", found)
    if found.dim() != 1:
        raise UsageError(f"{path}: {name} of a sample is not a list of numbers")
    return as_numpy(found)


def _whole_number(path: Path, name: str, value: Any) -> int:
    if isinstance(value, int) and abs(value) <= LARGEST_INT:
        return value
    raise UsageError(f"{path}: {name} is {short_repr(value)}; expected a whole number")


def _expect(path: Path, value: Any, kind: type, name: str) -> Any:
    if isinstance(value, kind):
        return value
    raise UsageError(f"{path}: {name} is of type {type(value).__name__}; expected {kind.__name__}")


if __name__ == "__main__":
    print_text(f"{convert(sys.argv[1], sys.argv[2])} samples")
