"""TRL 1.16: every generation of a GRPOTrainer, written as it is scored.

    export(trainer, "dump")   # before trainer.train(); then `onepolicy audit dump`

TRL's own completions_NNNNN.parquet holds text and rewards, no tokens and no log-probabilities.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepolicy.audit.export import write_step
from onepolicy.config import UsageError


def export(trainer: Any, folder: Path | str) -> None:
    """From now on FOLDER gets a file for every training generation of this process.

    One more forward a generation gives the trainer's log-probabilities and entropy under its current weights, so that
    another temperature can be told from mismatch. Text models only. UsageError at the first generation: it came without
    log-probabilities.
    """
    generate, reward = trainer._generate_and_score_completions, trainer._calculate_rewards
    rewards: list[Tensor] = []

    def rewarded(*args: Any, **kwargs: Any) -> Tensor:
        found: Tensor = reward(*args, **kwargs)
        rewards[:] = [
            (found * trainer.reward_weights.to(found.device)).nansum(1)
        ]  # of all processes
        return found

    def generated(inputs: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        made: dict[str, Any] = generate(inputs)
        if trainer.model.training:
            rank, count = trainer.accelerator.process_index, len(made["completion_ids"])
            own = rewards[0][rank * count : (rank + 1) * count].tolist()
            write_step(folder, step, rows(trainer, made, step, own), rank=rank)
        return made

    trainer._calculate_rewards, trainer._generate_and_score_completions = rewarded, generated


@torch.no_grad()
def rows(
    trainer: Any, made: dict[str, Any], step: int, rewards: list[float]
) -> list[dict[str, Any]]:
    rollout = made.get("sampling_per_token_logps")
    if rollout is None:
        raise UsageError(
            "TRL: no sampling log-probabilities; set use_vllm=True, or return them from a rollout_func"
        )
    ids, mask = made["completion_ids"], made["completion_mask"].bool()
    whole = (
        torch.cat([made["prompt_ids"], ids], 1),
        torch.cat([made["prompt_mask"], made["completion_mask"]], 1),
    )
    size = trainer.args.per_device_train_batch_size
    scored = trainer._get_per_token_logps_and_entropies(
        trainer.model, *whole, ids.shape[1], size, compute_entropy=True
    )
    if (tool := made.get("tool_mask")) is not None:
        mask = mask & tool.bool()
    mask = mask & rollout.isfinite()  # TRL fills what vLLM could not score with NaN
    columns = {
        "tokens": ids,
        "mask": mask,
        "logp_rollout": rollout,
        "logp_trainer": scored[0],
        "entropy": scored[1],
    }
    listed = {name: value.cpu().tolist() for name, value in columns.items()}
    lengths = made["completion_mask"].sum(1).tolist()
    return [
        {name: value[i][:length] for name, value in listed.items()}
        | {"step": step, "reward": rewards[i]}
        for i, length in enumerate(lengths)
        if length
    ]
