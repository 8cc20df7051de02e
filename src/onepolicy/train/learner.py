"""The learner: scores a packed batch, and takes optimiser steps on it, with the rollout's experts replayed.

Nothing here knows how many processes there are: the model is called as a module, gradients live on parameters, and
denominators arrive fixed, so FSDP2 can wrap the model without a change to this file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import R2, FromRollout, OptimConfig, RunConfig, SoftReplay, UsageError, WeightsReplay
from onepolicy.objective.advantages import totals
from onepolicy.objective.loss import policy_loss
from onepolicy.replay.alignment import check_alignment
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.contexts import Replayed, Tape
from onepolicy.replay.routers import Routers
from onepolicy.train.forward import Scored, forward
from onepolicy.train.pack import micro_batches, mini_steps
from onepolicy.types import RoutingTrace, TokenBatch


class LocalLearner:
    """Learner of one process. `routers` is None for a dense model."""

    def __init__(self, model: PreTrainedModel, config: RunConfig, *, routers: Routers | None) -> None:
        self.model, self.config, self.routers = model, config, routers
        self.device = next(model.parameters()).device
        self.version = 0  # RL steps taken
        self.updates = 0  # optimiser steps taken: mini_steps per RL step
        self.optimizer = adamw(model, config.optim, self.device)
        self._how: dict[str, Any] = {}  # the mode's settings of a replay
        if isinstance(config.replay, SoftReplay):
            self._how = {"soft": config.replay.ratio}
        elif isinstance(config.replay, WeightsReplay):
            self._how = {"weights": True}
        self._replaced: list[Tensor] = []  # [L] per replayed forward, of soft replay
        self._live: list[tuple[list[int], Tensor]] = []  # micro-batches of score() whose graph step() will use
        if config.train.activation_checkpointing:
            refuse_randomness(model)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()  # transformers checkpoints in train mode only

    def score(self, batch: TokenBatch) -> TokenBatch:
        replay = isinstance(self.config.replay, FromRollout)
        if isinstance(self.config.replay, FromRollout) and batch.routing is not None:
            _check_source(batch.routing, self.config.replay)
        return self._score(batch, replay=replay, live=self.config.train.reuse_scoring_forward)

    def score_again(self, batch: TokenBatch) -> TokenBatch:
        return self._score(batch, replay=isinstance(self.config.replay, FromRollout), live=False)

    def score_without_replay(self, batch: TokenBatch) -> TokenBatch:
        return self._score(batch, replay=False, live=False)

    def step(self, batch: TokenBatch) -> dict[str, float]:
        """One optimiser step per mini-step. Metrics are means over trainable slots; the norm is the largest."""
        batch = batch.replace(gate_mass=None)  # only measured
        sums: Counter[str] = Counter()
        norms = [
            self._optimise(batch.select(part), sums) for part in mini_steps(batch, self.config.objective.mini_steps)
        ]
        self.version += 1
        slots = totals(batch).slots
        metrics = {f"train/{name}": value / slots for name, value in sums.items()}
        if self._replaced:
            metrics["train/soft_replaced"] = float(torch.stack(self._replaced).mean())
            self._replaced.clear()
        return metrics | {"train/grad_norm": max(norms), "train/lr": self.optimizer.param_groups[0]["lr"]}

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    def _optimise(self, batch: TokenBatch, sums: Counter[str]) -> float:
        denominator = totals(batch).slots
        live, self._live = self._live, []
        if self.config.train.reuse_scoring_forward:
            assert live, "score() comes before step() when its forward is reused"
        for chosen, logp in live or ((c, None) for c in self._micro_batches(batch)):
            micro = batch.select(chosen).to(self.device)
            with self._replaying(self._routes(micro)) if logp is None else nullcontext() as tape:
                new = self._forward(micro).logp if logp is None else logp
                self._count_replaced(tape, counts=logp is None)
                loss, parts = policy_loss(new, micro, config=self.config.objective, denominator=denominator)
                loss.backward()  # inside the replay context: recompute routes like the forward did
            sums.update({"loss": loss.item() * denominator} | {name: value.item() for name, value in parts.items()})
        return self._update()

    def _update(self) -> float:
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm))
        if not norm < float("inf"):
            raise RuntimeError(
                f"gradient norm is {norm} in step {self.version + 1}; this update was not made. Fork from an earlier "
                "checkpoint with a lower optim.lr, and look at mismatch/k3 and train/entropy before it"
            )
        rate = learning_rate(self.config.optim, self.updates, self.config.steps * self.config.objective.mini_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates += 1
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _score(self, batch: TokenBatch, *, replay: bool, live: bool) -> TokenBatch:
        logp, entropy = torch.zeros(batch.num_slots), torch.zeros(batch.num_slots)
        native: Tensor | None = None
        mass: Tensor | None = None
        if live:
            self._live = []
        bounds = batch.cu_seqlens.tolist()
        for chosen in self._micro_batches(batch):
            slots = torch.cat([torch.arange(bounds[s], bounds[s + 1]) for s in chosen])
            micro = batch.select(chosen).to(self.device)
            routes = self._routes(micro) if replay else None
            with torch.set_grad_enabled(live), self._replaying(routes, native=True) as tape:
                scored = self._forward(micro)
                self._count_replaced(tape, counts=live)
            logp[slots], entropy[slots] = scored.logp.detach().cpu(), scored.entropy.cpu()
            if live:
                self._live.append((chosen, scored.logp))
            if tape is not None:
                ids = (tape.native() if isinstance(tape, Replayed) else tape.trace()).ids.cpu()
                native = torch.empty(batch.num_slots, *ids.shape[1:], dtype=ids.dtype) if native is None else native
                native[slots] = ids
            if isinstance(tape, Replayed):
                mass = torch.empty(batch.num_slots, len(tape.layers)) if mass is None else mass
                mass[slots] = tape.gate_mass().cpu()
        own = self._trace(native)
        settings = self.config.replay
        if replay and own is not None and isinstance(settings, FromRollout) and settings.min_agreement > 0:
            assert batch.routing is not None
            check_alignment(batch.routing, own, batch.cu_seqlens, least=settings.min_agreement)
        return batch.replace(logp_old=logp, entropy=entropy, routing_native=own, gate_mass=mass)

    def _trace(self, ids: Tensor | None) -> RoutingTrace | None:
        if ids is None or self.routers is None:
            return None
        return RoutingTrace(ids, torch.ones(len(ids), dtype=torch.bool), self.routers.layers, self.routers.num_experts)

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
        self, routes: RoutingTrace | None, *, native: bool = False
    ) -> AbstractContextManager[Tape | Replayed | None]:
        """Replay these routes; without any, record the trainer's own if they are wanted."""
        if self.routers is None:
            return nullcontext()
        if routes is not None:
            return self.routers.replay(routes, native=native, **self._how)
        return self.routers.record() if native else nullcontext()

    def _count_replaced(self, tape: Tape | Replayed | None, *, counts: bool) -> None:
        """counts: whether this is the forward the update is made of."""
        if counts and isinstance(tape, Replayed) and isinstance(self.config.replay, SoftReplay):
            self._replaced.append(tape.replaced())

    def _forward(self, micro: TokenBatch) -> Scored:
        autocast = torch.bfloat16 if self.config.train.autocast == "bfloat16" else None
        return forward(self.model, micro, autocast=autocast)

    def _micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        return micro_batches(batch, self.config.train.tokens_per_micro_batch)


