"""The methods that stand in for those of a TRL trainer's instance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from onepolicy.config import UsageError
from onepolicy.integrations.core.advantages import of_a_part
from onepolicy.integrations.core.armed import ArmedReplay
from onepolicy.integrations.core.dump import add_routes
from onepolicy.integrations.core.first_step import FirstStep
from onepolicy.integrations.core.metrics import (
    mismatch_metrics,
    replay_metrics,
    routing_metrics,
)
from onepolicy.integrations.core.supports import add_supports
from onepolicy.integrations.trl.correction import (
    average_of,
    correct_generation,
    correct_micro_batch,
)
from onepolicy.integrations.trl.own_model import own_rollouts
from onepolicy.integrations.trl.preflight import (
    sampling_of,
    scores_over_supports,
    top_k_of,
    trl_scores,
)
from onepolicy.integrations.trl.ranks import TrlLog
from onepolicy.integrations.trl.route_book import RouteBook
from onepolicy.integrations.trl.settings import TrlSettings
from onepolicy.integrations.trl.supports import (
    NONE_RETURNED,
    SUPPORTS,
    SupportScorer,
    check_completions,
    likeliest_of,
    supports_of_rollout,
)
from onepolicy.integrations.trl.vllm_routes import (
    watch_client,
    watch_colocated,
    watch_generation,
)
from onepolicy.record.export.trl import StepDump, response_mask, response_rows
from onepolicy.support.trace import SupportTrace
from onepolicy.types import RoutingTrace

Trace = RoutingTrace | None
ROUTES = "routed_experts"
"""Key of the routes: in a rollout_func's output as payloads, in TRL's batch as traces."""
SAMPLED, OWN_SAMPLED = "sampling_per_token_logps", "onepolicy_sampling_logps"
"""TRL's field of a batch, and ours where TRL has none: its off-policy mask would read the first."""
IMAGE_FIELDS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass(slots=True)
class Generation:
    """One generation while TRL samples and scores it."""

    traces: list[Trace] = field(default_factory=list)
    logp_rollout: list[Any] | None = None  # of each sample, where TRL itself drops them
    logp: Tensor | None = None  # [B, T] float32, scored under replay
    entropy: Tensor | None = None  # [B, T]
    native: list[Trace] = field(default_factory=list)  # the routers' own choice
    dropped: int = 0  # samples whose routes were wrong, and are None in `traces` now
    supports: list[SupportTrace] | None = None  # of the completions, where sampling was cut
    logp_vocabulary: Tensor | None = None  # [B, T] float32, if there are supports


