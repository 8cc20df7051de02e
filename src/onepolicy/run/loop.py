"""The loop over the steps of a run, with evaluation, log, probe files and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from onepolicy.build.calibrate import calibrate
from onepolicy.build.components import Components
from onepolicy.config import RolloutReplay
from onepolicy.config.output_paths import BEGUN
from onepolicy.engine_check.checks import require_correct_logprobs
from onepolicy.envs.multiturn.tokenization import decode_tokens
from onepolicy.files import write_text_atomically
from onepolicy.interfaces import PressedEngine, Progress, RolloutEngine
from onepolicy.invariant.fingerprint import short_digest
from onepolicy.run import run_folder
from onepolicy.run.adapter_check import AdapterCheck, holding_policy
from onepolicy.run.async_rollouts import RolloutPrefetcher
from onepolicy.run.evaluate import evaluate, num_eval_episodes
from onepolicy.run.hooks import build_hooks, is_counterfactual_step
from onepolicy.run.learning_check import LearningMonitor
from onepolicy.run.log import RunLog, read_metrics, truncate_after
from onepolicy.run.log_digest import digest_log
from onepolicy.run.probe_file import save_counterfactual
from onepolicy.run.run_folder import Json, RunOrigin
from onepolicy.run.step import StepResult, StepRunner
from onepolicy.run.step_metrics import metrics_per_layer
from onepolicy.run.summary import write_summary
from onepolicy.run.trackers import trackers_of
from onepolicy.sync.push import checked_push, push_weights
from onepolicy.train import checkpoint
from onepolicy.verdict.bug_signatures import diagnose_batch


class TrainingLoop:
    """A run from its starting point to its summary."""

    def __init__(
        self,
        components: Components,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        origin: RunOrigin,
        progress: Progress,
    ) -> None:
        self.components, self.tokenizer = components, tokenizer
        self.config, self.learner = components.config, components.learner
        self.runner = StepRunner(components, build_hooks(components))
        self.folder, self.origin, self.progress = folder, origin, progress

    async def run(self) -> Json:
        """Run all steps and return the summary."""
        self._restore()
        await self._start_engine()
        with RunLog(self.folder, trackers_of(self.config, self.progress.note)) as log:
            await self._run_steps(log)
        with self._writing():
            self.learner.finish_saving()
            checkpoint.prune(self.folder, self.config.checkpoint.keep)
            return write_summary(self.config, self.folder, self.origin.parent)

    # --- start ------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Restore the checkpoint that the run starts from, if there is one, and clean the folder.

        A fork saves it as its own, because it must not need its parent again: after the cleaning,
        which would delete a checkpoint that a sharded learner still writes.
        """
        if self.origin.weights is not None:
            self.learner.restore(self.origin.weights)
        clean_folder(self.folder, self.origin.step)
        if self.origin.parent and not checkpoint.complete_checkpoints(self.folder):
            with self._writing():
                self._save_checkpoint(self.origin.step)

    async def _start_engine(self) -> None:
        """Calibrate the engine, push the first weights, and check its log-probabilities."""
        components, engine = self.components, self.components.engine
        advance = self.progress.phase("engine warm-up and sync check", 1)
        if self.config.rollout.quant is not None:
            policy, lora = None, self.config.train.lora
            if lora is not None and (self.origin.weights is not None or lora.base == "nf4"):
                policy = holding_policy(components)
            await calibrate(
                self.config,
                engine,
                components.environment,
                components.sampling.stop,
                self.folder,
                reprefill=components.reprefill,
                policy=policy,
            )
        with _without_pressure(engine):
            if self.config.train.lora is not None:
                await start_adapter(components, self.progress.note)
            else:
                await checked_push(self.learner, engine, vocab=self.learner.scorer.vocab_size)
                await push_weights(self.learner, *components.samplers[1:])
            await require_correct_logprobs(engine, self.learner.scorer, self.tokenizer, self.config)
        advance()
        if not engine.caps.seeded:
            self.progress.note(
                "the engine does not use the request's seed: a resumed or repeated run samples "
                "other tokens"
            )

    # --- steps ------------------------------------------------------------------------------------

    async def _run_steps(self, log: RunLog) -> None:
        if self.config.eval.every and not read_metrics(self.folder):
            metrics = await self._evaluate(None, self.origin.step)
            with self._writing():
                log.write(self.origin.step, metrics)
        monitor = LearningMonitor(self.config, self.folder, self.progress.note)
        async with self._prefetcher() as prefetcher:
            for step in range(self.origin.step, self.config.steps):
                done = step + 1
                with self._writing():
                    write_text_atomically(self.folder / BEGUN, str(done))
                result = await self._run_step(prefetcher, step)
                if step == self.origin.step:
                    self._note_bug_signatures(result)
                if self._is_due(done, self.config.eval.every):
                    result.metrics |= await self._evaluate(prefetcher, done)
                with self._writing():
                    self._write_step(log, result, step)
                self.progress.step(done, result.metrics)
                monitor.after_step(done, result.metrics)
                if self._is_due(done, self.config.checkpoint.every):
                    await self._write_checkpoint(log, done, in_thread=prefetcher is not None)

    def _prefetcher(self) -> AbstractAsyncContextManager[RolloutPrefetcher | None]:
        """Return the prefetcher of an asynchronous run. None if rollout.max_staleness is unset."""
        if self.config.rollout.max_staleness is None:
            return nullcontext()
        return RolloutPrefetcher(self.runner, self.origin.step)

    async def _run_step(self, prefetcher: RolloutPrefetcher | None, step: int) -> StepResult:
        rollout = self.config.rollout
        episodes = rollout.prompts_per_step * rollout.group_size
        advance = self.progress.phase("rollout", episodes)
        if prefetcher is None:
            return await self.runner.rl_step(step, advance=advance)
        return await prefetcher.run_step(step, advance=advance)

    def _note_bug_signatures(self, result: StepResult) -> None:
        """Report if the ratio of engine and trainer in the first step looks like a bug.

        Under rollout.pressure only with the routes replayed: noise on routes has many marks of
        bugs.
        """
        replayed = isinstance(self.config.replay, RolloutReplay)
        if self.config.rollout.pressure is not None and not replayed:
            return
        found = diagnose_batch(result.batch)
        if found.bug:
            self.progress.note(
                "the ratio of engine and trainer looks like a bug, not like a mismatch\n"
                f"{found.text()}"
            )

    def _is_due(self, done: int, every: int) -> bool:
        """Return whether something happens after `done` steps: every `every` steps and at the end.

        every = 0 means never.
        """
        return every > 0 and (done % every == 0 or done == self.config.steps)

    async def _evaluate(self, prefetcher: RolloutPrefetcher | None, step: int) -> dict[str, float]:
        """Evaluate the current weights.

        prefetcher: plays the episodes of `step` (from 0) and of later steps at the same time.
        """
        components, config = self.components, self.config
        engine = components.engine
        if components.evaluator is not None:
            engine = components.evaluator
            await push_weights(self.learner, engine)
        evaluation = partial(
            evaluate,
            engine,
            components.environment,
            config.eval,
            stop=components.sampling.stop,
            max_tokens=config.eval.max_tokens or config.rollout.sampling.max_tokens,
            solved_at=getattr(config.task, "threshold", 1.0),
            advance=self.progress.phase("evaluation", num_eval_episodes(config.eval)),
        )
        cancel_pending = None
        if prefetcher is not None:
            cancel_pending = partial(prefetcher.cancel_all, step)
        metrics = await self.runner.with_recovery(evaluation, cancel_pending)
        if prefetcher is None or prefetcher.idle or components.evaluator is not None:
            # Otherwise rollouts would reuse cached prefixes that a resumed run does not have.
            await self.runner.with_recovery(engine.reset_cache, cancel_pending)
        return metrics

    # --- files ------------------------------------------------------------------------------------

    def _writing(self) -> AbstractContextManager[None]:
        return run_folder.convert_write_errors(self.folder)

    def _write_step(self, log: RunLog, result: StepResult, step: int) -> None:
        """Write the step's row, samples and, in a counterfactual step, its layers and probe."""
        done, probed = step + 1, is_counterfactual_step(self.config, step)
        if probed:
            result.metrics |= metrics_per_layer(result.batch)
        log.write(done, result.metrics)
        write_samples(log, result, self.tokenizer, done, self.config.log.samples_per_step)
        if probed:
            path = self.folder / run_folder.PROBES / f"step_{done:05d}.safetensors"
            fingerprint = self.learner.fingerprint
            save_counterfactual(path, result.batch, result.without_replay, fingerprint, result.own)

    async def _write_checkpoint(self, log: RunLog, done: int, *, in_thread: bool) -> None:
        """Save a checkpoint. in_thread: leave the event loop to episodes that are being played."""
        with self._writing():
            log.sync_to_disk()  # a checkpoint must not be newer than the rows on disk
            if in_thread:
                await asyncio.to_thread(self._save_checkpoint, done)
            else:
                self._save_checkpoint(done)
            checkpoint.prune(self.folder, self.config.checkpoint.keep)

    def _save_checkpoint(self, step: int) -> None:
        extra = {"parent": self.origin.parent, "log": digest_log(self.folder)}
        checkpoint.save(self.folder, self.learner, self.tokenizer, step=step, extra=extra)


