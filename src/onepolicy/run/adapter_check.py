"""Adapter truth: after every sync, a check that what samples is what learns (train.lora).

The engine is asked for the log-probabilities of the likeliest tokens after fixed prompts, and
the trainer scores the same tokens. `sync/truth.py` says which weights these are of. At step 0
the adapter is 0, so an adapter that is never delivered is seen after the first update. Where the
engine's weights can be read, they are compared too. And the name and version on every reply must be
those of this run's adapter.

An engine starts with the checkpoint's weights. With train.lora.base = nf4 the trainer computes with
others, the dequantised ones, so the first sync must move the engine, and from then on the
unquantised base is a fault.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from onepolicy.build.components import Components
from onepolicy.config import TrainingError
from onepolicy.config.input_files import resolve_model
from onepolicy.engine_check.checks import GeneratedBatch, generate_all, pack_generated
from onepolicy.interfaces import ReadableEngine, engine_name
from onepolicy.models import lora
from onepolicy.models.load import DTYPES, load_model
from onepolicy.notation import number, with_error
from onepolicy.rollout.hf.engine import HFEngine
from onepolicy.sync import truth
from onepolicy.sync.canary import canary_prompts
from onepolicy.sync.push import checked_push, push_weights
from onepolicy.sync.truth import HYPOTHESES, Answers, Share, root_mean_square
from onepolicy.types import Completion, Sampling

if TYPE_CHECKING:
    from onepolicy.train.learner import LocalLearner

TOP = 64
"""Likeliest tokens after each prompt that are compared."""
TRIAL = 0.5
"""About how far the trial adapter at the start moves the fixed batch [nats]. bfloat16 rounds by
0.01 to 0.1."""
TRIES = 8  # sizes of B that are tried to get there


class AdapterCheck:
    """The check of one run's adapter, with what it has to remember from sync to sync."""

    prompts = 32
    """Prompts of the fixed batch. Twice as many with nf4: in bfloat16 the two bases differ by
    little more than rounding."""

    def __init__(self, components: Components, note: Callable[[str], None]) -> None:
        learner = cast("LocalLearner", components.learner)
        settings = components.config.train.lora
        assert settings is not None
        assert learner.adapter is not None
        self.components, self.learner, self.adapter = components, learner, learner.adapter
        self.engine, self.note, self.settings = components.engine, note, settings
        count = self.prompts * (1 + (settings.base == "nf4"))
        vocab, longest = learner.scorer.vocab_size, self.engine.caps.max_len
        self._prompts = canary_prompts(vocab, longest, count)
        self._before: lora.Factors | None = None
        self._loaded: Answers | None = (
            None  # of the base that only the engine had, less the trainer
        )
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
            if self.settings.base == "nf4":
                await self._push_quantised()
            await checked_push(learner, self.engine, vocab=vocab)
            self._engine_base = await self._ask_engine()
            self._base = self._score(self._engine_base)
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

    async def _push_quantised(self) -> None:
        """Push the dequantised base, and check that the engine has it in place of its own.

        Raises TrainingError if its log-probabilities are still of the base that it loaded.
        """
        from onepolicy.models.nf4 import stored_bytes  # needs bitsandbytes

        now, before = stored_bytes(self.learner.model)
        self.note(
            f"train.lora.base = nf4: the frozen linear layers and experts take {now / 1e6:.1f} MB "
            f"in place of {before / 1e6:.1f} MB; trainer and engine compute with what they "
            "dequantise to"
        )
        loaded = await self._ask_engine()
        self._loaded = loaded.beside(self._score(loaded))
        await push_weights(self.learner, self.engine)
        canary = await self._ask_engine()
        moved, mask = canary.since(loaded)
        now_moved = self._score(canary).gather(1, canary.ids) - (canary.logp - moved)
        if truth.share(moved, now_moved, torch.zeros_like(now_moved), mask).excludes_now:
            raise self._error(None, "unquantised")

    def _trial_size(self) -> float:
        """Return the size of B's elements that moves the fixed batch by about TRIAL nats."""
        size = self.components.config.optim.lr
        for _ in range(TRIES):
            with lora.trial_adapter(self.learner.model, size, seed=0):
                effect = root_mean_square(self._moved(self._engine_base))
            if effect >= TRIAL / 2:
                break
            size *= TRIAL / max(effect, TRIAL / 8)
        return size

    def _note_merge_loss(self) -> None:
        """Report what a merge into the engine's dtype loses of an adapter, before any step."""
        rate, dtype = self.components.config.optim.lr, self.components.config.rollout.engine.dtype
        what = "the adapter"
        trial: AbstractContextManager[None] = nullcontext()
        if not any(bool(b.any()) for _, b in self.adapter.factors().values()):  # not trained yet
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

    def _merge_loss(self) -> tuple[float, float]:
        """Return how far the adapter moves the fixed batch, and how far a merge misses that."""
        canary, dtype = self._engine_base, self.components.config.rollout.engine.dtype
        return truth.merge_loss(
            self.learner.model, DTYPES[dtype], lambda: self._score(canary), self._base, canary.ids
        )

    # --- every sync -------------------------------------------------------------------------------

    async def after_push(self) -> dict[str, float]:
        """Check the engine after a sync. Return what was measured (run/metrics.toml).

        Raises TrainingError if the engine samples with anything but this version of the adapter.
        """
        metrics: dict[str, float] = {}
        if isinstance(self.engine, HFEngine):
            metrics = self.engine.take_metrics()  # the check's own requests are no rollouts
        delivered, effect, gap = await self._check_push()
        metrics |= {"adapter/effect": effect, "adapter/gap": gap}
        if delivered.certain:
            metrics |= {"adapter/delivered": delivered.value}
        elif self.learner.updates and not self._noted:
            self._noted = True
            self.note(
                f"train.lora: the adapter of version {self.learner.version} moves the fixed batch "
                f"by {number(effect)} nats, which the engine's rounding ({number(gap)} nats) "
                "hides: its log-probabilities cannot show yet whether it was delivered"
            )
        every = self.settings.loss_every
        if every and self.learner.version % every == 0:
            metrics["adapter/merge_loss"] = self._merge_loss()[1]
        return metrics

    async def _check_push(self) -> tuple[Share, float, float]:
        """Return the share, effect and gap of the adapter that was just pushed, after the checks.

        Raises TrainingError as `after_push`.
        """
        wrong = self._wrong_weights()
        canary = await self._ask_engine()
        if wrong is None:
            self._check_names(canary.completions)
        moved, mask = canary.since(self._engine_base)
        now, others = self._moved(canary), self._hypotheses(canary)
        delivered = truth.share(moved, now, others["base"], mask)
        fault = truth.find_fault(moved, now, others, mask)
        if wrong is not None or fault is not None:
            raise self._error(wrong, fault, delivered)
        self._before = self.adapter.copy_factors()
        effect = root_mean_square(now - others["base"], mask)
        return delivered, effect, root_mean_square(moved - now, mask)

    def _hypotheses(self, canary: Answers) -> dict[str, Tensor]:
        """Return how far the trainer has moved with every wrong adapter, [P, K] each.

        All with the engine's routes of now, if the run replays them: routes move log-probabilities
        too, and under every hypothesis alike. So the base that the engine loaded, and the
        quantised one, are each compared with the trainer on the routes that the engine was asked
        with, and only what their weights differ by is left.
        """
        taken = truth.taken(self.learner.model, self._before)
        others = {name: self._moved(canary) for name in taken}
        if self._loaded is None:
            return others
        base = self._engine_base.beside(self._base)
        back, known = base.since(self._loaded)  # what quantisation moved
        back = torch.where(known, back, torch.nan)
        loaded, known = base._replace(logp=back).at(canary.ids)
        known &= ~loaded.isnan()
        now = self._moved(canary)
        others["unquantised"] = torch.where(known, now - loaded, now)
        others["unquantised_alone"] = torch.where(known, others["base"] - loaded, now)
        return others

    def _moved(self, canary: Answers) -> Tensor:
        """Return how far the trainer's log-probabilities are from those before any update, [P, K].

        With the adapter that the model has at the time.
        """
        return (self._score(canary) - self._base).gather(1, canary.ids)

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

    def _wrong_weights(self) -> str | None:
        """Return which weights of the engine are not base + adapter; None if it cannot be read."""
        engine, kind = self.engine, engine_name(self.engine)
        if not isinstance(engine, ReadableEngine):
            return None
        held = engine.held_weights()
        adapted = lora.adapted_layers(self.learner.model).keys()
        frozen: AbstractContextManager[None] = nullcontext()
        if engine.caps.takes_adapter:
            factors, frozen = engine.held_factors(), self.adapter.off()
            for name, own in self.adapter.factors().items():
                if not all(map(_equal, factors[name], own)):
                    return f"A and B of {name!r} in {kind} are"
        with frozen:
            sent = self.learner.named_weights(engine.caps.weights_dtype)
            compared = (adapted | self.adapter.stored_names) & held.keys()
            # read to the end, so that the ranks of a sharded learner stay in step
            wrong = [n for n, own in sent if n in compared and not _equal(held[n], own)]
        return f"{wrong[0]!r} of {kind} is" if wrong else None

    def _error(
        self, wrong: str | None, fault: str | None, delivered: Share | None = None
    ) -> TrainingError:
        """Return the error of an engine that has other weights.

        wrong: which, if they were read. fault: the hypothesis that log-probabilities are of.
        """
        version, how = self.learner.version, "by its log-probabilities of a fixed batch"
        words = "something else, perhaps an earlier version"
        if fault is not None:
            words = HYPOTHESES[fault].words
            if delivered is not None and HYPOTHESES[fault].take is not None:
                how = (
                    f"{with_error(delivered.value, delivered.error)} of what it changes in the "
                    "trainer's log-probabilities of a fixed batch is in the engine's, and 1 "
                    "should be"
                )
        if fault == "base" and version <= 1:
            words += ", or the adapter of version 0, which is the same"
        found = f"{engine_name(self.engine)} samples with {words}: {how}"
        if wrong is not None:
            found = f"{wrong} {words}"
        return TrainingError(
            f"weight sync: after version {version} of the adapter {self.adapter.name!r} was "
            f"pushed, {found}. Every rollout would be another policy's"
        )

    # --- values -----------------------------------------------------------------------------------

    async def _ask_engine(self) -> Answers:
        """Return the engine's log-probabilities after the fixed prompts."""
        top = min(TOP, self.engine.caps.top_logprobs)
        greedy = Sampling(temperature=0.0, max_tokens=1, top_logprobs=top)
        asked = await generate_all(self.engine, self._prompts, greedy, range(len(self._prompts)))
        replies = asked.completions
        ids = [reply.token_ids[:, None] for reply in replies]
        logp = [reply.logp[:, None] for reply in replies]
        if top:
            ids = [reply.top_ids for reply in replies if reply.top_ids is not None]
            logp = [reply.top_logp for reply in replies if reply.top_logp is not None]
        if not self.components.config.rollout.overlaps:
            await self.engine.reset_cache()
        return Answers(torch.cat(ids).long(), torch.cat(logp), replies)

    @torch.no_grad()
    def _score(self, canary: Answers) -> Tensor:
        """Return the trainer's log-probabilities after the prompts, [P, vocabulary] float32, CPU.

        The engine's routes are replayed if the run replays them. With replay.source = reprefill it
        returns none, and both sides route by themselves, as with replay.mode = r2.
        """
        scorer = self.learner.scorer
        replies = [
            dataclasses.replace(reply, top_ids=None, top_logp=None) for reply in canary.completions
        ]
        generated = GeneratedBatch(self._prompts, Sampling(0.0, 1), replies)
        micro = pack_generated(generated, routes=True).to(scorer.device)
        slots = micro.trainable.nonzero()[:, 0]
        routing: AbstractContextManager[object] = nullcontext()
        if self.components.reprefill is None and scorer.replay_mode.in_scoring:
            routing = scorer.routing_context(micro, native=False)
        with routing:
            logits = scorer.logits(micro, slots)
        return logits.log_softmax(-1).cpu()


