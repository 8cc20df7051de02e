"""The scorer: log-probabilities of packed batches under the policy, with replay. No optimiser."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import R2, RolloutReplay, RunConfig, SoftReplay, WeightsReplay
from onepolicy.config.numerics import ON_POLICY
from onepolicy.config.replay import ReplayConfig
from onepolicy.invariant.enable import enable_invariant
from onepolicy.invariant.fingerprint import compute_fingerprint
from onepolicy.invariant.numerics_contract import numerics_contract_of
from onepolicy.replay.checks import RoutingError
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.replay.routers import Routers
from onepolicy.support.checks import check_displaced
from onepolicy.sync.push import SentTensors
from onepolicy.train.checks import check_routes
from onepolicy.train.forward import LOGP, Scored, forward, tempered_logits
from onepolicy.train.pack import Batcher
from onepolicy.types import RoutingTrace, TokenBatch, index_ids

NATIVE = "routing_native"  # fields of a TokenBatch
TOP_FIELDS = ("top_logp_old", "trainer_top_ids", "trainer_top_logp")
KeepGraph = Callable[[list[int], Scored, RouteRecorder | ReplayHandle | None], None]


@dataclass(frozen=True, slots=True)
class ReplayMode:
    """The routes that forwards of the trainer replay (replay.mode)."""

    routes: Literal["routing", "routing_native"] | None = None
    """Field of the batch. None: the trainer routes every token itself."""
    in_scoring: bool = False  # False: only the update replays
    settings: dict[str, Any] = field(default_factory=dict)  # arguments of `Routers.replay`

    @classmethod
    def of(cls, config: ReplayConfig) -> ReplayMode:
        """Return the mode of the section `replay`."""
        match config:
            case R2():  # the update replays the experts that scoring chose (arXiv:2507.18071)
                return cls("routing_native")
            case SoftReplay():
                return cls("routing", in_scoring=True, settings={"soft": config.ratio})
            case WeightsReplay():
                return cls("routing", in_scoring=True, settings={"weights": True})
            case RolloutReplay():
                return cls("routing", in_scoring=True)
        return cls()

    @property
    def is_soft(self) -> bool:
        """True if experts that the trainer finds too unlikely are replaced."""
        return "soft" in self.settings


class PolicyScorer:
    """The policy with its routers and its replay mode.

    `routers` is None for a dense model. A subclass scores on several ranks (train/sharded/).
    """

    def __init__(
        self, model: PreTrainedModel, config: RunConfig, *, routers: Routers | None
    ) -> None:
        if config.numerics == ON_POLICY:
            enable_invariant(model)
        self.model, self.config, self.routers = model, config, routers
        self.device = next(model.parameters()).device
        self.contract = numerics_contract_of(model, logp=LOGP)
        self.fingerprint = compute_fingerprint(self.device, self.contract.numerics)
        self.version = 0  # steps that the weights were trained for
        self.replay_mode = ReplayMode.of(config.replay)
        self.batcher = Batcher(model, config, self.device)
        self._sent = SentTensors(model)

    @property
    def vocab_size(self) -> int:
        """Number of token ids of the model."""
        return int(self.model.config.get_text_config().vocab_size)

    def score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        """Fill `logp_old`, `entropy`, `routing_native` and `gate_mass`.

        replay: replay the rollout's routes if the run's mode does so in scoring. False: the trainer
        routes every token itself. Raises RoutingError if the replayed routes are not those of the
        batch's tokens and weights.
        """
        scored = self.score_unchecked(batch, replay=replay)
        if not replay:
            return scored
        return self.check_scored(scored)

    def score_unchecked(
        self, batch: TokenBatch, *, replay: bool, keep_graph: KeepGraph | None = None
    ) -> TokenBatch:
        """Score like `score`, without its check of the routes.

        keep_graph: called with the samples, scores and routes of each micro-batch that the update
        computes. These scores carry a graph.
        """
        buffer = ScoreBuffer(batch)
        updated = [] if keep_graph is None else self.batcher.updated(batch)
        for samples in self.batcher.micro_batches(batch):
            graph = keep_graph if samples in updated else None
            self.score_into(buffer, samples, replay=replay, keep_graph=graph)
        return self.fill_batch(buffer)

    def fill_batch(self, buffer: ScoreBuffer) -> TokenBatch:
        """Return the buffer's batch with everything that its forwards have filled."""
        return buffer.fill_batch(self.routers)

    def score_into(
        self,
        buffer: ScoreBuffer,
        samples: list[int],
        *,
        replay: bool,
        keep_graph: KeepGraph | None = None,
    ) -> None:
        """Score these samples of the buffer's batch in one forward, with a graph if it is kept."""
        with_graph = keep_graph is not None
        entropy_graph = with_graph and self.config.objective.entropy_coef > 0
        micro = self.batcher.micro_batch(buffer.batch, samples)
        replay = replay and self.replay_mode.in_scoring
        with (
            torch.set_grad_enabled(with_graph),
            self.routing_context(micro, native=True, replay=replay) as handle,
        ):
            scored = self.forward(
                micro, entropy_graph=entropy_graph, trainer_top=True, displaced=True
            )
            if keep_graph is not None:
                keep_graph(samples, scored, handle)
        buffer.add_scores(samples, scored, handle)

    def forward(
        self, micro: TokenBatch, model: PreTrainedModel | None = None, **options: bool
    ) -> Scored:
        """Run one forward. model: another model than the policy. options: of `forward.forward`."""
        autocast = None
        if self.config.train.autocast == "bfloat16":
            autocast = torch.bfloat16
        return forward(model or self.model, micro, autocast=autocast, **options)

    def routing_context(
        self, micro: TokenBatch, *, native: bool, replay: bool = True
    ) -> AbstractContextManager[RouteRecorder | ReplayHandle | None]:
        """Return a context in which the micro-batch's forward replays the routes of the mode.

        Without `replay`, or if the mode has no routes, the trainer routes every token itself.
        native: also record the trainer's own choice.
        """
        if self.routers is None:
            return nullcontext()
        mode = self.replay_mode
        if replay and mode.routes is not None:
            routes = getattr(micro, mode.routes)
            if routes is None:
                raise RoutingError("replay is on, but the batch has no routes; they were dropped")
            if micro.shared is not None:
                routes = routes.at(micro.shared.slots)
            # `Learner.score` has checked their form; `check_scored` compares the whole batch
            return self.routers.replay_known(routes, native=native, **mode.settings)
        if native:
            return self.routers.record()
        return nullcontext()

    def check_scored(self, scored: TokenBatch) -> TokenBatch:
        """Fill `routers_differing`. Raises RoutingError, SupportError for those of other tokens."""
        if scored.displaced is not None:
            slots = scored.segment, scored.trainable, scored.version
            check_displaced(scored.displaced, *slots, now=self.version)
        return self.check_routes(scored)

    def check_routes(self, scored: TokenBatch, *, moved: int = 0) -> TokenBatch:
        """Fill `routers_differing`. Raises RoutingError if routes are not those of their tokens.

        moved: optimiser steps between the weights of `version` and those that scored.
        """
        pressed = self.config.rollout.pressure is not None
        return check_routes(scored, self.config.replay, self.version, pressed=pressed, moved=moved)

    def micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        """Return the sample indices of each forward."""
        return self.batcher.micro_batches(batch)

    @torch.no_grad()
    def compute_per_slot(self, batch: TokenBatch, values: Callable[[TokenBatch], Tensor]) -> Tensor:
        """Return `values` of every micro-batch, in the order of the batch: [T] float32, CPU."""
        found = torch.zeros(batch.num_slots)
        for samples in self.batcher.micro_batches(batch):
            micro = self.batcher.micro_batch(batch, samples)
            slots = batch.slots_of(samples)
            found[slots] = values(micro).cpu()[: len(slots)]
        return found

    @torch.no_grad()
    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        """Return tempered logits [n, vocabulary] float32 of the slots [n] int64.

        `micro` is on the model's device.
        """
        return tempered_logits(self.model, micro, slots)

    def named_weights(self, dtype: str | None = None) -> Generator[tuple[str, Tensor]]:
        return self._sent.cast(dtype)


