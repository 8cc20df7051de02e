"""Score packed batches with the policy, the rollout's experts replayed. There is no optimiser here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onepolicy.config import RunConfig
from onepolicy.config.numerics import ON_POLICY
from onepolicy.invariant.fingerprint import compute_fingerprint
from onepolicy.invariant.numerics_contract import numerics_contract_of
from onepolicy.replay.contexts import ReplayHandle, RouteRecorder
from onepolicy.replay.routers import Routers
from onepolicy.train.checks import check_routes
from onepolicy.train.forward import LOGP, Scored, forward, tempered_logits
from onepolicy.train.pack import micro_batches
from onepolicy.train.replay_mode import ReplayMode, replay_mode
from onepolicy.types import RoutingTrace, TokenBatch

TOP = ("top_logp_old", "trainer_top_ids", "trainer_top_logp")  # fields of the batch
Keep = Callable[[list[int], Scored], None]


class PolicyScorer:
    """The policy as it scores. `routers` is None for a dense model.

    Subclasses score on several ranks (train/sharded/).
    """

    def __init__(
        self, model: PreTrainedModel, config: RunConfig, *, routers: Routers | None
    ) -> None:
        if config.numerics == ON_POLICY:
            from onepolicy.invariant.enable import enable_invariant

            enable_invariant(model)
        self.model, self.config, self.routers = model, config, routers
        self.device = next(model.parameters()).device
        self.contract = numerics_contract_of(model, logp=LOGP)
        self.fingerprint = compute_fingerprint(self.device, self.contract.numerics)
        self.version = 0  # RL steps taken by the weights
        self.mode: ReplayMode = replay_mode(config.replay)

    @property
    def vocabulary(self) -> int:
        """Token ids that the model knows."""
        return int(self.model.config.get_text_config().vocab_size)

    def score(self, batch: TokenBatch, *, replay: bool = True) -> TokenBatch:
        """Fill `logp_old`, `entropy`, `routing_native` and `gate_mass`, with replay if the run replays.

        replay=False: with the trainer's own routing. RoutingError if the replayed routes are not those of these tokens
        and weights.
        """
        scored = self.fill(batch, replay=replay)
        return self.checked(scored) if replay else scored

    @torch.no_grad()
    def logits(self, micro: TokenBatch, slots: Tensor) -> Tensor:
        """[n, vocabulary] float32, tempered; micro is on the model's device, slots [n] int64."""
        return tempered_logits(self.model, micro, slots)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.state_dict().items()

    @torch.no_grad()
    def routes(self, micro: TokenBatch, *, weights: bool = False) -> RoutingTrace:
        """The experts that every slot of a micro-batch fires; weights: and their combine weights."""
        assert self.routers is not None
        first = torch.zeros(1, dtype=torch.int64, device=self.device)  # no logits are read
        with self.routers.record(weights=weights) as tape:
            tempered_logits(self.model, micro, first)
        return tape.trace()

    def fill(self, batch: TokenBatch, *, replay: bool, keep: Keep | None = None) -> TokenBatch:
        """`score` without its check. keep: takes each micro-batch's samples and its scoring, which then has a graph."""
        scores, replay = ScoreBuffer(batch), replay and self.mode.in_scoring
        entropy_graph = keep is not None and self.config.objective.entropy_coef > 0
        for chosen in self.micro_batches(batch):
            micro = batch.select(chosen).to(self.device)
            with (
                torch.set_grad_enabled(keep is not None),
                self.routing(micro, native=True, replay=replay) as tape,
            ):
                scored = self.forward(micro, entropy_graph=entropy_graph, trainer_top=True)
                if keep is not None:
                    self.mode.saw(tape)
                    keep(chosen, scored)
            scores.put(chosen, scored, tape)
        return scores.filled(self.routers)

    @torch.no_grad()
    def per_slot(self, batch: TokenBatch, values: Callable[[TokenBatch], Tensor]) -> Tensor:
        """[T] float32 on the CPU: `values` of every micro-batch, put together."""
        found = torch.zeros(batch.num_slots)
        for chosen in self.micro_batches(batch):
            found[batch.slots_of(chosen)] = values(batch.select(chosen).to(self.device)).cpu()
        return found

    def forward(
        self, micro: TokenBatch, model: PreTrainedModel | None = None, **how: bool
    ) -> Scored:
        """model: another than the policy. how: see `train.forward.forward`."""
        autocast = torch.bfloat16 if self.config.train.autocast == "bfloat16" else None
        return forward(model or self.model, micro, autocast=autocast, **how)

    def routing(
        self, micro: TokenBatch, *, native: bool, replay: bool = True
    ) -> AbstractContextManager[RouteRecorder | ReplayHandle | None]:
        """Replay what the mode replays. Where it replays nothing, or not `replay`, the trainer routes every token.

        native: also record the trainer's own choices.
        """
        if self.routers is None:
            return nullcontext()
        routes = self.mode.routes(micro) if replay else None
        if routes is not None:
            return self.routers.replay(
                routes, native=native, check=False, **self.mode.settings
            )  # `checked` checks
        return self.routers.record() if native else nullcontext()

    def micro_batches(self, batch: TokenBatch) -> list[list[int]]:
        """The samples of each forward."""
        return micro_batches(batch, self.config.train.tokens_per_micro_batch)

    def checked(self, scored: TokenBatch) -> TokenBatch:
        """The same batch. RoutingError if its routes are not those of its tokens and weights."""
        return check_routes(scored, self.config.replay, self.version)