def _check_source(routing: RoutingTrace, replay: FromRollout) -> None:
    if routing.reprefilled != (replay.source == "reprefill"):
        found = "a re-prefill" if routing.reprefilled else "the engine"
        raise UsageError(f"replay.source: {replay.source}, but the batch's routes were recorded by {found}")


RANDOM = (
    "attention_dropout",
    "hidden_dropout",
    "hidden_dropout_prob",
    "resid_dropout",
    "resid_pdrop",
    "attn_pdrop",
    "embd_pdrop",
    "router_jitter_noise",
    "input_jitter_noise",
    "moe_jitter_eps",
)


def refuse_randomness(model: PreTrainedModel) -> None:
    """Train mode must compute what eval mode does, or the trainer would not be the policy that is measured."""
    config = model.config.get_text_config()
    for name in RANDOM:
        if getattr(config, name, 0):
            raise UsageError(
                f"model.path: {name}={getattr(config, name)} in the config; checkpointing activations needs 0"
            )


def learning_rate(config: OptimConfig, update: int, updates: int) -> float:
    """Of optimiser step `update` (from 0) of `updates`."""
    warm = min(1.0, (update + 1) / (config.warmup_steps + 1))
    left = 1 - update / updates if config.decay == "linear" else 1.0
    return config.lr * warm * left


def adamw(model: PreTrainedModel, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        model.parameters(),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=device.type in ("cpu", "cuda"),
    )
