"""The learner of a run on several ranks: every rank has one, with its shards.

All ranks make the same calls with the same batch. Each divides the batch by the same rule and
computes its own micro-batches; scores and sums are then those of all. So everything else runs as in
one process. Rank 0 announces its calls (`Ranks.everywhere`), and the others repeat them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from onepolicy.config import R2, RunConfig
from onepolicy.correct.report import Sums, combine
from onepolicy.interfaces import Update
from onepolicy.replay.routers import Routers
from onepolicy.train.learner import LocalLearner
from onepolicy.train.pack import Batcher, MicroBatches, micro_batches
from onepolicy.train.scorer import PolicyScorer, ScoreBuffer
from onepolicy.train.sharded import shards
from onepolicy.train.sharded.divide import assign_micro_batches, idle_batch
from onepolicy.train.sharded.export import export_model
from onepolicy.train.sharded.fsdp import gather_full_tensor
from onepolicy.train.sharded.ranks import Call, Ranks
from onepolicy.train.update_parts import Measured
from onepolicy.types import TokenBatch

SUM_FIELDS = tuple(field.name for field in dataclasses.fields(Sums))


class RankBatcher(Batcher):
    """The micro-batches of a rank. One without samples is a sample without effect.

    FSDP2 gathers parameters on all ranks at once, so every rank has the same number.
    """

    def __init__(
        self, model: PreTrainedModel, config: RunConfig, device: torch.device, ranks: Ranks
    ) -> None:
        super().__init__(model, config, device)
        self.rank, self.world_size = ranks.rank, ranks.world_size
        self._divided: TokenBatch | None = None
        self._micro_batches: MicroBatches = []  # of `_divided`

    def micro_batches(self, batch: TokenBatch) -> MicroBatches:
        if batch is not self._divided:
            share = self.shares_prompts
            of_ranks = assign_micro_batches(batch, self.budget, self.world_size, share=share)
            self._divided, self._micro_batches = batch, of_ranks[self.rank]
        return self._micro_batches

    def micro_batch(self, batch: TokenBatch, samples: list[int]) -> TokenBatch:
        if not samples:
            return super().micro_batch(idle_batch(batch), [0])
        return super().micro_batch(batch, samples)


class RankScorer(PolicyScorer):
    """The scorer of every rank. What it returns is scored by all ranks together."""

    def __init__(
        self, model: PreTrainedModel, config: RunConfig, *, routers: Routers | None, ranks: Ranks
    ) -> None:
        super().__init__(model, config, routers=routers)
        self.ranks = ranks
        self.batcher: RankBatcher = RankBatcher(model, config, self.device, ranks)

    def micro_batches(self, batch: TokenBatch) -> MicroBatches:
        """Return the samples of each forward of the whole batch: all ranks compute `logits`."""
        return micro_batches(batch, self.batcher.budget)

    def score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        with self.ranks.everywhere("rescore", batch, replay=replay):
            return super().score(batch, replay=replay)

    def fill_batch(self, buffer: ScoreBuffer) -> TokenBatch:
        self.ranks.join_rows(buffer.rows)
        return super().fill_batch(buffer)

    def compute_per_slot(self, batch: TokenBatch, values: Callable[[TokenBatch], Tensor]) -> Tensor:
        found = super().compute_per_slot(batch, values)
        self.ranks.join_rows({"values": found})
        return found

    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        """Return logits like `PolicyScorer.logits`.

        They are those of rank 0's adapter and routes: the others only help to gather weights.
        """
        with self.ranks.everywhere("logits", micro, slots=slots.tolist()):
            return super().logits(micro, slots)


class RankLearner(LocalLearner):
    """A LocalLearner with sharded models (`fsdp.FSDPSharding`), on every rank."""

    scorer: RankScorer

    def __init__(self, scorer: RankScorer, *, like: PreTrainedModel, **kwargs: Any) -> None:
        """Build the learner.

        like: the model on the meta device. Checkpoints are written with its names and its config.
        """
        super().__init__(scorer, **kwargs)
        self.like, self.ranks = like, scorer.ranks
        timeout = timedelta(seconds=scorer.config.train.rank_timeout)
        self._save_group = dist.new_group(backend="gloo", timeout=timeout)
        self.pending_save: shards.PendingSave | None = None

    def repeat(self, call: Call) -> None:
        """Make a call that rank 0 makes."""
        match call:
            case Call("score", TokenBatch() as batch):
                self.score(batch)
            case Call("step", TokenBatch() as batch):
                self.step(batch)
            case Call("rescore", TokenBatch() as batch, {"replay": replay}):
                self.scorer.score(batch, replay=replay)
            case Call("logits", TokenBatch() as batch, {"slots": slots}):
                device = self.scorer.device
                self.scorer.logits(batch.to(device), torch.tensor(slots, device=device))
            case Call("named_weights", None, {"dtype": dtype}):
                for _ in self.named_weights(dtype):
                    pass
            case Call("save", None, {"folder": folder}):
                self._start_saving(Path(folder))
            case Call("restore", None, {"folder": folder}):
                self.restore(Path(folder))
            case _:
                raise AssertionError(f"no such call: {call.name}")

    def score(self, batch: TokenBatch) -> TokenBatch:
        with self.ranks.everywhere("score", batch):
            scored = super().score(batch)
        self.ranks.held = scored  # the update's batch has most of its fields
        return scored

    def step(self, batch: TokenBatch) -> Update:
        with self.ranks.everywhere("step", batch):
            update = super().step(batch)
        self.ranks.held = None
        return update

    def _train_minibatch(
        self, batch: TokenBatch, slots: int, index: int, measured: Measured
    ) -> float:
        """Train like `LocalLearner`, and add the measurements of all ranks to `measured`."""
        if not isinstance(self.config.replay, R2):
            batch = batch.replace(routing_native=None)  # prompts are shared as in the scoring
        own = Measured()
        norm = super()._train_minibatch(batch, slots, index, own)
        if own.scored is not None:
            measured.scored = own.scored
        corrections = []
        for of_rank in gather_measured(own, self.ranks):
            measured.sums.update(of_rank.sums)
            measured.replaced += of_rank.replaced
            if of_rank.correction is not None:
                corrections.append(of_rank.correction)
            own.seconds = max(own.seconds, of_rank.seconds)
        measured.seconds += own.seconds
        if corrections:
            measured.add_correction(combine(corrections))
        return norm

    def _optimizer_step(self, minibatch: int) -> float:
        if self.adapter is not None:
            sum_gradients(self.model)
        return super()._optimizer_step(minibatch)

    # --- weights and checkpoints ------------------------------------------------------------------

    def named_weights(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        """Yield one tensor at a time. Each is cast, then gathered when it is asked for."""
        with self.ranks.everywhere("named_weights", dtype=dtype):
            tensors = self.scorer.named_weights(dtype)
            try:
                for name, tensor in tensors:
                    yield name, gather_full_tensor(tensor)
            finally:  # the other ranks gather all tensors, so a reader that stops early must too
                for _, tensor in tensors:
                    gather_full_tensor(tensor)

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Write the checkpoint into `folder` in the background, then call `finish` there.

        Every rank has the whole adapter and its optimiser, so rank 0 writes them at once.
        """
        if self.adapter is not None:
            super().save(folder, finish)
            return
        with self.ranks.everywhere("save", folder=str(folder.absolute())):
            pending = self._start_saving(folder)
        pending.then(partial(self._export, folder, finish))

    def _start_saving(self, folder: Path) -> shards.PendingSave:
        """Start to write the shards. Once this returns, the weights may change."""
        self.finish_saving()
        tensors = shards.checkpoint_tensors(self)
        self.pending_save = shards.start_saving(folder, tensors, self._save_group)
        return self.pending_save

    def _export(self, folder: Path, finish: Callable[[], None]) -> None:
        export_model(folder, self.like)
        finish()

    def finish_saving(self) -> None:
        if self.pending_save is not None:
            self.pending_save.wait()
            self.pending_save = None

    def restore(self, folder: Path) -> None:
        with self.ranks.everywhere("restore", folder=str(folder.absolute())):
            super().restore(folder)


def gather_measured(own: Measured, ranks: Ranks) -> list[Measured]:
    """Return the measurements of a minibatch on every rank, in their order, without `scored`."""
    numbers = torch.tensor([*own.sums.values(), own.seconds], dtype=torch.float64, device="cpu")
    correction = []
    if own.correction is not None:
        correction = [getattr(own.correction, name) for name in SUM_FIELDS]
    found = []
    for tensors in ranks.gather([numbers, *own.replaced, *correction]):
        *sums, seconds = tensors[0].tolist()
        of_rank = Measured(seconds=seconds, replaced=tensors[1 : 1 + len(own.replaced)])
        of_rank.sums.update(dict(zip(own.sums, sums, strict=True)))
        if correction:
            of_rank.correction = Sums(*tensors[-len(SUM_FIELDS) :])
        found.append(of_rank)
    return found


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
            parameter.grad = grad.view_as(parameter).to(parameter.grad_dtype)
