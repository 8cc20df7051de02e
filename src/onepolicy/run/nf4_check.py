"""Adapter truth for a base in 4 bits: the engine must hold the dequantised base.

An engine starts with the checkpoint's weights. The trainer computes with others, the dequantised
ones, so the first sync must move the engine, and from then on the unquantised base is a fault.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onepolicy.config import TrainingError
from onepolicy.interfaces import ReadableEngine, engine_name
from onepolicy.models.nf4 import stored_bytes
from onepolicy.run.adapter_check import AdapterCheck, EngineCanary
from onepolicy.sync.push import push_weights
from onepolicy.verdict.adapter import FAULTS, Share, share


class Nf4Check(AdapterCheck):
    """The check of an adapter on a base in nf4."""

    prompts = 64
    """Prompts of the fixed batch. In bfloat16 the two bases differ by little more than rounding."""

    async def start(self) -> None:
        """Push the dequantised base, and check that the engine has it in place of its own.

        Then start as without quantisation. Raises TrainingError if the engine still has its own.
        """
        now, before = stored_bytes(self.learner.model)
        self.note(
            f"train.lora.base = nf4: the frozen linear layers and experts take {now / 1e6:.1f} MB "
            f"in place of {before / 1e6:.1f} MB; trainer and engine compute with what they "
            "dequantise to"
        )
        with self.adapter.off():
            self._loaded = await self._ask_engine()
            self._loaded_beside = _beside(self._loaded, self._score(self._loaded))
            self._loaded_weight = self._copy_a_weight()
            await push_weights(self.learner, self.engine)
            await self._check_base()
        await super().start()

    def _copy_a_weight(self) -> tuple[str, Tensor] | None:
        """Return the first quantised weight as the engine loaded it, None if it cannot be read."""
        if not isinstance(self.engine, ReadableEngine):
            return None
        held = self.engine.held_weights()
        names = [name for name in self.adapter.stored_names if name in held]
        if not names:
            return None
        return names[0], held[names[0]].detach().clone()

    async def _check_base(self) -> None:
        """Raise TrainingError if the engine's log-probabilities are of the base that it loaded."""
        canary = await self._ask_engine()
        moved, mask = _changes(canary, self._loaded)
        now = self._score(canary).gather(1, canary.ids) - (canary.logp - moved)
        found = share(moved, now, torch.zeros_like(now), mask)
        if found.excludes_now:
            raise self._error("unquantised", found)

    def _hypotheses(self, canary: EngineCanary) -> dict[str, Tensor]:
        """Add what the engine would have moved by with the base that it loaded.

        With the adapter, and without. An error does not tell these two apart. Two engines with two
        bases also route otherwise, and `_moved` has that already where routes are replayed. So
        each base is compared with the trainer on the routes that it was asked with, and only what
        its weights differ by is left.
        """
        others = super()._hypotheses(canary)
        base = _beside(self._engine_base, self._base)
        back, mask = _changes(base, self._loaded_beside)  # by quantisation, at the base's routes
        ids = self._engine_base.ids
        same = (canary.ids[:, :, None] == ids[:, None, :]) & mask[:, None, :]  # [P, K, K]
        loaded = back.gather(1, same.int().argmax(2))
        now, known = self._moved(canary), same.any(2)
        others["unquantised"] = torch.where(known, now - loaded, now)
        others["unquantised_alone"] = torch.where(known, others["base"] - loaded, now)
        return others

    def _name_weights(self, name: str, held: Tensor) -> str:
        if self._loaded_weight is None or self._loaded_weight[0] != name:
            return super()._name_weights(name, held)
        dtype = self.engine.caps.weights_dtype
        own = dict(self.learner.named_weights(dtype))[name].float()
        with self.adapter.off():
            base = dict(self.learner.named_weights(dtype))[name].float()
        loaded = self._loaded_weight[1].float()
        nearest = min(_distance(held, loaded), _distance(held, loaded + own - base))
        if nearest < 0.1 * _distance(held, own):
            return FAULTS["unquantised"]
        return super()._name_weights(name, held)

    def _error(self, fault: str, delivered: Share) -> TrainingError:
        if not fault.startswith("unquantised"):
            return super()._error(fault, delivered)
        return TrainingError(
            f"weight sync: after version {self.learner.version} of the adapter "
            f"{self.adapter.name!r} was pushed, {engine_name(self.engine)} samples with "
            f"{FAULTS['unquantised']}, by its log-probabilities of a fixed batch. Every rollout "
            "would be another policy's"
        )


def _beside(canary: EngineCanary, own: Tensor) -> EngineCanary:
    """Return how far the engine is from the trainer. own: [P, vocabulary] of `_score`."""
    return canary._replace(logp=canary.logp - own.gather(1, canary.ids))


def _changes(canary: EngineCanary, before: EngineCanary) -> tuple[Tensor, Tensor]:
    """Return how far log-probabilities have moved since `before`, and which are in both: [P, K]."""
    same = canary.ids[:, :, None] == before.ids[:, None, :]  # [P, K, K]
    return canary.logp - before.logp.gather(1, same.int().argmax(2)), same.any(2)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.to(one.device)).norm())
