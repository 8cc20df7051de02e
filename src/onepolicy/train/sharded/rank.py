"""One rank of a sharded learner: it handles commands on its own samples and its own shards.

`RankLearner.handle` takes a message and returns the answer. It does not depend on how messages
travel (gloo here). Ranks meet in FSDP2's collectives, so all of them must handle the same
commands in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import RunConfig
from onepolicy.correct.report import Sums
from onepolicy.replay.checks import MisalignedRoutesError
from onepolicy.replay.routers import Routers
from onepolicy.support.checks import SupportError
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import Batcher, MicroBatches
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.sharded import shards
from onepolicy.train.sharded.fsdp import gather_full_tensor
from onepolicy.train.sharded.wire import Message, batch_from_message
from onepolicy.train.update_parts import Measured
from onepolicy.types import TokenBatch

SCORED = (
    "logp_old",
    "entropy",
    "gate_mass",
    "routers_differing",
    "entropy_vocabulary",
    "logp_vocabulary",
    "displaced",
    "top_logp_old",
    "trainer_top_ids",
    "trainer_top_logp",
    "logp_ref",
    "value",
)
"""[T, ...] fields that scoring fills, beside routing_native."""
NATIVE = "routing_native"
REPLACED = "replaced"  # [forwards, L], of soft replay
CORRECTION = "current_policy."  # prefix of the correction's sums
SUM_FIELDS = tuple(field.name for field in dataclasses.fields(Sums))


class RankBatcher(Batcher):
    """The micro-batches that the driver assigned to this rank."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, device: torch.device) -> None:
        super().__init__(model, config, device)
        self.rounds: MicroBatches = []  # of the current command

    def micro_batches(self, batch: TokenBatch) -> MicroBatches:
        return self.rounds


class RankScorer(PolicyScorer):
    """The scorer of one rank's samples, in the micro-batches that the driver assigned."""

    def __init__(
        self, model: PreTrainedModel, config: RunConfig, *, routers: Routers | None
    ) -> None:
        super().__init__(model, config, routers=routers)
        self.batcher: RankBatcher = RankBatcher(model, config, self.device)
        self.samples: list[int] = []  # places of the batch's samples in the whole batch

    def check_scored(self, scored: TokenBatch) -> TokenBatch:
        try:
            return super().check_scored(scored)
        except MisalignedRoutesError as error:
            raise MisalignedRoutesError(
                f"{error}. {self._places()}", layers_wrong=error.layers_wrong
            ) from error
        except SupportError as error:
            raise SupportError(f"{error}. {self._places()}") from error

    def _places(self) -> str:
        places = ", ".join(map(str, self.samples))
        return f"Samples are counted among this rank's, which are {places} of the batch"


class RankLearner(LocalLearner):
    """The learner of one rank: a LocalLearner with sharded models (`fsdp.FSDPSharding`)."""

    scorer: RankScorer

    def __init__(self, scorer: RankScorer, *, like: PreTrainedModel, **kwargs: Any) -> None:
        """Build the learner.

        like: the model on the meta device. Checkpoints are written with its names and its config.
        """
        super().__init__(scorer, **kwargs)
        self.like = like
        timeout = timedelta(seconds=scorer.config.train.rank_timeout)
        self._save_group = dist.new_group(backend="gloo", timeout=timeout)
        self.pending_save: shards.PendingSave | None = None

    def handle(self, message: Message) -> Message:
        """Handle a command of the driver and return the answer.

        The header's field `do` names the command. The others are its arguments.
        """
        command = message.header
        self.scorer.batcher.rounds = command.get("rounds", [])
        self.scorer.samples = command.get("samples", [])
        self.version = command.get("version", self.version)
        match command["do"]:
            case "score":
                return reply_with_scores(
                    self._score_as(command["how"], batch_from_message(message))
                )
            case "optimise":
                return self._train_on(batch_from_message(message), command)
            case "logits":
                micro = batch_from_message(message).to(self.scorer.device)
                self.scorer.logits(micro, micro.trainable.nonzero()[:, 0])
            case "weights":
                for _ in self.named_weights(command["dtype"]):
                    pass
            case "save":
                self.start_saving(Path(command["folder"]))
            case "restore":
                self.restore(Path(command["folder"]))
            case unknown:
                raise AssertionError(f"no such command: {unknown}")
        return Message({})

    def named_weights(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield the weights one at a time, cast and then gathered on every rank."""
        for name, tensor in self.scorer.named_weights(dtype):
            yield name, gather_full_tensor(tensor)

    def _optimizer_step(self, minibatch: int) -> float:
        if self.adapter is not None:
            sum_gradients(self.model)
        return super()._optimizer_step(minibatch)

    def start_saving(self, folder: Path) -> shards.PendingSave:
        """Start to write the shards in the background.

        Once this returns, the weights may change.
        """
        if self.pending_save is not None:
            self.pending_save.wait()
        tensors = shards.checkpoint_tensors(self)
        self.pending_save = shards.start_saving(folder, tensors, self._save_group)
        return self.pending_save

    def _score_as(self, how: str, batch: TokenBatch) -> TokenBatch:
        """Score the batch.

        how = score: like `Learner.score`. again: with the policy alone, with replay. native: with
        the policy alone, without replay.
        """
        match how:
            case "score":
                return self._fill_scores(batch)
            case "again":
                return self.scorer.score(batch)
            case "native":
                return self.scorer.score(batch, replay=False)
        raise AssertionError(how)

    def _train_on(self, batch: TokenBatch, command: dict[str, Any]) -> Message:
        """Make one optimiser step. The driver adds up the answers of all ranks."""
        measured = Measured()
        norm = self._train_minibatch(batch, command["slots"], command["minibatch"], measured)
        tensors: dict[str, Tensor] = {}
        if measured.scored is not None:
            tensors |= reply_with_scores(measured.scored).tensors
        if measured.replaced:
            tensors[REPLACED] = torch.stack(measured.replaced).cpu()
        if measured.correction is not None:
            sums = measured.correction
            tensors |= {f"{CORRECTION}{n}": getattr(sums, n).cpu() for n in SUM_FIELDS}
        reply = {"norm": norm, "sums": dict(measured.sums), "seconds": measured.seconds}
        return Message(reply, tensors)


def reply_with_scores(scored: TokenBatch) -> Message:
    """Return a message with the fields that scoring has filled."""
    fields = {name: getattr(scored, name) for name in SCORED}
    tensors = {name: value for name, value in fields.items() if value is not None}
    if scored.routing_native is not None:
        tensors[NATIVE] = scored.routing_native.ids
    return Message({}, tensors)


def sum_gradients(model: nn.Module) -> None:
    """Add up the gradients of all trainable parameters over the ranks, in float32.

    They are summed and not averaged, as FSDP2's are here, because the loss weight of a slot is that
    of the whole minibatch. A parameter that no rank has a gradient of keeps none.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    present = torch.tensor([float(p.grad is not None) for p in trained], device=trained[0].device)
    flat = [present]
    for parameter in trained:
        grad = parameter.grad
        if grad is None:
            grad = torch.zeros_like(parameter)
        flat.append(grad.float().flatten())
    summed = torch.cat(flat)
    dist.all_reduce(summed)
    counts, *gradients = summed.split([each.numel() for each in flat])
    for parameter, count, grad in zip(trained, counts.tolist(), gradients, strict=True):
        if count:
            parameter.grad = grad.view_as(parameter).to(parameter.dtype)
