"""Shards of the ranks on disk, written in the background.

The format is that of torch.distributed.checkpoint in safetensors. The header of each file holds the
place of every shard, so nothing is unpickled. Any number of ranks, or a process without ranks, can
read the files. Each reads the rows of its own shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onepolicy.config import TrainingError, UsageError
from onepolicy.train.optim import MasterAdamW
from onepolicy.train.state import SHARDS, CheckpointedLearner, optimizer_moments

MODEL, CRITIC, RNG = "model", "critic.", "rng"
"""Names: model/NAME, exp_avg/NAME, ... of the policy; critic.model/NAME, critic.exp_avg/NAME, ...
of the critic; rng."""
WEIGHTS_FILE, REST_FILE = 1, 2  # numbers of a rank's files

# Files are read without torch.distributed on purpose.
warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)


class PendingSave:
    """A save in the background. `wait` raises its errors."""

    def __init__(self, written: Future) -> None:
        self._done = written

    def then(self, work: Callable[[], None]) -> None:
        """Run `work` in the background too, after all ranks have written."""
        written = self._done

        def finish() -> None:
            written.result()
            work()

        pool = ThreadPoolExecutor(1, "onepolicy-checkpoint")
        self._done = pool.submit(finish)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the save is complete. Raises TrainingError if a rank could not write."""
        try:
            self._done.result()
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise TrainingError(
                f"checkpoint: rank {rank} could not write its shards: {cause}; complete "
                "checkpoints are kept, and `onepolicy train --resume RUN` continues from the newest"
            ) from error


def checkpoint_tensors(learner: CheckpointedLearner) -> dict[str, Tensor]:
    """Return all tensors that a rank saves. The random state is that of rank 0 only."""
    tensors = _model_tensors(learner.model) | optimizer_moments(learner.model, learner.optimizer)
    critic = learner.critic
    if critic is not None:
        of_critic = _model_tensors(critic.values) | optimizer_moments(
            critic.values, critic.optimizer
        )
        tensors |= {f"{CRITIC}{name}": tensor for name, tensor in of_critic.items()}
    if dist.get_rank() == 0:
        tensors[RNG] = torch.get_rng_state()
    return tensors


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters, and buffers that belong to the state dict. Tied ones appear once."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    tensors = dict(model.named_parameters()) | buffers
    return {f"{MODEL}/{name}": tensor.detach() for name, tensor in tensors.items()}


def start_saving(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> PendingSave:
    """Copy the tensors, and write the copies of all ranks into one folder in the background.

    group: a process group that is used for saving only.
    """
    files = {}
    for name in tensors:
        files[name] = REST_FILE
        if name.startswith(f"{MODEL}/"):
            files[name] = WEIGHTS_FILE
    writer = HuggingFaceStorageWriter(
        str(folder / SHARDS), fqn_to_index_mapping=files, save_distributed=True
    )
    future = dcp.async_save(tensors, storage_writer=writer, process_group=group)
    assert isinstance(future, Future)
    return PendingSave(future)


class _Moment(NamedTuple):
    """An optimiser moment of a parameter, to be read from the shards."""

    full_name: str
    kind: str
    optimizer: MasterAdamW
    parameter: nn.Parameter

    def empty(self) -> Tensor:
        """Return a tensor to read the moment into."""
        if self.kind == "step":
            return torch.zeros((), device=self.parameter.device)
        return self.optimizer.empty_state(self.parameter.detach())


def restore(folder: Path, learner: CheckpointedLearner) -> None:
    """Read moments, critic and, on the driver, random state into the learner, sharded or not.

    The policy's weights are loaded elsewhere. A fork without the parent's critic ignores it.
    """
    names = list(tensor_sizes(folder))
    policy_names = [name for name in names if name != RNG and not name.startswith(CRITIC)]
    moments = _moments(policy_names, learner.model, learner.optimizer, folder)
    wanted: dict[str, Any] = {}
    critic = learner.critic
    if critic is not None:
        critic_names = [name for name in names if name.startswith(CRITIC)]
        moments += _moments(critic_names, critic.values, critic.optimizer, folder)
        wanted |= _critic_weights(critic_names, critic.values, folder)
    wanted |= {moment.full_name: moment.empty() for moment in moments}
    if RNG in names:
        wanted[RNG] = torch.get_rng_state()
    read_tensors(folder, wanted)
    for moment in moments:
        moment.optimizer.put_state(moment.parameter, moment.kind, wanted[moment.full_name])
    if RNG in wanted:
        torch.set_rng_state(wanted[RNG])


def _moments(
    names: list[str], model: nn.Module, optimizer: MasterAdamW, folder: Path
) -> list[_Moment]:
    parameters = dict(model.named_parameters())
    moments = []
    for full_name in names:
        kind, _, name = full_name.removeprefix(CRITIC).partition("/")
        if kind != MODEL:
            parameter = _lookup(parameters, name, folder)
            moments.append(_Moment(full_name, kind, optimizer, parameter))
    return moments


def _critic_weights(names: list[str], values: nn.Module, folder: Path) -> dict[str, Tensor]:
    """Return the critic's own tensors, which are then filled in place."""
    state = values.state_dict()
    prefix = f"{CRITIC}{MODEL}/"
    return {
        name: _lookup(state, name.removeprefix(prefix), folder)
        for name in names
        if name.startswith(prefix)
    }


def tensor_sizes(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return shape and dtype of every whole tensor."""
    found = HuggingFaceStorageReader(str(folder / SHARDS)).read_metadata().state_dict_metadata
    return {
        name: about for name, about in found.items() if isinstance(about, TensorStorageMetadata)
    }


def read_tensors(folder: Path, wanted: dict[str, Any]) -> None:
    """Fill these tensors, or this rank's shards of them."""
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)), no_dist=True)


def _lookup(tensors: dict[str, Any], name: str, folder: Path) -> Any:
    if name not in tensors:
        raise UsageError(
            f"{folder / SHARDS}: optimiser state for {name}, which the model does not have"
        )
    return tensors[name]
