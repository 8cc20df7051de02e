"""TRL 1.16: every generation of a GRPOTrainer, written as it is scored.

    export(trainer, "dump")   # before trainer.train(); then `onepolicy audit dump`

TRL's own completions_NNNNN.parquet has text and rewards, no tokens and no log-probabilities.
`onepolicy.integrations.trl.attach(trainer, dump="dump")` writes the same rows with the routes of
both sides, and needs no forward of its own where TRL scores. Use one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.record.export import write_step
from onepolicy.record.trainers import TRAINERS

TRAINER = TRAINERS["trl"]


def export(trainer: Any, folder: Path | str) -> None:
    """Write a file for every later training generation of this process. Text models only.

    One more forward per generation computes the trainer's log-probabilities and entropy under its
    current weights, so that an audit can distinguish another temperature from mismatch. The first
    generation raises UsageError if it has no log-probabilities.
    """
    generate, dump = trainer._generate_and_score_completions, StepDump(trainer, folder)

    def generate_and_score(inputs: Any) -> dict[str, Any]:
        step = trainer.state.global_step
        generation: dict[str, Any] = generate(inputs)
        if trainer.model.training:
            rewards = dump.rewards(len(generation["completion_ids"]))
            dump.write(step, generation_rows(trainer, generation, step, rewards))
        return generation

    trainer._generate_and_score_completions = generate_and_score


class StepDump:
    """The dump of one process of a trainer, and the rewards that its rows hold."""

    def __init__(self, trainer: Any, folder: Path | str, *, replayed: bool = False) -> None:
        """Watch the trainer's rewards from now on. replayed: it scores with the engine's routes."""
        self._trainer, self._folder, self._replayed = trainer, folder, replayed
        self._rewards: Tensor | None = None  # the last ones, of all processes
        self._step = -1
        self._rows: list[dict[str, Any]] = []  # of this step so far
        reward = trainer._calculate_rewards

        def calculate_rewards(*args: Any, **kwargs: Any) -> Tensor:
            by_function: Tensor = reward(*args, **kwargs)
            weights = trainer.reward_weights.to(by_function.device)
            self._rewards = (by_function * weights).nansum(1)
            return by_function

        trainer._calculate_rewards = calculate_rewards

    def rewards(self, count: int) -> list[float]:
        """Return the rewards of this process's `count` samples."""
        assert self._rewards is not None, "TRL calculates rewards in every generation"
        rank = self._trainer.accelerator.process_index
        own: list[float] = self._rewards[rank * count : (rank + 1) * count].tolist()
        return own

    def write(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of a generation. Those of one optimiser step share a file."""
        if step != self._step:
            self._step, self._rows = step, []
        older = not self._rows  # a file of the step that is there is of a run before this one
        self._rows += rows
        if self._rows:
            processes = self._trainer.accelerator
            write_step(
                self._folder,
                step,
                self._rows,
                rank=processes.process_index,
                ranks=processes.num_processes,
                keep_older=older,
                framework="trl",
                replayed=self._replayed,
            )


@torch.no_grad()
def generation_rows(
    trainer: Any, generation: dict[str, Any], step: int, rewards: list[float]
) -> list[dict[str, Any]]:
    """Score a generation and return its rows. Raises UsageError without log-probabilities."""
    theirs = TRAINER.names["logp_rollout"]
    logp_rollout = generation.get(theirs)
    if logp_rollout is None:
        raise UsageError(f"TRL: no sampling log-probabilities; {TRAINER.fixes[theirs]}")
    ids, completion_mask = generation[TRAINER.names["tokens"]], generation[TRAINER.names["mask"]]
    logp_trainer, entropy = trainer._get_per_token_logps_and_entropies(
        trainer.model,
        torch.cat([generation["prompt_ids"], ids], 1),
        torch.cat([generation["prompt_mask"], completion_mask], 1),
        ids.shape[1],
        trainer.args.per_device_train_batch_size,
        compute_entropy=True,
    )[:2]
    columns = {"logp_rollout": logp_rollout, "logp_trainer": logp_trainer, "entropy": entropy}
    return response_rows(generation, columns, step, rewards)


def response_mask(generation: Mapping[str, Any]) -> Tensor:
    """Return [B, T] bool: the tokens that the policy sampled, without tool output and padding."""
    mask: Tensor = generation[TRAINER.names["mask"]].bool()
    tool_mask = generation.get("tool_mask")
    if tool_mask is not None:
        mask = mask & tool_mask.bool()
    return mask


def response_rows(
    generation: Mapping[str, Any],  # prompts padded left, completions right
    columns: Mapping[str, Tensor],  # [B, T] float32 each, by their names in the schema
    step: int,
    rewards: list[float],  # of the B samples
) -> list[dict[str, Any]]:
    """Return a row for each sample whose completion is not masked out altogether.

    TRL sets NaN for tokens that vLLM could not score. They stay in the mask: the audit leaves them
    out and counts them.
    """
    given = {"tokens": generation[TRAINER.names["tokens"]], "mask": response_mask(generation)}
    listed = {name: value.cpu().tolist() for name, value in {**given, **columns}.items()}
    lengths = generation[TRAINER.names["mask"]].sum(1).tolist()
    return [
        {name: value[i][:length] for name, value in listed.items()}
        | {"step": step, "reward": rewards[i]}
        for i, length in enumerate(lengths)
        if length
    ]
