"""The learner: a scorer with an optimiser. Takes optimiser steps on packed batches, the rollout's experts replayed.

Nothing here knows how many processes there are: the model is called as a module, gradients live on parameters, and
denominators arrive fixed, so FSDP2 can wrap the model (train/sharded/) without a change to this file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from onepolicy.interfaces import Update
from onepolicy.objective.loss import loss_weights, policy_loss
from onepolicy.replay.routers import Routers
from onepolicy.train import checkpoint, pack
from onepolicy.train.checks import check_batch, refuse_randomness
from onepolicy.train.extension import LearnerExtension, MicroBatch
from onepolicy.train.old_policy_scoring import BypassScoring, ReusedScoring, SeparateScoring
from onepolicy.train.optim import adamw, clip_gradients, learning_rate, may_skip, norm_metrics
from onepolicy.train.scorer import PolicyScorer
from onepolicy.train.state import CheckpointedCritic
from onepolicy.types import TokenBatch


class LocalLearner:
    """Learner of one process.

    extensions: what an update has beside the policy's own loss (build/learner.py). critic: the one of them that is saved.
    """

    def __init__(
        self,
        scorer: PolicyScorer,
        *,
        extensions: Sequence[LearnerExtension] = (),
        critic: CheckpointedCritic | None = None,
    ) -> None:
        self.scorer, self.model, self.config = scorer, scorer.model, scorer.config
        self.extensions, self.critic = list(extensions), critic
        self.updates = 0  # optimiser steps taken, by this run and those it was forked from
        self.skipped = 0  # optimiser steps in a row that were not taken, because their gradients were not finite
        self.optimizer = adamw(self.model, self.config.optim, scorer.device)
        self.scoring = build_scoring(scorer)
        if self.config.train.activation_checkpointing:
            refuse_randomness(self.model)
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            self.model.train()  # transformers checkpoints in train mode only

    @property
    def version(self) -> int:
        """RL steps taken."""
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

    def score(self, batch: TokenBatch) -> TokenBatch:
        check_batch(batch, self.config.replay, self.scorer.vocabulary)
        return self._fill(batch)

    def step(self, batch: TokenBatch) -> Update:
        """One optimiser step per mini-step. Metrics are means over trainable slots; the norm is the largest."""
        sums: Counter[str] = Counter()
        self.scoring.begin()
        norms = [
            self._optimise(part, part.num_trainable, i, sums)
            for i, part in enumerate(self.minibatches(batch))
        ]
        self.version += 1
        return Update(self.metrics(batch, sums, norms), self.scoring.scored)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Everything that training goes on from into `folder`; then `finish`, which may be after this has returned."""
        checkpoint.write_files(self, folder)
        finish()

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written, if there is one."""

    def restore(self, folder: Path) -> None:
        """All of a checkpoint but the policy's weights."""
        checkpoint.restore_optimizer(folder, self)

    def _fill(self, batch: TokenBatch) -> TokenBatch:
        """Scored by the policy, then by every extra that scores."""
        batch = self.scoring.score(batch)
        for extension in self.extensions:
            batch = extension.fill(batch, self.scorer)
        return batch

    def minibatches(self, batch: TokenBatch) -> Iterator[TokenBatch]:
        """The samples of each optimiser step, with every slot's share in its loss."""
        batch = batch.replace(gate_mass=None)  # only measured
        most = self.config.rollout.sampling.max_tokens
        for chosen in pack.minibatches(batch, self.config.objective.num_minibatches):
            part = batch.select(chosen)
            yield part.replace(
                loss_weight=loss_weights(part, self.config.objective, max_tokens=most)
            )

    def _optimise(self, batch: TokenBatch, slots: int, minibatch: int, sums: Counter[str]) -> float:
        """One optimiser step of samples with their share; slots: trainable ones of all ranks. Returns the norm."""
        self.scoring.begin_minibatch(batch)
        for chosen in self.scorer.micro_batches(batch):
            on_device = batch.select(chosen).to(self.scorer.device)
            with self.scoring(chosen, on_device) as scored:
                micro = MicroBatch(on_device, scored)
                for extension in self.extensions:
                    extension.weigh(micro)
                loss, parts = self._loss(micro)
                loss.backward()  # inside the replay context: recompute routes like the forward did
            sums.update(
                {"loss": loss.item() * slots}
                | {name: value.item() for name, value in parts.items()}
            )
            for extension in self.extensions:
                extension.learn(micro, slots, sums)
        self.scoring.end_minibatch()
        return self._update(minibatch)

    def _loss(self, micro: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        batch, score_baseline = micro.batch, micro.score_baseline
        loss, sums = policy_loss(
            micro.scored.logp,
            batch,
            config=self.config.objective,
            logp_behaviour=None if self.config.scores_old else batch.logp_rollout,
            entropy=micro.scored.entropy,
            score_baseline=score_baseline,
            protect=self.config.correction.protect,
        )
        assert batch.keep is not None
        sums["kept"] = batch.keep.sum()
        if score_baseline is not None and batch.top_logp_rollout is not None:
            sums["head_mass"] = batch.top_logp_rollout[batch.trainable].exp().sum()
        return loss, sums

    def _update(self, minibatch: int) -> float:
        """One optimiser step with the gradients there are, or none if they are not finite. Returns the norm."""
        norms = [clip_gradients(self.model, self.config.optim.clip_norm)]
        norms += [norm for extension in self.extensions for norm in extension.clip()]
        bad = [norm for norm in norms if not norm < math.inf]
        if bad:
            self.skipped = may_skip(
                self.skipped, self.config.optim.max_skipped, norms, self.version + 1
            )
        else:
            self._take_step(minibatch)
        self.optimizer.zero_grad(set_to_none=True)
        for extension in self.extensions:
            extension.zero_grad()
        return bad[0] if bad else norms[0]

    def _take_step(self, minibatch: int) -> None:
        parts = self.config.objective.num_minibatches
        done = (self.version * parts + minibatch) / (self.config.steps * parts)
        rate = learning_rate(self.config.optim, self.updates, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for extension in self.extensions:
            extension.step(rate / self.config.optim.lr)
        self.updates += 1
        self.skipped = 0

    def metrics(
        self, batch: TokenBatch, sums: Counter[str], norms: list[float]
    ) -> dict[str, float]:
        """Of a step: means over its trainable slots, which `sums` are sums over."""
        metrics = {
            f"train/{name}": value / batch.num_trainable
            for name, value in sums.items()
            if name != "kept"
        }
        metrics |= self.scorer.mode.metrics()
        for extension in self.extensions:
            metrics |= extension.metrics(batch, sums)
        metrics |= self.scoring.metrics() | norm_metrics(norms, self.config.optim.max_skipped)
        return metrics | {"train/lr": self.optimizer.param_groups[0]["lr"]}


def build_scoring(scorer: PolicyScorer) -> SeparateScoring:
    """How the run's settings have the old policy scored."""
    if not scorer.config.scores_old:
        return BypassScoring(scorer)
    return (
        ReusedScoring(scorer)
        if scorer.config.train.reuse_scoring_forward
        else SeparateScoring(scorer)
    )