class TrlAdapter:
    """Replay, correction, metrics and dump of one trainer."""

    def __init__(self, trainer: Any, settings: TrlSettings, armed: ArmedReplay | None) -> None:
        """Prepare the adapter. `install` changes the trainer.

        armed: None replays nothing.
        """
        self._trainer, self._settings, self._armed = trainer, settings, armed
        self._routers = armed.routers if armed is not None else None
        self._book = RouteBook(self._routers, settings.form)
        self._log = TrlLog(trainer)
        self._first = FirstStep("trl", replays=armed is not None)
        self._adds_scoring = settings.scoring == "always" and not trl_scores(trainer)
        self._in_training_forward = settings.scoring != "always" and not trl_scores(trainer)
        self._generation: Generation | None = None
        self._micro_batch: dict[str, Any] | None = None
        self._supports = False
        self._scorer = SupportScorer(trainer)
        self._over: Sequence[SupportTrace] | None = None  # supports of the batch at hand
        self._generations = 0
        name = getattr(trainer.model, "active_adapter", None)
        self._peft_adapter = name if isinstance(name, str) else None

    def install(self) -> None:
        """Put the wrappers in the place of the trainer's methods, and watch its sampler."""
        trainer = self._trainer
        self._supports = scores_over_supports(trainer)
        self._dump = None
        if self._settings.dump is not None:
            self._dump = StepDump(trainer, self._settings.dump, replayed=bool(self._armed))
        self._generate = trainer._generate
        self._single_turn = trainer._generate_single_turn
        self._generate_and_score = trainer._generate_and_score_completions
        self._logps = trainer._get_per_token_logps_and_entropies
        self._loss = trainer._compute_loss
        trainer._generate = self.generate
        trainer._generate_single_turn = self.generate_single_turn
        trainer._generate_and_score_completions = self.generate_and_score
        trainer._get_per_token_logps_and_entropies = self.per_token_logps
        trainer._compute_loss = self.compute_loss
        if trainer.use_vllm:
            self._watch_vllm(trainer.vllm_generation)

    def _watch_vllm(self, generation: Any) -> None:
        if self._armed is not None and hasattr(generation, "llm"):
            watch_colocated(generation.llm, self._book)
        if self._armed is not None and hasattr(generation, "vllm_client"):
            watch_client(generation.vllm_client, self._book)
        if hasattr(generation, "generate"):
            if self._supports:
                top_k = top_k_of(sampling_of(self._trainer))
                generation.logprobs = likeliest_of(self._trainer, top_k)
            watch_generation(generation, self._book, supports=self._supports)

    # Sampling

    def generate(self, prompts: list[Any]) -> Any:
        """Run TRL's `_generate` and keep the routes of its samples."""
        self._book.clear()
        made = self._generate(prompts)
        payloads = supports = tool_mask = None
        if len(made) > 5:  # GRPO; the fields that a rollout_func returned beside its tokens
            payloads, supports = made[5].pop(ROUTES, None), made[5].pop(SUPPORTS, None)
            tool_mask = made[2]
        if self._generation is None:
            return made
        prompt_ids, completion_ids = made[:2]
        if payloads is not None:
            self._add_payloads(prompt_ids, completion_ids, payloads)
        self._generation.logp_rollout = self._book.logps(prompt_ids, completion_ids)
        if supports is not None:
            self._over = supports_of_rollout(supports, completion_ids)
        elif self._supports and getattr(self._trainer, "rollout_func", None) is None:
            self._over = self._book.supports(prompt_ids, completion_ids)
        elif self._supports and self._settings.correction is not None:
            raise UsageError(NONE_RETURNED)
        if self._over is not None:
            check_completions(self._over, completion_ids, tool_mask)
            self._generation.supports = list(self._over)
        if self._armed is not None:
            self._generation.traces = self._book.traces(prompt_ids, completion_ids)
            self._check_routes(self._generation.traces)
        return made

    def generate_single_turn(self, prompt_ids: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        """Run TRL's `_generate_single_turn`, recording where the trainer's own model samples.

        GRPO's second result, the sampling log-probabilities, is None then; ours take its place.
        """
        trainer = self._trainer
        batched = trainer.use_transformers_continuous_batching
        if self._generation is None or trainer.use_vllm or batched:
            return self._single_turn(prompt_ids, *args, **kwargs)
        recording = own_rollouts(
            trainer.model, self._routers, trainer.temperature, supports=self._supports
        )
        with recording as own:
            made = self._single_turn(prompt_ids, *args, **kwargs)
        completions = made
        if isinstance(made, tuple):
            completions = made[0]
        assert own.logp is not None, "TRL samples with the model's generate()"
        logps = [values[: len(ids)] for values, ids in zip(own.logp, completions, strict=True)]
        traces: list[Trace] = [None] * len(logps)
        if own.traces is not None:
            traces = list(own.traces)
        supports: list[SupportTrace | None] = [None] * len(logps)
        if own.supports is not None:
            supports = list(own.supports)
        paths = zip(prompt_ids, completions, traces, logps, supports, strict=True)
        for prompt, ids, trace, logp, support in paths:
            self._book.add(prompt, ids, routes=trace, logp=logp, support=support)
        if isinstance(made, tuple) and made[1] is None:
            return completions, logps
        return made

    def _add_payloads(self, prompts: Any, completions: Any, payloads: Any) -> None:
        if not isinstance(payloads, list | tuple) or len(payloads) != len(completions):
            size = "no list"
            if hasattr(payloads, "__len__"):
                size = f"{len(payloads)} entries"
            raise UsageError(
                f"rollout_func: {ROUTES} has {size} for {len(completions)} completions; return a "
                "list with the routes of each, or None for one without"
            )
        self._book.clear()
        for prompt, completion, routes in zip(prompts, completions, payloads, strict=True):
            self._book.add(prompt, completion, routes=routes)

    def _check_routes(self, traces: list[Trace]) -> None:
        if any(trace is not None and trace.valid.any() for trace in traces):
            return
        if any(trace is not None for trace in traces):
            raise UsageError(
                f"TRL: no row of the routes of {len(traces)} samples was captured (they are zeros, "
                "or marked as missing), so there is nothing to replay; the engine's MoE kernels do "
                "not record: on vLLM's CPU build give op_trl.routed_vllm(enforce_eager=True)"
            )
        fix = f'return them from the rollout_func, under the key "{ROUTES}"'
        if getattr(self._trainer, "rollout_func", None) is None and self._trainer.use_vllm:
            fix = "start the server with --enable-return-routed-experts"
            if self._trainer.vllm_mode == "colocate":
                fix = "build the trainer inside op_trl.routed_vllm()"
        raise UsageError(
            f"TRL: none of the {len(traces)} samples of a generation came with routes, so there is "
            f'nothing to replay; {fix}, or attach with replay="off"'
        )

    # Scoring

    def generate_and_score(self, inputs: Any) -> dict[str, Any]:
        """Run TRL's `_generate_and_score_completions`; measure, correct and dump the result.

        Evaluations pass through, natively.
        """
        made: dict[str, Any]
        if not self._trainer.model.training:
            made = self._generate_and_score(inputs)
            return made
        step = self._trainer.state.global_step
        self._generation = generation = Generation()
        try:
            made = self._generate_and_score(inputs)
            if self._adds_scoring:
                self._score(made)
            self._generation = None
            if SAMPLED not in made and generation.logp_rollout is not None:
                made[OWN_SAMPLED] = _padded(generation.logp_rollout, made["completion_ids"])
            self._finish(made, generation, step)
        finally:
            self._generation = self._over = None
        if self._armed is not None:
            made[ROUTES] = generation.traces
        if generation.supports is not None:
            made[SUPPORTS] = generation.supports
        return made

    def _run_logps(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's method, or ours where the batch at hand has supports."""
        if self._over is None:
            return self._logps(model, *args, **kwargs)
        return self._scorer.score(self._over, model, *args, **kwargs)

    def per_token_logps(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Run TRL's `_get_per_token_logps_and_entropies`, replaying where the policy runs."""
        if self._micro_batch is not None:
            return self._training_forward(self._micro_batch, model, *args, **kwargs)
        generation = self._generation
        if generation is None or self._is_reference(model):
            return self._run_logps(model, *args, **kwargs)
        kwargs["compute_entropy"] = True
        without = missing(generation.traces)
        with self._replaying(generation.traces, native=True) as native:
            found = self._run_logps(model, *args, **kwargs)
        generation.logp_vocabulary = self._scorer.logp_vocabulary
        generation.logp, generation.entropy = found[:2]
        generation.native = native
        generation.dropped = missing(generation.traces) - without
        return found

    @contextmanager
    def _replaying(self, traces: list[Trace], *, native: bool) -> Iterator[list[Trace]]:
        """Replay the forwards of this context. Yield a list that then gets the native routes.

        Traces of samples that were dropped become None in `traces`, so that no later forward of the
        step replays them.
        """
        found: list[Trace] = []
        if self._armed is None:
            yield found
            return
        how: dict[str, Any] = {
            "check": self._settings.check,
            "on_mismatch": self._settings.on_mismatch,
        }
        with self._armed.batch(traces, native=native, **how) as batch:
            yield found
        found += batch.native
        for sample in batch.dropped:
            traces[sample] = None

    def _is_reference(self, model: Any) -> bool:
        """Return whether this call scores the reference policy, which is never replayed.

        With peft it is the policy's own model, its adapters off or another one active.
        """
        if model is getattr(self._trainer, "ref_model", None):
            return True
        if self._peft_adapter is None:
            return False
        off = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
        active: str = self._trainer.model.active_adapter
        return off or active != self._peft_adapter

    @torch.no_grad()
    def _score(self, made: Mapping[str, Any]) -> Tensor:
        """Score the generation with the current weights. Return log-probabilities [B, T]."""
        from trl.models.utils import disable_gradient_checkpointing

        trainer = self._trainer
        images = {name: made[name] for name in IMAGE_FIELDS if name in made}
        checkpointing = trainer.args.gradient_checkpointing_kwargs
        with disable_gradient_checkpointing(trainer.model, checkpointing):
            found = trainer._get_per_token_logps_and_entropies(
                trainer.model,
                torch.cat([made["prompt_ids"], made["completion_ids"]], 1),
                torch.cat([made["prompt_mask"], made["completion_mask"]], 1),
                made["completion_ids"].shape[1],
                batch_size=trainer.args.per_device_train_batch_size,
                **images,
            )
        logp: Tensor = found[0]
        return logp

    def _finish(self, made: dict[str, Any], generation: Generation, step: int) -> None:
        """Measure, correct and dump a generation whose tokens and scores are known."""
        self._generations += 1
        metrics: dict[str, float] = {}
        if generation.traces:
            tokens = (made["prompt_mask"].sum(1) + made["completion_mask"].sum(1)).tolist()
            metrics = replay_metrics(generation.traces, tokens)
        drops = self._settings.on_mismatch == "drop" and generation.logp is not None
        if drops and generation.traces:
            metrics["replay/dropped_samples"] = generation.dropped / len(generation.traces)
        if generation.native:
            metrics |= routing_metrics(generation.traces, generation.native)
        logp_rollout, mask = sampled(made), response_mask(made)
        if logp_rollout is None:
            self._require_logps()
            self._log.add(metrics)
            return
        logp_native = self._native_scores(made)
        if logp_native is not None:
            prefix = "mismatch_native"
            metrics |= mismatch_metrics(logp_native, logp_rollout, mask, prefix=prefix)
        logp_old = generation.logp
        if logp_old is not None:
            metrics |= mismatch_metrics(logp_old, logp_rollout, mask)
            self._look(made, logp_old, logp_rollout, mask, generation.entropy)
            if self._dump is not None:
                self._write_dump(made, generation, logp_native, step)
            if self._settings.correction is not None:
                metrics |= correct_generation(
                    made,
                    logp_old,
                    logp_rollout,
                    mask,
                    self._settings.correction,
                    average_of(self._trainer),
                )
        self._log.add(metrics)

    def _look(
        self,
        made: Mapping[str, Any],
        logp: Tensor,  # [B, T]
        logp_rollout: Tensor,  # [B, T]
        mask: Tensor,  # [B, T] bool
        entropy: Tensor | None = None,  # [B, T]
    ) -> None:
        """Diagnose the main process's part of the first scored step."""
        if self._first.due and self._trainer.accelerator.is_main_process:
            tokens = made["completion_ids"]
            self._first.look(logp, logp_rollout, mask, tokens=tokens, entropy=entropy)

    def _native_scores(self, made: Mapping[str, Any]) -> Tensor | None:
        """Return the scores [B, T] without replay, every `native_every` generations, or None."""
        every = self._settings.native_every
        if not every or (self._generations - 1) % every:
            return None
        return self._score(made)

    def _require_logps(self) -> None:
        if self._settings.correction is not None or self._dump is not None:
            raise UsageError(
                "TRL: this generation has no sampling log-probabilities, which correction and dump "
                "need; set use_vllm=True, return them from the rollout_func, or let the trainer's "
                "own model sample without continuous batching"
            )

    def _write_dump(
        self,
        made: Mapping[str, Any],
        generation: Generation,
        logp_native: Tensor | None,
        step: int,
    ) -> None:
        assert self._dump is not None
        assert generation.logp is not None
        columns = {"logp_rollout": sampled(made), "logp_trainer": generation.logp}
        if generation.entropy is not None:
            columns["entropy"] = generation.entropy
        if logp_native is not None and self._settings.native_every == 1:
            columns["logp_native"] = logp_native  # or rows of some generations alone would have it
        rows = response_rows(made, columns, step, self._dump.rewards(len(made["completion_ids"])))
        kept = made["completion_mask"].any(1).nonzero()[:, 0].tolist()
        if generation.supports is not None:
            assert generation.logp_vocabulary is not None
            supports = [generation.supports[i] for i in kept]
            add_supports(rows, supports, generation.logp_vocabulary[kept].cpu())
        if generation.native and self._routers is not None:
            prompts = made["prompt_mask"].sum(1).tolist()
            add_routes(
                rows,
                [generation.traces[i] for i in kept],
                [generation.native[i] for i in kept],
                [prompts[i] for i in kept],
                (len(self._routers.layers), self._routers.top_k),
            )
        self._dump.write(step, rows)

    # Training

    def compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """Run TRL's `_compute_loss` on a copy of the micro-batch that corrections may change."""
        if not self._trainer.model.training:
            return self._loss(model, inputs)
        self._micro_batch = dict(inputs)
        self._over = self._micro_batch.pop(SUPPORTS, None)
        try:
            return self._loss(model, self._micro_batch)
        finally:
            self._micro_batch = self._over = None

    def _training_forward(self, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward with gradient, and correct before TRL computes the loss from it."""
        measure = self._in_training_forward
        traces = inputs.get(ROUTES, [])
        without = missing(traces)
        with self._replaying(traces, native=measure) as native:
            found = self._run_logps(*args, **kwargs)
        metrics: dict[str, float] = {}
        if measure and traces and self._settings.on_mismatch == "drop":
            metrics["replay/dropped_samples"] = (missing(traces) - without) / len(traces)
        logp_rollout, config = sampled(inputs), self._settings.correction
        if logp_rollout is None:
            self._log.add(metrics)
            return found
        if config is not None:
            config = of_a_part(config)
        logp_new, mask = found[0].detach(), response_mask(inputs)
        if native:
            metrics |= routing_metrics(traces, native)
        if measure:
            metrics |= mismatch_metrics(logp_new, logp_rollout, mask)
            self._look(inputs, logp_new, logp_rollout, mask)
        if measure and config is not None:
            metrics |= correct_generation(inputs, logp_new, logp_rollout, mask, config)
        if config is not None and config.live:
            metrics |= correct_micro_batch(inputs, logp_new, logp_rollout, mask, config)
        self._log.add(metrics)
        return found


def missing(traces: Iterable[Trace]) -> int:
    """Return how many samples have no routes."""
    return sum(trace is None for trace in traces)


def sampled(batch: Mapping[str, Any]) -> Any:
    """Return the engine's log-probabilities [B, T], None if there are none."""
    return batch.get(SAMPLED, batch.get(OWN_SAMPLED))


def _padded(logps: list[Any], completion_ids: Tensor) -> Tensor:
    """Return lists of log-probabilities as [B, T] float32; NaN for one that is not known."""
    padded = torch.zeros(completion_ids.shape, dtype=torch.float32)
    for row, values in zip(padded, logps, strict=True):
        known = [float("nan") if value is None else value for value in values]
        row[: len(known)] = torch.tensor(known)
    return padded.to(completion_ids.device)