def clean_folder(run: Path, step: int) -> None:
    """Remove unfinished checkpoints, and rows and probe files of steps after `step`.

    A finished run that is trained on loses summary and report, which say that it has finished.
    """
    with run_folder.convert_write_errors(run):
        checkpoint.remove_unfinished(run)
        for name in (run_folder.SUMMARY, "report.html"):
            (run / name).unlink(missing_ok=True)
        truncate_after(run, step)
        run_folder.drop_probes_after(run, step)


def _without_pressure(engine: RolloutEngine) -> AbstractContextManager[None]:
    """Return a context in which the engine's routers are as the trainer's.

    The checks at the start ask if the engine is right, and rollout.pressure makes it wrong on
    purpose.
    """
    if isinstance(engine, PressedEngine):
        return engine.without_pressure()
    return nullcontext()


def write_samples(
    log: RunLog,
    result: StepResult,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    groups: int,
) -> None:
    """Write the first sample of the first groups as text.

    Each has the mean log-probability of engine and trainer. The trainer's is null for a sample that
    was not scored before the weights changed. With the rollout as behaviour policy (bypass) these
    are the samples after the first minibatch.
    """
    batch, first_of_group = result.batch, 0
    assert batch.logp_old is not None
    for group in result.groups[:groups]:
        sample = group.samples[0]
        slots = (batch.segment == first_of_group) & batch.trainable
        first_of_group += len(group.samples)
        first_sampled = int(sample.trainable.nonzero()[0, 0]) + 1
        log.write_sample(
            {
                "step": step,
                "problem": group.problem_id,
                "prompt": decode_tokens(tokenizer, sample.tokens[:first_sampled].tolist()),
                "response": decode_tokens(tokenizer, sample.tokens[first_sampled:].tolist()),
                "answer": group.answer,
                "reward": sample.reward,
                "finish": sample.finish,
                "mean_logp_rollout": sample.logp_rollout[sample.trainable].mean().item(),
                "mean_logp_trainer": batch.logp_old[slots].mean().item(),
                "fingerprint": "+".join(sorted(map(short_digest, sample.fingerprints))) or None,
            }
        )


async def start_adapter(components: Components, note: Callable[[str], None]) -> None:
    """Give the engine its first weights, and start the checks of every sync."""
    check = AdapterCheck(components, note)
    check.adapter.check = check
    await check.start()
