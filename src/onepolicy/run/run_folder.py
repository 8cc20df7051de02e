"""The run folder: its creation, its lock, and errors of writing into it."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

import onepolicy
from onepolicy.config import RunConfig, TrainingError, UsageError
from onepolicy.config.json_shapes import RunInfo, read_json_object
from onepolicy.config.output_paths import (
    BEGUN,
    CONFIG,
    NO_LOCKS,
    check_new_run_folder,
    not_writable_error,
)
from onepolicy.config.stored_config import resume_command
from onepolicy.console import print_status
from onepolicy.files import DISK_FULL, open_lock, write_text_atomically
from onepolicy.run.log_digest import digest_problems
from onepolicy.train import checkpoint

Json = dict[str, Any]
RUN, SUMMARY, PROBES = "run.json", "summary.json", "probes"


@dataclass(frozen=True, slots=True)
class RunOrigin:
    """The starting point of a run: step 0 of its model, or a checkpoint."""

    step: int = 0
    weights: Path | None = None
    parent: Json | None = None  # {"run", "step"} of a fork
    log: Json | None = None  # the run's own files as the checkpoint was saved (log_digest.py)


FROM_SCRATCH = RunOrigin()


def create_run_folder(
    out: Path, config: RunConfig, origin: RunOrigin, fingerprint: str, quant: Json | None = None
) -> Path:
    """Write the folder under a temporary name and rename it to `out`, or to the end of its links.

    quant: sizes of the engine's quantised weights. Return the folder that was made. Raises
    UsageError if it cannot be made.
    """
    check_new_run_folder(out)
    target = out
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # A link to an empty folder stays. Not realpath, which would leave /proc/PID/root.
        while target.is_symlink():
            target = target.parent / os.readlink(target)
        # A short name, because that of `target` may be as long as names can be.
        temporary = target.with_name(f".making-{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        about = _about(config, origin, fingerprint) | {"quant": quant}
        (temporary / RUN).write_text(json.dumps(about, indent=1), encoding="utf-8")
        write_config(temporary, config)
        os.rename(temporary, target)  # an empty folder of that name is replaced
    except OSError as error:
        raise UsageError(
            f"out: cannot make {out}: {error.strerror}; choose another folder"
        ) from None
    return target


@contextmanager
def removed_if_refused(folder: Path, *, existed: bool) -> Iterator[None]:
    """Leave the place as it was if a UsageError refuses the run before its first step.

    folder: as `create_run_folder` made it. existed: an empty folder was there before.
    """
    try:
        yield
    except UsageError:
        if not (folder / BEGUN).exists():
            shutil.rmtree(folder, ignore_errors=True)  # a rank may still write a checkpoint
            if existed:
                folder.mkdir(exist_ok=True)
        raise


def _about(config: RunConfig, origin: RunOrigin, fingerprint: str) -> Json:
    """Return the content of run.json."""
    kl = config.objective.kl
    kl_reference = None
    if kl.coef:
        kl_reference = kl.reference or config.model.path
    pressure = None
    if config.rollout.pressure is not None:
        pressure = config.rollout.pressure.describe()
    return {
        "id": secrets.token_hex(4),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "parent": origin.parent,
        "kl_reference": kl_reference,
        "pressure": pressure,
        "problems": digest_problems(config),
        "versions": {
            "onepolicy": onepolicy.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "fingerprint": json.loads(fingerprint),
    }


def write_config(run: Path, config: RunConfig) -> None:
    """Write the settings, unless the folder has just these."""
    path, text = run / CONFIG, config.model_dump_json(indent=1)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_text_atomically(path, text, durable=True)


def read_about(run: Path) -> Json:
    """Return run.json. Raises UsageError if it is missing or damaged."""
    return read_json_object(
        run / RUN, RunInfo, "copy it from a run of the same kind, or start anew"
    )


def read_parent(run: Path) -> Json | None:
    return read_about(run)["parent"]


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Lock the folder, so that no second process writes it.

    The lock ends with the process, so a killed process leaves nothing to clean up. A file system
    without locks is noted.
    """
    with ExitStack() as stack:
        try:
            lock = open_lock(run / ".lock")
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{run}: another process is training in this folder; wait for it or stop it"
            ) from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise not_writable_error(run, error.strerror) from None
            print_status(
                f"{run}: cannot be locked: {error.strerror}; no second process may train in it"
            )
        yield


@contextmanager
def convert_write_errors(run: Path) -> Iterator[None]:
    """Raise TrainingError if writing into the folder fails in this context.

    The disk is full, or gone.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem, fix = str(error), "Make room"
        if isinstance(error, OSError) and error.strerror:
            problem = error.strerror
            if error.errno not in DISK_FULL:
                fix = f"Fix that ({error.filename or run})"
        raise TrainingError(
            f"{run}: cannot be written to: {problem}; complete checkpoints are kept. {fix}, then "
            f"continue with {resume_command(run)}{_without_checkpoint(run)}"
        ) from error


def _without_checkpoint(run: Path) -> str:
    """Return a note on where a resume starts if no checkpoint is complete. Raises nothing."""
    try:
        if checkpoint.complete_checkpoints(run):
            return ""
        parent = read_parent(run)
    except (OSError, UsageError):
        return ""
    start = "step 0"
    if parent is not None:
        start = f"step {parent['step']} of {parent['run']}"
    return f", which starts again from {start}: no checkpoint exists yet"


def drop_probes_after(run: Path, step: int) -> None:
    """Delete the probe files of later steps, which a resumed run writes again."""
    for path in (run / PROBES).glob("*.safetensors"):
        named = re.fullmatch(r"step_([0-9]+)", path.stem)  # other files are not the run's
        if named and int(named[1]) > step:
            path.unlink()
