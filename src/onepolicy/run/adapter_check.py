"""Adapter truth: after every sync, a check that what samples is what learns (train.lora).

The engine is asked for the log-probabilities of the likeliest tokens after fixed prompts, and
the trainer scores the same tokens. `verdict/adapter.py` says which adapter these are of. At step 0
the adapter is 0, so an adapter that is never delivered is seen after the first update. Where the
engine's weights can be read, they are compared too. And the name and version on every reply must be
those of this run's adapter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from onepolicy.build.components import Components
from onepolicy.config import TrainingError
from onepolicy.engine_check.checks import GeneratedBatch, generate_all, pack_generated
from onepolicy.interfaces import ReadableEngine, engine_name
from onepolicy.models import lora
from onepolicy.models.load import DTYPES
from onepolicy.notation import number, with_error
from onepolicy.sync.canary import canary_prompts
from onepolicy.sync.push import checked_push, push_weights
from onepolicy.types import Completion, Sampling
from onepolicy.verdict.adapter import FAULTS, Share, find_fault, root_mean_square, share

if TYPE_CHECKING:
    from onepolicy.train.learner import LocalLearner
    from onepolicy.train.sharded.learner import ShardedLearner

TOP = 64
"""Likeliest tokens after each prompt that are compared."""
TRIAL = 0.5
"""About how far the trial adapter at the start moves the fixed batch [nats]. bfloat16 rounds by
0.01 to 0.1."""
TRIES = 8  # sizes of B that are tried to get there


class EngineCanary(NamedTuple):
    """The engine's log-probabilities of the likeliest next tokens of P fixed prompts."""

    ids: Tensor  # [P, K] int64
    logp: Tensor  # [P, K] float32
    completions: list[Completion]