class ScoreBuffer:
    """What the forwards of a batch's micro-batches found, back in the order of the batch, on the CPU."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch
        self.logp, self.entropy = torch.zeros(batch.num_slots), torch.zeros(batch.num_slots)
        self.top: dict[
            str, Tensor
        ] = {}  # [T, k] each: what both engines find likely, if the batch has top_ids
        self.native: Tensor | None = None  # [T, L, K], experts the trainer would choose
        self.mass: Tensor | None = None  # [T, L], how good the replayed experts are to the trainer

    def put(
        self, chosen: list[int], scored: Scored, tape: RouteRecorder | ReplayHandle | None
    ) -> None:
        """The micro-batch of samples `chosen`; `tape` recorded its forward."""
        slots = self.batch.slots_of(chosen)
        self.logp[slots], self.entropy[slots] = (
            scored.logp.detach().cpu(),
            scored.entropy.detach().cpu(),
        )
        if scored.top is not None and scored.own is not None:
            for name, rows in zip(TOP, (scored.top, *scored.own), strict=True):
                whole = self.top.setdefault(
                    name, torch.zeros(self.batch.num_slots, rows.shape[1], dtype=rows.dtype)
                )
                whole[slots] = rows.detach().cpu()
        if tape is None:
            return
        ids = (tape.native() if isinstance(tape, ReplayHandle) else tape.trace()).ids.cpu()
        if self.native is None:
            self.native = torch.empty(self.batch.num_slots, *ids.shape[1:], dtype=ids.dtype)
        self.native[slots] = ids
        if isinstance(tape, ReplayHandle):
            mass = tape.gate_mass().cpu()
            self.mass = (
                torch.empty(self.batch.num_slots, mass.shape[1]) if self.mass is None else self.mass
            )
            self.mass[slots] = mass

    def filled(self, routers: Routers | None) -> TokenBatch:
        """The batch with logp_old, entropy, routing_native, gate_mass, and TOP if its forwards looked for that."""
        trace = None
        if self.native is not None and routers is not None:
            valid = torch.ones(len(self.native), dtype=torch.bool)
            trace = RoutingTrace(self.native, valid, routers.layers, routers.num_experts)
        return self.batch.replace(
            logp_old=self.logp,
            entropy=self.entropy,
            routing_native=trace,
            gate_mass=self.mass,
            **self.top,
        )
