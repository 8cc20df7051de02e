"""Resume of a run after its newest checkpoint, and the starting point of a fork."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path

from onepolicy.build.components import build_components, model_to_load
from onepolicy.build.room import settle_max_len
from onepolicy.config import RunConfig, ServerEngineConfig, UsageError
from onepolicy.config.stored_config import check_trust, read_stored_config
from onepolicy.files import refuse_links_out
from onepolicy.interfaces import Progress
from onepolicy.invariant.fingerprint import fingerprint_differences
from onepolicy.launch.launcher import (
    LOCAL_LAUNCHER,
    Launcher,
    apply_torchrun_ranks,
    started_ranks,
)
from onepolicy.models.load import parse_device
from onepolicy.report.jsonl import METRICS, SAMPLES
from onepolicy.run import run_folder
from onepolicy.run.log_digest import find_changed_problems, find_damage
from onepolicy.run.loop import TrainingLoop, clean_folder
from onepolicy.run.recovery import wait_for_server
from onepolicy.run.run_folder import PROBES, RUN, SUMMARY, Json, RunOrigin, read_about, read_parent
from onepolicy.run.summary import has_summary, write_summary
from onepolicy.run.train import check_log, note_pressure
from onepolicy.train import checkpoint


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
    if config is None:
        config = read_stored_config(run)
        check_trust(config, run, (), f"train --resume {run}")
    config = apply_torchrun_ranks(config, count, resumed=run)
    before = config.steps
    if steps is not None:
        config = config.model_copy(update={"steps": steps})
    refuse_links_out(run, "the run's")
    with run_folder.lock_run(run):
        origin = resume_origin(run)
        all_steps_done = origin.step == config.steps
        if origin.step > config.steps or (all_steps_done and has_summary(config, run)):
            raise UsageError(
                f"{run}: already finished {origin.step} of {config.steps} steps; give steps=N to "
                "train on"
            )
        _note_damaged_log(run, origin, progress)
        if config.steps != before and config.optim.lr_decay == "linear":
            progress.note(
                f"steps: {before} -> {config.steps} moves the end of optim.lr_decay = linear, so "
                f"the learning rate changes from step {origin.step + 1} on"
            )
        if all_steps_done:
            clean_folder(run, origin.step)  # it may have gone on to later steps
            joined = started_ranks(config, launcher.launch_ranks)  # and so ended, if there are any
            with joined, run_folder.convert_write_errors(run):
                run_folder.write_config(run, config)
                return write_summary(config, run, origin.parent)
        _note_changed_problems(run, config, progress)
        check_log(config)
        note_pressure(config, progress)
        if parse_device(config.train.device).type == "cuda":
            model = model_to_load(config, origin.weights)
            config = settle_max_len(config, model, progress.note, resumes=True)
        if isinstance(config.rollout.engine, ServerEngineConfig):
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


def _note_damaged_log(run: Path, origin: RunOrigin, progress: Progress) -> None:
    """Report rows and samples before the checkpoint that are gone or other than written."""
    for path in find_damage(run, origin.log or {}):
        progress.note(
            f"WARNING: {path} is not as it was at the checkpoint of step {origin.step}; lines are "
            "lost or changed, and the run's history and report lack them or are wrong there; the "
            "run goes on without them, or stop it and restore the file from a copy"
        )


def _note_changed_problems(run: Path, config: RunConfig, progress: Progress) -> None:
    """Report files of problems that were changed since the run started."""
    for path in find_changed_problems(config, read_about(run).get("problems", {})):
        progress.note(
            f"WARNING: {path} is not as it was at the start of {run}; problems that were held out "
            "may be trained on now, and evaluations cannot be compared with those before; stop the "
            "run and restore the file from a copy"
        )


def note_fork(config: RunConfig, origin: RunOrigin, progress: Progress) -> None:
    """Report settings of a fork that do not mean what they would mean in a new run."""
    assert origin.weights is not None
    updates, warmup = checkpoint.read_state(origin.weights)["updates"], config.optim.warmup_steps
    if 0 < warmup <= updates:
        progress.note(
            f"optim.warmup_steps: {warmup} of the {updates} updates before, so this run begins at "
            "the full optim.lr"
        )
    parent = read_stored_config(origin.weights.parent.parent)
    then, now = (origin.step * _problems_per_step(each) for each in (parent, config))
    if then != now:
        missed = f"passes over {now - then} problems"
        if now < then:
            missed = f"plays {then - now} problems again"
        progress.note(
            "rollout.prompts_per_step or objective.dynamic_sampling is not the parent's: step s "
            f"begins at a multiple of s, so this run {missed}"
        )


def _problems_per_step(config: RunConfig) -> int:
    """Return how many problems a step owns, whether it plays all of them or not."""
    return config.rollout.prompts_per_step * (1 + config.objective.dynamic_sampling)


def _note_resume(run: Path, origin: RunOrigin, fingerprint: str, progress: Progress) -> None:
    """Report the starting point, and whether the run began on another build or processor."""
    start = "step 0"
    if origin.parent is not None:
        start = f"step {origin.step} of {origin.parent['run']}"
    if checkpoint.complete_checkpoints(run):
        progress.note(f"resuming {run} after step {origin.step}")
    else:
        progress.note(f"resuming {run}: it has no checkpoint, so it starts again at {start}")
    difference = build_difference(run, fingerprint)
    if difference is not None:
        progress.note(
            "the run began on another build or processor, which may compute other bits "
            f"(now, then): {difference}"
        )


# --- starting points ------------------------------------------------------------------------------


def build_difference(run: Path, fingerprint: str) -> str | None:
    """Return the differences from the build and processor on which the run began.

    None if there are none, or if the run's own build is unknown.
    """
    original = read_about(run).get("fingerprint")
    if not original:
        return None
    return "; ".join(fingerprint_differences(fingerprint, json.dumps(original))) or None


def check_layout(run: Path) -> None:
    """Raise UsageError for a file in place of a folder, or a folder in place of a file."""
    for name in (checkpoint.FOLDER, PROBES, "tensorboard", "wandb"):
        path = run / name
        if os.path.lexists(path) and not path.is_dir():
            raise UsageError(f"{path}: must be a folder, which the run writes; move it away")
    for name in (RUN, SUMMARY, METRICS, SAMPLES, "report.html", ".lock"):
        path = run / name
        if os.path.lexists(path) and not path.is_file():
            raise UsageError(f"{path}: must be a file, which the run writes; move it away")


def resume_origin(run: Path) -> RunOrigin:
    """Return the newest complete checkpoint, or the run's own starting point if there is none."""
    check_layout(run)
    parent = read_parent(run)
    if checkpoint.complete_checkpoints(run):
        newest = checkpoint.latest_checkpoint(run)
        state = checkpoint.verify(newest)
        return RunOrigin(state["step"], newest, parent, state.get("log"))
    if parent is None:
        return RunOrigin()
    folder = checkpoint.checkpoint_folder(Path(parent["run"]), parent["step"])
    if not folder.is_dir():
        raise UsageError(
            f"{run}: was killed before its first checkpoint, and its parent's {folder} is gone"
        )
    checkpoint.verify(folder)
    return RunOrigin(parent["step"], folder, parent)


def fork_origin(source: Path) -> RunOrigin:
    """Return the starting point of a fork.

    source: RUN/checkpoints/step_NNNNN, RUN/NNNNN, or RUN for its newest checkpoint.
    """
    if (source / checkpoint.FOLDER).is_dir():
        folder = checkpoint.latest_checkpoint(source)
    elif re.fullmatch("[0-9]{1,15}", source.name):
        folder = checkpoint.checkpoint_folder(source.parent, int(source.name))
        checkpoint.refuse_elsewhere(source.parent, folder)
    else:
        folder = source
    step = checkpoint.verify(folder)["step"]
    run = folder.resolve().parent.parent
    return RunOrigin(step, folder.resolve(), {"run": str(run), "step": step})
