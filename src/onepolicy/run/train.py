"""Repeat rl_step: new runs, resumed runs, forks. The algorithm is in step.py, the run folder in run_folder.py."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from onepolicy.build import components
from onepolicy.build.calibrate import calibrate
from onepolicy.build.components import Components
from onepolicy.config import PromptsTask, RunConfig, UsageError
from onepolicy.config.output_paths import check_new_run_folder
from onepolicy.config.stored_config import BEGUN, read_stored_config
from onepolicy.correct.predict import warning
from onepolicy.envs.multiturn.tokenization import decode_tokens
from onepolicy.files import write_text_atomically
from onepolicy.interfaces import Progress
from onepolicy.invariant.fingerprint import short_digest
from onepolicy.launch.launcher import LOCAL_LAUNCHER, Launcher, started_ranks
from onepolicy.launch.rank_info import apply_torchrun_ranks
from onepolicy.run import run_folder
from onepolicy.run.evaluate import evaluate, num_eval_episodes
from onepolicy.run.hooks import is_counterfactual_step
from onepolicy.run.learning_check import LearningMonitor
from onepolicy.run.log import RunLog, read_metrics, truncate_after
from onepolicy.run.recovery import do_nothing, retry_on_engine_loss, wait_for_server
from onepolicy.run.result import StepResult
from onepolicy.run.run_folder import FROM_SCRATCH, Json, RunOrigin
from onepolicy.run.step import rl_step
from onepolicy.run.step_metrics import save_counterfactual
from onepolicy.run.summary import summarise
from onepolicy.sync.push import checked_push, push_weights
from onepolicy.train import checkpoint

if TYPE_CHECKING:
    from onepolicy.run.async_rollouts import RolloutPrefetcher


def start_run(
    config: RunConfig,
    progress: Progress,
    origin: RunOrigin = FROM_SCRATCH,
    launcher: Launcher = LOCAL_LAUNCHER,
) -> Json:
    """A new run (or a fork, which starts at a parent's checkpoint). hosts: of its processes. Returns the summary."""
    if isinstance(config.task, PromptsTask):
        raise UsageError(
            "task.kind: prompts have no answers, so nothing can be learned from them; give another task"
        )
    config = apply_torchrun_ranks(config)
    out = Path(config.out)
    check_new_run_folder(out)
    if origin.step >= config.steps:
        raise UsageError(
            f"steps: {config.steps} is not beyond step {origin.step}, where this run starts; set steps higher"
        )
    tokens, turns = config.longest_episode
    if (shrinks := warning(config.correction, tokens, turns=turns)) is not None:
        progress.note(shrinks)
    with started_ranks(config, launcher.launch_ranks) as others:
        parts, tokenizer = components.build_components(
            config, origin.weights, others, launcher.build_engine
        )
        sizes = parts.engine.caps.sizes
        if sizes is not None:
            progress.note(sizes.describe())
        run_folder.create_run_folder(
            out,
            config,
            origin,
            parts.learner.fingerprint,
            None if sizes is None else sizes.as_json(),
        )
        with run_folder.lock_run(out):
            return asyncio.run(_train(parts, tokenizer, out, origin, progress))


def resume_run(
    run: Path,
    progress: Progress,
    steps: int | None = None,
    count: int | None = None,
    launcher: Launcher = LOCAL_LAUNCHER,
    config: RunConfig | None = None,
) -> Json:
    """Continue a run from its newest complete checkpoint; the next steps are those of an uninterrupted run.

    steps: to train on to. count: another number of ranks. hosts: other ones. config: its settings, with what else may
    change (where its processes and servers are); None: as they are in its folder. A run that was killed between its
    last step and its summary gets its summary and report.
    """
    config = apply_torchrun_ranks(config or read_stored_config(run), count, resuming=True)
    if steps is not None:
        config = config.model_copy(update={"steps": steps})
    with run_folder.lock_run(run):
        origin = run_folder.resume_origin(run)
        if origin.step > config.steps or (origin.step == config.steps and _finished(config, run)):
            raise UsageError(
                f"{run}: already finished {origin.step} of {config.steps} steps; give steps=N to train on"
            )
        if origin.step == config.steps:
            return _finish(config, run, origin)
        asyncio.run(wait_for_server(config, progress.note))
        with started_ranks(config, launcher.launch_ranks) as others:
            parts, tokenizer = components.build_components(
                config, origin.weights, others, launcher.build_engine
            )
            with run_folder.convert_write_errors(run):
                run_folder.write_config(run, config)
            progress.note(_resuming(run, origin))
            if other := run_folder.build_difference(run, parts.learner.fingerprint):
                progress.note(f"it began where other bits are computed (here, there): {other}")
            return asyncio.run(_train(parts, tokenizer, run, origin, progress))


def _resuming(run: Path, origin: RunOrigin) -> str:
    """From where a run goes on."""
    if checkpoint.complete_checkpoints(run):
        return f"resuming {run} after step {origin.step}"
    if origin.parent is None:
        return f"resuming {run}: it has no checkpoint, so it starts again at step 0"
    return f"resuming {run}: it has no checkpoint, so it starts again at step {origin.step} of {origin.parent['run']}"


async def _train(
    parts: Components,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    origin: RunOrigin,
    progress: Progress,
) -> Json:
    config, learner = parts.config, parts.learner
    if origin.weights is not None:
        learner.restore(origin.weights)
        if origin.parent and not checkpoint.complete_checkpoints(
            out
        ):  # a fork must not need its parent again
            with run_folder.convert_write_errors(out):
                checkpoint.save(
                    out, learner, tokenizer, step=origin.step, extra={"parent": origin.parent}
                )
    with run_folder.convert_write_errors(out):
        checkpoint.remove_unfinished(out)
        truncate_after(out, origin.step)
    run_folder.drop_probes_after(out, origin.step)
    checked = progress.phase("engine warm-up and sync check", 1)
    await calibrate(config, parts.engine, parts.environment, parts.stop, out)
    await checked_push(learner, parts.engine, vocab=learner.scorer.vocab_size)
    await push_weights(learner, *parts.samplers[1:])
    from onepolicy.engine_check.checks import require_correct_logprobs  # for the start alone

    await require_correct_logprobs(parts.engine, learner.scorer, tokenizer, config)
    checked()
    if not parts.engine.caps.seeded:
        progress.note(
            "the engine draws random numbers as it likes: a resumed or repeated run samples other tokens"
        )
    with RunLog(out, tensorboard=config.log.tensorboard) as log:
        await _repeat(parts, tokenizer, out, origin, progress, log)
    with run_folder.convert_write_errors(out):
        learner.finish_saving()
        checkpoint.prune(out, config.checkpoint.keep)
        return _finish(config, out, origin)


async def _repeat(
    parts: Components,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    origin: RunOrigin,
    progress: Progress,
    log: RunLog,
) -> None:
    """Every step of the run, with what belongs to it: evaluation, log, probe, checkpoint."""
    config, learner = parts.config, parts.learner
    if config.eval.every and not read_metrics(out):
        evaluated = await _evaluate(parts, progress)
        with run_folder.convert_write_errors(out):
            log.write(origin.step, evaluated)
    monitor = LearningMonitor(config, out, progress.note)
    async with _prefetcher(parts, origin.step) as prefetcher:
        for step in range(origin.step, config.steps):
            done = step + 1
            with run_folder.convert_write_errors(out):
                write_text_atomically(out / BEGUN, str(done))
            result = await _step(parts, prefetcher, step, progress)
            if step == origin.step:
                _look_for_bugs(result, progress)
            if _due(done, config.eval.every, config.steps):
                result.metrics |= await _evaluate(parts, progress, prefetcher, done)
            with run_folder.convert_write_errors(out):
                log.write(done, result.metrics)
                _write_samples(log, parts, result, tokenizer, done)
                if is_counterfactual_step(config, step):
                    path = out / run_folder.PROBES / f"step_{done:05d}.safetensors"
                    save_counterfactual(
                        path, result.batch, result.without_replay, learner.fingerprint
                    )
            progress.step(done, result.metrics)
            monitor.after_step(done, result.metrics)
            if _due(done, config.checkpoint.every, config.steps):
                with run_folder.convert_write_errors(out):
                    log.sync()  # a checkpoint never outlives the rows before it
                    save = partial(
                        checkpoint.save,
                        out,
                        learner,
                        tokenizer,
                        step=done,
                        extra={"parent": origin.parent},
                    )
                    if prefetcher is None:
                        save()
                    else:  # episodes are in play, and need the event loop
                        await asyncio.to_thread(save)
                    checkpoint.prune(out, config.checkpoint.keep)


def _prefetcher(
    parts: Components, first: int
) -> AbstractAsyncContextManager[RolloutPrefetcher | None]:
    """Plays episodes ahead of the learner, if rollout.max_staleness asks for it."""
    if parts.config.rollout.max_staleness is None:
        return nullcontext()
    from onepolicy.run.async_rollouts import RolloutPrefetcher

    return RolloutPrefetcher(parts, first)


async def _step(
    parts: Components, prefetcher: RolloutPrefetcher | None, step: int, progress: Progress
) -> StepResult:
    """One after the other, or with episodes that are played ahead."""
    rollout = parts.config.rollout
    advance = progress.phase("rollout", rollout.prompts_per_step * rollout.group_size)
    if prefetcher is None:
        return await rl_step(parts, step, advance=advance)
    return await prefetcher.run_step(step, advance=advance)


def _look_for_bugs(result: StepResult, progress: Progress) -> None:
    """Of the first step: does the ratio of the two engines look like a bug?"""
    from onepolicy.verdict.bug_signatures import diagnose_batch

    found = diagnose_batch(result.batch)
    if found.bug:
        progress.note(
            f"the ratio of the two engines looks like a bug, not a mismatch\n{found.text()}"
        )


async def _evaluate(
    parts: Components,
    progress: Progress,
    prefetcher: RolloutPrefetcher | None = None,
    done: int = 0,
) -> dict[str, float]:
    """prefetcher: plays the episodes of step `done` (from 0) and later ones meanwhile."""
    config, engine = parts.config, parts.engine
    if parts.evaluator is not None:
        engine = parts.evaluator
        await push_weights(parts.learner, engine)
    evaluation = partial(
        evaluate,
        engine,
        parts.environment,
        config.eval,
        stop=parts.stop,
        max_tokens=config.eval.max_tokens or config.rollout.sampling.max_tokens,
        solved_at=getattr(config.task, "threshold", 1.0),
        advance=progress.phase("evaluation", num_eval_episodes(config.eval)),
    )
    metrics = await retry_on_engine_loss(
        parts,
        evaluation,
        do_nothing if prefetcher is None else partial(prefetcher.cancel_all, done),
    )
    if prefetcher is None or prefetcher.idle or parts.evaluator is not None:
        await retry_on_engine_loss(
            parts, engine.reset_cache
        )  # or rollouts would reuse prefixes that a resumed run does not have
    return metrics


def _finished(config: RunConfig, out: Path) -> bool:
    return (out / run_folder.SUMMARY).exists() and (
        not config.log.report or (out / "report.html").exists()
    )


def _finish(config: RunConfig, out: Path, origin: RunOrigin) -> Json:
    summary = summarise(config, read_metrics(out), out, origin.parent)
    write_text_atomically(out / run_folder.SUMMARY, json.dumps(summary, indent=1))
    if config.log.report:
        from onepolicy.report.html import write_report  # plotly is an extra

        summary["report"] = str(write_report(out))
        write_text_atomically(out / run_folder.SUMMARY, json.dumps(summary, indent=1))
    return summary


def _due(done: int, every: int, steps: int) -> bool:
    return every > 0 and (done % every == 0 or done == steps)


def _write_samples(
    log: RunLog,
    parts: Components,
    result: StepResult,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
) -> None:
    """The first sample of the first groups as text, with both engines' mean log-probability.

    The trainer's is null where nobody scored the sample before the weights moved: with the rollout as the anchor, those
    that are not in the first mini-step.
    """
    batch, first_of_group = result.batch, 0
    assert batch.logp_old is not None
    for group in result.groups[: parts.config.log.samples_per_step]:
        sample = group.samples[0]
        slots = (batch.segment == first_of_group) & batch.trainable
        first_of_group += len(group.samples)
        first = int(sample.trainable.nonzero()[0, 0]) + 1
        log.sample(
            {
                "step": step,
                "problem": group.problem_id,
                "prompt": decode_tokens(tokenizer, sample.tokens[:first].tolist()),
                "response": decode_tokens(tokenizer, sample.tokens[first:].tolist()),
                "answer": group.answer,
                "reward": sample.reward,
                "finish": sample.finish,
                "mean_logp_rollout": sample.logp_rollout[sample.trainable].mean().item(),
                "mean_logp_trainer": batch.logp_old[slots].mean().item(),
                "fingerprint": "+".join(sorted(map(short_digest, sample.fingerprints))) or None,
            }
        )
