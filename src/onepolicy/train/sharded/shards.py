"""What the ranks keep, as shards on disk: torch.distributed.checkpoint in its safetensors format, in the background.

Reading takes any number of ranks, or none, whatever wrote the files; each reads the rows of its own shards. The files
are safetensors with the place of every shard in their header: nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from onepolicy.config import TrainingError, UsageError
from onepolicy.train.state import SHARDS, CheckpointedLearner, optimizer_moments

MODEL, CRITIC, RNG = "model", "critic.", "rng"
"""Names: model/NAME, exp_avg/NAME, ... of the policy; critic.model/NAME, critic.exp_avg/NAME, ...; rng."""
WEIGHTS, REST = 1, 2  # numbers of a rank's files

warnings.filterwarnings(
    "ignore", message="torch.distributed is disabled, unavailable or uninitialized"
)  # we know


class PendingSave:
    """A save in the background. Errors come out of `wait`."""

    def __init__(self, written: Future) -> None:
        self._done = written

    def then(self, work: Callable[[], None]) -> None:
        """Do this too, after all ranks have written."""
        written = self._done

        def finish() -> None:
            written.result()
            work()

        pool = ThreadPoolExecutor(1, "onepolicy-checkpoint")
        self._done = pool.submit(finish)
        pool.shutdown(wait=False)

    def wait(self) -> None:
        try:
            self._done.result()
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise TrainingError(
                f"checkpoint: rank {rank} could not write its shards: {cause}; what was complete is kept, and "
                "`onepolicy train --resume RUN` continues from it"
            ) from error


def tensors_of(learner: CheckpointedLearner) -> dict:
    """Everything a rank keeps; the random state of rank 0 only."""
    found = _named(learner.model) | optimizer_moments(learner.model, learner.optimizer)
    if (critic := learner.critic) is not None:
        own = _named(critic.values) | optimizer_moments(critic.values, critic.optimizer)
        found |= {f"{CRITIC}{name}": tensor for name, tensor in own.items()}
    return found | ({RNG: torch.get_rng_state()} if dist.get_rank() == 0 else {})


def _named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and buffers that belong to the state dict; of tied ones, one."""
    kept = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    return {
        f"{MODEL}/{name}": t.detach()
        for name, t in (dict(model.named_parameters()) | buffers).items()
    }


def start_saving(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup) -> PendingSave:
    """Copies the tensors and writes the copies, all ranks into one folder. group: for this alone."""
    files = {name: WEIGHTS if name.startswith(f"{MODEL}/") else REST for name in tensors}
    writer = HuggingFaceStorageWriter(
        str(folder / SHARDS), fqn_to_index_mapping=files, save_distributed=True
    )
    future = dcp.async_save(tensors, storage_writer=writer, process_group=group)
    assert isinstance(future, Future)
    return PendingSave(future)


def restore(folder: Path, learner: CheckpointedLearner) -> None:
    """Moments, critic and (on the driver) random state into `learner`, sharded or not. Weights are loaded elsewhere."""
    sizes = sizes_in(folder)
    critic = learner.critic
    policy: tuple[dict, torch.optim.Optimizer] = (
        dict(learner.model.named_parameters()),
        learner.optimizer,
    )
    own = policy if critic is None else (dict(critic.values.named_parameters()), critic.optimizer)
    wanted: dict[str, Any] = {}
    states: list[tuple[torch.optim.Optimizer, nn.Parameter, str, str]] = []
    for full in sizes:
        of_critic = full.startswith(CRITIC)
        kind, _, name = full.removeprefix(CRITIC).partition("/")
        if full == RNG:
            wanted[RNG] = torch.get_rng_state()
        elif of_critic and critic is None:
            continue  # a fork without the parent's critic
        elif kind == MODEL and of_critic:
            assert critic is not None
            wanted[full] = _known(critic.values.state_dict(), name, folder)
        elif kind != MODEL:
            parameters, optimizer = own if of_critic else policy
            parameter = _known(parameters, name, folder)
            like = parameter.detach()
            step = torch.zeros((), device=like.device)
            wanted[full] = step if kind == "step" else torch.empty_like(like, dtype=torch.float32)
            states.append((optimizer, parameter, kind, full))
    read(folder, wanted)
    for optimizer, parameter, kind, full in states:
        optimizer.state[parameter][kind] = wanted[full]
    if RNG in wanted:
        torch.set_rng_state(wanted[RNG])


def sizes_in(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every whole tensor."""
    found = HuggingFaceStorageReader(str(folder / SHARDS)).read_metadata().state_dict_metadata
    return {
        name: about for name, about in found.items() if isinstance(about, TensorStorageMetadata)
    }


def read(folder: Path, wanted: dict[str, Any]) -> None:
    """Fill these tensors, or this rank's shards of them."""
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder / SHARDS)), no_dist=True)


def _known(tensors: dict[str, Any], name: str, folder: Path) -> Any:
    if name not in tensors:
        raise UsageError(
            f"{folder / SHARDS}: optimiser state for {name}, which the model does not have"
        )
    return tensors[name]
