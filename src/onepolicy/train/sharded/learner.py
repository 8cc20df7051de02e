"""The learner on several ranks, as the driver (rank 0) runs it.

The driver sends every rank its samples and merges the answers. Everything per slot that needs the
samples of all ranks happens here, on the whole batch: loss weights, metrics. Another rank receives
only its own samples, with their routes, and checks these.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import R2, RunConfig, TrainingError
from onepolicy.correct.report import Sums, combine
from onepolicy.interfaces import Update
from onepolicy.replay.routers import Routers
from onepolicy.train.checks import check_batch
from onepolicy.train.pack import micro_batches
from onepolicy.train.sharded.divide import RankBatch, divide_batch
from onepolicy.train.sharded.export import export_model
from onepolicy.train.sharded.rank import (
    CORRECTION,
    NATIVE,
    REPLACED,
    SCORED,
    SUM_FIELDS,
    RankLearner,
)
from onepolicy.train.sharded.ranks import Ranks
from onepolicy.train.sharded.wire import Message, batch_message
from onepolicy.train.update_parts import Measured
from onepolicy.types import RoutingTrace, TokenBatch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
    from onepolicy.train.lora import Adapter


class RankDispatcher:
    """A dispatcher of commands to all ranks, the driver's own included, at the same time."""

    def __init__(self, rank_0: RankLearner, other_ranks: Ranks) -> None:
        self.rank_0, self.other_ranks = rank_0, other_ranks

    def divide(self, batch: TokenBatch) -> list[RankBatch]:
        """Divide the batch over the ranks."""
        scorer, ranks = self.rank_0.scorer, self.other_ranks.world_size
        budget = scorer.config.train.tokens_per_micro_batch
        return divide_batch(batch, budget, ranks, share=scorer.batcher.shares_prompts)

    def run_on_batches(
        self, command: str, batches: list[RankBatch], about: dict[str, Any]
    ) -> list[Message]:
        """Run a command on each rank's batch. Return the answers in the order of the ranks.

        about: more fields of the command.
        """
        messages = [
            batch_message(
                {"do": command, "rounds": each.rounds, "samples": each.samples, **about}, each.batch
            )
            for each in batches
        ]
        self.other_ranks.send(messages[1:])
        with self.other_ranks.attribute_failures():
            answer = self.rank_0.handle(messages[0])
            return [answer, *self.other_ranks.recv()]

    def run_on_folder(self, command: str, folder: Path) -> None:
        """Run a command about a checkpoint's folder."""
        message = Message({"do": command, "folder": str(folder)})
        self.other_ranks.broadcast(message)
        with self.other_ranks.attribute_failures():
            self.rank_0.handle(message)
            self.other_ranks.recv()

    def score(self, batch: TokenBatch, how: str) -> TokenBatch:
        """Score the batch. how: see `RankLearner._score_as`."""
        batches = self.divide(batch)
        about = {"how": how, "version": self.rank_0.version}
        answers = self.run_on_batches("score", batches, about)
        return self.merge_scores(batch, batches, answers)

    def merge_scores(
        self, batch: TokenBatch, batches: list[RankBatch], answers: list[Message]
    ) -> TokenBatch:
        """Return the whole batch with the scores of all ranks."""
        merged: dict[str, Tensor] = {}
        for of_rank, answer in zip(batches, answers, strict=True):
            slots = torch.zeros(0, dtype=torch.int64)
            if of_rank.samples:
                slots = batch.slots_of(of_rank.samples)
            for name in {*SCORED, NATIVE} & answer.tensors.keys():
                rows = answer.tensors[name][: len(slots)]  # those of a dummy sample come last
                if name not in merged:
                    merged[name] = rows.new_empty(batch.num_slots, *rows.shape[1:])
                merged[name][slots] = rows
        # without replay the ranks return neither, and those of an earlier scoring are outdated
        batch = batch.replace(gate_mass=None, routers_differing=None)
        native, routers = merged.pop(NATIVE, None), self.rank_0.routers
        if native is not None and routers is not None:
            valid = torch.ones(len(native), dtype=torch.bool)
            trace = RoutingTrace(native, valid, routers.layers, routers.num_experts)
            batch = batch.replace(routing_native=trace)
        return batch.replace(**merged)


class ShardedScorer:
    """The Scorer of a run on several ranks."""

    def __init__(self, dispatcher: RankDispatcher) -> None:
        self._dispatcher, self._scorer = dispatcher, dispatcher.rank_0.scorer
        self.fingerprint, self.vocab_size = self._scorer.fingerprint, self._scorer.vocab_size
        self.contract, self.device = self._scorer.contract, self._scorer.device
        self.routers = self._scorer.routers

    @property
    def version(self) -> int:
        return self._scorer.version

    def score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        """Score like `PolicyScorer.score`."""
        if not replay:
            return self._dispatcher.score(batch, "native")
        return self._dispatcher.score(batch, "again")

    def micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        return micro_batches(batch, self._scorer.config.train.tokens_per_micro_batch)

    def routing_context(
        self, micro: TokenBatch, *, native: bool
    ) -> AbstractContextManager[RouteRecorder | ReplayHandle | None]:
        """Return a context in which rank 0 replays routes. The other ranks' logits are dropped."""
        return self._scorer.routing_context(micro, native=native)

    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        """Return logits like `PolicyScorer.logits`. All ranks compute them together.

        They are those of rank 0's adapter and routes: the others only help to gather weights.
        """
        other_ranks = self._dispatcher.other_ranks
        other_ranks.broadcast(batch_message({"do": "logits"}, micro))
        with other_ranks.attribute_failures():
            logits = self._scorer.logits(micro, slots)
            other_ranks.recv()
        return logits


