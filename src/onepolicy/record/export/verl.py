"""verl 0.9: a step's DataProto, once it has both sides' log-probabilities.

    # RayPPOTrainer.fit, after batch.union(old_log_prob):
    export(batch, "dump", self.global_steps)
    # V1: _compute_old_log_prob, after data = DataProto(...):
    export(data, "dump", self.global_steps)

Then run `onepolicy audit dump`. Export before rejection, which clears response_mask.

verl's own trainer.rollout_data_dir has text and scores as JSON lines, no tokens and no
log-probabilities. DataProto.save_to_disk is a pickle. The engine returns its log-probabilities with
rollout.calculate_log_probs=true.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onepolicy.config import UsageError
from onepolicy.record.export import write_step

NEEDED = ("responses", "response_mask", "rollout_log_probs", "old_log_probs")
OPTIONAL = {"entropys": "entropy", "entropy": "entropy"}  # of the legacy and the V1 trainer
FIXES = {
    "rollout_log_probs": "set actor_rollout_ref.rollout.calculate_log_probs=true",
    "old_log_probs": (
        "export after the trainer has scored the batch; with bypass_mode it never does"
    ),
    "response_mask": "verl sets it with compute_response_mask(batch)",
}


def export(batch: Any, folder: Path | str, step: int) -> Path:
    """Write a DataProto with [B, R] tensors, padded on the right, as one step.

    Raises UsageError if one of NEEDED is missing.
    """
    return write_step(folder, step, batch_rows(batch, step), framework="verl")


def batch_rows(batch: Any, step: int) -> list[dict[str, Any]]:
    """Return the rows of a DataProto."""
    tensors, extra = batch.batch, batch.non_tensor_batch
    for name in NEEDED:
        if name not in tensors:
            fix = FIXES.get(name, "is this a batch after generation?")
            raise UsageError(f"verl batch: no {name}; {fix}")
    names = {
        "responses": "tokens",
        "response_mask": "mask",
        "rollout_log_probs": "logp_rollout",
        "old_log_probs": "logp_trainer",
    } | {theirs: ours for theirs, ours in OPTIONAL.items() if theirs in tensors}
    listed = {ours: tensors[theirs].cpu().tolist() for theirs, ours in names.items()}
    width = tensors["responses"].shape[1]
    lengths = [width] * len(tensors["responses"])
    if "attention_mask" in tensors:  # of prompt and response
        lengths = tensors["attention_mask"][:, -width:].sum(1).tolist()
    per_row: dict[str, list[Any]] = {"step": [step] * len(lengths)}
    for name in ("token_level_scores", "rm_scores"):
        if name in tensors:
            per_row["reward"] = tensors[name].sum(1).tolist()
            break
    # In the fully asynchronous trainer: the weights that the sequence was begun with.
    if "min_global_steps" in extra:
        per_row["version"] = [int(value) for value in extra["min_global_steps"]]
    return [
        {name: value[i][:length] for name, value in listed.items()}
        | {name: value[i] for name, value in per_row.items()}
        for i, length in enumerate(lengths)
        if length
    ]