def _equal(held: Tensor, sent: Tensor) -> bool:
    return torch.equal(held, sent.to(held.device, held.dtype))


@asynccontextmanager
async def holding_policy(components: Components) -> AsyncIterator[None]:
    """Give the engine base + adapter, and afterwards the weights that it was built with again.

    A forked run's engine is built with the base alone, and `AdapterCheck.start` begins there.
    """
    config, engine = components.config, components.engine
    learner = cast("LocalLearner", components.learner)
    assert config.train.lora is not None
    assert learner.adapter is not None
    await push_weights(learner, engine)
    yield
    if config.train.lora.base == "nf4":  # the learner does not have what the engine was built with
        model, dtype = resolve_model(config.model), DTYPES[config.model.dtype]
        base = load_model(model, dtype, torch.device("cpu"))  # a GPU may lack the room
        await engine.load_weights(base.state_dict().items(), learner.version)
        return
    with learner.adapter.off():
        await push_weights(learner, engine)


async def check_adapter(components: Components) -> dict[str, float]:
    """Check the engine's adapter after a sync. Return what was measured."""
    adapter = cast("LocalLearner", components.learner).adapter
    assert adapter is not None
    assert isinstance(adapter.check, AdapterCheck), "the start of a run makes it"
    return await adapter.check.after_push()
