"""Start of a run, or of a fork. The loop over steps is in run/loop.py, one step in run/step.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

from onepolicy.build.components import build_components
from onepolicy.build.gpu_defaults import settle_gpu_settings
from onepolicy.config import PromptsTask, RunConfig, UsageError
from onepolicy.config.output_paths import check_new_run_folder
from onepolicy.correct.predict import warning
from onepolicy.interfaces import Progress
from onepolicy.launch.launcher import (
    LOCAL_LAUNCHER,
    Launcher,
    apply_torchrun_ranks,
    started_ranks,
)
from onepolicy.models.load import parse_device
from onepolicy.run import run_folder, trackers
from onepolicy.run.loop import TrainingLoop
from onepolicy.run.run_folder import FROM_SCRATCH, Json, RunOrigin


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
    check_log(config)
    if parse_device(config.train.device).type == "cuda":
        config = settle_gpu_settings(config, origin.weights, progress.note)
    _note_small_steps(config, progress)
    note_pressure(config, progress)
    with started_ranks(config, launcher.launch_ranks) as ranks:
        components, tokenizer = build_components(
            config, origin.weights, ranks, launcher.build_engine
        )
        quant = None
        sizes = components.engine.caps.sizes
        if sizes is not None:
            progress.note(sizes.describe())
            quant = sizes.as_json()
        existed = folder.exists()
        made = run_folder.create_run_folder(
            folder, config, origin, components.learner.fingerprint, quant
        )
        with (
            run_folder.removed_if_refused(made, existed=existed),
            run_folder.lock_run(folder),
        ):
            loop = TrainingLoop(components, tokenizer, folder, origin, progress)
            return asyncio.run(loop.run())


def check_log(config: RunConfig) -> None:
    """Raise UsageError for a tracker or report that could not be written, before work starts."""
    trackers.check_log(config)


def _refuse_prompts(config: RunConfig) -> None:
    if isinstance(config.task, PromptsTask):
        raise UsageError(
            "task.kind: prompts have no answers, so nothing can be learned from them; give "
            "another task"
        )


def _note_small_steps(config: RunConfig, progress: Progress) -> None:
    """Report a correction that would make every step much smaller."""
    if config.correction.weight.level == "none" and not config.correction.rejects:
        return
    tokens, turns = config.longest_episode
    correction_warning = warning(config.correction, tokens, turns=turns)
    if correction_warning is not None:
        progress.note(correction_warning)


def note_pressure(config: RunConfig, progress: Progress) -> None:
    """Report that the engine is under pressure, before anything else of the run."""
    if config.rollout.pressure is not None:
        progress.note(f"WARNING: {config.rollout.pressure.describe()}")


def _check_steps_left(config: RunConfig, origin: RunOrigin) -> None:
    if origin.step >= config.steps:
        raise UsageError(
            f"steps: {config.steps} is not beyond step {origin.step}, where this run starts; set "
            "steps higher"
        )
