"""Restoring of a learner from a checkpoint: optimiser moments, RNG, counters and critic."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from onepolicy.config import UsageError
from onepolicy.train import checkpoint
from onepolicy.train.optim import MASTER, MasterAdamW
from onepolicy.train.state import SHARDS, CheckpointedLearner, sharded_like


def restore_optimizer(folder: Path, learner: CheckpointedLearner) -> None:
    """Restore optimiser moments, RNG and counters as they were when the checkpoint was written.

    The critic's weights are restored too. The policy's weights are loaded elsewhere. A fork of a
    run without a critic starts with a new one.
    """
    if (folder / SHARDS).is_dir():
        from onepolicy.train.sharded import shards

        shards.restore(folder, learner)
    else:
        _restore_files(folder, learner)
    state = checkpoint.read_state(folder)
    learner.version = state["step"]
    learner.updates = state["updates"]
    learner.skipped = state.get("skipped", 0)


def _restore_files(folder: Path, learner: CheckpointedLearner) -> None:
    tensors = load_file(folder / checkpoint.OPTIMIZER)
    torch.set_rng_state(tensors.pop("rng"))
    _restore_moments(tensors, learner.model, learner.optimizer, folder / checkpoint.OPTIMIZER)
    critic = learner.critic
    if critic is not None and (folder / checkpoint.CRITIC).is_file():
        critic.load(load_file(folder / checkpoint.CRITIC), str(folder / checkpoint.CRITIC))
        path = folder / checkpoint.CRITIC_OPTIMIZER
        _restore_moments(load_file(path), critic.values, critic.optimizer, path)


def _restore_moments(
    tensors: dict[str, Tensor], model: nn.Module, optimizer: MasterAdamW, path: Path
) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        key, _, name = full_name.partition("/")
        if name not in parameters:
            raise UsageError(f"{path}: optimiser state for {name}, which the model does not have")
        parameter = parameters[name]
        if key == MASTER and parameter.dtype == torch.float32:  # a fork may change model.dtype
            continue
        if key != "step":
            value = sharded_like(parameter, value)
        optimizer.put_state(parameter, key, value)
