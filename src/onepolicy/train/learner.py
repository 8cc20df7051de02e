"""The learner: trains the policy on a step's batch, one optimiser step per minibatch.

A learner is a scorer with an optimiser. The main path of an update is

    step -> minibatches -> _train_minibatch -> _backward (per micro-batch) -> _optimizer_step

Nothing here depends on the number of processes. The model is called as a module, gradients are on
its parameters, and the denominators of the loss are fixed beforehand. So FSDP2 can wrap the model
(train/sharded/) without a change to this file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from onepolicy.interfaces import Update
from onepolicy.objective.loss import loss_weights, policy_loss
from onepolicy.replay.routers import Routers
from onepolicy.train import checkpoint, pack
from onepolicy.train.activation_checkpointing import checkpoint_activations
from onepolicy.train.bypass import scoring_of
from onepolicy.train.checks import check_batch
from onepolicy.train.optim import (
    clip_gradients,
    count_skipped_update,
    learning_rate,
    norm_metrics,
)
from onepolicy.train.optimizers import adamw
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.scoring import ScoringFirst
from onepolicy.train.update_parts import Measured, MicroBatch, UpdatePart
from onepolicy.types import TokenBatch

if TYPE_CHECKING:
    from onepolicy.train.critic import Critic
    from onepolicy.train.lora import Adapter


class LocalLearner:
    """The learner of a run in one process."""

    def __init__(
        self,
        scorer: PolicyScorer,
        *,
        parts: Sequence[UpdatePart] = (),
        critic: Critic | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """Build the learner.

        parts: what the update does beside the policy's own loss (build/learner.py), such as a
        reference model, a critic or a current-policy correction. critic: the part that has weights
        and an optimiser of its own. adapter: all that is trained of the model (train.lora).
        """
        self.scorer, self.model, self.config = scorer, scorer.model, scorer.config
        self.parts, self.critic, self.adapter = list(parts), critic, adapter
        self.updates = 0  # optimiser steps made, by this run and the runs it was forked from
        self.skipped = 0  # optimiser steps skipped in a row, because gradients were not finite
        self.optimizer = adamw(self.model, self.config.optim, scorer.device)
        self.scoring: ScoringFirst = scoring_of(scorer, self.config)
        self._narrows = self.config.rollout.sampling.narrows
        if self.config.train.activation_checkpointing:
            checkpoint_activations(self.model)

    # --- scoring ----------------------------------------------------------------------------------

    def score(self, batch: TokenBatch) -> TokenBatch:
        """Fill the fields that the update needs from models: see `interfaces.Learner.score`."""
        check_batch(batch, self.scorer.vocab_size, narrows=self._narrows)
        routers, mode = self.scorer.routers, self.scorer.replay_mode
        if routers is not None and mode.routes == "routing" and batch.routing is not None:
            routers.check_replayable(batch.routing, **mode.settings)
        return self._fill_scores(batch)

    def _fill_scores(self, batch: TokenBatch) -> TokenBatch:
        """Score with the policy, then with every part that scores."""
        batch = self.scoring.score(batch)
        for part in self.parts:
            batch = part.fill_fields(batch, self.scorer)
        return batch

    # --- update -----------------------------------------------------------------------------------

    def step(self, batch: TokenBatch) -> Update:
        """Train on a scored batch, whose advantage, weight and keep are set.

        Makes one optimiser step per minibatch. Metrics are means over trainable slots;
        train/grad_norm is the largest norm of the step.
        """
        measured = Measured()
        norms: list[float] = []
        self.scoring.begin(batch)
        for index, minibatch in enumerate(self.minibatches(batch)):
            slots = minibatch.num_trainable
            norms.append(self._train_minibatch(minibatch, slots, index, measured))
        self.version += 1
        return Update(self.metrics(batch, measured, norms), measured.scored)

    def minibatches(self, batch: TokenBatch) -> Iterator[TokenBatch]:
        """Yield the samples of each optimiser step, with every slot's `loss_weight` set."""
        batch = batch.replace(gate_mass=None)  # a measurement that the update does not read
        objective, sampling = self.config.objective, self.config.rollout.sampling
        for samples in pack.minibatches(batch, objective.num_minibatches):
            minibatch = batch.select(samples)
            weights = loss_weights(minibatch, objective, max_tokens=sampling.max_tokens)
            yield minibatch.replace(loss_weight=weights)

    def _train_minibatch(
        self, batch: TokenBatch, slots: int, index: int, measured: Measured
    ) -> float:
        """Accumulate the gradients of a minibatch, then make one optimiser step.

        slots: trainable slots of the minibatch on all ranks. index: number of the minibatch in its
        step. Returns the gradient norm.
        """
        batcher = self.scorer.batcher
        with self.scoring.minibatch(batch, measured, index=index):
            for samples in batcher.updated(batch):
                self._backward(batcher.micro_batch(batch, samples), samples, slots, measured)
        return self._optimizer_step(index)

    def _backward(
        self, batch: TokenBatch, samples: list[int], slots: int, measured: Measured
    ) -> None:
        """Run forward, loss and backward of one micro-batch: these samples of the minibatch."""
        with self.scoring.update_forward(samples, batch, measured) as micro:
            for part in self.parts:
                part.adjust(micro, measured)
            loss, loss_sums = self._loss(micro)
            loss.backward()  # in the context: recomputed layers replay the routes of the forward
        read = _read({"loss": loss, **loss_sums})
        measured.sums.update(read | {"loss": read["loss"] * slots})
        for part in self.parts:
            part.backward(micro, slots, measured)

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the policy's loss of a micro-batch and sums over its slots."""
        batch = micro.batch
        loss, sums = policy_loss(
            micro.scored.logp,
            batch,
            config=self.config.objective,
            logp_behaviour=micro.logp_behaviour,
            entropy=micro.scored.entropy,
            score_baseline=micro.score_baseline,
            protect=self.config.correction.protect,
        )
        assert batch.keep is not None
        sums["kept"] = batch.keep.sum()
        if micro.score_baseline is not None and batch.top_logp_rollout is not None:
            sums["head_mass"] = batch.top_logp_rollout[batch.trainable].exp().sum()
        return loss, sums

    def _optimizer_step(self, minibatch: int) -> float:
        """Clip the gradients and make one optimiser step. Return the gradient norm.

        The step is skipped if a norm is not finite.
        """
        optim = self.config.optim
        norms = [clip_gradients(self.model, optim.clip_norm)]
        if self.critic is not None:
            norms.append(clip_gradients(self.critic.values, optim.clip_norm))
        not_finite = [norm for norm in norms if not norm < math.inf]
        if not_finite:
            self.skipped = count_skipped_update(
                self.skipped, optim.max_skipped, norms, self.version + 1
            )
        else:
            self._update_weights(minibatch)
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)
        return (not_finite or norms)[0]

    def _update_weights(self, minibatch: int) -> None:
        """Apply the gradients at the learning rate of this point of the run."""
        count = self.config.objective.num_minibatches
        done = (self.version * count + minibatch) / (self.config.steps * count)
        rate = learning_rate(self.config.optim, self.updates, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.critic is not None:
            self.critic.optimizer_step(rate / self.config.optim.lr)
        self.updates += 1
        self.skipped = 0

    def metrics(
        self, batch: TokenBatch, measured: Measured, norms: list[float]
    ) -> dict[str, float]:
        """Return the metrics of a step on this batch. norms: of its updates' gradients."""
        slots, sums = batch.num_trainable, measured.sums
        metrics = {f"train/{name}": sums[name] / slots for name in sums if name != "kept"}
        if measured.replaced:
            replaced, rows = torch.stack(measured.replaced).sum((0, 2)).tolist()
            metrics["train/soft_replaced"] = replaced / max(rows, 1.0)
        if measured.seconds:
            metrics["time/score_saved"] = measured.seconds
        for part in self.parts:
            metrics |= part.metrics(batch, measured)
        metrics |= norm_metrics(norms, self.config.optim.max_skipped)
        return metrics | {"train/lr": self.optimizer.param_groups[0]["lr"]}

    # --- weights and checkpoints ------------------------------------------------------------------

    def named_weights(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        return self.scorer.named_weights(dtype)

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Write everything that training continues from into `folder`, then call `finish`.

        A sharded learner writes in the background: `finish` is then called after this returns.
        """
        checkpoint.write_files(self, folder, self.adapter)
        finish()

    def finish_saving(self) -> None:
        """Wait until a checkpoint that is being written is complete."""

    def restore(self, folder: Path) -> None:
        """Restore a checkpoint, except for the policy's weights. An adapter is restored."""
        if self.adapter is not None:
            self.adapter.load(folder)
        checkpoint.restore_optimizer(folder, self)

    # --- properties -------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Number of steps that the weights were trained for."""
        return self.scorer.version

    @version.setter
    def version(self, version: int) -> None:
        self.scorer.version = version

    @property
    def fingerprint(self) -> str:
        return self.scorer.fingerprint

    @property
    def routers(self) -> Routers | None:
        return self.scorer.routers


def _read(values: dict[str, Tensor]) -> dict[str, float]:
    """Return the numbers in tensors without dimensions. Waits for the device once."""
    numbers = torch.stack([value.detach().double() for value in values.values()]).tolist()
    return dict(zip(values, numbers, strict=True))
