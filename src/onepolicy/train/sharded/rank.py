"""What one rank does: its share of every command, on its own samples and its own shards.

`RankLearner.handle` takes a message and answers with one; who carries them (sockets here) does not matter to it. Ranks
meet in FSDP2's collectives, so all of them must be given the same commands in the same order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from pydantic import ConfigDict, Field, NonNegativeInt
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import TypedDict

from onepolicy.config import RunConfig
from onepolicy.replay.routers import Routers
from onepolicy.sync.messages import validate_message
from onepolicy.train.learner import LocalLearner
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.sharded import shards
from onepolicy.train.sharded.fsdp import whole
from onepolicy.train.sharded.wire import Message, batch_from_message
from onepolicy.types import TokenBatch

SCORED = (
    "logp_old",
    "entropy",
    "gate_mass",
    "top_logp_old",
    "trainer_top_ids",
    "trainer_top_logp",
    "logp_ref",
    "value",
)
"""[T, ...] fields that scoring fills, beside routing_native."""
NATIVE = "routing_native"
REPLACED = "replaced"  # [forwards, L], of soft replay


class Batched(TypedDict):
    """A command with a batch."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    traces: dict[str, Any]


class Score(Batched):
    do: Literal["score"]
    how: Literal["score", "again", "native"]
    rounds: list[list[NonNegativeInt]]


class Optimise(Batched):
    do: Literal["optimise"]
    rounds: list[list[NonNegativeInt]]
    minibatch: int
    slots: int
    version: int


class Logits(Batched):
    do: Literal["logits"]


class Weights(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    do: Literal["weights"]


class Files(TypedDict):
    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    do: Literal["save", "restore"]
    folder: str


Command: TypeAlias = Annotated[
    Score | Optimise | Logits | Weights | Files, Field(discriminator="do")
]


class UpdateReply(TypedDict):
    """A rank's answer to `optimise`."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    norm: float
    sums: dict[str, float]
    seconds: float


class RankScorer(PolicyScorer):
    """Of one rank's own samples, in the micro-batches that the driver dealt it."""

    def __init__(
        self, model: PreTrainedModel, config: RunConfig, *, routers: Routers | None
    ) -> None:
        super().__init__(model, config, routers=routers)
        self.rounds: list[list[int]] = []  # micro-batches of the command at hand

    def micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        return self.rounds

    def checked(self, scored: TokenBatch) -> TokenBatch:
        return scored  # by the driver, on the whole batch


class RankLearner(LocalLearner):
    """The learner of one rank: models of a LocalLearner, sharded (`fsdp.FSDPSharding`)."""

    scorer: RankScorer

    def __init__(self, scorer: RankScorer, *, like: PreTrainedModel, **kwargs: Any) -> None:
        """like: the model on the meta device, for the names and the config that a checkpoint is written with."""
        super().__init__(scorer, **kwargs)
        self.like = like
        timeout = timedelta(seconds=scorer.config.train.rank_timeout)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self.saving: shards.PendingSave | None = None

    def handle(self, message: Message) -> Message:
        about = validate_message(Command, message.header, "the driver's command")
        self.scorer.rounds = about.get("rounds", [])
        match about["do"]:
            case "score":
                return answer_of(self._score_as(about["how"], batch_from_message(message)))
            case "optimise":
                return self._update_on(batch_from_message(message), about)
            case "logits":
                micro = batch_from_message(message).to(self.scorer.device)
                self.scorer.logits(micro, micro.trainable.nonzero()[:, 0])
            case "weights":
                for _ in self.named_weights():
                    pass
            case "save":
                self.start_saving(Path(about["folder"]))
            case "restore":
                self.restore(Path(about["folder"]))
            case other:
                raise AssertionError(f"no such command: {other}")
        return Message({})

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Gathered one at a time, on every rank."""
        for name, tensor in self.model.state_dict().items():
            yield name, whole(tensor)

    def start_saving(self, folder: Path) -> shards.PendingSave:
        """Once this returns the weights may change; the files are written in the background."""
        if self.saving is not None:
            self.saving.wait()
        tensors = shards.tensors_of(self)
        self.saving = shards.start_saving(folder, tensors, self._group)
        return self.saving

    def _score_as(self, how: str, batch: TokenBatch) -> TokenBatch:
        match how:
            case "score":
                return self._fill(batch)
            case "again":
                return self.scorer.fill(batch, replay=True)
            case "native":
                return self.scorer.fill(batch, replay=False)
        raise AssertionError(how)

    def _update_on(self, batch: TokenBatch, about: dict[str, Any]) -> Message:
        """One optimiser step. Answers with what the driver adds up over the ranks."""
        self.version = about["version"]
        first = about["minibatch"] == 0
        if first:
            self.scoring.begin()
        self.scoring.seconds = 0.0
        sums: Counter[str] = Counter()
        norm = self._optimise(batch, about["slots"], about["minibatch"], sums)
        answer = Message({})
        if first and self.scoring.scored is not None:
            answer = answer_of(self.scoring.scored)
        tensors = dict(answer.tensors)
        if replaced := self.scorer.mode.take():
            tensors[REPLACED] = torch.stack(replaced).cpu()
        for extension in self.extensions:
            tensors |= extension.take()
        return Message({"norm": norm, "sums": dict(sums), "seconds": self.scoring.seconds}, tensors)


def answer_of(scored: TokenBatch) -> Message:
    tensors = {name: value for name in SCORED if (value := getattr(scored, name)) is not None}
    if scored.routing_native is not None:
        tensors[NATIVE] = scored.routing_native.ids
    return Message({}, tensors)
