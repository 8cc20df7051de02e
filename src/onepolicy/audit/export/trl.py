"""TRL 1.16: every generation of a GRPOTrainer, written as it is scored.

    export(trainer, "dump")   # before trainer.train(); then `onepolicy audit dump`

TRL's own completions_NNNNN.parquet has text and rewards, no tokens and no log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepolicy.audit.export import write_step
from onepolicy.config import UsageError


def export(trainer: Any, folder: Path | str) -> None:
    """Write a file for every later training generation of this process. Text models only.

    One more forward per generation computes the trainer's log-probabilities and entropy under its
    current weights, so that an audit can distinguish another temperature from mismatch. The first
    generation raises UsageError if it has no log-probabilities.
    """
    generate, reward = trainer._generate_and_score_completions, trainer._calculate_rewards
    rewards: list[Tensor] = []  # the last one, of all processes

    def calculate_rewards(*args: Any, **kwargs: Any) -> Tensor:
        by_function: Tensor = reward(*args, **kwargs)
        weights = trainer.reward_weights.to(by_function.device)
        rewards[:] = [(by_function * weights).nansum(1)]
        return by_function

    def generate_and_score(inputs: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        generation: dict[str, Any] = generate(inputs)
        if trainer.model.training:
            rank = trainer.accelerator.process_index
            count = len(generation["completion_ids"])
            own_rewards = rewards[0][rank * count : (rank + 1) * count].tolist()
            write_step(
                folder, step, generation_rows(trainer, generation, step, own_rewards), rank=rank
            )
        return generation

    trainer._calculate_rewards = calculate_rewards
    trainer._generate_and_score_completions = generate_and_score


@torch.no_grad()
def generation_rows(
    trainer: Any, generation: dict[str, Any], step: int, rewards: list[float]
) -> list[dict[str, Any]]:
    """Score a generation and return its rows. Raises UsageError without log-probabilities."""
    logp_rollout = generation.get("sampling_per_token_logps")
    if logp_rollout is None:
        raise UsageError(
            "TRL: no sampling log-probabilities; set use_vllm=True, or return them from a "
            "rollout_func"
        )
    ids, completion_mask = generation["completion_ids"], generation["completion_mask"]
    logp_trainer, entropy = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([generation["prompt_ids"], ids], 1),
        torch.cat([generation["prompt_mask"], completion_mask], 1),
        ids.shape[1],
        trainer.args.per_device_train_batch_size,
        compute_entropy=True,
    )[:2]
    mask = completion_mask.bool()
    tool_mask = generation.get("tool_mask")
    if tool_mask is not None:
        mask = mask & tool_mask.bool()
    mask = mask & logp_rollout.isfinite()  # TRL sets NaN for tokens that vLLM could not score
    columns = {
        "tokens": ids,
        "mask": mask,
        "logp_rollout": logp_rollout,
        "logp_trainer": logp_trainer,
        "entropy": entropy,
    }
    listed = {name: value.cpu().tolist() for name, value in columns.items()}
    lengths = completion_mask.sum(1).tolist()
    return [
        {name: value[i][:length] for name, value in listed.items()}
        | {"step": step, "reward": rewards[i]}
        for i, length in enumerate(lengths)
        if length
    ]