class ScoreBuffer:
    """Scores of a batch, collected from its micro-batches on the CPU, in the order of the batch."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch
        self.samples: set[int] = set()  # that have been added
        self.rows: dict[str, Tensor] = {}
        """[T, ...] fields of the batch that forwards fill; of NATIVE the ids. 0 until added."""

    def add_scores(
        self, samples: list[int], scored: Scored, handle: RouteRecorder | ReplayHandle | None
    ) -> None:
        """Add the scores of the micro-batch of these samples. Without samples, add nothing.

        handle: recorded the routes of its forward.
        """
        self.samples.update(samples)
        found: dict[str, Tensor | None] = {"logp_old": scored.logp, "entropy": scored.entropy}
        if scored.entropy_support is not None:
            found["entropy"] = scored.entropy_support
            found |= {"entropy_vocabulary": scored.entropy, "displaced": scored.displaced}
            found["logp_vocabulary"] = scored.logp_vocabulary
        if scored.top is not None and scored.trainer_top is not None:
            found |= zip(TOP_FIELDS, (scored.top, *scored.trainer_top), strict=True)
        computed = slice(None) if scored.row_of is None else scored.row_of.cpu()
        if isinstance(handle, ReplayHandle):
            found[NATIVE] = index_ids(handle.native().ids.cpu(), computed)
            found["gate_mass"] = handle.gate_mass().cpu()[computed]
        elif handle is not None:
            found[NATIVE] = index_ids(handle.trace().ids.cpu(), computed)
        slots = self.batch.slots_of(samples)
        for name, rows in found.items():
            if rows is not None:
                self._add_rows(name, slots, rows.detach().cpu()[: len(slots)])

    def _add_rows(self, name: str, slots: Tensor, rows: Tensor) -> None:
        if name not in self.rows:
            shape = self.batch.num_slots, *rows.shape[1:]
            self.rows[name] = torch.zeros(shape, dtype=rows.dtype)
        self.rows[name][slots] = rows

    def fill_batch(self, routers: Routers | None) -> TokenBatch:
        """Return the batch with everything that forwards fill."""
        # of an earlier scoring: gate_mass is of replay, and nobody has checked these routes yet
        fields: dict[str, Any] = {"gate_mass": None, "routers_differing": None} | self.rows
        native, trace = fields.pop(NATIVE, None), None
        if native is not None and routers is not None:
            valid = torch.ones(len(native), dtype=torch.bool)
            trace = RoutingTrace(native, valid, routers.layers, routers.num_experts)
        return self.batch.replace(routing_native=trace, **fields)