class AdapterCheck:
    """The check of one run's adapter, with what it has to remember from sync to sync."""

    prompts = 32
    """Prompts of the fixed batch."""

    def __init__(self, components: Components, note: Callable[[str], None]) -> None:
        learner = _learner_of(components)
        assert learner.adapter is not None
        self.components, self.learner, self.adapter = components, learner, learner.adapter
        self.engine, self.note = components.engine, note
        settings = components.config.train.lora
        assert settings is not None
        self.settings = settings
        vocab, longest = learner.scorer.vocab_size, self.engine.caps.max_len
        self._prompts = canary_prompts(vocab, longest, self.prompts)
        self._noted = False

    # --- start ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Push the frozen weights, which the engine already holds, a trial adapter, and the run's.

        The run's own adapter is 0 at first, and its first updates may be smaller than the engine's
        rounding. The trial adapter is larger, so that an engine that always loses or doubles
        adapters is named before the first step. Raises TrainingError if the first push changes a
        log-probability, or an adapter does not arrive.
        """
        learner, vocab = self.learner, self.learner.scorer.vocab_size
        with self.adapter.off():
            await checked_push(learner, self.engine, vocab=vocab)
            self._engine_base = await self._ask_engine()
            self._base = self._score(self._engine_base)
        self._before: lora.Factors | None = None
        self._note_merge_loss()
        with lora.trial_adapter(learner.model, self._trial_size(), seed=0):
            await push_weights(learner, *self.components.samplers)
            delivered, effect, gap = await self._check_push()  # it is the adapter of before now
        if not delivered.certain:
            self.note(
                f"train.lora: a trial adapter that moves the fixed batch by {number(effect)} nats "
                f"is hidden by the engine's rounding ({number(gap)} nats): log-probabilities may "
                "show an adapter that was not delivered late"
            )
        await push_weights(learner, *self.components.samplers)
        await self._check_push()

    def _trial_size(self) -> float:
        """Return the size of B's elements that moves the fixed batch by about TRIAL nats."""
        size = self.components.config.optim.lr
        for _ in range(TRIES):
            with lora.trial_adapter(self.learner.model, size, seed=0):
                effect = self._effect()
            if effect >= TRIAL / 2:
                break
            size *= TRIAL / max(effect, TRIAL / 8)
        return size

    def _effect(self) -> float:
        """Return how far the trainer's adapter moves the fixed batch [nats]."""
        ids = self._engine_base.ids
        moved = (self._score(self._engine_base) - self._base).gather(1, ids)
        return root_mean_square(moved, torch.ones_like(ids, dtype=torch.bool))

    def _note_merge_loss(self) -> None:
        """Report what a merge into the engine's dtype loses of an adapter, before any step."""
        rate, dtype = self.components.config.optim.lr, self.components.config.rollout.engine.dtype
        what = "the adapter"
        trial: AbstractContextManager[None] = nullcontext()
        if not self._is_trained():
            what = f"an adapter of one update (B = +-{rate:g})"
            trial = lora.trial_adapter(self.learner.model, rate, seed=0)
        with trial:
            effect, lost = self._merge_loss()
        advice = ""
        if self.settings.sync == "merged" and lost > 0.1 * effect:
            native = "" if self.settings.base == "nf4" else "train.lora.sync = native or "
            advice = f"; {native}rollout.engine.dtype = float32 loses less"
        self.note(
            f"train.lora: {what} moves the log-probabilities of a fixed batch by {number(effect)} "
            f"nats; merged into {dtype} it moves them {number(lost)} nats otherwise{advice}"
        )

    def _is_trained(self) -> bool:
        tensors = self.adapter.tensors().items()
        return any(bool(tensor.any()) for name, tensor in tensors if ".lora_B." in name)

    # --- every sync -------------------------------------------------------------------------------

    async def after_push(self) -> dict[str, float]:
        """Check the engine after a sync. Return what was measured (run/metrics.toml).

        Raises TrainingError if the engine samples with anything but this version of the adapter.
        """
        delivered, effect, gap = await self._check_push()
        self._note_invisible(delivered, effect, gap)
        return self._metrics(delivered, effect, gap)

    async def _check_push(self) -> tuple[Share, float, float]:
        """Return the share, effect and gap of the adapter that was just pushed, after the checks.

        Raises TrainingError as `after_push`.
        """
        self._check_weights()
        canary = await self._ask_engine()
        self._check_names(canary.completions)
        base = self._engine_base
        same = canary.ids[:, :, None] == base.ids[:, None, :]  # [P, K, K]
        mask, column = same.any(2), same.int().argmax(2)
        moved = canary.logp - base.logp.gather(1, column)
        now = self._moved(canary)
        others = self._hypotheses(canary)
        delivered = share(moved, now, others["base"], mask)
        fault = find_fault(moved, now, others, mask)
        if fault is not None:
            raise self._error(fault, delivered)
        self._before = self.adapter.copy_factors()
        effect = root_mean_square(now - others["base"], mask)
        gap = root_mean_square(moved - now, mask)
        return delivered, effect, gap

    def _hypotheses(self, canary: EngineCanary) -> dict[str, Tensor]:
        """Return how far the trainer has moved with every wrong adapter, [P, K] each.

        All with the engine's routes of now, if the run replays them: routes move log-probabilities
        too, and under every hypothesis alike.
        """
        model = self.learner.model
        with self.adapter.off():
            others = {"base": self._moved(canary)}
        if self._before is not None:
            with lora.other_factors(model, self._before):
                others["stale"] = self._moved(canary)
            on_top = lora.summed_factors(model, self._before, self.adapter.factors())
            with lora.other_factors(model, on_top):
                others["on_top"] = self._moved(canary)
        with lora.scaled_adapters(model, 2):
            others["twice"] = self._moved(canary)
        return others

    def _moved(self, canary: EngineCanary) -> Tensor:
        """Return how far the trainer's log-probabilities are from those before any update, [P, K].

        With the adapter that the model has at the time.
        """
        return (self._score(canary) - self._base).gather(1, canary.ids)

    def _metrics(self, delivered: Share, effect: float, gap: float) -> dict[str, float]:
        metrics = {"adapter/effect": effect, "adapter/gap": gap}
        if delivered.certain:
            metrics |= {"adapter/delivered": delivered.value}
        every = self.settings.loss_every
        if every and self.learner.version % every == 0:
            metrics["adapter/merge_loss"] = self._merge_loss()[1]
        return metrics

    def _note_invisible(self, delivered: Share, effect: float, gap: float) -> None:
        """Report once that the adapter is too small to be seen in the engine's numbers."""
        if delivered.certain or not self.learner.updates or self._noted:
            return
        self._noted = True
        self.note(
            f"train.lora: the adapter of version {self.learner.version} moves the fixed batch by "
            f"{number(effect)} nats, which the engine's rounding ({number(gap)} nats) hides: its "
            "log-probabilities cannot show yet whether it was delivered"
        )

    def _error(self, fault: str, delivered: Share) -> TrainingError:
        name, version = engine_name(self.engine), self.learner.version
        words = FAULTS[fault]
        if fault == "base" and version <= 1:
            words += ", or the adapter of version 0, which is the same"
        return TrainingError(
            f"weight sync: after version {version} of the adapter {self.adapter.name!r} was "
            f"pushed, {name} samples with {words}: {with_error(delivered.value, delivered.error)} "
            "of what it changes in the trainer's log-probabilities of a fixed batch is in the "
            "engine's, and 1 should be. Every rollout would be another policy's"
        )

    def _check_names(self, completions: list[Completion]) -> None:
        """Raise TrainingError unless replies carry the name and version of this adapter."""
        for completion in completions:
            named, expected = completion.adapter, self.adapter.name
            if named != expected:
                raise TrainingError(
                    f"weight sync: {engine_name(self.engine)} was given the adapter "
                    f"{expected!r}, but a reply names {named!r}: requests do not name the adapter, "
                    "and the frozen weights would be sampled"
                )
            versions = completion.version.unique().tolist()
            if versions != [self.learner.version]:
                raise TrainingError(
                    f"weight sync: the adapter {self.adapter.name!r} is at version "
                    f"{self.learner.version}, but {engine_name(self.engine)} sampled with "
                    f"versions {versions}: it is stale"
                )

    def _check_weights(self) -> None:
        """Raise TrainingError if the engine's weights can be read and are not base + adapter."""
        if not isinstance(self.engine, ReadableEngine):
            return
        held = self.engine.held_weights()
        adapted = lora.adapted_layers(self.learner.model)
        frozen: AbstractContextManager[None] = nullcontext()
        if self.engine.caps.takes_adapter:
            self._check_factors(self.engine.held_factors())
            frozen = self.adapter.off()
        compared = (adapted.keys() | self.adapter.stored_names) & held.keys()
        with frozen:
            sent = self.learner.named_weights(self.engine.caps.weights_dtype)
            # read to the end, so that the ranks of a sharded learner stay in step
            wrong = [n for n, own in sent if n in compared and not _equal(held[n], own)]
        if wrong:
            name = wrong[0]
            raise TrainingError(
                f"weight sync: after version {self.learner.version} of the adapter "
                f"{self.adapter.name!r} was pushed, {name!r} of {engine_name(self.engine)} "
                f"is {self._name_weights(name, held[name])}"
            )

    def _check_factors(self, held: lora.Factors) -> None:
        """Raise TrainingError if an engine that computes with A and B has others."""
        for name, (a, b) in self.adapter.factors().items():
            own_a, own_b = held[name]
            if _equal(own_a, a) and _equal(own_b, b):
                continue
            words = "not those of the learner, perhaps of an earlier version"
            if not own_b.any():
                words = f"0: it samples {FAULTS['base']}"
            raise TrainingError(
                f"weight sync: after version {self.learner.version} of the adapter "
                f"{self.adapter.name!r} was pushed, A and B of {name!r} in "
                f"{engine_name(self.engine)} are {words}"
            )

    def _name_weights(self, name: str, held: Tensor) -> str:
        """Return words for the weights that an engine holds in place of the right ones."""
        dtype = self.engine.caps.weights_dtype
        with self.adapter.off():
            if _equal(held, dict(self.learner.named_weights(dtype))[name]):
                return FAULTS["base"]
        with lora.scaled_adapters(self.learner.model, 2):
            if _equal(held, dict(self.learner.named_weights(dtype))[name]):
                return FAULTS["twice"]
        return "something else, perhaps an earlier version"

    # --- values -----------------------------------------------------------------------------------

    async def _ask_engine(self) -> EngineCanary:
        """Return the engine's log-probabilities after the fixed prompts."""
        top = min(TOP, self.engine.caps.top_logprobs)
        greedy = Sampling(temperature=0.0, max_tokens=1, top_logprobs=top)
        asked = await generate_all(self.engine, self._prompts, greedy, range(self.prompts))
        replies = asked.completions
        ids = [reply.token_ids[:, None] for reply in replies]
        logp = [reply.logp[:, None] for reply in replies]
        if top:
            ids = [reply.top_ids for reply in replies if reply.top_ids is not None]
            logp = [reply.top_logp for reply in replies if reply.top_logp is not None]
        if not self.components.config.rollout.overlaps:
            await self.engine.reset_cache()
        return EngineCanary(torch.cat(ids).long(), torch.cat(logp), replies)

    @torch.no_grad()
    def _score(self, canary: EngineCanary) -> Tensor:
        """Return the trainer's log-probabilities after the prompts, [P, vocabulary] float32, CPU.

        The engine's routes are replayed if the run replays them. With replay.source = reprefill it
        returns none, and both sides route by themselves.
        """
        scorer = self.learner.scorer
        replies = [
            dataclasses.replace(reply, top_ids=None, top_logp=None) for reply in canary.completions
        ]
        generated = GeneratedBatch(self._prompts, Sampling(0.0, 1), replies)
        batch = pack_generated(generated, routes=True)
        micro = batch.to(scorer.device)
        slots = micro.trainable.nonzero()[:, 0]
        routing: AbstractContextManager[object] = nullcontext()
        if self.components.reprefill is None:
            routing = scorer.routing_context(micro, native=False)
        with routing:
            logits = scorer.logits(micro, slots)
        return logits.log_softmax(-1).cpu()

    def _merge_loss(self) -> tuple[float, float]:
        """Return how far the adapter moves the fixed batch, and how far a merge misses that [nats].

        The merge is into the engine's dtype. Both are root mean squares over likely tokens.
        """
        model, dtype = self.learner.model, DTYPES[self.components.config.rollout.engine.dtype]
        canary = self._engine_base
        now = self._score(canary) - self._base
        with lora.merged_in(model, dtype, adapter=True):
            merged = self._score(canary)
        with lora.merged_in(model, dtype, adapter=False):
            merged = merged - self._score(canary)
        ids = canary.ids
        mask = torch.ones_like(ids, dtype=torch.bool)
        now, merged = now.gather(1, ids), merged.gather(1, ids)
        return root_mean_square(now, mask), root_mean_square(merged - now, mask)


def _equal(held: Tensor, sent: Tensor) -> bool:
    return torch.equal(held, sent.to(held.device, held.dtype))


def _learner_of(components: Components) -> LocalLearner | ShardedLearner:
    return cast("LocalLearner | ShardedLearner", components.learner)


async def check_adapter(components: Components) -> dict[str, float]:
    """Check the engine's adapter after a sync. Return what was measured."""
    adapter = _learner_of(components).adapter
    assert adapter is not None
    check = adapter.check
    assert isinstance(check, AdapterCheck), "the start of a run makes it"
    return await check.after_push()
