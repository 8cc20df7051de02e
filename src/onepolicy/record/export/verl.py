"""verl 0.9: a step's DataProto, once it has both sides' log-probabilities.

    # RayPPOTrainer.fit, after batch.union(old_log_prob):
    export(batch, "dump", self.global_steps)
    # V1: _compute_old_log_prob, after data = DataProto(...):
    export(data, "dump", self.global_steps)

Then run `onepolicy audit dump`. Export before rejection, which clears response_mask. The newest
weights that sampled the batch count as those that trained on it (trained_version).

verl's own trainer.rollout_data_dir has text and scores as JSON lines, no tokens and no
log-probabilities. DataProto.save_to_disk is a pickle. The engine returns its log-probabilities with
rollout.calculate_log_probs=true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onepolicy.config import UsageError
from onepolicy.record.export import write_step
from onepolicy.record.schema import COLUMNS
from onepolicy.record.trainers import TRAINERS

TRAINER = TRAINERS["verl"]
ENTROPIES = ("entropys", "entropy")  # of the legacy and the V1 trainer


def export(batch: Any, folder: Path | str, step: int) -> Path:
    """Write a DataProto with [B, R] tensors, padded on the right, as one step.

    Raises UsageError if it lacks a required column.
    """
    return write_step(folder, step, batch_rows(batch, step), framework="verl")


def batch_rows(batch: Any, step: int) -> list[dict[str, Any]]:
    """Return the rows of a DataProto."""
    tensors, extra = batch.batch, batch.non_tensor_batch
    names = dict(TRAINER.names)
    names["entropy"] = next((name for name in ENTROPIES if name in tensors), "")
    for ours, theirs in names.items():
        if COLUMNS[ours].required and theirs not in tensors:
            raise UsageError(f"verl batch: no {theirs}; {TRAINER.fixes[theirs]}")
    listed = {
        ours: tensors[theirs].cpu().tolist() for ours, theirs in names.items() if theirs in tensors
    }
    width = tensors["responses"].shape[1]
    lengths = [width] * len(tensors["responses"])
    if "attention_mask" in tensors:  # of prompt and response
        lengths = tensors["attention_mask"][:, -width:].sum(1).tolist()
    per_row: dict[str, list[Any]] = {"step": [step] * len(lengths)}
    for name in ("token_level_scores", "rm_scores"):
        if name in tensors:
            per_row["reward"] = tensors[name].sum(1).tolist()
            break
    # In the fully asynchronous trainer: the weights that the sequence was begun and ended with.
    begun, ended = (list(extra.get(f"{end}_global_steps", ())) for end in ("min", "max"))
    if begun and None not in begun:
        newest = max(int(value) for value in [*begun, *ended] if value is not None)
        per_row["version"] = [int(value) for value in begun]
        per_row["trained_version"] = [newest] * len(begun)
    return [
        {name: value[i][:length] for name, value in listed.items()}
        | {name: value[i] for name, value in per_row.items()}
        for i, length in enumerate(lengths)
        if length
    ]
