"""Start and resume of a run. The loop over steps is in run/loop.py, one step in run/step.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

from onepolicy.build.components import build_components
from onepolicy.config import PromptsTask, RunConfig, UsageError
from onepolicy.config.output_paths import check_new_run_folder
from onepolicy.config.stored_config import read_stored_config
from onepolicy.correct.predict import warning
from onepolicy.interfaces import Progress
from onepolicy.launch.launcher import LOCAL_LAUNCHER, Launcher, started_ranks
from onepolicy.launch.rank_info import apply_torchrun_ranks
from onepolicy.run import run_folder
from onepolicy.run.loop import TrainingLoop
from onepolicy.run.recovery import wait_for_server
from onepolicy.run.run_folder import FROM_SCRATCH, Json, RunOrigin
from onepolicy.run.summary import has_summary, write_summary
from onepolicy.train import checkpoint


def start_run(
    config: RunConfig,
    progress: Progress,
    origin: RunOrigin = FROM_SCRATCH,
    launcher: Launcher = LOCAL_LAUNCHER,
) -> Json:
    """Run a new training run, or a fork that starts at a parent's checkpoint.

    launcher: starts the run's other processes. Returns the summary.
    """
    _refuse_prompts(config)
    config = apply_torchrun_ranks(config)
    folder = Path(config.out)
    check_new_run_folder(folder)
    _check_steps_left(config, origin)
    tokens, turns = config.longest_episode
    correction_warning = warning(config.correction, tokens, turns=turns)
    if correction_warning is not None:
        progress.note(correction_warning)
    _note_pressure(config, progress)
    with started_ranks(config, launcher.launch_ranks) as ranks:
        components, tokenizer = build_components(
            config, origin.weights, ranks, launcher.build_engine
        )
        quant = None
        sizes = components.engine.caps.sizes
        if sizes is not None:
            progress.note(sizes.describe())
            quant = sizes.as_json()
        run_folder.create_run_folder(folder, config, origin, components.learner.fingerprint, quant)
        with run_folder.lock_run(folder):
            loop = TrainingLoop(components, tokenizer, folder, origin, progress)
            return asyncio.run(loop.run())


def _refuse_prompts(config: RunConfig) -> None:
    if isinstance(config.task, PromptsTask):
        raise UsageError(
            "task.kind: prompts have no answers, so nothing can be learned from them; give "
            "another task"
        )


def _note_pressure(config: RunConfig, progress: Progress) -> None:
    """Report that the engine is under pressure, before anything else of the run."""
    if config.rollout.pressure is not None:
        progress.note(f"WARNING: {config.rollout.pressure.describe()}")


def _check_steps_left(config: RunConfig, origin: RunOrigin) -> None:
    if origin.step >= config.steps:
        raise UsageError(
            f"steps: {config.steps} is not beyond step {origin.step}, where this run starts; set "
            "steps higher"
        )


def resume_run(
    run: Path,
    progress: Progress,
    steps: int | None = None,
    count: int | None = None,
    launcher: Launcher = LOCAL_LAUNCHER,
    config: RunConfig | None = None,
) -> Json:
    """Continue a run from its newest complete checkpoint.

    The next steps are those of an uninterrupted run. A run that was killed between its last step
    and its summary gets its summary and report. Returns the summary.

    steps: new number of steps of the run. count: another number of ranks. launcher: starts the
    run's other processes. config: the run's settings, in which only the places of processes and
    servers may differ; None: those in its folder.
    """
    config = apply_torchrun_ranks(config or read_stored_config(run), count, resuming=True)
    if steps is not None:
        config = config.model_copy(update={"steps": steps})
    with run_folder.lock_run(run):
        origin = run_folder.resume_origin(run)
        all_steps_done = origin.step == config.steps
        if origin.step > config.steps or (all_steps_done and has_summary(config, run)):
            raise UsageError(
                f"{run}: already finished {origin.step} of {config.steps} steps; give steps=N to "
                "train on"
            )
        if all_steps_done:
            return write_summary(config, run, origin.parent)
        _note_pressure(config, progress)
        asyncio.run(wait_for_server(config, progress.note))
        with started_ranks(config, launcher.launch_ranks) as ranks:
            components, tokenizer = build_components(
                config, origin.weights, ranks, launcher.build_engine
            )
            with run_folder.convert_write_errors(run):
                run_folder.write_config(run, config)
            _note_resume(run, origin, components.learner.fingerprint, progress)
            loop = TrainingLoop(components, tokenizer, run, origin, progress)
            return asyncio.run(loop.run())


def _note_resume(run: Path, origin: RunOrigin, fingerprint: str, progress: Progress) -> None:
    """Report the starting point, and whether the run began on another build or processor."""
    start = "step 0"
    if origin.parent is not None:
        start = f"step {origin.step} of {origin.parent['run']}"
    if checkpoint.complete_checkpoints(run):
        progress.note(f"resuming {run} after step {origin.step}")
    else:
        progress.note(f"resuming {run}: it has no checkpoint, so it starts again at {start}")
    difference = run_folder.build_difference(run, fingerprint)
    if difference is not None:
        progress.note(
            "the run began on another build or processor, which may compute other bits "
            f"(now, then): {difference}"
        )
