"""The learner: scores a packed batch, and takes optimiser steps on it, with the rollout's experts replayed.

Nothing here knows how many processes there are: the model is called as a module, gradients live on parameters, and
denominators arrive fixed, so FSDP2 can wrap the model (train/sharded/) without a change to this file.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import R2, FromRollout, RunConfig, SoftReplay, WeightsReplay
from onepolicy.invariant.contract import contract_of
from onepolicy.invariant.fingerprint import fingerprint
from onepolicy.invariant.probe import start
from onepolicy.objective.loss import policy_loss, slot_shares
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.contexts import Replayed, Tape
from onepolicy.replay.routers import Routers
from onepolicy.train import checkpoint
from onepolicy.train.checks import check_batch, check_routes, refuse_randomness
from onepolicy.train.critic import Critic, explained_variance
from onepolicy.train.forward import LOGP, Scored, forward, tempered_logits
from onepolicy.train.live import LiveCorrection
from onepolicy.train.optim import adamw, clip_gradients, learning_rate, may_skip, norm_metrics
from onepolicy.train.pack import micro_batches, mini_steps
from onepolicy.train.scores import Scores
from onepolicy.types import RoutingTrace, TokenBatch


class LocalLearner:
    """Learner of one process. `routers` is None for a dense model."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: RunConfig,
        *,
        routers: Routers | None,
        reference: PreTrainedModel | None = None,
        critic: Critic | None = None,
    ) -> None:
        if config.numerics == "on-policy":
            start(model)
        self.model, self.config, self.routers = model, config, routers
        self.reference, self.critic = reference, critic
        self.device = next(model.parameters()).device
        self.contract = contract_of(model, logp=LOGP)
        self.fingerprint = fingerprint(self.device, self.contract.numerics)
        self.version = 0  # RL steps taken
        self.updates = 0  # optimiser steps taken, by this run and those it was forked from
        self.skipped = 0  # optimiser steps in a row that were not taken, because their gradients were not finite
        self.optimizer = adamw(model, config.optim, self.device)
        self._how: dict[str, Any] = {}  # the mode's settings of a replay
        if isinstance(config.replay, SoftReplay):
            self._how = {"soft": config.replay.ratio}
        elif isinstance(config.replay, WeightsReplay):
            self._how = {"weights": True}
        self._replaced: list[Tensor] = []  # [L] per replayed forward, of soft replay
        self._graphs: list[tuple[list[int], Scored]] = []  # micro-batches of score() whose graph step() will use
        self._live = LiveCorrection(config.correction)
        self.seen: TokenBatch | None = None  # if score() left out the policy: the first mini-step, scored in its update
        self._forward_seconds = 0.0
        if config.train.activation_checkpointing:
            refuse_randomness(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()  # transformers checkpoints in train mode only

    def score(self, batch: TokenBatch) -> TokenBatch:
        check_batch(batch, self.config.replay, self.model.config.get_text_config().vocab_size)
        return self._score_all(batch)

    def _score_all(self, batch: TokenBatch) -> TokenBatch:
        """By the policy, the reference and the critic, as far as there are any."""
        if self.config.scores_old:
            graph = self.config.train.reuse_scoring_forward
            batch = self._checked(self._score(batch, replay=True, graph=graph))
        if (reference := self.reference) is not None:
            logp = self._per_slot(batch, lambda micro: self._forward(micro, reference).logp)
            batch = batch.replace(logp_ref=logp)
        if self.critic is not None:
            batch = batch.replace(value=self._per_slot(batch, self.critic.values))
        return batch

    def score_again(self, batch: TokenBatch) -> TokenBatch:
        return self._checked(self._score(batch, replay=True, graph=False))

    def score_without_replay(self, batch: TokenBatch) -> TokenBatch:
        return self._score(batch, replay=False, graph=False)

    def step(self, batch: TokenBatch) -> dict[str, float]:
        """One optimiser step per mini-step. Metrics are means over trainable slots; the norm is the largest."""
        sums: Counter[str] = Counter()
        self.seen, self._forward_seconds = None, 0.0
        norms = [self._optimise(part, part.num_trainable, i, sums) for i, part in enumerate(self._mini_steps(batch))]
        self.version += 1
        return self._metrics(batch, sums, norms)

    def _mini_steps(self, batch: TokenBatch) -> Iterator[TokenBatch]:
        """The samples of each optimiser step, with every slot's share in its loss."""
        batch = batch.replace(gate_mass=None)  # only measured
        most = self.config.rollout.sampling.max_tokens
        for chosen in mini_steps(batch, self.config.objective.mini_steps):
            part = batch.select(chosen)
            yield part.replace(share=slot_shares(part, self.config.objective, max_tokens=most))

    def _metrics(self, batch: TokenBatch, sums: Counter[str], norms: list[float]) -> dict[str, float]:
        slots = batch.num_trainable
        kept = sums.pop("kept")
        metrics = {f"train/{name}": value / slots for name, value in sums.items()}
        if self._replaced:
            metrics["train/soft_replaced"] = float(torch.stack(self._replaced).mean())
            self._replaced.clear()
        metrics |= self._live.report(kept, slots)
        if self.critic is not None and (explained := explained_variance(batch)) is not None:
            metrics["train/value_explained"] = explained
        if not self.config.scores_old:
            metrics["time/score_saved"] = self._forward_seconds
        metrics |= norm_metrics(norms, self.config.optim.max_skipped)
        return metrics | {"train/lr": self.optimizer.param_groups[0]["lr"]}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def save(self, folder: Path, finish: Callable[[], None]) -> None:
        """Everything that training goes on from into `folder`; then `finish`, which may be after this has returned."""
        checkpoint.write(self, folder)
        finish()

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is still being written, if there is one."""

    def restore(self, folder: Path) -> None:
        """All of a checkpoint but the policy's weights."""
        checkpoint.restore_optimizer(folder, self)

    def _optimise(self, batch: TokenBatch, slots: int, mini_step: int, sums: Counter[str]) -> float:
        """One optimiser step of samples with their share; slots: trainable ones of all ranks. Returns the norm."""
        seen = None if self.config.scores_old or self.seen is not None else Scores(batch)
        graphs, self._graphs = self._graphs, []
        if self.config.train.reuse_scoring_forward:
            assert graphs, "score() comes before step() when its forward is reused"
        for chosen, scored in graphs or ((c, None) for c in self._micro_batches(batch)):
            micro = batch.select(chosen).to(self.device)
            with self._replaying(micro, native=seen is not None) if scored is None else nullcontext() as tape:
                new = self._timed_forward(micro) if scored is None else scored
                self._count_replaced(tape, counts=scored is None)
                if seen is not None:
                    seen.put(chosen, new, tape)
                micro, centre = self._live.apply(new, micro)
                loss, parts = self._loss(new, micro, centre)
                loss.backward()  # inside the replay context: recompute routes like the forward did
            sums.update({"loss": loss.item() * slots} | {name: value.item() for name, value in parts.items()})
            if self.critic is not None:
                self.critic.train_on(micro, "value" in self.config.correction.protect, slots, sums)
        if seen is not None:
            self.seen = self._checked(seen.filled(self.routers))
        return self._update(mini_step)

    def _loss(self, new: Scored, micro: TokenBatch, centre: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = policy_loss(
            new.logp,
            micro,
            config=self.config.objective,
            anchor=None if self.config.scores_old else micro.logp_rollout,
            entropy=new.entropy,
            centre=centre,
            protect=self.config.correction.protect,
        )
        assert micro.keep is not None
        sums["kept"] = micro.keep.sum()
        if centre is not None and micro.top_logp_rollout is not None:
            sums["head_mass"] = micro.top_logp_rollout[micro.trainable].exp().sum()
        return loss, sums

    def _timed_forward(self, micro: TokenBatch) -> Scored:
        start = time.perf_counter()
        scored = self._forward(micro, self.model, entropy_graph=self.config.objective.entropy_coef > 0)
        if not self.config.scores_old and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._forward_seconds += time.perf_counter() - start
        return scored

    def _update(self, mini_step: int) -> float:
        """One optimiser step with the gradients there are, or none if they are not finite. Returns the norm."""
        norms = [clip_gradients(self.model, self.config.optim.clip_norm)]
        if self.critic is not None:
            norms.append(self.critic.clip())
        if bad := [norm for norm in norms if not norm < math.inf]:
            self.skipped = may_skip(self.skipped, self.config.optim.max_skipped, norms, self.version + 1)
        else:
            self._take_step(mini_step)
        for optimizer in [self.optimizer] if self.critic is None else [self.optimizer, self.critic.optimizer]:
            optimizer.zero_grad(set_to_none=True)
        return bad[0] if bad else norms[0]

    def _take_step(self, mini_step: int) -> None:
        parts = self.config.objective.mini_steps
        done = (self.version * parts + mini_step) / (self.config.steps * parts)
        rate = learning_rate(self.config.optim, self.updates, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        if self.critic is not None:
            self.critic.update(rate / self.config.optim.lr)
        self.updates += 1
        self.skipped = 0

    def _score(self, batch: TokenBatch, *, replay: bool, graph: bool) -> TokenBatch:
        scores = Scores(batch)
        replay = replay and isinstance(self.config.replay, FromRollout)
        if graph:
            self._graphs = []
        entropy_graph = graph and self.config.objective.entropy_coef > 0
        for chosen in self._micro_batches(batch):
            micro = batch.select(chosen).to(self.device)
            with torch.set_grad_enabled(graph), self._replaying(micro, native=True, replay=replay) as tape:
                scored = self._forward(micro, self.model, entropy_graph=entropy_graph, own_top=True)
                self._count_replaced(tape, counts=graph)
            scores.put(chosen, scored, tape)
            if graph:
                self._graphs.append((chosen, scored))
        return scores.filled(self.routers)

    def _checked(self, scored: TokenBatch) -> TokenBatch:
        return check_routes(scored, self.config.replay, self.version)

    @torch.no_grad()
    def _per_slot(self, batch: TokenBatch, model: Callable[[TokenBatch], Tensor]) -> Tensor:
        """[T] float32 on the CPU, one micro-batch at a time."""
        values = torch.zeros(batch.num_slots)
        for chosen in self._micro_batches(batch):
            values[batch.slots_of(chosen)] = model(batch.select(chosen).to(self.device)).cpu()
        return values

    @torch.no_grad()
    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        """[n, vocabulary] float32, tempered; micro is on the model's device, slots [n] int64."""
        return tempered_logits(self.model, micro, slots)

    def _routes(self, micro: TokenBatch) -> RoutingTrace | None:
        """What the mode replays; None: the trainer routes every token itself."""
        match self.config.replay:
            case FromRollout():
                if micro.routing is None:
                    raise RoutingError("replay is on, but the batch has no routes; they were dropped after collect()")
                return micro.routing
            case R2():
                assert micro.routing_native is not None, "r2 replays the routes that score() recorded"
                return micro.routing_native
        return None

    def _replaying(
        self, micro: TokenBatch, *, native: bool, replay: bool = True
    ) -> AbstractContextManager[Tape | Replayed | None]:
        """Replay the mode's routes; without any, or `replay`, record the trainer's own if they are wanted."""
        if self.routers is None:
            return nullcontext()
        routes = self._routes(micro) if replay else None
        if routes is not None:
            return self.routers.replay(routes, native=native, check=False, **self._how)  # score() checks every batch
        return self.routers.record() if native else nullcontext()

    def _count_replaced(self, tape: Tape | Replayed | None, *, counts: bool) -> None:
        """counts: whether this is the forward the update is made of."""
        if counts and isinstance(tape, Replayed) and isinstance(self.config.replay, SoftReplay):
            self._replaced.append(tape.replaced())

    def _forward(self, micro: TokenBatch, model: PreTrainedModel, **how: bool) -> Scored:
        autocast = torch.bfloat16 if self.config.train.autocast == "bfloat16" else None
        return forward(model, micro, autocast=autocast, **how)

    def _micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        return micro_batches(batch, self.config.train.tokens_per_micro_batch)