class ShardedLearner:
    """The Learner of a run on several ranks."""

    def __init__(self, rank_0: RankLearner, other_ranks: Ranks) -> None:
        self.rank_0, self.dispatcher = rank_0, RankDispatcher(rank_0, other_ranks)
        self.scorer = ShardedScorer(self.dispatcher)
        self.fingerprint = rank_0.fingerprint

    @property
    def config(self) -> RunConfig:
        return self.rank_0.config

    @property
    def model(self) -> PreTrainedModel:
        """The model of rank 0: its shards, and all of an adapter."""
        return self.rank_0.model

    @property
    def adapter(self) -> Adapter | None:
        return self.rank_0.adapter

    @property
    def routers(self) -> Routers | None:
        return self.rank_0.routers

    @property
    def version(self) -> int:
        return self.rank_0.version

    @property
    def updates(self) -> int:
        return self.rank_0.updates

    @property
    def skipped(self) -> int:
        return self.rank_0.skipped

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Fill the fields that the update needs from models: see `interfaces.Learner.score`."""
        check_batch(batch, self.scorer.vocab_size, narrows=self.config.rollout.sampling.narrows)
        return self.dispatcher.score(batch, "score")

    def step(self, batch: TokenBatch) -> Update:
        """Train on a scored batch, one optimiser step per minibatch, like `LocalLearner.step`."""
        rank_0 = self.rank_0
        measured = Measured()
        norms: list[float] = []
        for index, minibatch in enumerate(rank_0.minibatches(batch)):
            batches = self.dispatcher.divide(self._for_update(minibatch))
            about = {"minibatch": index, "slots": minibatch.num_trainable, "version": self.version}
            answers = self.dispatcher.run_on_batches("optimise", batches, about)
            _add_answers(measured, answers)
            norms.append(answers[0].header["norm"])
            if index == 0 and not self.config.scores_old:
                measured.scored = self.dispatcher.merge_scores(minibatch, batches, answers)
        rank_0.version += 1
        return Update(rank_0.metrics(batch, measured, norms), measured.scored)

    def _for_update(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch without the fields that an update does not read."""
        unread = {
            "entropy",
            "entropy_vocabulary",
            "logp_vocabulary",
            "displaced",
            "routers_differing",
            "trainer_top_ids",
            "trainer_top_logp",
            "top_logp_old",
        }
        if not isinstance(self.config.replay, R2):  # r2 replays the trainer's own routes
            unread.add("routing_native")
        return batch.replace(**dict.fromkeys(unread))

    def named_weights(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield one tensor at a time. Each is cast, then gathered when it is asked for."""
        other_ranks = self.dispatcher.other_ranks
        other_ranks.broadcast(Message({"do": "weights", "dtype": dtype}))
        gathered = self.rank_0.named_weights(dtype)
        try:
            # `yield from` would close the generator if the caller stops early
            for item in gathered:  # noqa: UP028
                yield item
        finally:
            with other_ranks.attribute_failures():
                for _ in gathered:  # the other ranks gather all tensors, so rank 0 must too
                    pass
                other_ranks.recv()

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Write the checkpoint into `folder` in the background, then call `finish` there.

        Every rank has the whole adapter and its optimiser, so rank 0 writes them at once.
        """
        if self.adapter is not None:
            self.rank_0.save(folder, finish)
            return
        self.dispatcher.run_on_folder("save", folder)
        assert self.rank_0.pending_save is not None
        self.rank_0.pending_save.then(partial(self._export, folder, finish))

    def finish_saving(self) -> None:
        """Wait until a checkpoint that is being written is complete."""
        if self.rank_0.pending_save is not None:
            self.rank_0.pending_save.wait()
            self.rank_0.pending_save = None

    def restore(self, folder: Path) -> None:
        """Restore a checkpoint, except for the policy's weights. An adapter is restored."""
        self.dispatcher.run_on_folder("restore", folder)

    def _export(self, folder: Path, finish: Callable[[], None]) -> None:
        export_model(folder, self.rank_0.like)
        finish()


def _add_answers(measured: Measured, answers: Sequence[Message]) -> None:
    """Add the measurements of all ranks in a minibatch, from `RankLearner._train_on`."""
    corrections = []
    for answer in answers:
        measured.sums.update(answer.header["sums"])
        for row in answer.tensors.get(REPLACED, ()):
            if row.isfinite().all():  # NaN where a micro-batch had no routes
                measured.replaced.append(row)
        if f"{CORRECTION}{SUM_FIELDS[0]}" in answer.tensors:
            corrections.append(_correction_sums(answer.tensors))
    measured.seconds += max(answer.header["seconds"] for answer in answers)
    if corrections:
        measured.add_correction(combine(corrections))


def _correction_sums(tensors: dict[str, Tensor]) -> Sums:
    missing = [name for name in SUM_FIELDS if f"{CORRECTION}{name}" not in tensors]
    if missing:
        raise TrainingError(f"a rank's answer is malformed: its sums lack {missing[0]}")
    return Sums(**{name: tensors[f"{CORRECTION}{name}"] for name in SUM_FIELDS})
