"""The names that trainers have for our columns, a row for each.

`--columns NAME` reads a file by a row, the exporters (record/export) read a batch by it, and an
error about a file names the trainer that wrote it. Children of bounded.py import this module.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Trainer:
    """The names of one trainer."""

    names: Mapping[str, str]  # our column -> theirs
    row_mask: str = ""  # column with 0 for a row that is not trained on, 1 for others
    complete: bool = False  # its own file has them all, so that `--columns NAME` reads it
    # columns or keys by which one of its files is known -> what it is, and what to do with it
    files: Mapping[frozenset[str], str] = field(default_factory=dict)
    # their name -> what gives it where it is missing
    fixes: Mapping[str, str] = field(default_factory=dict)


VERL_EXPORT = "call onepolicy.record.export.verl.export(batch, FOLDER, step) in the trainer"
NO_TOKENS = "which has no tokens and no log-probabilities"
TRAINERS = {
    "prime-rl": Trainer(  # its trainer.enable_token_export
        {
            "tokens": "token_ids",
            "mask": "loss_mask",
            "logp_rollout": "inference_logprobs",
            "logp_trainer": "trainer_logprobs",
        },
        complete=True,
        files={
            frozenset(("token_ids", "inference_logprobs", "trainer_logprobs")): (
                "prime-rl's token export; add --columns prime-rl"
            )
        },
    ),
    "nemo-rl": Trainer(  # its train_data_stepN.jsonl; a value is a list of one sample's
        {
            "tokens": "token_ids",
            "mask": "token_loss_mask",
            "logp_rollout": "generation_logprobs",
            "logp_trainer": "prev_logprobs",
        },
        row_mask="sample_loss_mask",
        complete=True,
        files={
            frozenset(("token_ids", "generation_logprobs", "prev_logprobs")): (
                "NeMo-RL's training data; add --columns nemo-rl"
            )
        },
    ),
    "verl": Trainer(  # a DataProto, [B, R]; entropys is of the legacy trainer
        {
            "tokens": "responses",
            "mask": "response_mask",
            "logp_rollout": "rollout_log_probs",
            "logp_trainer": "old_log_probs",
            "entropy": "entropys",
        },
        files={
            frozenset(("input", "output", "score")): (
                f"verl's text log, {NO_TOKENS}; {VERL_EXPORT}"
            ),
            frozenset(("batch",)): f"a batch of verl; {VERL_EXPORT}",
        },
        fixes={
            "rollout_log_probs": "set actor_rollout_ref.rollout.calculate_log_probs=true",
            "old_log_probs": (
                "export after the trainer has scored the batch; with bypass_mode it never does"
            ),
            "response_mask": "verl sets it with compute_response_mask(batch)",
            "responses": "is this a batch after generation?",
        },
    ),
    "trl": Trainer(  # a generation, [B, T]; the trainer's score is a forward of its own
        {
            "tokens": "completion_ids",
            "mask": "completion_mask",
            "logp_rollout": "sampling_per_token_logps",
        },
        files={
            frozenset(("prompt", "completion")): (
                f"TRL's text log, {NO_TOKENS}; call onepolicy.integrations.trl.attach(trainer, "
                "dump=FOLDER) before trainer.train()"
            )
        },
        fixes={
            "sampling_per_token_logps": ("set use_vllm=True, or return them from a rollout_func")
        },
    ),
    "miles": Trainer(  # and slime: their --save-debug-train-data
        {
            "tokens": "tokens",
            "mask": "loss_masks",
            "logp_rollout": "rollout_log_probs",
            "logp_trainer": "log_probs",
            "entropy": "entropy",
        },
        files={
            frozenset((key,)): (
                "a training dump of slime or miles; python -m onepolicy.record.export.slime FOLDER "
                "OUT turns a folder of them into a dump"
            )
            for key in ("samples", "rollout_data")
        },
    ),
    "sglang": Trainer(
        {},
        files={
            frozenset(("meta_info",)): (
                "replies of a SGLang server, which lack the trainer's side; write rows with both"
            )
        },
    ),
}
ROW_MASKS = {each.names["mask"]: each.row_mask for each in TRAINERS.values() if each.row_mask}
"""A trainer's mask of tokens -> its mask of rows."""
COMPLETE = [name for name, trainer in TRAINERS.items() if trainer.complete]


def recognised(columns: Collection[str]) -> str:
    """Return what a file with these columns or keys is, and what to do; empty if not known."""
    for trainer in TRAINERS.values():
        for names, said in trainer.files.items():
            if names <= set(columns):
                return said
    return ""
