"""Repeat rl_step: new runs, resumed runs, forks. Owns the run folder; the algorithm is in step.py."""

from __future__ import annotations

import asyncio
import json
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

import onepolicy
from onepolicy.config import RunConfig, UsageError
from onepolicy.envs.render import decode
from onepolicy.loop import setup
from onepolicy.loop.evaluate import attempts, evaluate
from onepolicy.loop.metrics import RunLog, read_metrics, truncate_after
from onepolicy.loop.probe import save_probe
from onepolicy.loop.step import Parts, StepResult, rl_step
from onepolicy.loop.summary import summarise
from onepolicy.sync.local import push_weights
from onepolicy.train import checkpoint
from onepolicy.train.learner import LocalLearner

Json = dict[str, Any]
CONFIG, RUN, SUMMARY = "config.json", "run.json", "summary.json"


class Progress:
    """What a caller may show; every method does nothing here."""

    def phase(self, name: str, total: int) -> Callable[[], None]:
        return lambda: None

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a run starts: step 0 of its model, or a checkpoint."""

    step: int = 0
    weights: Path | None = None
    parent: Json | None = None  # {"run", "step"} of a fork


def start(config: RunConfig, progress: Progress, origin: Origin = Origin()) -> Json:
    """A new run (or a fork, which starts at a parent's checkpoint). Returns the summary."""
    out = Path(config.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(
            f"out: {out} is not empty; choose another folder, or continue it with `onepolicy train --resume {out}`"
        )
    if origin.step >= config.steps:
        raise UsageError(
            f"steps: {config.steps} is not beyond step {origin.step}, where this run starts; set steps higher"
        )
    parts, tokenizer = setup.build_parts(config, origin.weights)
    out.mkdir(parents=True, exist_ok=True)
    (out / RUN).write_text(json.dumps(_about(origin), indent=1))
    write_config(out, config)
    return asyncio.run(_train(parts, tokenizer, out, origin, progress))


def resume(run: Path, progress: Progress, steps: int | None = None) -> Json:
    """Continue a run from its newest complete checkpoint; the next steps are those of an uninterrupted run."""
    config = read_config(run)
    if steps is not None:
        config = RunConfig.model_validate(config.model_dump() | {"steps": steps})
    origin = _resume_origin(run)
    if origin.step >= config.steps:
        raise UsageError(f"{run}: already finished {origin.step} of {config.steps} steps; give steps=N to train on")
    parts, tokenizer = setup.build_parts(config, origin.weights)
    write_config(run, config)
    progress.note(f"resuming {run} after step {origin.step}")
    return asyncio.run(_train(parts, tokenizer, run, origin, progress))


def _resume_origin(run: Path) -> Origin:
    """The newest complete checkpoint; before the first one, the place the run itself started from."""
    parent = json.loads((run / RUN).read_text())["parent"]
    if checkpoint.complete(run):
        newest = checkpoint.latest(run)
        return Origin(checkpoint.verify(newest)["step"], newest, parent)
    if parent is None:
        return Origin()
    return Origin(parent["step"], checkpoint.folder_of(Path(parent["run"]), parent["step"]), parent)


def fork_origin(source: Path) -> tuple[RunConfig, Origin]:
    """Config and starting point of RUN/checkpoints/step_NNNNN, also written RUN/NNNNN or (newest) RUN."""
    if (source / checkpoint.FOLDER).is_dir():
        folder = checkpoint.latest(source)
    elif source.name.isdigit():
        folder = checkpoint.folder_of(source.parent, int(source.name))
    else:
        folder = source
    step = checkpoint.verify(folder)["step"]
    run = folder.parent.parent
    return read_config(run), Origin(step, folder, {"run": str(run), "step": step})


def read_config(run: Path) -> RunConfig:
    path = run / CONFIG
    if not path.is_file():
        raise UsageError(f"{run}: not a run folder (no {CONFIG})")
    return RunConfig.model_validate_json(path.read_text())


def write_config(run: Path, config: RunConfig) -> None:
    (run / CONFIG).write_text(config.model_dump_json(indent=1))


async def _train(
    parts: Parts, tokenizer: PreTrainedTokenizerBase, out: Path, origin: Origin, progress: Progress
) -> Json:
    config, learner = parts.config, parts.learner
    assert isinstance(learner, LocalLearner)
    if origin.weights is not None:
        checkpoint.restore_optimizer(origin.weights, learner)
    truncate_after(out, origin.step)
    await push_weights(learner, parts.engine)
    with RunLog(out, tensorboard=config.log.tensorboard) as log:
        if config.eval.every and not read_metrics(out):
            log.write(origin.step, await _evaluate(parts, progress))
        for step in range(origin.step, config.steps):
            done = step + 1
            every = config.log.counterfactual_every
            probing = every > 0 and (step % every == 0 or done == config.steps)
            advance = progress.phase("rollout", config.rollout.prompts_per_step * config.rollout.group_size)
            result = await rl_step(parts, step, probe=probing and config.replay.mode != "off", advance=advance)
            if _due(done, config.eval.every, config.steps):
                result.metrics |= await _evaluate(parts, progress)
            log.write(done, result.metrics)
            _write_samples(log, parts, result, tokenizer, done)
            if probing:
                save_probe(out / "probes" / f"step_{done:05d}.safetensors", result.batch, result.without_replay)
            progress.step(done, result.metrics)
            if _due(done, config.checkpoint.every, config.steps):
                checkpoint.save(out, learner, tokenizer, step=done, extra={"parent": origin.parent})
                checkpoint.prune(out, config.checkpoint.keep)
    return _finish(config, out, origin)


async def _evaluate(parts: Parts, progress: Progress) -> dict[str, float]:
    config = parts.config
    return await evaluate(
        parts.engine,
        parts.environment,
        config.eval,
        stop=parts.stop,
        max_tokens=config.eval.max_tokens or config.rollout.sampling.max_tokens,
        solved_at=getattr(config.task, "threshold", 1.0),
        advance=progress.phase("evaluation", attempts(config.eval)),
    )


def _finish(config: RunConfig, out: Path, origin: Origin) -> Json:
    summary = summarise(config, read_metrics(out), out, origin.parent)
    (out / SUMMARY).write_text(json.dumps(summary, indent=1))
    if config.log.report:
        from onepolicy.report.html import write_report  # plotly is an extra

        summary["report"] = str(write_report(out))
        (out / SUMMARY).write_text(json.dumps(summary, indent=1))
    return summary


def _due(done: int, every: int, steps: int) -> bool:
    return every > 0 and (done % every == 0 or done == steps)


def _write_samples(
    log: RunLog, parts: Parts, result: StepResult, tokenizer: PreTrainedTokenizerBase, step: int
) -> None:
    """The first sample of the first groups as text, with both engines' mean log-probability."""
    batch, rollout = result.batch, parts.config.rollout
    assert batch.logp_old is not None
    for g, group in enumerate(result.groups[: parts.config.log.samples_per_step]):
        sample = group.samples[0]
        slots = (batch.segment == g * rollout.group_size) & batch.trainable
        first = int(sample.trainable.nonzero()[0, 0]) + 1
        log.sample(
            {
                "step": step,
                "problem": group.problem_id,
                "prompt": decode(tokenizer, sample.tokens[:first].tolist()),
                "response": decode(tokenizer, sample.tokens[first:].tolist()),
                "answer": parts.environment.train_problem((step - 1) * rollout.prompts_per_step + g).answer,
                "reward": sample.reward,
                "finish": sample.finish,
                "mean_logp_rollout": batch.logp_rollout[slots].mean().item(),
                "mean_logp_trainer": batch.logp_old[slots].mean().item(),
            }
        )


def _about(origin: Origin) -> Json:
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "parent": origin.parent,
        "versions": {
            "onepolicy": onepolicy.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
