"""What the forwards of a batch's micro-batches found, back in the order of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.replay.contexts import Replayed, Tape
from onepolicy.replay.routers import Routers
from onepolicy.train.forward import Scored
from onepolicy.types import RoutingTrace, TokenBatch

TOP = ("top_logp_old", "own_ids", "own_logp")  # fields of the batch


class Scores:
    """Filled micro-batch by micro-batch, on the CPU."""

    def __init__(self, batch: TokenBatch) -> None:
        self.batch = batch
        self.logp, self.entropy = torch.zeros(batch.num_slots), torch.zeros(batch.num_slots)
        self.top: dict[str, Tensor] = {}  # [T, k] each: what both engines find likely, if the batch has top_ids
        self.native: Tensor | None = None  # [T, L, K], experts the trainer would choose
        self.mass: Tensor | None = None  # [T, L], how good the replayed experts are to the trainer

    def put(self, chosen: list[int], scored: Scored, tape: Tape | Replayed | None) -> None:
        """The micro-batch of samples `chosen`; `tape` recorded its forward."""
        slots = self.batch.slots_of(chosen)
        self.logp[slots], self.entropy[slots] = scored.logp.detach().cpu(), scored.entropy.detach().cpu()
        if scored.top is not None and scored.own is not None:
            for name, rows in zip(TOP, (scored.top, *scored.own), strict=True):
                whole = self.top.setdefault(name, torch.zeros(self.batch.num_slots, rows.shape[1], dtype=rows.dtype))
                whole[slots] = rows.detach().cpu()
        if tape is None:
            return
        ids = (tape.native() if isinstance(tape, Replayed) else tape.trace()).ids.cpu()
        if self.native is None:
            self.native = torch.empty(self.batch.num_slots, *ids.shape[1:], dtype=ids.dtype)
        self.native[slots] = ids
        if isinstance(tape, Replayed):
            mass = tape.gate_mass().cpu()
            self.mass = torch.empty(self.batch.num_slots, mass.shape[1]) if self.mass is None else self.mass
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
